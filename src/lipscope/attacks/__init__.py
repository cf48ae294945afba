"""Inputs that make sigma large, built and found; moves that a certificate must survive; text edits.

``A = K^T Q / sqrt(k)``, logits ``<A x_i, x_j>``, tokens of norm at most ``R``. The head decides
where the tokens go; what is measured is the layer with its biases, heads and projection.
"""

from lipscope.attacks.ascent import Ascent, ascend, check_size, confirm
from lipscope.attacks.ball_attack import (
    BallAttack,
    Flip,
    Function,
    ascent_move,
    attack_decision,
    attack_in_ball,
    of_size,
    random_move,
    sign_move,
)
from lipscope.attacks.constructions import (
    Construction,
    constant,
    dominant_token,
    gamma_star,
    l2_opposed,
    large_radius,
    quadratic,
    two_cluster,
    unbalanced,
    weighted_two_atoms,
)
from lipscope.attacks.edits import RECIPES, Draft, EditSearch, Scores
from lipscope.attacks.worst_known import DRAWN, KNOWN, PER_HEAD, PER_LAYER, WorstInput, worst
from lipscope.measures import Repeated

__all__ = [
    "DRAWN",
    "KNOWN",
    "PER_HEAD",
    "PER_LAYER",
    "RECIPES",
    "Ascent",
    "BallAttack",
    "Construction",
    "Draft",
    "EditSearch",
    "Flip",
    "Function",
    "Repeated",
    "Scores",
    "WorstInput",
    "ascend",
    "ascent_move",
    "attack_decision",
    "attack_in_ball",
    "check_size",
    "confirm",
    "constant",
    "dominant_token",
    "gamma_star",
    "l2_opposed",
    "large_radius",
    "of_size",
    "quadratic",
    "random_move",
    "sign_move",
    "two_cluster",
    "unbalanced",
    "weighted_two_atoms",
    "worst",
]
