"""Model types of transformers: exact, or refused in one line; none wrong, none a traceback."""

from __future__ import annotations

import pytest

from zoo import MAPS, TYPES, outcomes

# Thirty layouts: encoders, decoders, two parts, pictures, sound; adapters, experts, windows.
SAMPLE = (
    "albert",
    "bart",
    "bert",
    "bloom",
    "clip_vision_model",
    "deberta-v2",
    "distilbert",
    "funnel",
    "gemma3_text",
    "gpt2",
    "gptj",
    "granite",
    "hubert",
    "informer",  # a list of blocks, some of which are None
    "layoutlm",
    "llama",
    "luke",
    "mixtral",
    "mobilebert",
    "modernbert",
    "mpnet",
    "mpt",
    "nomic_bert",
    "olmo2",
    "phi3",
    "qwen3",
    "reformer",
    "swinv2",
    "t5",
    "vit_mae",
    "wavtokenizer",  # channels first, behind a norm
    "xlm",
)


@pytest.mark.parametrize("kind", SAMPLE)
def test_a_sample_is_exact_or_refused(kind):
    found = outcomes(kind, ("attention", "block"))
    assert not [one for one in found if one.verdict == "wrong"]


def test_parts_without_attention_may_lack_its_fused_form():
    """The tokenizers of this type are convolutions that offer no `sdpa`."""
    assert [one.verdict for one in outcomes("vibevoice_asr", ("attention",))] == ["exact"]


def test_a_copy_of_the_output_leads_to_the_projection():
    """CANINE concatenates the outputs of chunks, of which there is one here."""
    assert [one.verdict for one in outcomes("canine", ("attention", "residual"))] == ["exact"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPES)
def test_every_model_type_is_exact_or_refused(kind):
    """About two seconds each; what cannot be built small, or takes too long, is skipped."""
    found = outcomes(kind, MAPS)
    assert not [one for one in found if one.verdict == "wrong"]
    if all(one.verdict == "skipped" for one in found):
        pytest.skip(found[0].why)
