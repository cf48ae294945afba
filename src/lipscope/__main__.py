"""`lipscope`, and `python -m lipscope`: the command, also where it is stopped while it starts."""

from __future__ import annotations

from typing import NoReturn


def main() -> NoReturn:
    """Entry point: the command line, or status 130 without a traceback."""
    try:
        from lipscope.cli import main as run
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    run()


if __name__ == "__main__":
    main()
