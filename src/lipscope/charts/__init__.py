"""Charts of result rows.

The only package that imports altair. A chart is saved as SVG, PNG or a self-contained HTML page;
charts of a report (from `focus` on) also appear in its page.
"""

import lazy_loader

# Modules are imported lazily, on first use of one of their names; see `__init__.pyi`.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
