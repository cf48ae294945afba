"""From a model and an input to the maps of its layers, checked against the model itself."""

from lipscope.models.data.controls import random_tokens, repeated_token, shuffled_words
from lipscope.models.data.images import normalisation
from lipscope.models.data.inputs import inputs_of, remarks_on
from lipscope.models.data.positions import later_positions
from lipscope.models.data.samples import Sample, given, moved, samples_of
from lipscope.models.data.window_decoder import Written
from lipscope.models.data.windows import (
    Window,
    WindowKind,
    decoded,
    default_text,
    digest,
    read_text,
    read_texts,
    special_tokens_of,
    whole_text,
    windows_of_text,
)
from lipscope.models.families.affine import projected
from lipscope.models.library_messages import quiet
from lipscope.models.loading import LoadedModel, adopt_model, check_finite, fingerprint, load_model
from lipscope.models.model_fingerprint import stamp, stamp_of_folder
from lipscope.models.model_name import parted
from lipscope.models.modified_models import (
    Keeps,
    Rounds,
    Which,
    as_decoder,
    quantised,
    reinitialised,
    rounded,
    rounding,
    rounding_error,
    scrambled,
    with_mask,
)
from lipscope.models.next_token import with_own_head, with_scores
from lipscope.models.patches import Patches, coded, patches_of, picture_move
from lipscope.models.pretrained import with_words
from lipscope.models.tracing.calls import Trace, first_tensor
from lipscope.models.tracing.embedded import Embedded, Read, Where
from lipscope.models.tracing.map_endpoints import Ends
from lipscope.models.tracing.maps import (
    MAPS,
    OF_BLOCKS,
    PER_HEAD_MAPS,
    WHOLE,
    LayerMap,
    MapName,
    build_map,
    check_request,
    margin_of,
)
from lipscope.models.tracing.overflow import overflows
from lipscope.models.tracing.padding import without_padding
from lipscope.models.tracing.prepare import (
    Choice,
    ExactNorm,
    as_chosen,
    at_rest,
    choices,
    converted,
    copied,
    device_of,
    exact_maths,
    implementation_for,
    prepared,
)
from lipscope.models.tracing.readings import Reader, Readings
from lipscope.models.tracing.residual import Norms, norm_before
from lipscope.models.tracing.sites import (
    OF_FUNCTION,
    SIDES,
    AttentionCall,
    NotCoveredError,
    Scores,
    Side,
    attention_sites,
    block_of,
    closed_form,
    families,
    family,
    reader_of,
    why_run,
)
from lipscope.models.tracing.trace import run, trace

__all__ = [
    "MAPS",
    "OF_BLOCKS",
    "OF_FUNCTION",
    "PER_HEAD_MAPS",
    "SIDES",
    "WHOLE",
    "AttentionCall",
    "Choice",
    "Embedded",
    "Ends",
    "ExactNorm",
    "Keeps",
    "LayerMap",
    "LoadedModel",
    "MapName",
    "Norms",
    "NotCoveredError",
    "Patches",
    "Read",
    "Reader",
    "Readings",
    "Rounds",
    "Sample",
    "Scores",
    "Side",
    "Trace",
    "Where",
    "Which",
    "Window",
    "WindowKind",
    "Written",
    "adopt_model",
    "as_chosen",
    "as_decoder",
    "at_rest",
    "attention_sites",
    "block_of",
    "build_map",
    "check_finite",
    "check_request",
    "choices",
    "closed_form",
    "coded",
    "converted",
    "copied",
    "decoded",
    "default_text",
    "device_of",
    "digest",
    "exact_maths",
    "families",
    "family",
    "fingerprint",
    "first_tensor",
    "given",
    "implementation_for",
    "inputs_of",
    "later_positions",
    "load_model",
    "margin_of",
    "moved",
    "norm_before",
    "normalisation",
    "overflows",
    "parted",
    "patches_of",
    "picture_move",
    "prepared",
    "projected",
    "quantised",
    "quiet",
    "random_tokens",
    "read_text",
    "read_texts",
    "reader_of",
    "reinitialised",
    "remarks_on",
    "repeated_token",
    "rounded",
    "rounding",
    "rounding_error",
    "run",
    "samples_of",
    "scrambled",
    "shuffled_words",
    "special_tokens_of",
    "stamp",
    "stamp_of_folder",
    "trace",
    "whole_text",
    "why_run",
    "windows_of_text",
    "with_mask",
    "with_own_head",
    "with_scores",
    "with_words",
    "without_padding",
]
