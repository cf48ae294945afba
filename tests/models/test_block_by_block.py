"""Models whose weights are read block by block: the same numbers, and no more is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModel

import lipscope as ls
from lipscope import InputError
from lipscope.models import loading, stored_weights
from lipscope.models.stored_weights import StoredWeights
from lipscope.models.tracing import resident_weights
from lipscope.models.tracing.map_endpoints import MapEndpoints

IDS = torch.randint(3, 200, (1, 10), generator=torch.Generator().manual_seed(0))
_SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
_SIZES |= {"intermediate_size": 48, "vocab_size": 300}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_T5 = {"d_model": 32, "d_kv": 8, "num_heads": 4, "num_layers": 2, "d_ff": 48, "vocab_size": 300}
_BART = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
_BART |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "vocab_size": 300}
FAMILIES: dict[str, dict[str, Any]] = {
    "albert": {**_SIZES, "embedding_size": 16},  # one block, called three times
    "bart": {**_BART, "max_position_embeddings": 64},
    "bert": _SIZES,
    "bloom": {"hidden_size": 32, "n_layer": 3, "n_head": 4, "vocab_size": 300},
    "deberta-v2": _SIZES,
    "gemma3_text": {**_GROUPED, "head_dim": 8},  # scaled embeddings
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 300},
    "llama": _GROUPED,
    "mixtral": {**_GROUPED, "num_local_experts": 4},  # experts that are stacked on loading
    "opt": {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 3, "num_attention_heads": 4},
    "qwen2_moe": {
        **_GROUPED,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "t5": {**_T5, "num_decoder_layers": 2},  # tied tables
    "vit": {**_SIZES, "image_size": 16, "patch_size": 4},
}
FAMILIES["opt"] |= {"word_embed_proj_dim": 32, "vocab_size": 300}
FAMILIES["vit"].pop("vocab_size")


def model_of(family: str, **sizes: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = CONFIG_MAPPING[family](**{**FAMILIES[family], **sizes})
        model = AutoModel.from_config(config).eval()
        for weight in model.parameters():
            weight.data += 0.2 * torch.randn_like(weight)  # so that attention is not flat
    return model.to(torch.bfloat16 if family != "vit" else torch.float32)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    held: dict[str, str] = {}

    class Folders(dict[str, str]):
        def __missing__(self, family: str) -> str:
            path = tmp_path_factory.mktemp(family)
            model_of(family).save_pretrained(path, max_shard_size="20KB")
            return self.setdefault(family, str(path))

    return Folders(held)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model is large, every table is one."""
    monkeypatch.setattr(loading, "LARGE", 0)
    monkeypatch.setattr(resident_weights, "_TABLE", 100)
    monkeypatch.setattr(resident_weights, "_SMALL", 100)


def given(family: str) -> dict[str, Tensor]:
    if family == "vit":
        draw = torch.Generator().manual_seed(0)
        return {"pixel_values": torch.randn(1, 3, 16, 16, generator=draw)}
    return {"input_ids": IDS} | ({"decoder_input_ids": IDS[:, :6]} if family in _SIDES else {})


_SIDES = ("t5", "bart")


def asked(model: Any, family: str, **options: Any) -> Any:
    return exact(model, given(family), **options)


def exact(model: Any, inputs: dict[str, Tensor], **options: Any) -> Any:
    """Rows that rounding does not change by 1e-6, whatever shares a product or a thread."""
    return ls.measure(model, inputs, dtype="float64", tol=1e-8, **options)


@pytest.fixture(scope="module")
def whole(folders: dict[str, str]) -> dict[tuple[str, str], list[float]]:
    """Sigmas of all layers of a family in a map, with the whole model in memory."""

    class Sigmas(dict[tuple[str, str], list[float]]):
        def __missing__(self, key: tuple[str, str]) -> list[float]:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(loading, "LARGE", 2**40)
                rows = asked(folders[key[0]], key[0], map=key[1])
            return self.setdefault(key, [row.sigma for row in rows])

    return Sigmas()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("map", ["attention", "block"])
@pytest.mark.parametrize("family", FAMILIES)
def test_sigma_is_that_of_the_whole_model(
    family: str, map: str, folders: dict[str, str], whole: Any
) -> None:
    expected = whole[family, map]
    model = ls.load_model(folders[family])
    assert model.loaded.stored is not None
    assert all(p.is_meta or family == "vit" for p in model.model.parameters())
    rows = asked(model, family, map=map)
    assert [row.sigma for row in rows] == pytest.approx(expected, rel=1e-6)
    (one,) = asked(model, family, map=map, layers=[1])
    assert one.sigma == pytest.approx(expected[1], rel=1e-6)
    assert "read block by block" in (one.note or "")


