"""Worst-case inputs for sigma, adversarial moves within a ball, and token edits of a text.

``A = K^T Q / sqrt(k)``, logits ``<A x_i, x_j>``, tokens of norm at most ``R``. A head determines
where tokens are placed; the whole layer is measured, with biases, heads and projection.
"""

from lipscope.attacks.ascent import (
    Ascent as Ascent,
    ascend as ascend,
    check_size as check_size,
    confirm as confirm,
)
from lipscope.attacks.ball_attack import (
    BallAttack as BallAttack,
    Function as Function,
    ascent_move as ascent_move,
    attack_in_ball as attack_in_ball,
    of_size as of_size,
    random_move as random_move,
    sign_move as sign_move,
)
from lipscope.attacks.edits import (
    RECIPES as RECIPES,
    Draft as Draft,
    EditSearch as EditSearch,
    Scores as Scores,
)
from lipscope.attacks.inputs import (
    DRAWN as DRAWN,
    KNOWN as KNOWN,
    PER_HEAD as PER_HEAD,
    PER_LAYER as PER_LAYER,
    Construction as Construction,
    WorstInput as WorstInput,
    constant as constant,
    dominant_token as dominant_token,
    gamma_star as gamma_star,
    l2_opposed as l2_opposed,
    large_radius as large_radius,
    opposed_pair as opposed_pair,
    quadratic as quadratic,
    two_cluster as two_cluster,
    unbalanced as unbalanced,
    weighted_two_atoms as weighted_two_atoms,
    worst as worst,
)
