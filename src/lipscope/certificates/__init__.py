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

__all__ = [
    "BallCertificate",
    "Decision",
    "HeadCertificate",
    "Pool",
    "certified_changes",
    "certified_radius",
    "certify_ball",
    "check_ball",
    "in_double",
    "sigma_of",
    "tokens_of",
]
