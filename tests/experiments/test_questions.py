"""Questions people ask: planted sinks, planted predictors, rounding with known results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from lipscope.control import attention_received, entropy_and_sink
from lipscope.errors import InputError
from lipscope.models import LoadedModel, rounded
from lipscope.records.folder import RunFolder
from lipscope_experiments import experiments
from lipscope_experiments.data import Text
from lipscope_experiments.experiment import Source, Study
from lipscope_experiments.findings import chosen
from lipscope_experiments.joint_test import correlations
from lipscope_experiments.questions import long_context, precision, sink
from lipscope_experiments.questions.precision import RoundedModel
from small import drawn
from tiny import TEXT, tiny


def a_study(folder: RunFolder) -> Study:
    return Study(folder, (), (), True, None)


def with_a_sink() -> LoadedModel:
    """A tiny GPT-2 whose first layer reads the token at position 0 and hardly any other."""
    loaded = tiny("gpt2", scale=1.0)
    model: Any = loaded.model
    width = model.config.n_embd
    with torch.no_grad():
        far = torch.tensor([1.0, -1.0]).repeat(width // 2)
        model.wpe.weight.zero_()
        model.wpe.weight[0] = 50 * far
        attention = model.h[0].attn.c_attn
        # Queries are constant, keys say how far a token lies along `far`.
        attention.weight[:, : 2 * width] = 0.0
        attention.weight[:, width : 2 * width] = far[:, None]
        attention.bias[:width] = 3.0
    return loaded


def test_a_planted_sink_is_found(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sink, "_TOKENS", 16)
    source = Source(with_a_sink(), "text", {"data": TEXT})
    with RunFolder(tmp_path / "run", {"a": 1}) as folder:
        study = a_study(folder)
        windows = [*sink._windows(study, source, "here", "planted")]
        (received,) = folder.values("received, here, planted").values()
    for window in chosen(windows, layer=0):
        assert window["top"] == sink.FIRST and window[sink.FIRST] > 0.9
        assert window["received"] == pytest.approx(1.0, abs=1e-3)
        assert window["kept"] < 0.3
    for window in chosen(windows, layer=1):
        assert sum(window.get(kind, 0.0) for kind in sink._KINDS) == pytest.approx(1.0, abs=1e-5)
    for values in received["received"].values():
        assert sum(values) == pytest.approx(1.0, abs=1e-5)
    sink._of_the_sink(study, "here", windows)
    (about, received, *_) = study.findings.claims
    assert "first token" in about.found and received.said.startswith("0.062")


def test_attention_received_is_the_mean_of_the_columns() -> None:
    layer, x = drawn(0, causal=True), torch.randn(5, 4, dtype=torch.float64)
    q, k = x @ layer.query.T, x @ layer.key.T
    scores = (q @ k.T) * layer.scale
    scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    expected = scores.softmax(-1).mean(0)
    torch.testing.assert_close(attention_received(layer, x)[0], expected)
    torch.testing.assert_close(entropy_and_sink(layer, x)[1], expected.max()[None])


def test_a_predictor_is_advice_where_it_beats_the_baselines() -> None:
    gen = np.random.default_rng(0)
    change, noise = gen.random((2, 12, 8))
    known = {
        "itself": change**3,
        "constant": np.ones((12, 8)),
        precision.ERROR: noise,
        precision.INDEX: np.arange(12.0)[:, None].repeat(8, 1),
    }
    assert precision.holds(known, change, "itself") == (True, True)
    assert precision.holds(known, change, "constant") == (False, False)
    assert precision.holds(known, known[precision.INDEX], precision.INDEX) == (True, False)
    assert not precision.holds(known | {precision.ERROR: known["itself"]}, change, "itself")[1]
    expected = [stats.spearmanr(x, y).statistic for x, y in zip(noise.T, change.T, strict=True)]
    assert correlations(noise, change) == pytest.approx(expected)
    assert np.isnan(correlations(known["constant"], change)).all()


def run_of(loaded: LoadedModel) -> RoundedModel:
    return RoundedModel(loaded, {"data": TEXT, "lengths": [9], "samples": 3})


def test_rounding_what_is_on_the_grid_changes_nothing() -> None:
    loaded = tiny("bert")
    block: Any = loaded.model.get_submodule("encoder.layer.1")
    for one in block.modules():
        if isinstance(one, torch.nn.Linear):
            one.weight.data = rounded(one.weight.data, 4)
    before = {name: p.clone() for name, p in loaded.model.named_parameters()}
    run = run_of(loaded)
    exact = run.rounded("encoder.layer.1", 4, "weights")
    assert max(exact["local"] + exact["hidden"]) < 1e-6  # float32, after another order of sums
    other = run.rounded("encoder.layer.1", 4, "inputs")
    assert min(other["hidden"]) > 1e-3 and len(other["hidden"]) == len(other["cosine"]) == 3
    # The last block's output is the last hidden state.
    assert other["hidden"] == pytest.approx(other["local"])
    for name, p in loaded.model.named_parameters():
        assert torch.equal(p, before[name]), name


def test_what_rounding_does_to_the_next_token() -> None:
    """Against the divergence and the loss of torch."""
    loaded = tiny("gpt2")
    run = run_of(loaded)
    model: Any = loaded.model
    ids, table = run.arguments["input_ids"], model.get_input_embeddings().weight

    def log_probabilities() -> torch.Tensor:
        with torch.no_grad():
            return (model(ids).last_hidden_state @ table.T).log_softmax(-1)

    log_p, found = log_probabilities(), run.rounded("h.0", 4, "weights")
    with torch.no_grad():
        for one in (model.get_submodule("h.0").attn, model.get_submodule("h.0").mlp):
            for part in (one.c_proj, getattr(one, "c_attn", None) or one.c_fc):
                part.weight.data = rounded(part.weight.data.T.contiguous(), 4).T.contiguous()
    log_q = log_probabilities()
    for w in range(3):
        kl = torch.nn.functional.kl_div(log_q[w], log_p[w], reduction="batchmean", log_target=True)
        lost = [torch.nn.functional.nll_loss(p[w, :-1], ids[w, 1:]) for p in (log_q, log_p)]
        assert found["divergence"][w] == pytest.approx(float(kl), rel=1e-4, abs=1e-6)
        assert found["loss"][w] == pytest.approx(float(lost[0] - lost[1]), rel=1e-3, abs=1e-5)


def test_uniform_attention_reads_its_last_token_with_a_part_of_one_over_root_n(tmp_path) -> None:
    loaded = tiny("bert", scale=1.0)
    model: Any = loaded.model
    model.config.max_position_embeddings = 64
    for one in model.encoder.layer:
        one.attention.self.query.weight.data.zero_()
        one.attention.self.query.bias.data.zero_()
    with RunFolder(tmp_path / "run", {"a": 1}) as folder:
        names = ["all tokens", "read at the last token", "first tenth moves"]
        source = Source(loaded, "text", {"data": 3 * TEXT})
        case = long_context._restricted_case(a_study(folder), source, names)
    assert case.lengths == [32, 64]
    for n, tenth in ((32, 4), (64, 7)):
        for layer in case.layers:
            # To the solver's 1 %.
            for one in case.parts("read at the last token", layer, n):
                assert one == pytest.approx(n**-0.5, rel=0.02)
            for one in case.parts("first tenth moves", layer, n):
                assert one == pytest.approx((tenth / n) ** 0.5, rel=0.02)


def test_sources_are_texts_or_pictures(tmp_path, monkeypatch) -> None:
    vit = "random:vit:hidden_size=12,num_attention_heads=3,num_hidden_layers=1,image_size=16"
    bert = "random:bert:hidden_size=12,num_attention_heads=3,num_hidden_layers=1"
    texts = (Text("one", "a"), Text("two", "b"))
    with RunFolder(tmp_path / "run", {"a": 1}) as folder:
        study = Study(folder, (bert, vit, "dinov2"), texts, True, None, "random")
        load = study.load

        def without(name: str) -> LoadedModel:
            if name == "dinov2":
                raise InputError("no package")
            return load(name)

        monkeypatch.setattr(study, "load", without)
        found = [(one.where, one.sees) for one in study.sources()]
    assert found == [
        (f"{bert}, one", False),
        (f"{bert}, two", False),
        (f"{vit}, random pixels", True),
    ]
    assert study.missing == ["Not run: no package"]


def test_they_are_registered() -> None:
    names = {entry.name for entry in experiments() if entry.name.startswith("questions/")}
    assert names == {
        "questions/sink",
        "questions/sink-training",
        "questions/margin-gain",
        "questions/kept-tokens",
        "questions/precision",
        "questions/long-context",
    }
