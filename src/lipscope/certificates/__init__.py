"""Certificates that hold all over a ball, and decisions that cannot change within one."""

from lipscope.certificates.balls import in_double, sigma_of, tokens_of
from lipscope.certificates.certify import (
    BallCertificate,
    HeadCertificate,
    certified_changes,
    certify_ball,
)
from lipscope.certificates.decision import Decision, certified_radius
from lipscope.certificates.read_out import Pool, check_ball

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
