"""DeepT's networks on sentences of SST, read from a folder that is not shipped."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lipscope import InputError
from lipscope_experiments.certified.classifiers import SHOWN, Recipe, SmallTransformer, Trained

FOLDER = "LIPSCOPE_DEEPT"  # the environment variable that names it
_LONGEST = {1: 16, 3: 12}  # tokens, by blocks: a certificate of three takes minutes, and gigabytes


def deept(folder: Path, blocks: int) -> Trained:
    """A certifiably trained network of Bonaert et al. (2021), read from a folder.

    The inputs are the first sentences of its SST test set that have at most 16 tokens, of three
    blocks 12, and are classified correctly; accuracy is that on its first 400 sentences.
    """
    path = folder / {1: "smaller_1.ckpt", 3: "bert_smaller3.ckpt"}[blocks]
    stored = torch.load(path, map_location="cpu", weights_only=True)
    recipe = Recipe("N", blocks, d=64, task="SST")
    model = SmallTransformer(recipe, front=True)
    weights = stored["state_dict_model_from_embeddings"]
    model.load_state_dict({_name_here(name): value for name, value in weights.items()})
    model.double().eval().requires_grad_(False)
    word, position, kind = (t.double() for t in stored["state_dict_embeddings"].values())
    counts = Counter(w for one in sentences(folder, "train") for w in words_of(one))
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(w for w, k in counts.items() if k > 1)]
    if len(names) != len(word):
        raise AssertionError(f"{len(names)} words, {len(word)} embeddings")
    index = {name: i for i, name in enumerate(names)}
    asked, right = sentences(folder, "test")[:400], 0
    inputs: list[Tensor] = []
    labels: list[int] = []
    for one in asked:
        ids = [index.get(w, 1) for w in ("[CLS]", *words_of(one), "[SEP]")]
        x = word[ids] + position[: len(ids)] + kind[0]
        if int(model(x[None]).argmax()) == one["label"]:
            right += 1
            if len(ids) <= _LONGEST[blocks] and len(inputs) < SHOWN:
                inputs.append(x)
                labels.append(one["label"])
    return Trained(recipe, model, inputs, labels, right / len(asked))


def folder_for(name: str) -> Path:
    """The folder that the environment names, for a data set or network."""
    if not os.environ.get(FOLDER):
        raise InputError(f"{name} was left out: {FOLDER} names no folder.")
    return Path(os.environ[FOLDER])


def sentences(folder: Path, part: str) -> list[dict[str, Any]]:
    """Sentences of SST with their labels."""
    return json.loads((folder / f"{part}.json").read_text("utf-8"))


def words_of(sentence: dict[str, Any]) -> list[str]:
    """The words of one."""
    return sentence["sentence"].lower().split()


def _name_here(name: str) -> str:
    for theirs, own in _NAMES.items():
        name = name.replace(theirs, own)
    return name


_NAMES = {
    "bert.encoder.layer": "blocks",
    "attention.self": "attention",
    "attention.output.dense": "attention.out",
    "attention.output.LayerNorm": "norm",
    "intermediate.dense": "inner",
    "output.dense": "outer",
    "output.LayerNorm": "last",
    "bert.pooler.dense": "pooler",
    "classifier": "head",
    "linear_in": "front",
    "LayerNorm": "front_norm",
}
