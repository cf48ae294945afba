"""The process of the command: `lipscope`, and `python -m lipscope.cli`."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from typing import NoReturn

from lipscope.cli import main


def run_process() -> NoReturn:
    """Run the command; when all is written, end the process without taking its objects down.

    Those of torch and transformers would take a second. What is registered to run at exit runs; a
    thread that the process has to wait for is waited for, in the ordinary way.
    """
    try:
        main()
    except SystemExit as end:
        atexit._run_exitfuncs()  # ends pools of threads, too
        others = (one for one in threading.enumerate() if one is not threading.main_thread())
        if any(not one.daemon for one in others) or not isinstance(end.code, int):
            raise
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # closed, or its reader is gone
                stream.flush()
        os._exit(end.code)


if __name__ == "__main__":
    run_process()
