"""A worker process, spoken to through its standard streams.

The first line of its input holds the specification and the texts, every further one some
jobs. It says that it begins a job and answers it, a line each, and meanwhile that it lives. It
ends when its input does.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
from typing import Any, TextIO

from lipscope.engine.session import Session
from lipscope.engine.spec import spec_of
from lipscope.engine.sweeps.wire import ALIVE, BEAT, begun, decoded_jobs, encoded


def main() -> None:
    """Answer jobs until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver decides when to stop
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is no answer
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(lines,), daemon=True).start()
    say = _Voice(answers)
    threading.Thread(target=say.that_it_lives, daemon=True).start()
    _work(json.loads(lines.get()), lines, say)


def _listen(lines: queue.SimpleQueue[bytes]) -> None:
    """Take lines as they come; end at once when the driver is gone, even in mid-job."""
    for line in sys.stdin.buffer:
        lines.put(line)
    os._exit(0)


class _Voice:
    """The stream of answers, in which two threads take turns line by line."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.turn = stream, threading.Lock()

    def __call__(self, line: str) -> None:
        with self.turn:
            self.stream.write(line + "\n")
            self.stream.flush()

    def that_it_lives(self) -> None:
        """Say so again and again: a process that is stopped, or stuck in a call, is silent."""
        while True:
            self(ALIVE)
            time.sleep(BEAT)


def _work(start: dict[str, Any], lines: queue.SimpleQueue[bytes], say: _Voice) -> None:
    import torch

    torch.set_num_threads(start["threads"])
    session = Session(spec_of(start["spec"]), start["sources"])
    while True:
        jobs, shape = decoded_jobs(lines.get())
        for job in jobs:
            say(begun(job))
            say(encoded(session.result(job, shape)))


if __name__ == "__main__":
    main()
