# The front door: what other rooms may use.
from .checks import items
from .progress import Bar
from .ranges import parse_integers
from .results import pieces
from .runs import Progress, folder_of
from .source import nearest
from .spec import AXES, OPTIONS, options_of
from .sweeps import Estimate, estimate, sweep
from .verbs.attack import Attacked, attack
from .verbs.attack_text import attack_text
from .verbs.bounds import bounds
from .verbs.certify import CertifiedBall, certify
from .verbs.certify_decision import CertifiedDecision, certify_decision
from .verbs.directions import directions
from .verbs.measure import measure, measure_built
from .verbs.push import push
from .verbs.smooth import smooth
from .verbs.split import Splitting, split

__all__ = [
    "AXES",
    "OPTIONS",
    "Attacked",
    "Bar",
    "CertifiedBall",
    "CertifiedDecision",
    "Estimate",
    "Progress",
    "Splitting",
    "attack",
    "attack_text",
    "bounds",
    "certify",
    "certify_decision",
    "directions",
    "estimate",
    "folder_of",
    "items",
    "measure",
    "measure_built",
    "nearest",
    "options_of",
    "parse_integers",
    "pieces",
    "push",
    "smooth",
    "split",
    "sweep",
]
