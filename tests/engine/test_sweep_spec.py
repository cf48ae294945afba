"""Specifications of sweeps: what is read, what is refused, and how it becomes jobs."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from lipscope.engine.plan import InputKey, Job, Shape, Survey, plan, row_ids
from lipscope.engine.spec import AXES, OPTIONS, MeasureOptions, Spec, read_spec, spec_of
from lipscope.engine.sweeps.driver import seconds_at
from lipscope.engine.sweeps.pool import TRIES, Batches
from lipscope.engine.verbs.measure import measure
from lipscope.errors import InputError
from lipscope.theorems import catalogue

YAML = """
# growth of two models
models:
  - minilm
  - name: EleutherAI/pythia-70m
    checkpoints: [step0, step1000]
layers: [0, 2:4]
maps: [attention, block]
lengths: 2:50:16
samples: 3
tol: 1e-2
move: 1:1
theorems: all
seeds: [0, 7]
"""


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "growth.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def test_a_file_is_read_as_yaml_1_2(tmp_path):
    """`2:50:16` is a range, not 10,216 in base 60, and `1e-2` is a number."""
    path = written(tmp_path, YAML)
    request = read_spec(path)
    spec = request.spec
    assert request.source.name == str(path)
    assert [(m.name, m.step, m.entry) for m in spec.models] == [
        ("minilm", None, 0),
        ("EleutherAI/pythia-70m@step0", 0, 1),
        ("EleutherAI/pythia-70m@step1000", 1000, 1),
    ]
    assert (spec.layers, spec.lengths, spec.samples) == ((0, 2, 3, 4), (2, 18, 34, 50), 3)
    assert (spec.tol, spec.move, spec.seeds) == (0.01, "1:1", (0, 7))
    assert "castin_thm_3_3" in spec.theorems
    assert set(spec.theorems) < {one.name for one in catalogue()}
    assert "row_gram" not in spec.theorems  # it takes seconds a head: to be named
    assert spec_of(spec.as_dict()) == spec
    assert read_spec({"models": "minilm", "theorems": ["row_gram"]}).spec.theorems == ("row_gram",)


def test_an_option_is_documented_with_the_default_that_it_has():
    """`measure` says what every option means; default, check and help stand in `Spec`."""
    _, _, said = (measure.__doc__ or "").partition("**options")
    for name in set(MeasureOptions.__annotations__) - {"tokenizer", "revision"}:
        found = re.search(rf"``{name}(?:=([^`]+))?``", said)
        default = OPTIONS[AXES.get(name, name)].default
        (one,) = (default or ("none",)) if isinstance(default, tuple) else (default,)
        assert found and ast.literal_eval(found[1] or "None") == one, name


def test_checkpoints_in_a_folder(tmp_path):
    for step in (1000, 50, 200):
        (tmp_path / "lm" / f"checkpoint-{step}").mkdir(parents=True)
    entry = {"name": str(tmp_path / "lm"), "checkpoints": "checkpoint-*"}
    models = read_spec({"models": [entry]}).spec.models
    assert [m.step for m in models] == [50, 200, 1000]
    assert models[0].name == f"{tmp_path}/lm/checkpoint-50"


WRONG = {
    "an unknown key": ("lenghts: [16]", 4, "`lenghts` is not an entry.*Did you mean `lengths`"),
    "what only a verb has": ("directions: 3", 4, "`directions` is not an entry of a sweep"),
    "a key twice": ("models: [smollm2]", 4, "`models` should appear once.*line 3"),
    "an unknown map": ("maps: [atention]", 4, "`maps` should be one of heads.*mean `attention`"),
    "its line in a list": ("maps:\n  - heads\n  - blok", 6, "Found `blok`.*mean `block`"),
    "an unknown theorem": ("theorems: [castin_thm_33]", 4, "mean `castin_thm_3_3`"),
    "a decision of a layer": ("decisions: joint", 4, "`decisions` go with `maps: margin`"),
    "no number": ("lengths: [ten]", 4, "`lengths` should be whole numbers.*Found `ten`"),
    "a negative layer": ("layers: [-1]", 4, "`layers` should be whole numbers from 0"),
    "no text": ("texts: []", 4, "`texts` should name at least one"),
    "no length": ("lengths: []", 4, "`lengths` should name at least one"),
    "a tolerance": ("tol: 2", 4, "`tol` should be between 0 and 1. Found `2`"),
    "yes": ("rest: yes", 4, "`rest` should be true or false. Found `yes`"),
    "a missing text": ("texts: [no.txt]", 4, "`texts` should be readable.*`no.txt`"),
    "a radius": ("radii: [-1]", 4, "`radii` should be positive numbers, or text"),
    "radii of nothing": ("radii: [3]", 4, "`radii` go with built inputs"),
    "steps of no ascent": ("ascent_steps: 3", 4, "go with the inputs adversarial and ascent"),
    "tokens beyond": ("move: 3:300", 4, "`move = 3:300` should name tokens"),
    "built, of a block": (
        "inputs: [real, ascent]\nmaps: [block]", 4, "`inputs` other.*`ascent` with `block`"
    ),
    "a radius of no theorem": ("radius: 3", 4, "`radius` goes with `theorems`"),
    "theorems of a block": ("theorems: all\nmaps: [block]", 4, "Theorems cover the maps"),
    "no yaml": ("maps: [", 5, "should be YAML"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_mistake_is_one_line_that_says_where(tmp_path, what):
    text, line, expected = WRONG[what]
    file = written(tmp_path, f"# one\n\nmodels: [minilm]\n{text}\n")
    with pytest.raises(InputError, match=expected) as caught:
        read_spec(file)
    message = str(caught.value)
    assert "\n" not in message and str(file) in message
    assert f"line {line}" in message or what in ("no yaml",)


@pytest.mark.parametrize("text", ["", "- a list", "words"])
def test_a_file_without_entries(tmp_path, text):
    with pytest.raises(InputError, match="should hold entries"):
        read_spec(written(tmp_path, text))
    with pytest.raises(InputError, match="readable YAML file"):
        read_spec(tmp_path / "none.yaml")
    with pytest.raises(InputError, match="`models` should name at least one"):
        read_spec({})


def small(**values: Any) -> Spec:
    return read_spec(
        {"models": ["a", "random:bert"], "samples": 2, "lengths": [8, 4]} | values
    ).spec


def surveyed(*shapes: Shape, lengths: tuple[int, ...] = (4, 8), samples: int = 2) -> list[Survey]:
    """What models would say of one text; a window is named by its place in it."""
    items = [
        InputKey(n, s, 9 * s, f"{n} tokens from {9 * s}") for n in lengths for s in range(samples)
    ]
    return [Survey(shape, {"default": items}, None) for shape in shapes]


SURVEYS = surveyed(Shape(2, None), Shape(3, None))


def test_every_combination_is_one_job():
    spec = small(
        maps=["attention", "heads"],
        inputs=["real", "ascent"],
        radii=["text", 5],
        metrics=["frobenius", "token-relative"],
        dtypes=["float32", "float64"],
        seeds=[0, 1, 2],
    )
    jobs = plan(spec, SURVEYS)
    # inputs that are built do not depend on the window: once per length, for each radius
    per_layer = 2 * 2 * 2 * 3 * 2 * (2 + 2)  # maps, metrics, dtypes, seeds, lengths, inputs
    assert len(jobs) == per_layer * (2 + 3)
    assert len({job.id for job in jobs}) == len(jobs)
    assert {job.radius for job in jobs if job.input == "ascent"} == {None, 5.0}
    # the seed of a random model is that of its weights too: it is loaded once for each
    weights = [job.weights for job in jobs if job.model == 1]
    assert weights == sorted(weights, key=lambda seed: seed or 0) and set(weights) == {0, 1, 2}
    assert {job.weights for job in jobs if job.model == 0} == {None}


def test_ids_depend_on_what_is_asked_and_on_nothing_else():
    def ids(**values: Any) -> set[str]:
        return {job.id for job in plan(small(**values), SURVEYS)}

    plain = ids()
    for same in ({"memory": "2GiB"}, {"tokens": False}, {"rest": True}, {"theorems": "all"}):
        assert ids(**same) == plain
    for changed in (
        {"tol": 1e-2},
        {"move": "last"},
        {"seeds": 5},
        {"side": "query"},
        {"position_offset": 3},
        {"modules": "attn"},
        {"maps": "heads"},
        {"models": ["b", "c"]},
    ):
        assert not ids(**changed) & plain, changed
    # the window itself counts, and not in which company it was asked
    fewer = {job.id for job in plan(small(), surveyed(Shape(2, None), Shape(3, None), samples=1))}
    assert fewer < plain
    # an id is the same everywhere and for ever: resuming rests on it
    assert plan(small(), SURVEYS)[0].id == plan(small(), SURVEYS)[0].id


def test_heads_have_rows_of_their_own():
    spec = small(per_head=True)
    shape = Shape(2, (3, 4))
    first, second = plan(spec, surveyed(shape, shape, lengths=(4,), samples=1))[:2]
    ids = row_ids(first, shape)
    job = first
    assert len(row_ids(second, shape)) == 4
    assert len(set(ids)) == 3 and job.id not in ids
    assert row_ids(job, Shape(2, None)) == [job.id]


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), max_size=40), st.integers(1, 4))
def test_every_job_is_given_out_once(places, workers):
    """Whatever the models and windows are, and whoever asks."""
    jobs = [
        Job(str(i), m, None, "float32", True, "t", n, n, 0, "attention", 0, "real", None, "f", 0)
        for i, (m, n) in enumerate(sorted(places))
    ]
    batches, held, given_out = Batches(jobs, workers), None, []
    while some := batches.take(held, [0]):
        assert len({job.window for job in some}) == 1
        held = some[0].model
        given_out += some
    assert sorted(job.id for job in given_out) == sorted(job.id for job in jobs)


def test_models_are_shared_out_and_a_worker_keeps_its_own():
    jobs = [
        Job(f"{m}{n}", m, None, "float32", True, "t", n, n, 0, "attention", 0, "real", None, "f", 0)
        for m in (0, 1)
        for n in range(3)
    ]
    batches = Batches(jobs, 1)
    assert batches.take(None, [])[0].model == 0
    assert batches.take(None, [0])[0].model == 1  # a model that nobody holds comes first
    assert batches.take(0, [1])[0].model == 0


def test_a_job_that_kills_its_worker_is_tried_three_times():
    jobs = [
        Job(str(n), 0, None, "float32", True, "t", 0, 4, 0, "attention", n, "real", None, "f", 0)
        for n in range(8)
    ]
    batches, lost = Batches(jobs, 1), None
    for k in range(TRIES):
        some = batches.take(0, [])
        assert [job.id for job in some] == ["0", "1"]
        lost = batches.give_back(some)
        assert (lost is None) == (k < TRIES - 1)
    assert lost is not None and lost.id == "0"
    assert [job.id for job in batches.take(0, [])] == ["1"]


def test_times_at_other_lengths():
    times = {16: 0.1, 64: 0.4}
    assert seconds_at(times, 16) == 0.1
    assert seconds_at(times, 32) == pytest.approx(0.2)
    assert seconds_at(times, 256) == pytest.approx(1.6)  # like n, as from 16 to 64
    assert seconds_at({16: 0.1, 64: 1e3}, 128) == pytest.approx(8e3)  # at most like n^3
    assert seconds_at({16: 0.1}, 64) == pytest.approx(1.6)  # like n^2
    assert seconds_at(times, 4) == 0.1
