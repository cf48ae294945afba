"""Every model type of the installed transformers in a tiny random configuration, against a truth.

The truth is the dense Jacobian, by `torch.autograd`, of the unmodified model between the tensor
that a row says moves and the output of the module that it names: both are injected and read by
hooks, and nothing of it comes from lipscope but the row, and that casts to float32 give float64:
a scan in float32 (Jamba's) is off by 2 % at a sigma of 35,000. The map `residual` is read at the
input of the first module behind the attention that is given `u + s f(u)`, one factor `s` for every
channel, or behind that module where it is a norm.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import resource
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from math import isnan, nan
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

import lipscope as ls
from lipscope.errors import InputError
from zoo_models import model_of, run

TYPES = tuple(sorted(transformers.models.auto.modeling_auto.MODEL_MAPPING_NAMES))
MAPS = ("attention", "normed", "residual", "block", "model")
_MEMORY = 8 << 30  # bytes that a step of a model type may take beside what is held
_STATM = Path("/proc/self/statm")
_SECONDS = 15  # of processor time, for the building, a measurement and a comparison each
_LARGEST = 1600  # entries of an input whose dense Jacobian is still had
_NOTHING = (
    f"no truth: over {_LARGEST} entries, gradients cut by the model, or no module takes the sum"
)
# Attention modules that go on after their projection (residual, norm), and its name.
_ENDS = {
    "AlbertAttention": "dense",
    "BloomAttention": "dense",
    "FunnelRelMultiheadAttention": "post_proj",
    "TvpAttention": "dense",
}


class Outcome(NamedTuple):
    """What became of a map of a model type: ``exact``, ``refused``, ``wrong`` or ``skipped``."""

    kind: str
    map: str
    verdict: str
    why: str = ""


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """A limit on the processor time of one step of a model type, and on its memory."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"more than {seconds} s of processor time")

    before = signal.signal(signal.SIGPROF, stop)
    memory = resource.getrlimit(resource.RLIMIT_AS)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    if _STATM.exists():  # Linux: elsewhere the limit does not hold
        held = int(_STATM.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + _MEMORY, memory[1]))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_AS, memory)


class SumSeen:
    """Hooks behind an attention: the sum of its input and output, and the norm of that."""

    def __init__(self) -> None:
        self.u: Tensor | None = None
        self.branch: Tensor | None = None  # the attention's output, and what is made of it alone
        self.found: list[Tensor] = []
        self.behind: list[nn.Module] = []

    def hook(self, stack: contextlib.ExitStack, model: nn.Module, site: nn.Module) -> None:
        inside = set(site.modules()) if type(site).__name__ not in _ENDS else {site}
        for module in model.modules():
            if module not in inside:
                stack.callback(
                    module.register_forward_pre_hook(self.enter, with_kwargs=True).remove
                )
                stack.callback(module.register_forward_hook(self.leave).remove)

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        taken = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
        if self.found or self.u is None or self.branch is None or taken is None:
            return
        if taken.numel() != self.u.numel():
            return
        if taken is self.branch or _equal(taken, self.branch):
            self.behind.append(module)
        elif self.is_sum(taken):
            self.found.append(taken)
            if "norm" in type(module).__name__.lower():
                self.behind = [module]

    def leave(self, module: nn.Module, _: Any, result: Any) -> None:
        if module in self.behind:
            self.behind.remove(module)
            if not self.found:
                self.branch = tensor_of(result)
            elif len(self.found) == 1:
                self.found.append(tensor_of(result))

    def is_sum(self, taken: Tensor) -> bool:
        assert self.u is not None and self.branch is not None
        width = self.u.shape[-1]
        if taken.shape[-1] != width or self.branch.numel() != taken.numel():
            return False
        added = (taken - self.u.reshape(taken.shape)).detach().reshape(-1, width)
        branch = self.branch.detach().reshape(-1, width)
        scale = (added * branch).sum(0) / branch.square().sum(0).clamp_min(1e-30)
        return bool(scale.any()) and _equal(added, branch * scale)


def _equal(a: Tensor, b: Tensor) -> bool:
    a, b = a.detach().flatten(), b.detach().flatten()
    return a.shape == b.shape and bool((a - b).abs().max() <= 1e-7 * b.abs().max())


