"""Certificates that hold all over a ball, and decisions that cannot change within one."""

from lipscope.certificates.balls import (
    BallCertificate,
    HeadCertificate,
    certified_changes,
    certify_ball,
    check_ball,
    in_double,
    sigma_of,
    tokens_of,
)
from lipscope.certificates.decision import Decision, Pool, certified_radius
from lipscope.certificates.margin import NetworkBall
from lipscope.certificates.network_decision import (
    DecisionBall,
    NetworkCertificate,
    certify_network,
)

__all__ = [
    "BallCertificate",
    "Decision",
    "DecisionBall",
    "HeadCertificate",
    "NetworkBall",
    "NetworkCertificate",
    "Pool",
    "certified_changes",
    "certified_radius",
    "certify_ball",
    "certify_network",
    "check_ball",
    "in_double",
    "sigma_of",
    "tokens_of",
]
