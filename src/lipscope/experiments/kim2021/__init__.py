"""Kim, Papamakarios and Mnih (2021), "The Lipschitz Constant of Self-Attention"."""

from lipscope.experiments.kim2021 import tightness

__all__ = ["tightness"]
