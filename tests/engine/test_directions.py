"""Leading directions in words: dense matrices, finite differences, directions that are planted."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

import lipscope as ls
from command import BERT, TEXT
from lipscope.engine.direction_words import read
from lipscope.errors import InputError
from lipscope.linalg import Operator, leading, top_singular
from lipscope.models import Readings, build_map, trace
from lipscope.models.tracing.sites import attention_sites
from opened import layer_of
from tiny import TINY, tiny

GPT2, LLAMA = (f"random:{name}:{TINY[name]}" for name in ("gpt2", "llama"))
TIED = f"{LLAMA},tie_word_embeddings=true"
PICTURES = "random:dinov2:hidden_size=12,num_attention_heads=3,num_hidden_layers=2,image_size=28"
PICTURES += ",patch_size=14"
LENGTH = 6
# A small residual, so that vectors are those of the dense matrix to six digits.
EXACT: dict = {"dtype": "float64", "delta": 1e-6, "length": LENGTH, "tol": 1e-10}


def diagonal(*values: float) -> Operator:
    scale = torch.tensor(values, dtype=torch.float64)
    return Operator(lambda e: scale * e, lambda g: scale * g, scale.shape, scale.shape, scale.dtype)


def found(op: Operator, count: int):
    seeded = torch.Generator().manual_seed
    top = top_singular(op, generator=seeded(0))
    return leading(op, top, seeded, count=count, tol=1e-3, delta=1e-6)


@pytest.mark.parametrize(
    "values", [(5.0, 4.0, 3.0, 2.0, 1.0), (5.0, 5.0, 3.0, 1.0), (1.0,) * 4, (2.0, 0.0, 0.0)]
)
def test_intervals_hold_the_singular_values_of_every_rank(values: tuple[float, ...]) -> None:
    some = found(diagonal(*values), 4)
    assert len(some) == min(4, sum(value > 0 for value in values))
    for one, truth in zip(some, values, strict=False):
        assert one.sigma <= truth * (1 + 1e-12) and truth <= one.upper * (1 + 1e-12)


def test_angles_are_bounded_and_unknown_where_values_are_equal() -> None:
    some = found(diagonal(5.0, 4.0, 4.0, 1.0, 0.5), 4)
    assert some[1].sine is None or some[1].sine > 0.1
    for rank in (0, 3):
        one = some[rank]
        truth = 1 - float(one.v[rank]) ** 2
        assert one.sine is not None and one.sine < 0.1 and truth**0.5 <= one.sine + 1e-9


def parts(rows: ls.Rows, side: str, rank: int = 1) -> dict[int, ls.Direction]:
    return {p.index: p for p in rows.directions if (p.side, p.rank) == (side, rank)}


@pytest.mark.parametrize("model", [BERT, GPT2])
def test_directions_and_heads_of_a_layer_against_its_dense_jacobian(model: str) -> None:
    rows = ls.directions(model, TEXT, layer=1, k=3, **EXACT)
    layer, x = layer_of(model, TEXT, layer=1, length=LENGTH)
    u, values, vt = torch.linalg.svd(ls.to_dense(layer.linearise(x)))
    assert layer.output is not None

    def contributions(point: torch.Tensor) -> torch.Tensor:
        heads = layer.heads(point).unflatten(1, (layer.num_heads, -1)).transpose(0, 1)
        assert layer.output is not None
        return heads @ layer.output.unflatten(1, (layer.num_heads, -1)).permute(1, 2, 0)

    by_head = torch.autograd.functional.jacobian(contributions, x)
    for rank in (1, 2, 3):
        right, left, heads = (parts(rows, side, rank) for side in ("right", "left", "head"))
        first = right[next(iter(right))]
        truth = float(values[rank - 1])
        assert first.sigma <= truth * (1 + 1e-9) and truth <= first.upper * (1 + 1e-9)
        assert first.determined and first.sine is not None
        for side, vector in ((right, vt[rank - 1]), (left, u[:, rank - 1])):
            shares = vector.reshape(LENGTH, -1).square().sum(1)
            for i, one in side.items():
                assert one.share == pytest.approx(float(shares[i]), abs=3 * first.sine + 1e-6)
        assert sum(one.share for one in heads.values()) == pytest.approx(1, abs=1e-9)
        v = vt[rank - 1].reshape(x.shape)
        for h, one in heads.items():
            image = torch.einsum("nomd,md->no", by_head[h], v).flatten()
            exact = float(image @ u[:, rank - 1]) / truth
            assert one.share == pytest.approx(exact, abs=10 * first.sine + 1e-6)


def planted(loaded: ls.models.LoadedModel, direction: torch.Tensor) -> None:
    """Layer 0 of a GPT-2 that reads one direction of every token: uniform weights, rank one."""
    attention = loaded.model.h[0].attn
    width = len(direction)
    with torch.no_grad():
        attention.c_attn.weight.zero_()
        attention.c_attn.weight[:, 2 * width] = direction


def test_a_planted_replacement_is_read() -> None:
    """The first token weighs most, and its vector is where replacing it by "w" moves the input."""
    loaded = tiny("gpt2")
    model = loaded.model.double()
    ids = torch.tensor(loaded.tokenizer(TEXT)["input_ids"][:LENGTH])
    table, norm = model.wte.weight, model.h[0].ln_1
    stream = table[ids[0]] + model.wpe.weight[0]
    with torch.no_grad():
        step = norm(stream + table[ord("w")] - table[ids[0]]) - norm(stream)
    planted(loaded, step)
    rows = ls.directions(loaded, TEXT[:LENGTH], k=1, **EXACT)
    one = parts(rows, "right")[0]
    words = one.words("plus") + one.words("minus")
    assert ("w", 1.0) in words and one.space == "vocabulary"
    assert one.cosine == pytest.approx(1, abs=1e-6) and one.spanned == pytest.approx(1, abs=1e-6)
    assert one.reads and one.share == max(p.share for p in parts(rows, "right").values())
    heads = parts(rows, "head")
    assert heads[0].share == pytest.approx(1, abs=1e-9)  # the one whose values are not zero


def test_a_random_direction_reads_as_something_once_in_a_hundred_times() -> None:
    """200 of them, each with readings of its own: more than 8 pass once in 4,000 times."""
    gen = torch.Generator().manual_seed(0)
    passed = 0
    for k in range(200):
        vectors = torch.randn(40, 8, generator=gen, dtype=torch.float64)
        readings = Readings("window", [""] * 40, lambda ids, v=vectors: v[ids])
        one = torch.randn(1, 8, generator=gen, dtype=torch.float64)
        (said,) = read(readings, one, str(k), 2**20)
        passed += said["cosine"] > said["chance_cosine"]
    assert passed <= 8


@pytest.mark.parametrize("last", [[], ["(any other)"]])
def test_readings_in_blocks_are_those_of_the_whole_table(last: list[str]) -> None:
    gen = torch.Generator().manual_seed(0)
    vectors, some = (torch.randn(k, 16, generator=gen, dtype=torch.float64) for k in (40, 3))
    readings = Readings("window", [*map(str, range(40)), *last], lambda ids: vectors[ids])
    whole, parts = (read(readings, some, "", memory) for memory in (2**30, 1))
    table = torch.cat([vectors, vectors.mean(0, keepdim=True)]) if last else vectors
    for vector, one, other in zip(some, whole, parts, strict=True):
        assert one["plus"] == other["plus"] and one["minus"] == other["minus"]
        cosines = torch.cosine_similarity(table, vector[None]).abs()
        best = torch.linalg.qr(table[cosines.topk(10).indices].T)[0]
        inside = float((best.T @ vector).square().sum() / vector.square().sum())
        for found in (one, other):
            assert found["cosine"] == pytest.approx(float(cosines.max()), abs=1e-9)
            assert found["spanned"] == pytest.approx(min(inside, 1.0), abs=1e-9)


def test_a_direction_that_no_reading_has_reads_as_nothing() -> None:
    """No tokenizer: the ids of the window, and a vector that is orthogonal to all of them."""
    loaded = ls.load_model(
        "random:gpt2:n_embd=48,n_head=4,n_layer=1,n_positions=16,vocab_size=99"
    ).loaded
    model = loaded.model.double()
    ids = torch.tensor([[3, 14, 15, 92, 65, 35]])
    with torch.no_grad():
        x = model.h[0].ln_1(model.wte(ids[0]) + model.wpe.weight[:6])
    steps = torch.linalg.qr((x - x[0])[1:].T)[0]
    away = torch.randn(48, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    planted(loaded, away - steps @ (steps.T @ away))
    rows = ls.directions(model, {"input_ids": ids}, k=1, dtype="float64")
    one = parts(rows, "right")[0]
    assert one.space == "window" and one.text == "3"
    assert one.cosine == pytest.approx(0, abs=1e-6) and one.reads is False


def rms_norm(module: torch.nn.Module, h: torch.Tensor) -> torch.Tensor:
    """By its formula: the module itself goes through float32."""
    return module.weight * h / (h.square().mean(-1, keepdim=True) + module.variance_epsilon).sqrt()


def differences(f: Callable[[torch.Tensor], torch.Tensor], h: torch.Tensor) -> torch.Tensor:
    """The Jacobian of ``f`` at ``h`` by central differences."""
    with torch.no_grad():
        steps = 1e-5 * torch.eye(len(h), dtype=h.dtype)
        return torch.stack([(f(h + s) - f(h - s)) / 2e-5 for s in steps], dim=1)


@pytest.mark.parametrize("map", ["residual", "block", "attention"])
def test_readings_of_a_decoder_are_changes_of_its_logits(map) -> None:
    loaded = ls.load_model(TIED).loaded
    model = loaded.model.double()
    rows = ls.directions(loaded, TEXT, layer=1, k=1, map=map, **EXACT)
    ids = torch.tensor([loaded.tokenizer(TEXT)["input_ids"]])
    start = rows[0].start or 0
    ids = ids[:, start : start + LENGTH]
    record = trace(
        model,
        {"input_ids": ids},
        attention_sites(model),
        norms=True,
        blocks=True,
        dtype=torch.float64,
    )
    built = build_map(record, 1, map)
    u, _, vt = torch.linalg.svd(ls.to_dense(built.linearise(built.x)))
    stream = build_map(record, 1, "residual")
    named = loaded.tokenizer.convert_ids_to_tokens(range(300))

    def logits(h: torch.Tensor) -> torch.Tensor:
        y = rms_norm(model.norm, h) @ model.embed_tokens.weight.T
        return y - y.mean()

    turned = None
    after = built.output if map == "block" else stream.output
    for side, vector, points in (("right", vt[0], stream.x), ("left", u[:, 0], after)):
        for i, one in parts(rows, side).items():
            assert one.space == "read-out"
            gradients = differences(logits, points[i])
            if (side, map) == ("right", "attention"):
                # Of the least move of the stream that the norm turns into it.
                norm = model.layers[1].input_layernorm
                inside = differences(partial(rms_norm, norm), points[i])
                gradients = gradients @ torch.linalg.pinv(inside, rtol=1e-3)
            own = vector.reshape(LENGTH, -1)[i]
            cosines = torch.nn.functional.cosine_similarity(gradients, own[None])
            if turned is None:  # one sign for all tokens of both vectors
                turned = torch.sign(cosines[named.index(one.words("plus")[0][0])])
            cosines = cosines * turned
            assert one.cosine == pytest.approx(float(cosines.abs().max()), abs=1e-6)
            for sign, turn in (("plus", 1), ("minus", -1)):
                for word, cosine in one.words(sign):  # of four digits
                    exact = float(turn * cosines[named.index(word)])
                    assert exact == pytest.approx(cosine, rel=1e-3)


MASKED = {"hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 2}
MASKED |= {"intermediate_size": 16, "vocab_size": 300, "max_position_embeddings": 40}


@pytest.mark.parametrize("map", ["attention", "block"])
def test_readings_of_an_encoder_are_changes_of_the_words_it_would_fill_in(map) -> None:
    """Its norms stand behind its layers, and its head has layers of its own."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    model = BertForMaskedLM(BertConfig(**MASKED)).eval().double()
    tokenizer = tiny("bert").tokenizer
    rows = ls.directions(model, TEXT, layer=1, k=1, map=map, tokenizer=tokenizer, **EXACT)
    start = rows[0].start or 0
    inputs = {"input_ids": torch.tensor([tokenizer(TEXT)["input_ids"][start : start + LENGTH]])}
    record = trace(
        model, inputs, attention_sites(model), norms=True, blocks=True, dtype=torch.float64
    )
    built = build_map(record, 1, map)
    u, _, vt = torch.linalg.svd(ls.to_dense(built.linearise(built.x)))
    norm = model.bert.encoder.layer[1].attention.output.LayerNorm

    def logits(h: torch.Tensor) -> torch.Tensor:
        y = model.cls(h)
        return y - y.mean()

    def behind(total: torch.Tensor) -> torch.Tensor:
        return logits(norm(total))

    after = (logits, built.output) if map == "block" else (behind, built.x + built.output)
    named, turned = tokenizer.convert_ids_to_tokens(range(300)), None
    for side, vector, (f, points) in (
        ("right", vt[0], (logits, built.x)),
        ("left", u[:, 0], after),
    ):
        for i, one in parts(rows, side).items():
            assert one.space == "read-out"
            own = vector.reshape(LENGTH, -1)[i]
            cosines = torch.cosine_similarity(differences(f, points[i]), own[None])
            if turned is None:  # one sign for all tokens of both vectors
                turned = torch.sign(cosines[named.index(one.words("plus")[0][0])])
            for word, cosine in one.words("plus"):  # of four digits
                exact = float(turned * cosines[named.index(word)])
                assert exact == pytest.approx(cosine, rel=1e-3)
            assert one.cosine == pytest.approx(float(cosines.abs().max()), abs=1e-6)


