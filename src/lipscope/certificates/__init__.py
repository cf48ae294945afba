"""Robustness certificates over a ball: output bounds and certified decision radii."""

from lipscope.certificates.balls import (
    BallCertificate as BallCertificate,
    HeadCertificate as HeadCertificate,
    certified_changes as certified_changes,
    certify_ball as certify_ball,
    check_ball as check_ball,
    in_double as in_double,
    sigma_of as sigma_of,
)
from lipscope.certificates.map_ball import certify_map as certify_map
from lipscope.certificates.margin import NetworkBall as NetworkBall
from lipscope.certificates.network_decision import (
    DecisionBall as DecisionBall,
    DecisionSearch as DecisionSearch,
    NetworkCertificate as NetworkCertificate,
    certify_network as certify_network,
    check_memory as check_memory,
)
from lipscope.certificates.read_out import read_out_radius as read_out_radius
