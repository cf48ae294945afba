"""Rows to charts.

The only package that imports altair. A chart is saved as SVG, PNG or one HTML page that
needs no network; those of a report (from `focus` on) also live in its page.
"""

import lazy_loader

# Each module is imported when a name of it is first asked for: `__init__.pyi` says where they are.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
