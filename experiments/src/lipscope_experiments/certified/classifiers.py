"""Small text classifiers as modules of torch, trained here in seconds, or by DeepT."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lipscope import MultiheadAttention
from lipscope.control import MeanPool
from lipscope.models import Network, read_network
from lipscope_experiments.data import sentences, windows_of_words
from lipscope_experiments.training import fit, seeded

SHOWN = 10  # test inputs of a model that are certified and attacked
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_LONGEST = {1: 16, 3: 12}  # tokens, by blocks: a certificate of three takes minutes, and gigabytes
_NAMES = {  # DeepT's, and those of a sequence with a `_Block`
    r"^linear_in": "0",
    r"^LayerNorm": "1",
    r"bert\.encoder\.layer\.": "2.",
    r"attention\.output\.LayerNorm": "norm1",
    r"attention\.(?:self\.)?(\w+)(?:\.dense)?\.weight": r"attention.\1",
    r"attention\.(?:self\.)?(\w+)(?:\.dense)?\.bias": r"attention.\1_bias",
    r"intermediate\.dense": "feed.0",
    r"output\.dense": "feed.2",
    r"output\.LayerNorm": "norm2",
}


class Recipe(NamedTuple):
    """What to train: kind A (attention), N (norms without variance) or S (LayerNorm), and sizes.

    >>> Recipe.of("S2-n16-gelu")
    Recipe(kind='S', blocks=2, n=16, d=32, gelu=True)
    """

    kind: str = "N"
    blocks: int = 1
    n: int = 8
    d: int = 32
    gelu: bool = False

    @classmethod
    def of(cls, name: str) -> Recipe:
        """A recipe by its name."""
        first, *rest = name.split("-")
        sizes = {w[0]: int(w[1:]) for w in rest if w[1:].isdigit()}
        return cls(first[0], int(first[1:]), **sizes, gelu="gelu" in rest)

    def body(self, *ends: nn.Module) -> nn.Sequential:
        """Blocks, with weights as they are first drawn, before what reads the last one."""
        blocks = [_Block(self) for _ in range(self.blocks)]
        parts = [one.attention for one in blocks] if self.kind == "A" else blocks
        return nn.Sequential(*parts, *ends, nn.Linear(self.d, 2))


class _CentredNorm(nn.LayerNorm):
    """``γ (x - mean(x)) + β`` of every token: a norm without variance."""

    def forward(self, input: Tensor) -> Tensor:
        return self.weight * (input - input.mean(-1, keepdim=True)) + self.bias


class _Block(nn.Module):
    """Attention and a network, each added to the stream, with a norm after the sum."""

    def __init__(self, of: Recipe) -> None:
        super().__init__()
        norm = nn.LayerNorm if of.kind == "S" else _CentredNorm
        bend, wide = nn.GELU() if of.gelu else nn.ReLU(), 2 * of.d
        self.attention = MultiheadAttention(of.d, 4).attention
        self.norm1, self.norm2 = norm(of.d), norm(of.d)
        self.feed = nn.Sequential(nn.Linear(of.d, wide), bend, nn.Linear(wide, of.d))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.feed(x))


class _Embedded(nn.Module):
    """Vectors of words and places."""

    def __init__(self, vocabulary: int, n: int, d: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, d), nn.Parameter(0.1 * torch.randn(n, d))
        nn.init.normal_(self.words.weight, std=0.5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.words(ids) + self.places


class _First(nn.Module):
    """The first token."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0]


@dataclass(frozen=True)
class Trained:
    """A classifier in float64 and the inputs it is asked about, all classified correctly."""

    recipe: Recipe
    body: nn.Module  # from embedded tokens (b, n, d) to two scores
    inputs: Sequence[Tensor]  # embedded, (n, d) each
    labels: Sequence[int]
    accuracy: float  # on the test inputs

    def network(self, x: Float[Tensor, "n d"]) -> Network:
        """What lipscope reads at an input."""
        return read_network(self.body, (x[None],))[0]

    @classmethod
    def of(cls, recipe: Recipe, texts: Sequence[str], steps: int = 300) -> Trained:
        """Train a recipe: blocks, mean pool, linear head.

        The inputs are the first of the test windows in an order drawn with seed 0.
        """
        of, drawn = windows_of_words(texts, recipe.n), torch.Generator().manual_seed(0)
        with seeded(0):
            entry = _Embedded(of.vocabulary, recipe.n, recipe.d)
            body = recipe.body(MeanPool())
        model, (ids, labels) = fit(nn.Sequential(entry, body), of, steps, 2e-3).double(), of.test
        with torch.no_grad():
            right = model(ids).argmax(1) == labels
            order = torch.randperm(len(ids), generator=drawn)
            shown = order[right[order]][:SHOWN]
            x, accuracy = [*entry(ids[shown])], float(right.double().mean())
        return cls(recipe, body, x, labels[shown].tolist(), accuracy)

    @classmethod
    def deept(cls, folder: Path, blocks: int) -> Trained:
        """A certifiably trained network of Bonaert et al. (2021), from a folder not shipped.

        A linear map and a norm stand before the blocks, and the first token is read through a tanh
        pooler. The inputs are the first sentences of its SST test set that have at most 16 tokens,
        of three blocks 12, and are classified correctly; accuracy is that on its first 400.
        """
        path = folder / {1: "smaller_1.ckpt", 3: "bert_smaller3.ckpt"}[blocks]
        stored = torch.load(path, map_location="cpu", weights_only=True)
        word, position, kind = (t.double() for t in stored["state_dict_embeddings"].values())
        held = {k: t.double() for k, t in stored["state_dict_model_from_embeddings"].items()}
        recipe = Recipe("N", blocks, d=(d := word.shape[1]))
        rest = recipe.body(_First(), nn.Linear(d, d), nn.Tanh())
        body = nn.Sequential(nn.Linear(d, d), _CentredNorm(d), rest).double().eval()
        ends = {r"bert\.pooler\.dense": f"2.{blocks + 1}", "classifier": f"2.{blocks + 3}"}
        for theirs, own in (ends | _NAMES).items():
            held = {re.sub(theirs, own, name): t for name, t in held.items()}
        body.load_state_dict(held)
        counts = Counter(w for words, _ in sentences(folder, "train") for w in words)
        vocabulary = [*_SPECIAL, *(w for w, k in counts.items() if k > 1)]
        index = dict(zip(vocabulary, range(len(word)), strict=True))

        def embedded(words: Sequence[str]) -> Tensor:
            ids = [index.get(w, 1) for w in ("[CLS]", *words, "[SEP]")]
            return word[ids] + position[: len(ids)] + kind[0]

        asked = [(embedded(words), label) for words, label in sentences(folder, "test")[:400]]
        with torch.no_grad():
            right = [(x, y) for x, y in asked if int(body(x[None]).argmax()) == y]
        shown = [one for one in right if len(one[0]) <= _LONGEST[blocks]][:SHOWN]
        inputs, labels = zip(*shown, strict=True)
        return cls(recipe, body, inputs, labels, len(right) / len(asked))
