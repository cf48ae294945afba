"""The papers' experiments: what to sweep and what to draw, one file each."""

from lipscope.experiments import castin2024, kim2021
from lipscope.experiments.experiment import Experiment, experiments, reproduce

# What enters experiments into the register by being imported.
PAPERS = (castin2024, kim2021)

__all__ = ["PAPERS", "Experiment", "experiments", "reproduce"]
