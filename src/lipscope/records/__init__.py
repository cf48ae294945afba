"""Rows, run folders, growth and sampling: what is known once tensors are gone."""

import lazy_loader

# Each module is imported when a name of it is first asked for: `__init__.pyi` says where they are.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
