"""From a model and an input to the maps of its layers, checked against the model itself."""

from lipscope.models.data.controls import random_tokens, repeated_token, shuffled_words
from lipscope.models.data.inputs import inputs_of, remarks_on
from lipscope.models.data.positions import later_positions
from lipscope.models.data.samples import Sample, given, moved, samples_of
from lipscope.models.data.window_decoder import Written
from lipscope.models.data.windows import (
    Window,
    decoded,
    default_text,
    read_text,
    read_texts,
    whole_text,
    windows_of_text,
)
from lipscope.models.families.affine import projected
from lipscope.models.loading import LoadedModel, adopt_model, load_model
from lipscope.models.model_name import parted
from lipscope.models.modified_models import (
    as_decoder,
    quantised,
    reinitialised,
    rounded,
    rounding,
    rounding_error,
    scrambled,
)
from lipscope.models.tracing.calls import Trace
from lipscope.models.tracing.embedded import Embedded
from lipscope.models.tracing.maps import (
    MAPS,
    OF_BLOCKS,
    WHOLE,
    LayerMap,
    build_map,
    check_request,
    margin_of,
)
from lipscope.models.tracing.overflow import overflows
from lipscope.models.tracing.padding import without_padding
from lipscope.models.tracing.prepare import copied, device_of, implementation_for, prepared
from lipscope.models.tracing.readings import Reader, Readings
from lipscope.models.tracing.sites import (
    SIDES,
    AttentionCall,
    NotCoveredError,
    Side,
    attention_sites,
    families,
    family,
    reader_of,
    why_run,
)
from lipscope.models.tracing.trace import trace

__all__ = [
    "MAPS",
    "OF_BLOCKS",
    "SIDES",
    "WHOLE",
    "AttentionCall",
    "Embedded",
    "LayerMap",
    "LoadedModel",
    "NotCoveredError",
    "Reader",
    "Readings",
    "Sample",
    "Side",
    "Trace",
    "Window",
    "Written",
    "adopt_model",
    "as_decoder",
    "attention_sites",
    "build_map",
    "check_request",
    "copied",
    "decoded",
    "default_text",
    "device_of",
    "families",
    "family",
    "given",
    "implementation_for",
    "inputs_of",
    "later_positions",
    "load_model",
    "margin_of",
    "moved",
    "overflows",
    "parted",
    "prepared",
    "projected",
    "quantised",
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
    "samples_of",
    "scrambled",
    "shuffled_words",
    "trace",
    "whole_text",
    "why_run",
    "windows_of_text",
    "without_padding",
]
