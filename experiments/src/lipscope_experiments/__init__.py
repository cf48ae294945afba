"""The papers' experiments, repeated with lipscope: one file each; being here is what enters it."""

import importlib
import pkgutil

from lipscope_experiments.experiment import Experiment, experiments, reproduce

for _found in pkgutil.walk_packages(__path__, f"{__name__}."):
    importlib.import_module(_found.name)

__all__ = ["Experiment", "experiments", "reproduce"]
