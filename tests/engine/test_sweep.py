"""Sweeps in worker processes that are really started, and really killed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lipscope as ls
from command import BERT, TEXT
from lipscope.engine.model_decision import ModelDecision
from lipscope.engine.plan import InputKey, Job, Shape, Survey, plan
from lipscope.engine.session import Result
from lipscope.engine.spec import Spec
from lipscope.engine.sweeps import driver, estimate, pool, read_spec
from lipscope.engine.sweeps.pool import Batches
from lipscope.errors import InputError
from lipscope.records.folder import Finished, RunFolder
from sweeps import FAILED, JOBS, SPEC, in_this_process, rows_of, same_run
from tiny import TINY


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    told: list[tuple[int, int]] = []
    rows = ls.sweep(SPEC, folder, workers=1, progress=lambda *now: told.append(now[:2]))
    assert len(rows) == JOBS and [r.num_tokens for r in rows] == [6] * JOBS
    assert told[0] == (0, JOBS) and told[-1] == (JOBS, JOBS) and told == sorted(told)
    return folder


@pytest.fixture
def children(monkeypatch) -> list[subprocess.Popen[bytes]]:
    """The worker processes of this test as they are started."""
    started: list[subprocess.Popen[bytes]] = []

    class Recorded(subprocess.Popen):  # pyright: ignore[reportMissingTypeArgument]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)

    monkeypatch.setattr(pool.subprocess, "Popen", Recorded)
    return started


def at(done: int, act: Callable[[], None]) -> Callable[..., None]:
    """Progress that acts once, when so many jobs are done."""
    waiting = [act]

    def progress(now: int, total: int, row: object) -> None:
        del total, row
        if now >= done and waiting:
            waiting.pop()()

    return progress


def planned(spec: Spec, layers: int) -> tuple[list[Shape], list[Job]]:
    """The jobs of a model with so many layers on one window."""
    survey = Survey(Shape(layers, None), {"default": [InputKey(6, 0, 0, "a window")]}, None)
    return [survey.shape], plan(spec, [survey])


def test_rows_are_those_of_measure(uninterrupted):
    measured = ls.measure(BERT, lengths=[6], samples=4)
    swept = [r for r in ls.read_run(uninterrupted).measurements() if r.input == "text"]
    place = ("layer", "sample")
    ours = {tuple(getattr(r, k) for k in place): r for r in swept}
    for one in measured:
        other = ours[one.layer, one.sample]
        assert other.sigma == pytest.approx(one.sigma, rel=1e-6)
        assert (other.tokens_sha256, other.start) == (one.tokens_sha256, one.start)
        assert other.upper >= one.sigma  # pyright: ignore[reportOptionalOperand]


T5 = "random:t5:d_model=12,num_heads=3,d_kv=4,d_ff=16,num_layers=1,vocab_size=300"
VIT = "random:vit:hidden_size=32,num_attention_heads=2,num_hidden_layers=1,image_size=32"
# Asked of `measure` in the same words, but for the plurals of a sweep.
SAME: dict[str, tuple[str, dict[str, Any]]] = {
    "pictures": (
        VIT + ",patch_size=8",
        {"images": "random", "resolutions": [16, 32], "samples": 1, "map": "heads"},
    ),
    "cross-attention": (T5, {"lengths": [6], "samples": 1, "side": "query"}),
    "from the norm on, with theorems": (
        BERT,
        {"lengths": [6], "samples": 1, "map": "normed", "theorems": "all", "position_offset": 3}
        | {"layers": [0], "modules": "attention", "radius": "inputs"},
    ),
}


@pytest.mark.parametrize("what", SAME)
def test_what_measure_can_be_asked_a_sweep_can_too(tmp_path, monkeypatch, what):
    monkeypatch.setattr(driver, "local_results", in_this_process)
    model, options = SAME[what]
    measured = ls.measure(model, **options)
    spec = {"maps" if name == "map" else name: value for name, value in options.items()}
    swept = ls.sweep({"models": model, **spec}, tmp_path / "run", workers=1)
    assert [row.id for row in swept] == [row.id for row in measured]
    for one, other in zip(swept, measured, strict=True):
        assert (one.sigma, one.upper) == pytest.approx((other.sigma, other.upper), rel=1e-6)
        assert (one.map, one.side, one.num_tokens) == (other.map, other.side, other.num_tokens)
    assert len(swept.bounds) == len(measured.bounds)
    assert bool(swept.bounds) == ("theorems" in options)
    for one, other in zip(swept.bounds, measured.bounds, strict=True):
        assert (one.id, one.theorem, one.reason) == (other.id, other.theorem, other.reason)
        assert one.value == (other.value and pytest.approx(other.value, rel=1e-6))


def test_a_job_that_raises_is_a_row_with_its_error(uninterrupted):
    run = ls.read_run(uninterrupted)
    failed = [r for r in run.measurements() if r.status == "failed"]
    assert len(failed) == FAILED
    for row in failed:
        assert (row.input, row.sigma) == ("l2_opposed", None)
        assert row.error == (
            "`l2_opposed` is not available for this layer: made for L2 attention. "
            "Found `DotProduct`."
        )
    assert set(run.bounds["theorem"]) == {"castin_thm_3_3"}
    values = run.bounds.join(run.rows, on="id").select("value", "sigma")
    assert len(values) == JOBS - FAILED and (values["value"] >= values["sigma"]).all()


def test_the_manifest_says_what_was_done(uninterrupted):
    manifest = ls.read_run(uninterrupted).manifest
    spec = read_spec(SPEC).spec
    assert manifest["spec"] == json.loads(json.dumps(spec.as_dict()))
    about = {"revision": None, "weights": "random", "trained_length": None}
    assert manifest["models"] == {BERT: about}
    assert {"lipscope", "torch", "python", "machine", "cores"} <= set(manifest["provenance"])
    rows = (uninterrupted / "rows.jsonl").read_bytes()
    assert rows.count(b"\n") == JOBS
    assert manifest["files"]["rows"]["sha256"] == hashlib.sha256(rows).hexdigest()


def test_a_finished_sweep_starts_no_process(uninterrupted, children):
    before = (uninterrupted / "rows.jsonl").read_bytes()
    assert len(ls.sweep(SPEC, uninterrupted)) == JOBS
    assert children == [] and (uninterrupted / "rows.jsonl").read_bytes() == before


# A worker without torch, which knows the answers from another run.
REPLAYED = """
import json, sys, time
answers = json.load(open({answers!r}))
def say(line): print(line, flush=True)
sys.stdin.readline()
for line in sys.stdin:
    for job in json.loads(line)[0]:
        say(json.dumps({{"begun": job[0]}}))
        time.sleep(0.05)
        say(answers[job[0]])
