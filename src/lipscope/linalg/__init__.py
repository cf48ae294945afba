"""Linear algebra of Jacobians: operators, top singular value, interval and gradient."""

from lipscope.linalg.gradient import sigma as sigma
from lipscope.linalg.norms import (
    SPECTRAL as SPECTRAL,
    Metric as Metric,
    NormInterval as NormInterval,
    bracketed as bracketed,
    eigenvalue as eigenvalue,
    frobenius_interval as frobenius_interval,
    infinity_norm as infinity_norm,
    max_token_norm as max_token_norm,
    nonnegative_norm as nonnegative_norm,
    norm_in_double as norm_in_double,
    norms_of_many as norms_of_many,
)
from lipscope.linalg.operator import (
    Operator as Operator,
    Product as Product,
    Tape as Tape,
    compose as compose,
    derivatives as derivatives,
    difference as difference,
    linearise as linearise,
    over_leading as over_leading,
    plus_identity as plus_identity,
    restrict as restrict,
    start_named as start_named,
    stretch as stretch,
    to_dense as to_dense,
    together as together,
)
from lipscope.linalg.singular import (
    SMALLEST_TOL as SMALLEST_TOL,
    USUAL_STEPS as USUAL_STEPS,
    Leading as Leading,
    TopSingular as TopSingular,
    Watch as Watch,
    golub_kahan as golub_kahan,
    leading as leading,
    top_singular as top_singular,
    top_singular_batch as top_singular_batch,
    unit_vector as unit_vector,
)
from lipscope.linalg.torch_state import (
    by_threads as by_threads,
    draws_from as draws_from,
    few_threads as few_threads,
    one_thread as one_thread,
    torch_state as torch_state,
)
