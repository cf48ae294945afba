"""Verbs and their execution: from a question to result rows."""

import lazy_loader

# Modules are imported lazily, on first use of one of their names; see `__init__.pyi`.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