@pytest.mark.parametrize("family", ["Bert", "RobertaPreLayerNorm"])
def test_the_head_of_a_checkpoint_is_that_of_its_class(family: str, tmp_path: Path) -> None:
    """Read from the folder, and as an object: a model that is loaded leaves its head behind."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**MASKED)
    model = getattr(transformers, f"{family}ForMaskedLM")(config).eval()
    model.save_pretrained(tmp_path)
    options = EXACT | {"layer": 1, "k": 1, "tokenizer": tiny("bert").tokenizer}
    found = [ls.directions(one, TEXT, **options) for one in (model, str(tmp_path))]
    for side in ("right", "left"):
        mine, other = (parts(rows, side) for rows in found)
        assert {p.space for p in mine.values()} == {"read-out"} and mine.keys() == other.keys()
        for i, one in mine.items():  # its random start, and so its sign, follow its name
            assert one.cosine == pytest.approx(other[i].cosine, abs=1e-6)


NAMED = ("One fox, one dog.", "Shares fell on Monday.", "it sleeps")


def test_turning_towards_texts_is_the_derivative_of_the_model() -> None:
    loaded = ls.load_model(BERT).loaded
    model, read = loaded.model.double(), loaded.tokenizer
    rows = ls.directions(loaded, TEXT, layer=1, k=1, among=NAMED, **EXACT)
    layer, x = layer_of(loaded, TEXT, layer=1, length=LENGTH)
    v = torch.linalg.svd(ls.to_dense(layer.linearise(x)))[2][0].reshape(x.shape)
    start = rows[0].start or 0
    ids = torch.tensor([read(TEXT)["input_ids"][start : start + LENGTH]])

    def mean(ids: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids).last_hidden_state[0].mean(0)

    def cosines(size: float) -> torch.Tensor:
        def move(_: torch.nn.Module, args: tuple) -> tuple:
            return (args[0] + size * v, *args[1:])

        handle = model.encoder.layer[1].register_forward_pre_hook(move)
        found = mean(ids)
        handle.remove()
        return torch.cosine_similarity(texts, found[None])

    with torch.no_grad():
        texts = torch.stack([mean(torch.tensor([read(text)["input_ids"]])) for text in NAMED])
        exact = (cosines(1e-5) - cosines(-1e-5)) / 2e-5
    found = [p for p in rows.directions if p.side == "text"]
    assert [p.text for p in found] == list(NAMED)
    shares = torch.tensor([p.share for p in found], dtype=torch.float64)
    shares = shares * (shares @ exact).sign()  # v and u change their signs together
    assert torch.allclose(shares, exact, rtol=1e-5, atol=1e-9)
    assert all((p.cosine or 0) <= 1 and (p.chance_cosine or 0) > 0 for p in found)


@pytest.mark.parametrize("map", ["model", "stack"])
def test_many_layers_together_read_from_tokens_to_logits(map) -> None:
    layer = "all" if map == "model" else 1
    rows = ls.directions(GPT2, TEXT, layer=layer, k=1, length=LENGTH, map=map)
    read = {(p.side, p.space) for p in rows.directions}
    assert read == {("right", "vocabulary"), ("left", "read-out")}  # and no heads


@pytest.mark.parametrize(
    "model",
    [
        LLAMA,  # its embedding is not tied
        BERT,  # its norms stand behind its layers
        # Its embedding is tied, to logits behind a layer more than the final norm.
        f"random:roberta-prelayernorm:{TINY['roberta']},tie_word_embeddings=true",
    ],
)
def test_without_a_read_out_deeper_layers_read_the_window(model: str) -> None:
    rows = ls.directions(model, TEXT, layer=1, k=1, length=LENGTH)
    some = [p for p in rows.directions if p.side != "head"]
    assert {p.space for p in some} == {"window"}
    assert all(word.endswith(")") for p in some for word, _ in p.words("plus"))


def test_vectors_of_another_width_are_no_ground() -> None:
    """ALBERT's embedding is projected on its way into the first layer."""
    name = f"random:albert:{TINY['bert']},embedding_size=8"
    rows = ls.directions(name, TEXT, layer=0, k=1, length=LENGTH)
    assert {p.space for p in rows.directions if p.side != "head"} == {"window"}