"""


def replayed(folder: Path, answers: Path) -> list[str]:
    """The command of a worker that gives the rows of a run again."""
    run = ls.read_run(folder)
    lines = {}
    for row in run.measurements():
        own = [row.id]
        finished = Finished(row, tuple(run.token_shares(own)), tuple(run.bound_values(own)))
        about = run.manifest["models"][row.model]
        lines[row.id] = pool.encoded_result(Result(row.id, 0, about, [finished]))
    answers.write_text(json.dumps(lines))
    return [sys.executable, "-S", "-c", REPLAYED.format(answers=str(answers))]


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_worker_that_is_killed_in_mid_job(tmp_path, uninterrupted, children, monkeypatch, real):
    returned: list[int] = []
    give_back = Batches.give_back

    def recorded(self: Batches, jobs: Any, **more: Any) -> Any:
        returned.append(len(jobs))
        return give_back(self, jobs, **more)

    monkeypatch.setattr(Batches, "give_back", recorded)
    if not real:
        monkeypatch.setattr(pool, "COMMAND", replayed(uninterrupted, tmp_path / "answers"))
    progress = at(3, lambda: children[0].send_signal(signal.SIGKILL))
    rows = ls.sweep(SPEC, tmp_path / "run", workers=1, progress=progress)
    assert children[0].returncode == -signal.SIGKILL and len(children) == 2
    assert returned and returned[0] >= 1  # it was doing something
    assert len(rows) == JOBS
    same_run(tmp_path / "run", uninterrupted)


@pytest.mark.slow
def test_a_driver_that_is_killed_and_started_again(tmp_path, uninterrupted):
    (tmp_path / "spec.yaml").write_text(json.dumps(SPEC))  # JSON is YAML
    command = [sys.executable, "-m", "lipscope.cli", "sweep", "spec.yaml", "--workers", "1"]
    driver = subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.DEVNULL)
    folder = tmp_path / "runs" / "spec"
    lines, limit = folder / "rows.jsonl", time.monotonic() + 240
    while not (lines.exists() and lines.read_bytes().count(b"\n") >= 2):
        assert driver.poll() is None and time.monotonic() < limit
        time.sleep(0.002)
    workers = _children_of(driver.pid)
    driver.kill()
    driver.wait()
    kept = lines.read_text().split("\n")[:-1]
    assert len(workers) == 1 and len(kept) < JOBS, "not in the middle"
    limit = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < limit, "a worker outlived its driver"
        time.sleep(0.05)
    ls.sweep(tmp_path / "spec.yaml", folder, workers=1)
    assert lines.read_text().splitlines()[: len(kept)] == kept
    same_run(folder, uninterrupted)


def _children_of(pid: int) -> list[int]:
    found = [f.read_text() for f in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(word) for text in found for word in text.split()]


@pytest.mark.slow
def test_a_full_disk_and_half_a_line(tmp_path, uninterrupted):
    """No file may grow beyond what three rows take; then there is room again."""
    folder = tmp_path / "run"
    room = sum(map(len, (uninterrupted / "rows.jsonl").read_bytes().splitlines()[:3])) + 100
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The manifest and the Parquet copy of no rows are written first, and are larger.
    limit = at(0, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (max(room, 3000), before[1])))
    try:
        with pytest.raises(InputError, match="cannot be written") as caught:
            ls.sweep(SPEC, folder, workers=1, progress=limit)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(caught.value)
    kept = (folder / "rows.jsonl").read_text().split("\n")[:-1]
    assert 1 <= len(kept) < JOBS
    # A kill in the middle of a write, in every file.
    for name in ("rows.jsonl", "tokens.jsonl", "bounds.jsonl"):
        with (folder / name).open("a") as file:
            file.write('{"id": "half a li')
    parquet = folder / "rows.parquet"
    parquet.write_bytes(parquet.read_bytes()[: parquet.stat().st_size // 2])
    (folder / "manifest.part").write_text('{"spec": ')
    ls.sweep(SPEC, folder, workers=1)
    assert (folder / "rows.jsonl").read_text().splitlines()[: len(kept)] == kept
    same_run(folder, uninterrupted)


@pytest.mark.slow
def test_a_job_that_runs_out_of_memory(tmp_path, children):
    """The worker may take 300 MB more than it has when its first job is done.

    The scores of one layer at 6,000 tokens take 432 MB.
    """
    spec: dict[str, Any] = {"models": [BERT + ",max_position_embeddings=6000"], "layers": 0}
    spec |= {"lengths": [6, 6000], "samples": 1, "maps": "block", "memory": "64GiB"}
    (tmp_path / "text.txt").write_text(TEXT * 3)

    def narrow() -> None:
        status = Path(f"/proc/{children[0].pid}/status").read_text()
        (size,) = [int(x.split()[1]) for x in status.splitlines() if x.startswith("VmSize")]
        limit = 1024 * size + 300 * 2**20
        resource.prlimit(children[0].pid, resource.RLIMIT_AS, (limit, limit))

    spec["texts"] = [str(tmp_path / "text.txt")]
    rows = ls.sweep(spec, tmp_path / "run", workers=1, progress=at(1, narrow))
    assert len(children) == 1  # the worker goes on
    assert [r.status for r in rows] == ["converged", "failed"]
    assert "memory" in (rows[1].error or "")


def test_a_job_that_kills_every_worker_fails_and_the_others_go_on(monkeypatch):
    """As the system does when memory runs out; here by a worker that answers nothing else."""
    stub = (
        "import sys, os, json\n"
        "sys.stdin.readline()\n"
        "for line in sys.stdin:\n"
        "    for job in json.loads(line)[0]:\n"
        "        print(json.dumps({'begun': job[0]}), flush=True)\n"
        "        if job[10] == 1: os.kill(os.getpid(), 9)\n"
        "        print(json.dumps([job[0], job[1], {}, [], None]), flush=True)\n"
    )
    monkeypatch.setattr(pool, "COMMAND", [sys.executable, "-c", stub])
    request = read_spec(SPEC | {"inputs": "real", "samples": 1})
    shapes, jobs = planned(request.spec, 3)
    assert [job.layer for job in jobs] == [0, 1, 2]
    results = pool.local_results(request, shapes, jobs, 2, {job.id: {} for job in jobs})
    found = [one for some in results for one in some]
    assert sorted(one.job for one in found) == sorted(job.id for job in jobs)
    (lost,) = [one for one in found if one.finished]
    (row,) = [each.row for each in lost.finished]
    assert (lost.job, row.layer, row.status) == (jobs[1].id, 1, "failed")
    assert row.error == (
        "The worker process was killed by SIGKILL, perhaps out of memory, 3 times in a "
        "row; the next run tries it again"
    )
    assert row.passing


def test_a_worker_that_cannot_start_is_one_line(monkeypatch):
    request = read_spec(SPEC)
    shapes, jobs = planned(request.spec, 2)
    for command, expected in (
        ([sys.executable, "-c", "raise SystemExit(3)"], "ended with status 3 before its first"),
        (["/no/such/python"], "could not start"),
    ):
        monkeypatch.setattr(pool, "COMMAND", command)
        with pytest.raises(InputError, match=expected) as caught:
            list(pool.local_results(request, shapes, jobs, 1, {job.id: {} for job in jobs}))
        assert "\n" not in str(caught.value)


def test_a_second_driver_is_refused(tmp_path):
    spec = read_spec(SPEC).spec
    with RunFolder(tmp_path / "run", spec.as_dict()):
        with pytest.raises(InputError, match="in use by another process") as caught:
            ls.sweep(SPEC, tmp_path / "run")
        assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match=r"another specification \(it differs in tol\)"):
        ls.sweep(SPEC | {"tol": 1e-2}, tmp_path / "run")


def test_a_model_that_was_changed_is_not_mixed_in(tmp_path):
    spec = read_spec(SPEC).spec
    with RunFolder(tmp_path, spec.as_dict()) as folder:
        folder.add_model("lm", {"revision": "sha256:1", "layers": 2})
        folder.add_model("lm", {"revision": "sha256:1", "layers": 2})
        with pytest.raises(InputError, match=r"`lm` should be the model.*differs in revision"):
            folder.add_model("lm", {"revision": "sha256:2", "layers": 2})


TWO_LAYERS = "random:bert:hidden_size=48,num_attention_heads=4,num_hidden_layers=2"
ESTIMATED: dict[str, dict[str, Any]] = {
    "text": {"lengths": [16, 64, 128], "samples": 6},
    "sharp bounds": {"lengths": [8, 16, 24], "samples": 2, "theorems": "all", "sharp": True},
    "adversarial": {"lengths": [8, 16, 24], "samples": 2, "inputs": ["real", "adversarial"],
                    "ascent_steps": 5},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("what", ESTIMATED)
def test_an_estimate_is_within_a_factor_of_two(tmp_path, monkeypatch, capsys, what):
    """Of processor time, without what a process does once: imports, the start of workers."""
    ls.measure(TWO_LAYERS, TEXT, lengths=4, samples=1)
    spec = {"models": TWO_LAYERS + ",intermediate_size=64", **ESTIMATED[what]}
    estimates = driver
    monkeypatch.setattr(driver, "local_results", in_this_process)
    monkeypatch.setattr(estimates, "threads_of", lambda workers: workers)
    monkeypatch.setattr(estimates, "start_time", lambda: 0.0)
    found = estimate(spec, tmp_path / "run", workers=1)
    began = time.process_time()
    ls.sweep(spec, tmp_path / "run", workers=1)
    took = time.process_time() - began
    with capsys.disabled():
        print(f"\n{what}: estimated {found.seconds:.1f} s, took {took:.1f} s of processor time")
    assert 0.5 < found.seconds / took < 2


def test_an_input_is_built_for_each_seed(tmp_path, monkeypatch):
    monkeypatch.setattr(driver, "local_results", in_this_process)
    spec = {"models": "minilm", "layers": 0, "lengths": 4, "samples": 1}
    spec |= {"inputs": "ascent", "ascent_steps": 1}
    swept = ls.sweep(spec | {"seeds": [0, 1]}, tmp_path / "run", workers=1)
    shared = {name: value for name, value in spec.items() if name != "models"}
    (alone,) = ls.measure("minilm", seed=1, **shared)
    assert (swept[1].id, swept[1].sigma) == (alone.id, pytest.approx(alone.sigma, rel=1e-9))


BEFORE = {
    "a layer": ({"layers": [2]}, "`layers` should be between 0 and 1"),
    "a length": ({"lengths": [6, 100000]}, "should be at most 512, the positions"),
    "a map": ({"models": ["random:gpt2:n_embd=12,n_head=3,n_layer=1"], "maps": ["normed"],
               "inputs": "real", "theorems": "none", "modules": "nothing"}, "modules|attention"),
    "a model": ({"models": ["random:brt"]}, "nearest are bert"),
    "workers": ({}, "`workers` should be a whole number of at least 1"),
}  # fmt: skip


@pytest.mark.parametrize("what", BEFORE)
def test_what_no_job_could_answer_is_said_before_any_begins(tmp_path, what, children):
    change, expected = BEFORE[what]
    with pytest.raises(InputError, match=expected) as caught:
        ls.sweep(SPEC | change, tmp_path / "run", workers=0 if what == "workers" else 1)
    assert "\n" not in str(caught.value) and children == []


def test_a_layer_that_no_model_has_is_told_with_its_line(tmp_path):
    file = tmp_path / "deep.yaml"
    file.write_text(f"models: '{BERT}'\nlengths: 6\nlayers: [0, 33]\nsamples: 1\n")
    with pytest.raises(InputError, match=r"deep\.yaml`, line 3: `layers` should be between 0 and"):
        ls.sweep(file, tmp_path / "run", workers=1)
    with pytest.raises(InputError, match=r"deep\.yaml`, line 3: `layers` should be between 0 and"):
        driver.estimate(file, tmp_path / "run", workers=1)


def test_rows_of_a_killed_run_can_be_looked_at(tmp_path, uninterrupted):
    """The half that is there, in every reader; nothing of lipscope needs to run."""
    os.makedirs(tmp_path / "run")
    data = (uninterrupted / "rows.jsonl").read_bytes()
    (tmp_path / "run" / "rows.jsonl").write_bytes(data[: len(data) // 2])
    (tmp_path / "run" / "manifest.json").write_bytes((uninterrupted / "manifest.json").read_bytes())
    found = rows_of(tmp_path / "run")
    assert 0 < len(found) < JOBS


DECIDES = "random:gpt2:n_embd=4,n_head=1,n_layer=1,n_positions=16,vocab_size=300"


def test_decisions_of_a_sweep_are_those_of_the_verb(tmp_path, monkeypatch):
    """Radii, ids and keys; what an interrupted sweep finished stands, and the rest follows."""
    monkeypatch.setattr(driver, "local_results", in_this_process)
    spec = {"models": DECIDES, "maps": "margin", "dtypes": "float64", "lengths": [2], "samples": 2}
    spec |= {"decisions": ["joint", "token"]}

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ls.sweep(spec, tmp_path / "run", workers=1, progress=at(1, stop))
    rows = ls.sweep(spec, tmp_path / "run", workers=1)
    kinds = ("decision_joint", "decision_token_0", "decision_token_1")
    assert [bound.theorem for bound in rows.bounds] == [*kinds] * 2
    (alone,) = ls.certify_decision(DECIDES, length=2, out=tmp_path / "alone")
    by_key = [ls.read_run(tmp_path / name).contents("radii") for name in ("run", "alone")]
    assert len(by_key[0]) == 6 and by_key[1].keys() <= by_key[0].keys()
    assert alone.id == rows[0].id
    assert rows.bounds[0].value == pytest.approx(alone.radius, rel=1e-9)


RADII = {"models": DECIDES, "maps": "margin", "dtypes": "float64", "lengths": [2], "samples": 1}
RADII |= {"decisions": ["token", "each"]}


@pytest.mark.parametrize("on_cluster", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_interrupt_between_two_radii_of_a_row_keeps_the_first(tmp_path, monkeypatch, on_cluster):
    """Each is certified once, and all is as if nothing had happened."""
    certified: list[tuple[int, ...]] = []
    certify, add_value = ModelDecision.certified, RunFolder.add_value

    def counted(self: ModelDecision, ball: Any, tokens: tuple[int, ...], *more: Any) -> Any:
        certified.append(tokens)
        return certify(self, ball, tokens, *more)

    def interrupted(self: RunFolder, part: str, *more: Any) -> Any:
        kept = add_value(self, part, *more)
        if part == "radii" and len(self.values(part)) < 3:
            raise KeyboardInterrupt
        return kept

    monkeypatch.setattr(driver, "local_results", in_this_process)
    ls.sweep(RADII, tmp_path / "whole", workers=1)
    monkeypatch.setattr(ModelDecision, "certified", counted)
    with contextlib.ExitStack() as stack:
        how: dict[str, Any] = {"workers": 1}
        if on_cluster:
            how = {"cluster": stack.enter_context(cluster_here()).scheduler_address}
        monkeypatch.setattr(RunFolder, "add_value", interrupted)
        for kept in (1, 2):  # between tokens, and between balls
            with pytest.raises(KeyboardInterrupt):
                ls.sweep(RADII, tmp_path / "run", **how)
            assert len(ls.read_run(tmp_path / "run").contents("radii")) == kept
        rows = ls.sweep(RADII, tmp_path / "run", **how)
    assert certified == [(0,), (1,), (0, 1)]
    assert len(rows.bounds) == 3
    same_run(tmp_path / "run", tmp_path / "whole")
    found = [ls.read_run(tmp_path / name).values("radii") for name in ("run", "whole")]
    assert found[0].drop("seconds").equals(found[1].drop("seconds"))


def test_an_estimate_names_decisions_and_certifies_none(monkeypatch, command):
    def certified(*_: object, **__: object) -> None:
        raise AssertionError("a dry run certifies")

    monkeypatch.setattr(ModelDecision, "certified", certified)
    monkeypatch.setattr(driver, "start_time", lambda: 0.0)
    Path("spec.yaml").write_text(json.dumps(RADII))
    said = command("sweep", "spec.yaml", "--dry-run").out
    assert ", besides 2 decisions, whose time is not known before. From jobs timed" in said


@pytest.mark.slow
def test_radii_outlive_killed_workers_and_drivers(tmp_path):
    """Each radius is written once, whoever is killed while the next one is certified."""
    spec, folder = RADII | {"lengths": [5]}, tmp_path / "runs" / "spec"
    (tmp_path / "spec.yaml").write_text(json.dumps(spec))
    values = folder / "values.jsonl"
    command = [sys.executable, "-m", "lipscope.cli", "sweep", "spec.yaml", "--workers", "1"]

    def radii() -> list[str]:
        lines = values.read_text().split("\n")[:-1] if values.exists() else []
        return [one["key"] for one in map(json.loads, lines) if one["part"] == "radii"]

    for kind in (None, signal.SIGKILL, signal.SIGTERM, signal.SIGINT):  # None: of the worker
        before, process = len(radii()), subprocess.Popen(command, cwd=tmp_path)
        limit = time.monotonic() + 240
        while len(radii()) == before:
            assert process.poll() is None and time.monotonic() < limit
            time.sleep(0.002)
        if kind is None:
            (worker,) = _children_of(process.pid)
            os.kill(worker, signal.SIGKILL)
            while len(radii()) == before + 1:
                assert process.poll() is None and time.monotonic() < limit
                time.sleep(0.002)
        process.send_signal(kind or signal.SIGKILL)
        process.wait()
    assert len(radii()) >= 5 and not (folder / "rows.jsonl").exists()
    ls.sweep(spec, folder, workers=1)
    ls.sweep(spec, tmp_path / "whole", workers=1)
    assert len(radii()) == len(set(radii())) == 6
    same_run(folder, tmp_path / "whole")


def cluster_here() -> Any:
    """A Dask cluster of one worker in a thread of this process."""
    from distributed import LocalCluster

    how: dict[str, Any] = {"processes": False, "protocol": "tcp", "dashboard_address": None}
    return LocalCluster(n_workers=1, threads_per_worker=1, host="127.0.0.1", **how)


def test_a_decision_that_ran_out_of_memory_is_not_promised_again(tmp_path, monkeypatch):
    monkeypatch.setattr(driver, "local_results", in_this_process)

    def full(*_: object, **__: object) -> None:
        raise MemoryError("all is taken")

    monkeypatch.setattr(pool, "decision_at", full)
    spec = {"models": DECIDES, "maps": "margin", "dtypes": "float64", "lengths": [2], "samples": 1}
    (bound,) = ls.sweep({**spec, "decisions": "joint"}, tmp_path / "run", workers=1).bounds
    assert bound.reason == "MemoryError: all is taken"


def test_a_decision_that_cannot_be_certified_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(driver, "local_results", in_this_process)
    gemma = f"random:gemma2:{TINY['gemma2']}"  # a norm after attention, before the sum
    spec = {"models": gemma, "maps": "margin", "dtypes": "float64", "lengths": [4], "samples": 1}
    rows = ls.sweep({**spec, "decisions": "joint"}, tmp_path / "run", workers=1)
    (bound,) = rows.bounds
    assert rows[0].sigma is not None and bound.value is None
    assert bound.reason and bound.theorem == "decision_joint"
