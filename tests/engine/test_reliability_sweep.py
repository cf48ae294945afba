"""Workers that are stopped, killed and lost, interrupts, closed pipes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import lipscope as ls
from command import BERT, TEXT
from lipscope.engine.plan import InputKey, Job, Shape, Survey, plan
from lipscope.engine.session import Session
from lipscope.engine.sweeps import pool, read_spec
from lipscope.errors import InputError
from sweeps import JOBS, SPEC, in_this_process, same_run

AGAIN = ["measure", BERT, "--text", "text.txt", "--lengths", "6", "--samples", "2", "--jsonl"]
AGAIN += ["--out", "run"]

# A worker without torch: it says what a real one says, after a line of Python of the test's own.
STUB = """
import json, os, signal, sys, time
from pathlib import Path
def say(what): print(json.dumps(what), flush=True)
sys.stdin.readline()
for line in sys.stdin:
    for job in json.loads(line)[0]:
        {before}
        say({{"begun": job[0]}})
        {within}
        say([job[0], job[1], {{}}, [], None])
"""


def stubbed(monkeypatch: pytest.MonkeyPatch, before: str = "pass", within: str = "pass") -> None:
    code = STUB.format(before=before, within=within)
    monkeypatch.setattr(pool, "COMMAND", [sys.executable, "-S", "-c", code])


def answered(workers: int = 1, layers: int = 3) -> tuple[list[Job], list[Any]]:
    request = read_spec(SPEC | {"inputs": "real", "samples": 1})
    survey = Survey(Shape(layers, None), {"default": [InputKey(6, 0, 0, "a window")]}, None)
    jobs = plan(request.spec, [survey])
    held = {job.id: {} for job in jobs}
    results = pool.local_results(request, [survey.shape], jobs, workers, held)
    return jobs, [one for some in results for one in some]


def once(folder: Path, act: str) -> str:
    """Code that acts in the first process that comes to it."""
    return f"p = Path({str(folder)!r}) / 'done'; p.exists() or (p.touch(), {act})"


def test_a_worker_that_stands_still_is_replaced(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(pool, "SILENCE", 1.5)
    stubbed(monkeypatch, within=once(tmp_path, "os.kill(os.getpid(), signal.SIGSTOP)"))
    jobs, found = answered()
    assert sorted(one.job for one in found) == sorted(job.id for job in jobs)
    assert all(not one.finished for one in found)  # none has failed
    assert "was silent for 2 s and is replaced" in caplog.text


def test_a_death_before_a_job_began_does_not_count_against_it(monkeypatch, tmp_path):
    """Four workers in a row, more than a job that kills workers is given."""
    count = (
        f"p = Path({str(tmp_path)!r}) / str(len(os.listdir({str(tmp_path)!r}))); "
        "int(p.name) < 4 and (p.touch(), os.kill(os.getpid(), 9))"
    )
    stubbed(monkeypatch, before=count)
    jobs, found = answered()
    assert sorted(one.job for one in found) == sorted(job.id for job in jobs)
    assert all(not one.finished for one in found)


def test_deaths_between_radii_of_a_job_do_not_count_against_it(monkeypatch):
    """Five workers in a row, more than a job is given; each goes on from what the others found."""
    known = "k = len(json.loads(line)[2][0]); k < 5 and "
    radius = "say([*job[:2], {}, [], [str(k), {}]])"
    stubbed(monkeypatch, within=f"{known}({radius}, os.kill(os.getpid(), 9))")
    _, found = answered(layers=1)
    assert [one.radius and one.radius[0] for one in found] == [*"01234", None]
    assert not found[-1].finished  # it has not failed


def test_workers_that_never_begin_end_in_one_line(monkeypatch):
    stubbed(monkeypatch, before="os.kill(os.getpid(), 9)")
    with pytest.raises(
        InputError, match="Workers end before they begin a job, 6 of them"
    ) as caught:
        answered()
    assert "\n" not in str(caught.value) and "Finished rows are kept" in str(caught.value)


def test_an_interrupt_in_a_long_job_is_heard_within_three_seconds(monkeypatch):
    stubbed(monkeypatch, within="time.sleep(600)")
    sent: list[float] = []

    def interrupt() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(2.0, interrupt)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        answered(workers=2)
    assert time.monotonic() - sent[0] < 3


@pytest.mark.slow
def test_a_sweep_names_what_every_worker_died_of_and_the_next_run_tries_again(
    monkeypatch, tmp_path, command, caplog
):
    """Exit status 1, then 0."""
    monkeypatch.chdir(tmp_path)
    spec = {"models": [BERT], "lengths": [6], "samples": 1}
    Path("spec.yaml").write_text(json.dumps(spec))
    real = pool.COMMAND
    # As a worker that the system kills at its second job, each time.
    kill = (
        "import os, sys; from lipscope.engine import session as s; r = s.Session.result\n"
        "def result(self, job, shape):\n"
        "    if job.layer == 1: os.kill(os.getpid(), 9)\n"
        "    return r(self, job, shape)\n"
        "s.Session.result = result\n"
        "from lipscope.engine.sweeps.pool import serve; serve()"
    )
    monkeypatch.setattr(pool, "COMMAND", [sys.executable, "-c", kill])
    ended = command("sweep", "spec.yaml", "--workers", "1")
    assert ended.status == 1, ended.err
    assert f"{BERT}, layer 1, attention, 6 tokens, sample 0" in ended.out
    assert "3 times in a row; the next run tries it again" in ended.out
    monkeypatch.setattr(pool, "COMMAND", real)
    ended = command("sweep", "spec.yaml", "--workers", "1")
    assert ended.status == 0, ended.err
    assert "1 row failed for want of a worker, memory or disk, and will be tried again" in ended.err
    rows = ls.read_run("runs/spec").measurements()
    assert [row.status for row in rows] == ["converged", "converged"]
    ended = command("sweep", "spec.yaml", "--workers", "1")
    assert ended.status == 0 and "tried again" not in ended.err


def test_rows_that_wait_for_another_run_are_named_and_are_status_1(monkeypatch, tmp_path, command):
    """Jobs done in this process; the second of them as if it had killed its workers."""
    monkeypatch.chdir(tmp_path)
    Path("spec.yaml").write_text(json.dumps({"models": [BERT], "lengths": [6], "samples": 1}))
    fatal = [1]

    def results(request: Any, shapes: Any, jobs: Any, workers: int, held: Any) -> Any:
        with Session(request.spec, request.sources) as session:
            for job in jobs:
                if job.layer in fatal:
                    dying = pool._Pool(request, shapes, pool.Batches([job], workers), 1, held)
                    yield [dying._lost(job, -9)]
                else:
                    yield [session.result(job, shapes[0])]

    monkeypatch.setattr(sys.modules["lipscope.engine.sweeps.driver"], "local_results", results)
    ended = command("sweep", "spec.yaml")
    assert ended.status == 1, ended.err
    assert "2 rows (1 failed) in runs/spec." in ended.out
    assert f"{BERT}, layer 1, attention, 6 tokens, sample 0: The worker process was k" in ended.out
    assert "3 times in a row; the next run tries it again" in ended.out
    fatal.clear()
    ended = command("sweep", "spec.yaml")
    assert ended.status == 0, ended.err
    assert "1 row failed for want of a worker, memory or disk, and will be tried again" in ended.err
    ended = command("sweep", "spec.yaml")
    assert ended.status == 0 and "tried again" not in ended.err


@pytest.mark.parametrize("arguments", [["rows", "run", "--to", "csv"], ["rows", "run"], AGAIN])
def test_a_reader_that_goes_away_is_status_141(tmp_path, monkeypatch, arguments):
    """As in a pipe to `head -1`, for lines, tables and exports."""
    monkeypatch.chdir(tmp_path)
    ls.measure(BERT, TEXT, lengths=[6], samples=2, out="run")
    Path("text.txt").write_text(TEXT)
    from lipscope import cli

    reads, writes = os.pipe()
    os.close(reads)
    monkeypatch.setattr(sys, "argv", ["lipscope", *arguments])
    with os.fdopen(writes, "w", encoding="utf-8") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        with pytest.raises(SystemExit) as end:
            cli.main()
    assert end.value.code == 141


@pytest.mark.slow
def test_a_reader_that_goes_away_is_status_141_in_processes(tmp_path):
    """As in a pipe to `head -1`, for lines, tables and exports."""
    folder = tmp_path / "run"
    ls.measure(BERT, TEXT, lengths=[6], samples=2, out=folder)
    (tmp_path / "text.txt").write_text(TEXT)
    for arguments in (AGAIN, ["rows", "run", "--to", "csv"],
                      ["rows", "run"]):  # fmt: skip
        process = subprocess.Popen(
            [sys.executable, "-m", "lipscope.cli", *arguments],
            cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        process.stdout.close()
        _, said = process.communicate(timeout=120)
        assert process.returncode == 141, said
        assert "Traceback" not in said and "BrokenPipe" not in said


def test_rows_in_a_pipe_are_never_cut(tmp_path, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    name = "random:bert:" + BERT.partition("bert:")[2]
    out = tmp_path / "run"
    for model in (name, name + ",vocab_size=301"):
        ls.measure(model, TEXT, lengths=[6], samples=1, layers=[0], out=out.with_name(model[-5:]))
    a, b = out.with_name(name[-5:]), out.with_name("e=301")
    from lipscope.records.folder import Finished, RunFolder

    with RunFolder(tmp_path / "both", {"a": 1}) as folder:
        for one in (a, b):
            run = ls.read_run(one)
            folder.extend([Finished(run.measurements()[0], tuple(run.token_shares()))])
    shown = command("rows", str(tmp_path / "both")).out
    assert name + ",vocab_size=301" in shown and "…" not in shown


@pytest.mark.parametrize(
    "started",
    [
        "import lipscope.cli; lipscope.measure",
        "from lipscope.cli import main; sys.argv.append('doctor'); main()",
        "from lipscope.cli import main; sys.argv += ['measure', 'minilm']; main()",
    ],
    ids=["import", "doctor", "measure"],
)
def test_an_interrupt_while_modules_are_imported_is_no_traceback(started):
    """Torch takes seconds; here it takes for ever."""
    code = (
        "import sys, runpy, time, types; sys.argv = ['-m']\n"
        "class Slow:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'torch': print('now', flush=True); time.sleep(60)\n"
        "sys.meta_path.insert(0, Slow())\n" + started
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "now\n"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=10)
    assert (process.returncode, said) == (130, "")


# --- campaigns


@pytest.mark.slow
def test_kills_of_workers_and_drivers_at_random_moments(tmp_path, capsys):
    """SIGKILL, SIGTERM, SIGINT and SIGSEGV; then the command once more, to its end."""
    (tmp_path / "spec.yaml").write_text(json.dumps(SPEC))
    whole = tmp_path / "whole"
    ls.sweep(SPEC, whole, workers=2)  # with other threads a worker the last bits may differ
    chance, kills, campaigns = random.Random(0), 0, 8
    for k in range(campaigns):
        folder = tmp_path / f"run{k}"
        command = [sys.executable, "-m", "lipscope.cli", "sweep", "spec.yaml", "--workers", "2"]
        for _ in range(4):
            driver = subprocess.Popen(
                [*command, "--out", str(folder)], cwd=tmp_path, stderr=subprocess.PIPE, text=True
            )
            end = time.monotonic() + chance.uniform(4, 20)
            while time.monotonic() < end and driver.poll() is None:
                time.sleep(chance.uniform(0.2, 2))
                kind = chance.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
                workers = children_of(driver.pid)
                if workers and chance.random() < 0.3:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(chance.choice(workers), kind)
                        kills += 1
            if driver.poll() is None:
                driver.send_signal(chance.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT]))
                kills += 1
            _, said = driver.communicate(timeout=60)
            # Before it reads a line of ours, Python ends in its own way.
            assert "Traceback" not in said or "lipscope" not in said, said[-3000:]
        for _ in range(2):  # the second one tries again what failed for want of a worker
            ls.sweep(SPEC, folder, workers=2)
        found = ls.read_run(folder).rows
        assert len(found) == found["id"].n_unique() == JOBS
        same_run(folder, whole)
    with capsys.disabled():
        print(f"\nkills: {kills} in {campaigns} campaigns, 0 rows lost, doubled or changed")


def children_of(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        found = [f.read_text() for f in Path(f"/proc/{pid}/task").glob("*/children")]
        return [int(word) for text in found for word in text.split()]
    return []


@pytest.mark.slow
def test_two_thousand_jobs_leave_memory_flat(monkeypatch, tmp_path) -> None:
    """What this process holds after 1,500 more jobs: rows and what waits, no tensor of each."""
    monkeypatch.setattr("lipscope.engine.sweeps.driver.local_results", in_this_process)
    words = random.Random(0).choices("abcdefghijklmnopqrstuvwxyz ", k=20_000)
    (tmp_path / "text.txt").write_text("".join(words))
    spec = SPEC | {"inputs": "real", "theorems": [], "layers": [0], "samples": 2_000}
    held: dict[int, int] = {}

    def progress(done: int, total: int, row: object) -> None:
        if done in (500, 2_000):
            held[done] = int(Path("/proc/self/statm").read_text().split()[1])

    found = ls.sweep(
        spec | {"texts": [str(tmp_path / "text.txt")]},
        tmp_path / "run",
        workers=1,
        progress=progress,
    )
    assert len({row.id for row in found}) == 2_000
    grown = (held[2_000] - held[500]) * os.sysconf("SC_PAGE_SIZE")
    assert grown < 1_500 * 16_000, f"{grown / 1_500:.0f} bytes a job"
