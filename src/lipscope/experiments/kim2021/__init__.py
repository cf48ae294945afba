"""Kim, Papamakarios and Mnih (2021), "The Lipschitz Constant of Self-Attention"."""

from lipscope.experiments.kim2021 import tightness, witness

__all__ = ["tightness", "witness"]
