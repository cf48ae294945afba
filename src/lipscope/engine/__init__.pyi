# The front door: what other rooms may use.
from .checks import items, nearest, parse_integers
from .model_decision import DecisionCertificate, ModelDecision, TokenRadii
from .monitor import Monitor
from .open_model import LayerAtInput, OpenModel, load_model
from .runs import Bar, Progress, folder_of
from .spec import AXES, OPTIONS, options_of, refuse_early
from .sweeps import Estimate, estimate, sweep
from .verbs.attack import Attacked, attack, attack_text
from .verbs.certify import CertifiedBall, certify, certify_decision
from .verbs.measure import bounds, directions, measure, measure_built
from .verbs.push import Pushed, push
from .verbs.smooth import Smoothed, smooth
from .verbs.split import Splitting, split

__all__ = [
    "AXES",
    "OPTIONS",
    "Attacked",
    "Bar",
    "CertifiedBall",
    "DecisionCertificate",
    "Estimate",
    "LayerAtInput",
    "ModelDecision",
    "Monitor",
    "OpenModel",
    "Progress",
    "Pushed",
    "Smoothed",
    "Splitting",
    "TokenRadii",
    "attack",
    "attack_text",
    "bounds",
    "certify",
    "certify_decision",
    "directions",
    "estimate",
    "folder_of",
    "items",
    "load_model",
    "measure",
    "measure_built",
    "nearest",
    "options_of",
    "parse_integers",
    "push",
    "refuse_early",
    "smooth",
    "split",
    "sweep",
]
