"""The command as `python -m lipscope`."""

from lipscope.cli.__main__ import run_process

if __name__ == "__main__":
    run_process()
