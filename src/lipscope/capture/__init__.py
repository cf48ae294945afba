"""From a model and an input to the maps of its layers, checked against the model itself."""

from lipscope.capture import bert, llama  # noqa: F401  (registers the families)
from lipscope.capture.maps import MAPS, LayerMap, build_map, check_request
from lipscope.capture.models import LoadedModel, adopt_model, load_model
from lipscope.capture.sites import attention_sites
from lipscope.capture.trace import Trace, prepared, trace
from lipscope.capture.windows import Window, default_text, windows_of_text

__all__ = [
    "MAPS",
    "LayerMap",
    "LoadedModel",
    "Trace",
    "Window",
    "adopt_model",
    "attention_sites",
    "build_map",
    "check_request",
    "default_text",
    "load_model",
    "prepared",
    "trace",
    "windows_of_text",
]