def truth(
    model: nn.Module, inputs: dict[str, Tensor], row: Any, turn: int, *, follows: bool = True
) -> list[float]:
    """Sigma of the unmodified model between what moves and what is read, for one call.

    ``follows``: a linear layer behind the module that takes its output is the projection.
    Two of them for a sum that a norm takes (pre-norm and post-norm); none where it is not had.
    """
    before = row.argument.startswith("input of ")
    enters = model.get_submodule(row.argument.removeprefix("input of ") if before else row.module)
    behind = re.search(r"read after `([^`]+)`", row.note or "") if row.map == "model" else None
    path = behind[1] if behind else "" if row.map == "model" else row.module
    ends: nn.Module | None = model.get_submodule(path) if path else None
    names = row.argument.split(", ")
    signature = inspect.signature(enters.forward)
    found: dict[str, Any] = {}
    written: list[tuple[Tensor, Tensor]] = []

    def once(u: Tensor | None) -> tuple[Tensor, ...]:
        count, out = [0, 0], list[Tensor]()

        def start(_: nn.Module, args: Any, kwargs: Any) -> Any:
            count[0] += 1
            if count[0] != first + 1:
                return None
            bound = signature.bind(*args, **kwargs)
            flat = dict(bound.arguments)
            held = flat if not before else {next(iter(flat)): next(iter(flat.values()))}
            which = list(held)[:1] if before else names
            more = next((n for n, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD), "")
            holder = {n: bound.arguments if n in flat else bound.arguments[more] for n in which}
            if u is None:
                found["x"] = holder[which[0]][which[0]].detach().clone()
                found["several"] = len({holder[n][n].data_ptr() for n in which}) > 1
                if row.map == "residual":
                    sums.u = found["x"]
                return None
            held = holder[which[0]][which[0]]
            if row.map in ("residual", "model") and _is_free(held, model):
                # What else reads the tensor itself (a sum, a skip) reads the new values too.
                written.append((held.detach(), held.detach().clone()))
                held.copy_(u)
                if row.map == "residual":
                    sums.u = u
                return None
            for n in which:
                holder[n][n] = u.clone()
            return bound.args, bound.kwargs

        def finish(_: nn.Module, __: Any, result: Any) -> None:
            count[1] += 1
            if count[1] == turn + 1:
                out.append(tensor_of(result) if inner is None else inner[-1])
                if row.map == "residual" and not sums.found and inner is None:
                    sums.branch = out[-1]

        def end(_: nn.Module, __: Any, result: Tensor) -> None:
            assert inner is not None
            inner.append(result)
            if row.map == "residual" and not sums.found:
                sums.branch = result

        def follow(leaf: nn.Module, args: Any, result: Any) -> None:
            if len(out) == 1 and args and _equal(args[0], out[0]):  # perhaps reshaped in between
                out.append(tensor_of(result))

        inner: list[Tensor] | None = None
        sums = SumSeen()
        with contextlib.ExitStack() as stack:
            if ends is not None and row.map == "residual":
                sums.hook(stack, model, ends)
            if ends is not None and type(ends).__name__ in _ENDS and row.map != "block":
                inner = []
                leaf = ends.get_submodule(_ENDS[type(ends).__name__])
                stack.callback(leaf.register_forward_hook(end).remove)
            stack.callback(enters.register_forward_pre_hook(start, with_kwargs=True).remove)
            if ends is not None:
                stack.callback(ends.register_forward_hook(finish).remove)
                inside = set(ends.modules())
                for leaf in (
                    model.modules() if follows and row.map in ("attention", "normed") else ()
                ):
                    if type(leaf).__name__.endswith("Linear") and leaf not in inside:
                        stack.callback(leaf.register_forward_hook(follow).remove)
            result = run(model, inputs)
            if row.map == "residual":
                return tuple(y.clone() for y in sums.found)
        return (tensor_of(result) if ends is None else out[-1],)

    with torch.no_grad():
        first = _turn_of(enters, model, inputs, model.get_submodule(row.module), turn)
        found["read"] = once(None)
    if found["several"] or found["x"].numel() > _LARGEST:
        return []
    x = found["x"]
    if not found["read"] or (row.map == "residual" and not x.any()):
        return []  # beside tokens that are zero a sum cannot be told from what is added
    try:
        each = torch.autograd.functional.jacobian(once, x, vectorize=True)
    except RuntimeError:  # no rule for all rows at once: one after the other
        each = torch.autograd.functional.jacobian(once, x)
    for held, was in written:
        held.copy_(was)
    # A model that runs a call under `no_grad` (HRM) leaves no truth of it, but zeros.
    kept = [j.reshape(-1, x.numel()) for j in each if bool(j.any())]
    return [float(torch.linalg.matrix_norm(j, 2)) if j.isfinite().all() else nan for j in kept]


