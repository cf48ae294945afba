"""From a model and an input to the maps of its layers, checked against the model itself."""

from lipscope.capture import (
    bert,
    distilbert,
    gpt2,
    gpt_neox,
    llama,
    multihead,
    phi3,
    vit,
)
from lipscope.capture.calls import Trace
from lipscope.capture.changed import as_decoder, quantised, reinitialised
from lipscope.capture.controls import random_tokens, repeated_token, shuffled_words
from lipscope.capture.maps import MAPS, LayerMap, build_map, check_request
from lipscope.capture.models import LoadedModel, adopt_model, load_model
from lipscope.capture.prepare import prepared
from lipscope.capture.samples import Sample, moved, samples_of
from lipscope.capture.sites import attention_sites, reader_of
from lipscope.capture.trace import trace
from lipscope.capture.windows import Window, default_text, whole_text, windows_of_text

__all__ = [
    "MAPS",
    "LayerMap",
    "LoadedModel",
    "Sample",
    "Trace",
    "Window",
    "adopt_model",
    "as_decoder",
    "attention_sites",
    "bert",
    "build_map",
    "check_request",
    "default_text",
    "distilbert",
    "gpt2",
    "gpt_neox",
    "llama",
    "load_model",
    "moved",
    "multihead",
    "phi3",
    "prepared",
    "quantised",
    "random_tokens",
    "reader_of",
    "reinitialised",
    "repeated_token",
    "samples_of",
    "shuffled_words",
    "trace",
    "vit",
    "whole_text",
    "windows_of_text",
]
