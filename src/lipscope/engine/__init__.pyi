# The front door: what other rooms may use.
from .checks import items as items, nearest as nearest, parse_integers as parse_integers
from .model_decision import (
    DecisionCertificate as DecisionCertificate,
    ModelDecision as ModelDecision,
    TokenRadii as TokenRadii,
)
from .monitor import Monitor as Monitor
from .open_model import (
    LayerAtInput as LayerAtInput,
    OpenModel as OpenModel,
    load_model as load_model,
)
from .runs import Bar as Bar, Progress as Progress, folder_of as folder_of
from .spec import (
    AXES as AXES,
    OPTIONS as OPTIONS,
    options_of as options_of,
    refuse_early as refuse_early,
)
from .sweeps import Estimate as Estimate, estimate as estimate, sweep as sweep
from .verbs.attack import Attacked as Attacked, attack as attack, attack_text as attack_text
from .verbs.certify import (
    CertifiedBall as CertifiedBall,
    certify as certify,
    certify_decision as certify_decision,
)
from .verbs.measure import (
    bounds as bounds,
    directions as directions,
    measure as measure,
    measure_built as measure_built,
)
from .verbs.push import Pushed as Pushed, push as push
from .verbs.smooth import Smoothed as Smoothed, smooth as smooth
from .verbs.split import Splitting as Splitting, split as split