def _turn_of(
    enters: nn.Module, model: nn.Module, inputs: dict[str, Tensor], site: nn.Module, turn: int
) -> int:
    """Which call of a module is the last one before a call of another (or is that call)."""
    calls, before = [0], list[int]()
    with contextlib.ExitStack() as stack:
        for module, seen in ((enters, lambda *_: calls.append(0)),
                             (site, lambda *_: before.append(len(calls) - 2))):  # fmt: skip
            stack.callback(module.register_forward_pre_hook(seen).remove)
        run(model, inputs)
    return before[turn]


def _is_free(held: Tensor, model: nn.Module) -> bool:
    """Whether a tensor can be written over: it is no weight, and no entry stands for several."""
    weights = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    once = all(step or size == 1 for step, size in zip(held.stride(), held.shape, strict=True))
    return once and held.untyped_storage().data_ptr() not in weights


def tensor_of(result: Any) -> Tensor:
    while isinstance(result, tuple) and isinstance(result[0], tuple):  # outputs, their scales
        result = result[0]
    if isinstance(result, Tensor):
        return result
    last = getattr(result, "last_hidden_state", None)
    if last is not None:
        return last
    values = list(result.values()) if hasattr(result, "values") else list(result)
    return next(v for v in values if isinstance(v, Tensor))


def outcomes(kind: str, maps: tuple[str, ...] = MAPS) -> list[Outcome]:
    """What becomes of every map of a model type."""
    try:
        with limited(_SECONDS):
            model, inputs = model_of(kind)
    except Exception as problem:
        return [Outcome(kind, name, "skipped", f"not built: {_said(problem)}") for name in maps]
    return [_outcome(kind, model, inputs, name) for name in maps]


def _outcome(kind: str, model: nn.Module, inputs: dict[str, Tensor], name: str) -> Outcome:
    try:
        with limited(_SECONDS):
            rows = list(ls.measure(model, inputs, map=name, dtype="float64", tol=1e-6))
    except InputError as refusal:
        return Outcome(kind, name, "refused", " ".join(str(refusal).split()))
    except TimeoutError as late:
        return Outcome(kind, name, "skipped", str(late))
    except Exception as problem:
        return Outcome(kind, name, "wrong", _said(problem))
    try:
        with limited(_SECONDS):
            return _compared(kind, model, inputs, name, rows)
    except Exception as problem:  # of the truth
        return Outcome(kind, name, "skipped", f"no truth: {_said(problem)}")


def _said(problem: Exception) -> str:
    text = re.sub(r" from '/[^']*'", "", " ".join(str(problem).split()))  # where it is installed
    return f"{type(problem).__name__}: {text[:150]}"


def _compared(
    kind: str, model: nn.Module, inputs: dict[str, Tensor], name: str, rows: list[Any]
) -> Outcome:
    turns: dict[tuple[str, str], int] = {}  # two streams of one block are of one call
    compared = 0
    for row in rows:
        turn = turns.get((row.module, row.argument), 0)
        turns[row.module, row.argument] = turn + 1
        try:
            expected = truth(model, inputs, row, turn)
        except IndexError:  # it was called less often: several attentions of one block
            expected = truth(model, inputs, row, 0)
        if not expected:
            continue
        compared += 1
        sigma = nan if row.status == "non_finite" else row.sigma
        if not any(_agrees(sigma, s) for s in expected):
            instead = " or ".join(f"{s:.8g}" for s in expected)
            found = f"{row.module} ({row.argument}): {row.sigma} instead of {instead}"
            return Outcome(kind, name, "wrong", found)
    if not compared:
        return Outcome(kind, name, "skipped", _NOTHING)
    return Outcome(kind, name, "exact", f"{compared} of {len(rows)} compared")


def _agrees(sigma: float | None, expected: float) -> bool:
    """Whether a value is that of the truth, or neither is finite, as the row says."""
    if sigma is None or isnan(sigma):
        return sigma is not None and isnan(expected)
    return abs(sigma - expected) <= 1e-4 * max(expected, 1e-3)


