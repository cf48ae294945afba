"""Rows, run folders, growth and sampling statistics, without tensors."""

import lazy_loader

# Modules are imported lazily, on first access to one of their names in `__init__.pyi`.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
