"""Sweeps on a real Dask cluster: a scheduler and worker processes on this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from distributed import LocalCluster

import lipscope as ls
from lipscope.engine.sweeps.pool import cores
from lipscope.errors import InputError
from lipscope.records import RunFolder
from sweeps import JOBS, SPEC, same_run


@pytest.fixture(scope="module")
def local(tmp_path_factory) -> Path:
    """With one thread for each worker, as on the cluster below: threads change the rounding."""
    folder = tmp_path_factory.mktemp("runs") / "local"
    ls.sweep(SPEC, folder, workers=cores())
    return folder


def two_processes() -> LocalCluster:
    """Workers that can be killed."""
    return LocalCluster(
        n_workers=2,
        threads_per_worker=1,
        processes=True,
        host="127.0.0.1",
        dashboard_address=None,
        silence_logs=50,
    )


@pytest.mark.filterwarnings("ignore")  # of Dask, about a worker that was killed
@pytest.mark.slow
def test_rows_of_a_cluster_that_loses_a_worker_are_those_of_this_machine(tmp_path, local):
    killed: list[int] = []
    with two_processes() as cluster:

        def kill(done: int, total: int, row: object) -> None:
            del total, row
            if done and not killed:
                worker = next(iter(cluster.workers.values()))
                killed.append(worker.pid)
                os.kill(worker.pid, signal.SIGKILL)

        rows = ls.sweep(SPEC, tmp_path / "run", cluster=cluster.scheduler_address, progress=kill)
    assert killed and len(rows) == JOBS
    same_run(tmp_path / "run", local)


@pytest.mark.filterwarnings("ignore")  # of Dask, about workers that were killed
@pytest.mark.slow
def test_radii_outlive_killed_workers_of_a_cluster(tmp_path, monkeypatch):
    """Each is written once, though a worker is killed after every other one."""
    model = "random:gpt2:n_embd=4,n_head=1,n_layer=1,n_positions=16,vocab_size=300"
    spec: dict[str, Any] = {"models": model, "maps": "margin", "dtypes": "float64", "samples": 2}
    spec |= {"lengths": [3], "decisions": "token"}
    ls.sweep(spec, tmp_path / "local", workers=cores())
    add_value, written = RunFolder.add_value, list[str]()
    with two_processes() as cluster:

        def kill(self: RunFolder, part: str, key: str, content: Any) -> Any:
            if part == "radii":
                written.append(key)
                if len(written) % 2:
                    os.kill(next(iter(cluster.workers.values())).pid, signal.SIGKILL)
            return add_value(self, part, key, content)

        monkeypatch.setattr(RunFolder, "add_value", kill)
        ls.sweep(spec, tmp_path / "run", cluster=cluster.scheduler_address)
    assert len(written) == len(set(written)) == 6
    same_run(tmp_path / "run", tmp_path / "local")


def test_no_scheduler_is_one_line(tmp_path, monkeypatch):
    from lipscope.engine.sweeps import cluster

    monkeypatch.setattr(cluster, "_CONNECT", "1s")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        for where in (address, "nowhere"):
            with pytest.raises(InputError, match="`cluster` should be the address") as caught:
                ls.sweep(SPEC, tmp_path / "run", cluster=where)
            assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="exclude each other"):
        ls.sweep(SPEC, tmp_path / "run", cluster=address, workers=2)


def started(module: str, *words: str) -> subprocess.Popen[bytes]:
    """A part of Dask in a process of its own, heard by this machine only."""
    command = [sys.executable, "-m", f"distributed.cli.{module}", "--host", "127.0.0.1"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([*command, "--no-dashboard", *words], **quiet)


@pytest.mark.filterwarnings("ignore")  # of Dask, about what was killed
@pytest.mark.slow
def test_a_scheduler_that_dies_ends_the_sweep_in_one_line_and_keeps_its_rows(
    tmp_path, local, monkeypatch
):
    monkeypatch.setattr("lipscope.engine.sweeps.cluster._CONNECT", "120s")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"
    scheduler = started("dask_scheduler", "--port", str(port))
    worker = started("dask_worker", address, "--nthreads", "1", "--no-nanny")

    def kill(done: int, total: int, row: object) -> None:
        del total, row
        if done:
            scheduler.kill()

    try:
        with pytest.raises(InputError, match="went away") as caught:
            ls.sweep(SPEC, tmp_path / "run", cluster=address, progress=kill)
    finally:
        for process in (scheduler, worker):
            process.kill()
            process.wait()
    assert "Finished rows are kept" in str(caught.value) and "\n" not in str(caught.value)
    assert 0 < len(ls.read_run(tmp_path / "run").rows) < JOBS
    ls.sweep(SPEC, tmp_path / "run", workers=cores())
    same_run(tmp_path / "run", local)
