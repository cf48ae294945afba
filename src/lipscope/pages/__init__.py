"""Tables, sentences, figures and the HTML report of rows."""

import lazy_loader

# Each module is imported when a name of it is first asked for: `__init__.pyi` says where they are.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