def as_page(found: Sequence[Outcome]) -> str:
    """The page of the documentation on a run: how many are exact, and each reason that is none."""
    kinds = {one.kind for one in found}
    left = {one.kind: one.why[11:] for one in found if one.why.startswith("not built")}
    of_built = [one for one in found if one.kind not in left]
    built = sorted({one.kind for one in of_built})
    text = [
        "# Model types",
        "",
        f"Of the {len(TYPES)} model types of transformers {transformers.__version__}, {len(kinds)} "
        f"were tried in a small random configuration, and {len(built)} could be built and run that "
        "small with the packages at hand. Every layer of these was compared, in float64, with the "
        "dense Jacobian of the unmodified model between the tensor that its row says moves and the "
        "output of the module that it names (`tests/zoo.py`; this page is what "
        "`python tests/zoo.py` writes; sums of the map `residual` are read where a module takes "
        "them). *Skipped*: lipscope gave a number, and there was nothing to compare it with. "
        "Models of timm have a [page of their own](timm-models.md).",
        "",
        "| map | exact | refused in one line | wrong | skipped |",
        "|---|---|---|---|---|",
    ]
    for name in MAPS:
        count = Counter(o.verdict for o in of_built if o.map == name)
        numbers = (str(count[v]) for v in ("exact", "refused", "wrong", "skipped"))
        text.append(f"| `{name}` | {' | '.join(numbers)} |")
    whole = [k for k in built if {o.verdict for o in found if o.kind == k} == {"exact"}]
    text += ["", "## Exact in every map", "", f"{_listed(whole)}."]
    text += ["", "## Refused, and why", "", "The line of the first type stands for the others.", ""]
    text += _by_reason([o for o in of_built if o.verdict == "refused"])
    text += ["", "## Skipped, and why", ""]
    text += _by_reason([o for o in of_built if o.verdict == "skipped"])
    text += ["", "## Not built, and why", "", "| why | model types |", "|---|---|"]
    reasons: dict[str, list[str]] = {}
    for kind, why in left.items():
        reasons.setdefault(_needed(why), []).append(kind)
    text += [f"| {why} | {_listed(of)} |" for why, of in sorted(reasons.items(), key=_largest)]
    if wrong := [o for o in found if o.verdict == "wrong"]:
        text += ["", "## Wrong", "", "| model type | map | what |", "|---|---|---|"]
        text += [f"| `{o.kind}` | `{o.map}` | {o.why} |" for o in wrong]
    if untried := [kind for kind in TYPES if kind not in kinds]:
        text += ["", "## Not tried", "", f"{_listed(untried)}."]
    return "\n".join(text) + "\n"


def _by_reason(of: Sequence[Outcome]) -> list[str]:
    """A table: each reason in the words of the first that has it, and which maps of which types."""
    reasons: dict[str, list[Outcome]] = {}
    for one in of:
        reasons.setdefault(re.sub(r"`[^`]*`|\d[\d.]*", "", one.why.split("Found")[0]), []).append(
            one
        )
    rows = ["| why | maps | model types |", "|---|---|---|"]
    for group in sorted(reasons.values(), key=lambda group: -len(group)):
        maps: dict[str, list[str]] = {}
        for one in group:
            maps.setdefault(one.kind, []).append(one.map)
        types: dict[str, list[str]] = {}
        for kind, names in maps.items():
            types.setdefault("all" if len(names) == len(MAPS) else _listed(names), []).append(kind)
        why = group[0].why.replace("|", "\\|")
        for names, kinds in sorted(types.items(), key=_largest):
            rows.append(f"| {why} | {names} | {_listed(kinds)} |")
            why = "the same"
    return rows


def _needed(why: str) -> str:
    """Why a model type was not built, in words that types share."""
    package = re.search(r"requires the (\w+) library", why)
    if package:
        return f"needs the package {package[1]}"
    if "is not small" in why:
        return "no small configuration: its sizes follow from others"
    if "Unrecognized configuration class" in why:
        return "no `AutoModel` of it"
    return why.replace("|", "\\|")


def _largest(entry: tuple[str, list[str]]) -> tuple[int, str]:
    return -len(entry[1]), entry[0]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def answered(kind: str, results: Path) -> None:
    """The outcomes of a model type, by a process of its own, appended to the results."""
    process = os.fork()
    if process == 0:
        lines = [json.dumps(one) for one in outcomes(kind)]
        with results.open("a", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in lines))
        os._exit(0)
    if os.waitpid(process, 0)[1]:
        stopped = [Outcome(kind, name, "skipped", "not built: out of memory") for name in MAPS]
        with results.open("a", encoding="utf-8") as file:
            file.write("".join(f"{json.dumps(one)}\n" for one in stopped))


def main(results: Path) -> None:
    """Ask for the model types that the results lack, and print the page."""
    results.touch()
    done = {json.loads(line)[0] for line in results.read_text(encoding="utf-8").splitlines()}
    for kind in TYPES:
        if kind not in done:
            answered(kind, results)
    lines = results.read_text(encoding="utf-8").splitlines()
    print(as_page(sorted(Outcome(*json.loads(line)) for line in lines)), end="")


if __name__ == "__main__":  # python tests/zoo.py RESULTS > docs/model-types.md
    main(Path(sys.argv[1]))
