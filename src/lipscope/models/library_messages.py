"""Silence for what transformers prints while it loads or sets up a model."""

from __future__ import annotations

import contextlib
import io
import logging as stdlib_logging
import sys
import warnings
from collections.abc import Iterator

# In a notebook its bars, which are silenced here, would rather be widgets.
warnings.filterwarnings("ignore", message="IProgress not found")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' own progress bars and warnings off the terminal."""
    from transformers import logging

    hub = stdlib_logging.getLogger("huggingface_hub")
    hub_level, level = hub.level, logging.get_verbosity()
    hub.setLevel(stdlib_logging.CRITICAL)  # its retries would be lines of their own
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with contextlib.ExitStack() as stack:
            if not sys.stderr.isatty():  # dequantisation draws a bar of its own
                stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
            yield
    finally:
        hub.setLevel(hub_level)
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
