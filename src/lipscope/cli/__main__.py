"""Process entry point of `lipscope` and `python -m lipscope.cli`."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from typing import NoReturn

from lipscope.cli import main


def run_process() -> NoReturn:
    """Run the command, flush the output and exit without interpreter teardown.

    Teardown of torch and transformers takes a second. Exit handlers are still run, and with
    non-daemon threads the process exits normally.
    """
    try:
        main()
    except SystemExit as end:
        atexit._run_exitfuncs()  # also shuts down thread pools
        others = (one for one in threading.enumerate() if one is not threading.main_thread())
        if any(not one.daemon for one in others) or not isinstance(end.code, int):
            raise
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # closed stream or pipe
                stream.flush()
        os._exit(end.code)


if __name__ == "__main__":
    run_process()
