"""Layers read in closed form: one architecture, one file; being here is what enters it."""

import importlib
import pkgutil

for _found in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_found.name}")