def read_names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    read = StoredWeights.read

    def noted(self: StoredWeights, some: Any) -> Any:
        names.extend(some)
        return read(self, some)

    monkeypatch.setattr(StoredWeights, "read", noted)
    return names


@pytest.mark.usefixtures("small")
def test_blocks_above_are_not_read(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names = read_names(monkeypatch)
    rows: list[list[int]] = []
    some = StoredWeights.rows

    def noted(self: StoredWeights, name: str, index: list[int]) -> Tensor:
        rows.append(index)
        return some(self, name, index)

    monkeypatch.setattr(StoredWeights, "rows", noted)
    asked(folders["llama"], "llama", layers=[1])
    assert {name.split(".")[1] for name in names if name.startswith("layers.")} == {"0", "1"}
    assert "embed_tokens.weight" not in names
    assert {index for one in rows for index in one} == set(IDS.flatten().tolist())
    (said,) = [one.message for one in caplog.records]
    assert "on disk; layer 1 needs 2 of 3 blocks, read one after the other" in said


@pytest.mark.usefixtures("small")
def test_damage_is_found_where_it_is_read(tmp_path: Path) -> None:
    model_of("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    weights["layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(weights, file, metadata={"format": "pt"})
    (row,) = asked(str(tmp_path), "llama", layers=[0])
    assert row.sigma is not None
    with pytest.raises(InputError, match=r"finite. Found 1 NaN or Inf in `layers.1.mlp.up_proj"):
        asked(str(tmp_path), "llama", layers=[2])


@pytest.mark.usefixtures("small")
def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    model_of("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    del weights["layers.1.mlp.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match="are not in the file and would be random"):
        ls.load_model(tmp_path)


@pytest.mark.usefixtures("small")
def test_prefixes_of_wrappers_are_taken_off(tmp_path: Path, whole: Any) -> None:
    model_of("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = {f"_orig_mod.module.{name}": one for name, one in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    rows = asked(str(tmp_path), "llama")
    assert [row.sigma for row in rows] == pytest.approx(whole["llama", "attention"], rel=1e-6)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The most entries of weights in the run's type at a time, told at the end of each pass."""
    most = [0]
    fill = resident_weights.ResidentWeights._fill

    def filled(self: Any, block: str) -> None:
        fill(self, block)
        most[0] = max(most[0], sum(p.numel() for p in self.model.parameters() if not p.is_meta))

    monkeypatch.setattr(resident_weights.ResidentWeights, "_fill", filled)
    return most


@pytest.mark.usefixtures("small")
def test_a_module_in_half_precision_is_not_copied_as_a_whole(
    held: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of("llama")
    with monkeypatch.context() as patch:
        patch.setattr(loading, "LARGE", 2**40)
        expected = [row.sigma for row in asked(model, "llama")]
    assert held == [0]
    before = {name: (p.data_ptr(), p.dtype) for name, p in model.named_parameters()}
    rows = asked(model, "llama", memory="1MiB")
    assert [row.sigma for row in rows] == pytest.approx(expected, rel=1e-6)
    (said,) = [one.message for one in caplog.records]
    assert "in memory; all layers need 3 of 3 blocks, cast one after the other" in said
    block = sum(p.numel() for p in model.layers[0].parameters())
    table = model.embed_tokens.weight.numel()
    assert {name: (p.data_ptr(), p.dtype) for name, p in model.named_parameters()} == before
    assert 0 < held[0] <= table + 3 * block  # all blocks have room in 1 MiB; the table is virtual


@pytest.mark.usefixtures("small")
def test_a_block_goes_when_the_next_one_comes(held: list[int], folders: dict[str, str]) -> None:
    asked(folders["llama"], "llama", layers=[2])
    model = model_of("llama")
    block = sum(p.numel() for p in model.layers[0].parameters())
    small = sum(p.numel() for p in model.parameters() if p.numel() <= 100)
    assert held[0] <= model.embed_tokens.weight.numel() + block + small


@pytest.mark.usefixtures("small")
def test_what_needs_all_weights_has_them_or_says_so(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch, whole: Any
) -> None:
    model = ls.load_model(folders["llama"])
    rows = asked(model, "llama", map="stack", layers=[1])
    assert rows[0].sigma == pytest.approx(whole["llama", "stack"][1], rel=1e-6)
    monkeypatch.setattr(loading, "free_memory", lambda: 100)
    for map in ("stack", "model"):
        with pytest.raises(InputError, match=f"The map `{map}` needs all of .* in memory: 0.0 G"):
            asked(folders["llama"], "llama", map=map)
    with pytest.raises(InputError, match="`causal` needs all of"):
        asked(folders["bert"], "bert", causal=True)
    with pytest.raises(InputError, match="A decision of a model needs all of"):
        ls.load_model(folders["bert"]).decision(given("bert"))


@pytest.mark.usefixtures("small")
def test_a_layer_answers_everything(folders: dict[str, str], whole: Any) -> None:
    model = ls.load_model(folders["llama"])
    at = model.at(given("llama"), layer=1, dtype="float64", tol=1e-8)
    assert at.sigma == pytest.approx(whole["llama", "attention"][1], rel=1e-6)
    assert at.norm is not None and not any(p.is_meta for p in at.norm.parameters())
    assert all(t.is_floating_point() and not t.is_meta for t in at.attention.parameters())
    other = model.at(given("llama"), layer=2, map="block", dtype="float64")
    assert torch.allclose(at(at.x), at.output) and torch.allclose(other(other.x), other.output)
    assert at.certify(eps=1e-6).value >= at.sigma * (1 - 1e-9)
    assert len(at.bounds()) == 1 and len(at.directions()) > 0


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("map", ["attention", "block"])
def test_a_layer_keeps_its_weights_while_others_pass(map: str, folders: dict[str, str]) -> None:
    """The memory of a block that went is the next one's, unless somebody holds it."""
    model = ls.load_model(folders["llama"])
    about: Any = {"map": map, "dtype": "float64", "memory": "1MiB"}
    first = model.at(given("llama"), layer=0, **about)
    before = first(first.x)
    for layer in (2, 1):
        at = model.at({"input_ids": IDS + layer}, layer=layer, **about)
        assert torch.allclose(at(at.x), at.output, rtol=1e-10)
        assert torch.equal(first(first.x), before)


def test_a_changed_checkpoint_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_of("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"

    def now() -> str:
        stored = stored_weights.stored_weights(str(tmp_path), larger_than=0)
        assert stored is not None
        return stored.fingerprint()

    first = now()
    weights = load_file(file)
    save_file(weights, file, metadata={"format": "pt"})
    assert now() == first
    weights["norm.weight"][3] += 1
    save_file(weights, file, metadata={"format": "pt"})
    assert now() != first
    later, config = now(), tmp_path / "config.json"
    config.write_text(config.read_text().replace('"rope_theta": 1', '"rope_theta": 2'))
    assert now() != later
    monkeypatch.setattr(stored_weights, "HASHED", 0)
    later = now()
    save_file(weights, file, metadata={"format": "pt"})
    assert now() != later  # its time is another


@pytest.mark.usefixtures("small")
def test_files_that_changed_after_opening_are_refused(tmp_path: Path) -> None:
    """Else layers of two checkpoints stand beside each other."""
    model_of("llama").save_pretrained(tmp_path)
    model, file = ls.load_model(str(tmp_path)), tmp_path / "model.safetensors"
    ls.measure(model, {"input_ids": IDS}, layers=0)
    other = {name: 2 * one for name, one in load_file(file).items()}
    save_file(other, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match="as they were when it was opened"):
        ls.measure(model, {"input_ids": IDS}, layers=2)
    file.write_bytes(file.read_bytes()[:-100])  # cut short, with a whole header
    with pytest.raises(InputError, match="not fully covered"):
        ls.load_model(str(tmp_path))


def test_a_model_of_ones_own_is_not_a_stored_one(folders: dict[str, str], small: None) -> None:
    from dataclasses import replace

    loaded = ls.load_model(folders["llama"]).loaded
    assert loaded.stored is not None and replace(loaded, name="other").stored is not None
    assert replace(loaded, model=nn.Linear(2, 2)).stored is None


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_windows_pass_a_block_together(
    family: str, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.randint(3, 200, (3, 10), generator=torch.Generator().manual_seed(1))
    several = {"input_ids": ids}
    if family in _SIDES:
        several["decoder_input_ids"] = ids[:, :6]
    alone = [
        exact(folders[family], {k: v[i : i + 1] for k, v in several.items()}, layers=[1])[0]
        for i in range(3)
    ]
    names = read_names(monkeypatch)
    rows = exact(folders[family], several, layers=[1])
    assert [row.sigma for row in rows] == pytest.approx([row.sigma for row in alone], rel=1e-6)
    of_blocks = [name for name in names if "layers.0." in name or "block.0." in name]
    assert len(of_blocks) == len(set(of_blocks)) > 0  # once for all windows
    assert not any("layers.1.mlp.up" in name for name in names)  # behind the attention


@pytest.mark.usefixtures("small")
def test_each_window_passes_a_block_once(folders: dict[str, str]) -> None:
    loaded, ids = ls.load_model(folders["llama"]).loaded, torch.randint(3, 200, (2, 10))
    below: list[int] = []
    block = loaded.model.get_submodule("layers.0")
    hook = block.register_forward_hook(lambda *_: below.append(1))
    model = ls.load_model(loaded)
    for count in (1, 2):
        below.clear()
        for at in model.layers({"input_ids": ids[:count]}, layers=[2]):
            _ = at.x
        assert len(below) == count
    hook.remove()


@pytest.mark.usefixtures("small")
def test_a_window_that_fails_does_not_stop_the_others(folders: dict[str, str]) -> None:
    model = ls.load_model(folders["llama"])
    ids = torch.cat([IDS, IDS + 1, torch.full_like(IDS, 10_000)])
    with pytest.raises(InputError, match="Token ids"):
        ls.measure(model, {"input_ids": ids}, layers=[1])
    assert torch.get_default_dtype() == torch.float32
    (row,) = ls.measure(model, {"input_ids": IDS}, layers=[1])
    assert row.sigma is not None


def read_keys(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    keys: list[str] = []
    opened = StoredWeights._opened

    def noted(self: StoredWeights, some: Any) -> Any:
        keys.extend(some)
        return opened(self, some)

    monkeypatch.setattr(StoredWeights, "_opened", noted)
    return keys


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_only_experts_of_the_tokens_are_read(
    family: str, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = read_keys(monkeypatch)
    model = ls.load_model(folders[family])
    for token in (7, 8):  # each goes to two of four experts
        keys.clear()
        ls.measure(model, {"input_ids": torch.tensor([[token]])}, layers=[1])
        of_experts = [key.partition("experts.")[2] for key in keys if ".experts." in key]
        assert len({key.split(".")[0] for key in of_experts}) == 2
        assert len(of_experts) == len(set(of_experts)) == 2 * 3  # of the first block alone


@pytest.mark.usefixtures("small")
def test_pickles_are_mapped(tmp_path: Path, folders: dict[str, str], whole: Any) -> None:
    model = model_of("llama")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match="only as a pickle"):
        ls.load_model(tmp_path)
    loaded = ls.load_model(tmp_path, allow_pickle=True)
    assert loaded.loaded.stored is not None
    rows = asked(loaded, "llama", layers=[0, 1])
    expected = whole["llama", "attention"][:2]
    assert [row.sigma for row in rows] == pytest.approx(expected, rel=1e-6)
    torch.save(
        model.state_dict(), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False
    )
    assert ls.load_model(tmp_path, allow_pickle=True).loaded.stored is None


@pytest.mark.usefixtures("small")
def test_a_hub_id_in_the_cache_is_read_block_by_block(
    tmp_path: Path, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch, whole: Any
) -> None:
    from huggingface_hub import constants

    commit, home = "0123456789" * 4, tmp_path / "models--someone--llama"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text(commit)
    (home / "snapshots").mkdir()
    (home / "snapshots" / commit).symlink_to(folders["llama"])
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    loaded = ls.load_model("someone/llama")
    assert loaded.loaded.stored is not None and loaded.loaded.revision == commit
    (row,) = asked(loaded, "llama", layers=[1])
    assert row.sigma == pytest.approx(whole["llama", "attention"][1], rel=1e-6)


@pytest.mark.usefixtures("small")
def test_overflow_in_float16_is_found_where_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("llama").half()
    model.layers[1].self_attn.v_proj.weight.data *= 60_000
    model.save_pretrained(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(loading, "LARGE", 2**40)
        expected = [row.note for row in ls.measure(str(tmp_path), given("llama"))]
    found = [row.note for row in ls.measure(str(tmp_path), given("llama"))]
    said = "in float16 layer 1 overflows at this input"
    assert [said in (note or "") for note in found] == [said in (note or "") for note in expected]
    assert said in (found[1] or "")


@pytest.mark.usefixtures("small")
def test_a_push_runs_no_block_below_it(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"layer": 1, "draws": 1, "eps": [0.1, 10.0], "certificate": False}
    options["memory"] = "1MiB"  # too little to keep a block
    names = read_names(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(MapEndpoints, "below", lambda *_: {})
        expected = ls.push(folders["llama"], given("llama"), **options)
    before = names.count("layers.0.self_attn.q_proj.weight")
    names.clear()
    found = ls.push(folders["llama"], given("llama"), **options)
    numbers = [[(one.layer, one.block, one.model) for one in a.steps] for a in (found, expected)]
    assert numbers[0] == numbers[1]
    assert 2 * names.count("layers.0.self_attn.q_proj.weight") < before


def test_complex_buffers_are_as_precise_as_the_run():
    """As in a model that is converted whole: rotations of a Llama 4 are complex numbers."""
    model = nn.Linear(2, 2)
    model.register_buffer("turns", torch.polar(torch.ones(3), torch.arange(3.0)))
    empty = resident_weights.without_weights(model, torch.float64, torch.device("cpu"))
    assert empty.turns.dtype == torch.complex128
