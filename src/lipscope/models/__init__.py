"""Models: loading, inputs, tracing, and the maps of layers, checked against the model."""

from lipscope.models.families.affine import projected as projected
from lipscope.models.forward_pass import own_parts as own_parts
from lipscope.models.images import (
    Patches as Patches,
    encode_picture as encode_picture,
    normalisation as normalisation,
    patches_of as patches_of,
    picture_move as picture_move,
)
from lipscope.models.loading import (
    LoadedModel as LoadedModel,
    adopt_model as adopt_model,
    check_finite as check_finite,
    digest as digest,
    fingerprint as fingerprint,
    load_model as load_model,
    source_stamp as source_stamp,
    usable_memory as usable_memory,
)
from lipscope.models.modified_models import (
    Keeps as Keeps,
    Rounds as Rounds,
    Which as Which,
    as_decoder as as_decoder,
    quantised as quantised,
    reinitialised as reinitialised,
    rounded as rounded,
    rounding as rounding,
    rounding_error as rounding_error,
    scrambled as scrambled,
    with_mask as with_mask,
    with_own_head as with_own_head,
    with_scores as with_scores,
    with_words as with_words,
)
from lipscope.models.network import (
    ACTIVATIONS as ACTIVATIONS,
    ActivationName as ActivationName,
    Branch as Branch,
    Chain as Chain,
    Feed as Feed,
    Network as Network,
    Norm as Norm,
    scaled as scaled,
    with_plain_sums as with_plain_sums,
)
from lipscope.models.network_reader import (
    check_network as check_network,
    layer_network as layer_network,
    read_map as read_map,
    read_network as read_network,
    read_parts as read_parts,
)
from lipscope.models.network_search import Pooled as Pooled, read_norm as read_norm
from lipscope.models.pretrained import quiet as quiet
from lipscope.models.readings import (
    Embedded as Embedded,
    Read as Read,
    Reader as Reader,
    Readings as Readings,
    Where as Where,
)
from lipscope.models.samples import (
    checked_data as checked_data,
    inputs_of as inputs_of,
    inputs_of_ids as inputs_of_ids,
    later_positions as later_positions,
    remarks_on as remarks_on,
)
from lipscope.models.tracing.calls import Trace as Trace
from lipscope.models.tracing.map_endpoints import (
    LayerMap as LayerMap,
    MapEndpoints as MapEndpoints,
    Norms as Norms,
)
from lipscope.models.tracing.maps import (
    MAPS as MAPS,
    OF_BLOCKS as OF_BLOCKS,
    PER_HEAD_MAPS as PER_HEAD_MAPS,
    WHOLE as WHOLE,
    build_map as build_map,
    check_request as check_request,
    margin_of as margin_of,
    norm_before as norm_before,
    without_padding as without_padding,
)
from lipscope.models.tracing.prepare import (
    Choice as Choice,
    ExactNorm as ExactNorm,
    as_chosen as as_chosen,
    choices as choices,
    converted as converted,
    copied as copied,
    device_of as device_of,
    eval_mode as eval_mode,
    exact_maths as exact_maths,
    floating as floating,
    implementation_for as implementation_for,
    prepared as prepared,
)
from lipscope.models.tracing.recorder import (
    BlockOutputs as BlockOutputs,
    BlockRun as BlockRun,
    first_tensor as first_tensor,
    run as run,
    run_of_blocks as run_of_blocks,
    to_device as to_device,
    watched_blocks as watched_blocks,
)
from lipscope.models.tracing.resident_weights import (
    ModuleWeights as ModuleWeights,
    ResidentWeights as ResidentWeights,
    without_weights as without_weights,
)
from lipscope.models.tracing.sites import (
    OF_FUNCTION as OF_FUNCTION,
    SIDES as SIDES,
    AttentionCall as AttentionCall,
    NotCoveredError as NotCoveredError,
    Scores as Scores,
    Side as Side,
    are_read as are_read,
    attention_sites as attention_sites,
    block_of as block_of,
    closed_form as closed_form,
    count_of_layers as count_of_layers,
    family as family,
    known_families as known_families,
    why_run as why_run,
)
from lipscope.models.tracing.trace import (
    OF_MODELS as OF_MODELS,
    BlockPass as BlockPass,
    overflows as overflows,
    trace as trace,
)
from lipscope.models.windows import (
    Sample as Sample,
    WindowDecoder as WindowDecoder,
    WindowKind as WindowKind,
    random_tokens as random_tokens,
    repeated_token as repeated_token,
    shuffled_words as shuffled_words,
    special_tokens_of as special_tokens_of,
    whole_text as whole_text,
    windows_of_text as windows_of_text,
)
