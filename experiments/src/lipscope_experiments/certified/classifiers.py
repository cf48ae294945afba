"""Small text classifiers, trained here in seconds or by DeepT, as networks of parts."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lipscope.attention import DotProduct
from lipscope.models import ACTIVATIONS, ActivationName, Branch, Feed, Network, Norm, check_network
from lipscope_experiments.data import sentences

LICENCES = tuple(Path("/usr/share/common-licenses", name) for name in ("GPL-3", "MPL-2.0"))
SHOWN = 10  # test windows of a model that are certified and attacked
_SEGMENT, _STRIDE, _MOST = 200, 3, 12_000  # words: of a segment, between windows, of a text


@dataclass(frozen=True)
class Recipe:
    """What to train: kind A (attention), N (norms without variance) or S (LayerNorm), and sizes.

    >>> Recipe.of("S2-n16-gelu")
    Recipe(kind='S', blocks=2, n=16, d=32, activation='gelu', task='licences')
    """

    kind: str = "N"
    blocks: int = 1
    n: int = 8
    d: int = 32
    activation: ActivationName = "relu"
    task: str = "licences"

    @classmethod
    def of(cls, name: str) -> Recipe:
        """A recipe by its name."""
        first, *rest = name.split("-")
        sizes = {"n": 8, "d": 32} | {w[0]: int(w[1:]) for w in rest if w[1:].isdigit()}
        activation: ActivationName = "gelu" if "gelu" in rest else "relu"
        task = "prose" if "prose" in rest else "licences"
        return cls(first[0], int(first[1:]), sizes["n"], sizes["d"], activation, task)


class CentredNorm(nn.Module):
    """LayerNorm, or the same without its division by the deviation."""

    def __init__(self, d: int, scaled: bool) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(d)), nn.Parameter(torch.zeros(d))
        self.scaled = scaled

    def forward(self, x: Tensor) -> Tensor:
        """The norm of every token."""
        return Norm(self.weight, self.bias, scaled=self.scaled)(x)


class Mixing(nn.Module):
    """Attention of four heads."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(d, d) for _ in range(4))

    @property
    def part(self) -> DotProduct:
        """What it is in a network of parts."""
        (q, q0), (k, k0), (v, v0), (o, o0) = map(_of, (self.query, self.key, self.value, self.out))
        return DotProduct(
            q, k, v, o, heads=4, query_bias=q0, key_bias=k0, value_bias=v0, output_bias=o0
        )

    def forward(self, x: Tensor) -> Tensor:
        """The output of every token."""
        q, k, v = (
            one(x).unflatten(-1, (4, -1)).transpose(1, 2)
            for one in (self.query, self.key, self.value)
        )
        p = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return self.out((p @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A post-norm block."""

    def __init__(self, d: int, scaled: bool, activation: ActivationName) -> None:
        super().__init__()
        self.activation: ActivationName = activation
        self.attention = Mixing(d)
        self.norm, self.last = CentredNorm(d, scaled), CentredNorm(d, scaled)
        self.inner, self.outer = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        """The stream after the block."""
        y = self.norm(x + self.attention(x))
        return self.last(y + self.outer(ACTIVATIONS[self.activation](self.inner(y))))


class SmallTransformer(nn.Module):
    """From embedded tokens ``(b, n, d)`` to two logits.

    With a ``front``, as in DeepT's networks, a linear map and a norm stand before the blocks, and
    the first token is read through a tanh pooler.
    """

    def __init__(self, recipe: Recipe, front: bool = False) -> None:
        super().__init__()
        d = recipe.d
        blocks = [Block(d, recipe.kind == "S", recipe.activation) for _ in range(recipe.blocks)]
        self.blocks: Any = nn.Sequential(*([Mixing(d)] if recipe.kind == "A" else blocks))
        first = (nn.Linear(d, d), CentredNorm(d, False)) if front else ()
        self.front: Any = nn.Sequential(*first)
        self.pooler = nn.Linear(d, d) if front else None
        self.head = nn.Linear(d, 2)

    def forward(self, x: Tensor) -> Tensor:
        """The two logits."""
        x = self.blocks(self.front(x))
        return self.head(x.mean(1) if self.pooler is None else torch.tanh(self.pooler(x[:, 0])))


def _of(one: nn.Linear | CentredNorm) -> tuple[Tensor, Tensor]:
    return one.weight.detach(), one.bias.detach()


def _norm(norm: CentredNorm) -> Branch:
    return Branch(norm=Norm(*_of(norm), scaled=norm.scaled), skip=False)


def described(model: SmallTransformer, x: Tensor) -> Network:
    """The network as its parts, held against the module."""
    n, d = x.shape
    none = torch.eye(d).to(x), torch.zeros(d).to(x)  # a second map that does nothing
    share, branches, tail = torch.full((n,), 1 / n).to(x), list[Branch](), ()
    if model.pooler is not None:
        linear, norm = model.front
        branches += [Branch(Feed(*_of(linear), *none, "identity"), skip=False), _norm(norm)]
        share = torch.eye(n)[0].to(x)
        tail = (Branch(Feed(*_of(model.pooler), *none, "tanh"), skip=False),)
    for block in model.blocks:
        if isinstance(block, Mixing):
            branches.append(Branch(block.part, skip=False))
        else:
            feed = Feed(*_of(block.inner), *_of(block.outer), block.activation)
            branches += [Branch(block.attention.part), _norm(block.norm)]
            branches += [Branch(feed), _norm(block.last)]
    network = Network(tuple(branches), share, *_of(model.head), tail=tail)
    check_network(network, lambda z: model(z[None])[0], x)
    return network


# --- trained here, or by DeepT


@dataclass(frozen=True)
class Trained:
    """A classifier in float64 and the inputs it is asked about, all classified correctly."""

    recipe: Recipe
    model: SmallTransformer
    inputs: list[Tensor]  # embedded, (n, d) each
    labels: list[int]
    accuracy: float  # on the test windows

    @classmethod
    def of(cls, recipe: Recipe, texts: Sequence[str], steps: int = 300) -> Trained:
        """Train a recipe.

        Adam on float32, cosine decay; every fifth segment of 200 words is held out. The inputs are
        the first of the test windows in an order drawn with seed 0.
        """
        train, test, size = _windows(texts, recipe.n)
        torch.manual_seed(0)
        words, model = nn.Embedding(size, recipe.d), SmallTransformer(recipe)
        nn.init.normal_(words.weight, std=0.5)
        places = nn.Parameter(0.1 * torch.randn(recipe.n, recipe.d))
        source = torch.Generator().manual_seed(0)
        adam = torch.optim.Adam([*words.parameters(), *model.parameters(), places], 2e-3)
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
        for _ in range(steps):
            drawn = torch.randint(len(train[0]), (64,), generator=source)
            ids, labels = (one[drawn] for one in train)
            loss = nn.functional.cross_entropy(model(words(ids) + places), labels)
            adam.zero_grad()
            loss.backward()
            adam.step()
            decay.step()
        model.double().eval().requires_grad_(False)
        ids, labels = test
        with torch.no_grad():
            x = words.double()(ids) + places.double()
            right = model(x).argmax(1) == labels
        order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
        shown = order[right[order]][:SHOWN]
        accuracy = float(right.double().mean())
        return cls(recipe, model, list(x[shown]), labels[shown].tolist(), accuracy)

    @classmethod
    def deept(cls, folder: Path, blocks: int) -> Trained:
        """A certifiably trained network of Bonaert et al. (2021), from a folder not shipped.

        The inputs are the first sentences of its SST test set that have at most 16 tokens, of three
        blocks 12, and are classified correctly; accuracy is that on its first 400 sentences.
        """
        path = folder / {1: "smaller_1.ckpt", 3: "bert_smaller3.ckpt"}[blocks]
        stored = torch.load(path, map_location="cpu", weights_only=True)
        model = SmallTransformer(recipe := Recipe("N", blocks, d=64, task="SST"), front=True)
        weights = stored["state_dict_model_from_embeddings"]
        model.load_state_dict({_name_here(name): value for name, value in weights.items()})
        model.double().eval().requires_grad_(False)
        word, position, kind = (t.double() for t in stored["state_dict_embeddings"].values())
        counts = Counter(w for words, _ in sentences(folder, "train") for w in words)
        names = [*_SPECIAL, *(w for w, k in counts.items() if k > 1)]
        if len(names) != len(word):
            raise AssertionError(f"{len(names)} words, {len(word)} embeddings")
        index = {name: i for i, name in enumerate(names)}
        asked, right = sentences(folder, "test")[:400], list[tuple[Tensor, int]]()
        for words, label in asked:
            ids = [index.get(w, 1) for w in ("[CLS]", *words, "[SEP]")]
            x = word[ids] + position[: len(ids)] + kind[0]
            if int(model(x[None]).argmax()) == label:
                right.append((x, label))
        shown = [one for one in right if len(one[0]) <= _LONGEST[blocks]][:SHOWN]
        inputs, labels = ([*some] for some in zip(*shown, strict=True))
        return cls(recipe, model, inputs, labels, len(right) / len(asked))


_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_LONGEST = {1: 16, 3: 12}  # tokens, by blocks: a certificate of three takes minutes, and gigabytes
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
    "linear_in": "front.0",
    "LayerNorm": "front.1",
}


def _name_here(name: str) -> str:
    """What DeepT calls a weight, as it is called here."""
    for theirs, own in _NAMES.items():
        name = name.replace(theirs, own)
    return name


Labelled = tuple[Tensor, Tensor]


def _windows(texts: Sequence[str], n: int) -> tuple[Labelled, Labelled, int]:
    """Windows of n words with the text they are of, to train on and to test on; vocabulary."""
    found = [re.findall(r"[a-z]+|[^\sa-z]", text.lower())[:_MOST] for text in texts]
    counts = Counter(itertools.chain(*found))
    index = {word: i + 1 for i, (word, k) in enumerate(counts.most_common()) if k >= 3}
    parts: tuple[list[tuple[list[int], int]], ...] = ([], [])
    for label, words in enumerate(found):
        ids = [index.get(word, 0) for word in words]
        for k in range(len(ids) // _SEGMENT):
            own = ids[k * _SEGMENT : (k + 1) * _SEGMENT]
            windows = [(own[i : i + n], label) for i in range(0, _SEGMENT - n, _STRIDE)]
            parts[k % 5 == 4].extend(windows)
    train, test = (
        (torch.tensor([w for w, _ in p]), torch.tensor([y for _, y in p])) for p in parts
    )
    return train, test, len(index) + 1
