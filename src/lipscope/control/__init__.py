"""Smoothness control in training: penalties, constraints, monitoring, invertible blocks."""

from lipscope.control.alarm import (
    Alarm as Alarm,
    Alert as Alert,
    Reading as Reading,
    attention_received as attention_received,
    entropy_and_sink as entropy_and_sink,
    furthest as furthest,
    joint_norm as joint_norm,
    largest_logits as largest_logits,
)
from lipscope.control.invertible import (
    Contraction as Contraction,
    ContractiveAttention as ContractiveAttention,
    ContractiveMLP as ContractiveMLP,
    Flow as Flow,
    Inverse as Inverse,
    InvertibleResidual as InvertibleResidual,
    LogDeterminant as LogDeterminant,
    log_determinant as log_determinant,
    solve as solve,
)
from lipscope.control.restraint import (
    Restraint as Restraint,
    restrain as restrain,
    restraints as restraints,
)
from lipscope.control.smooth_transformer import (
    MeanPool as MeanPool,
    NormCap as NormCap,
    ResidualSum as ResidualSum,
    SmoothTransformer as SmoothTransformer,
)