def test_a_layer_by_itself_and_moves_of_one_token() -> None:
    eye = torch.eye(3, dtype=torch.float64)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = ls.directions(ls.DotProduct(eye, eye, eye), x, k=2, move="1", read="last")
    assert set(parts(rows, "right")) == {1} and set(parts(rows, "left")) == {3}
    assert parts(rows, "right")[1].share == pytest.approx(1)
    zero = ls.directions(ls.DotProduct(eye, eye, 0 * eye), x)
    assert zero[0].sigma == 0 and zero.directions == []


def test_texts_are_for_models_that_read_texts() -> None:
    for model, x in (
        (ls.DotProduct(*3 * [torch.eye(3)]), torch.eye(3)),
        (PICTURES, torch.rand(1, 3, 28, 28)),
    ):
        with pytest.raises(InputError, match="`among` needs a model that reads texts"):
            ls.directions(model, x, k=1, among=NAMED)


def test_patches_have_places() -> None:
    picture = torch.rand(1, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    rows = ls.directions(PICTURES, picture, layer=1, k=1)
    texts = {p.text for p in rows.directions if p.side != "head"}
    assert texts <= {"[0]", "patch 0,0", "patch 0,1", "patch 1,0", "patch 1,1"}


def test_a_folder_goes_on_and_lacks_nothing(tmp_path: Path) -> None:
    out = tmp_path / "run"
    first = ls.directions(GPT2, TEXT, layer=0, k=2, length=LENGTH, out=out)
    lines = (out / "directions.jsonl").read_bytes().splitlines(keepends=True)
    (out / "directions.jsonl").write_bytes(b"".join(lines[:-1]))
    (out / "directions.parquet").unlink()
    again = ls.directions(GPT2, TEXT, layer=[0, 1], k=2, length=LENGTH, out=out)
    assert {row.layer for row in again} == {0, 1}
    held = [p for p in again.directions if p.id == first[0].id]
    assert sorted(map(str, held)) == sorted(map(str, first.directions))
    run = ls.read_run(out)
    assert len(run.directions) == len(again.directions) == len(run.direction_parts())
    assert again.directions_to_polars().shape == run.directions.shape
    with pytest.raises(InputError, match="differs in directions"):
        ls.directions(GPT2, TEXT, layer=0, k=3, length=LENGTH, out=out)


def test_the_command_says_it(command) -> None:
    arguments = ("directions", GPT2, "--text", "text.txt", "--length", "6", "-k", "2")
    result = command(*arguments, "--out", "run")
    assert result.status == 0, result.err
    assert "direction 2: sigma in [" in result.out and "of the answer" in result.out
    lines = [json.loads(line) for line in command(*arguments, "--jsonl").out.splitlines()]
    assert {one["side"] for one in lines} == {"right", "left", "head"}
    assert all(isinstance(one["plus"], list) for one in lines)
    shown = command("rows", "run", "--part", "directions", "--to", "csv").out
    assert len(shown.splitlines()) == 1 + len(lines)
    where = "id IN (SELECT id FROM directions WHERE side = 'head')"
    assert "1 rows" in command("rows", "run", "--where", where).out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"per_head": True}, "`directions` has no option `per_head`"),
        ({"side": "key"}, "`directions` has no option `side`"),
        ({"theorems": "all"}, "`directions` has no option `theorems`"),
        ({"metric": "infinity"}, "`metric` should be one of frobenius, token-relative"),
        ({"move": "copies"}, "`move` should select tokens"),
        ({"among": ["one"]}, "`among` should name at least two"),
        ({"k": 0}, "`k` should be a whole number of at least 1"),
        ({"layer": 9}, "`layers` should be between 0 and 1"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(options, said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        ls.directions(BERT, TEXT, **options)
    assert "\n" not in str(caught.value)
