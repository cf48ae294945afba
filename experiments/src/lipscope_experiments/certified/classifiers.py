"""Small text classifiers, trained here in seconds or by DeepT, as networks of parts."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from lipscope.attention import Clip, DotProduct
from lipscope.models import ACTIVATIONS, ActivationName, Branch, Feed, Network, Norm
from lipscope_experiments.data import Task, sentences

LICENCES = tuple(Path("/usr/share/common-licenses", name) for name in ("GPL-3", "MPL-2.0"))
SHOWN = 10  # test windows of a model that are certified and attacked
_SEGMENT, _STRIDE, _MOST = 200, 3, 12_000  # words: of a segment, between windows, of a text

Linear = tuple[Tensor, Tensor | None]
"""Weight and bias."""


@dataclass(frozen=True)
class Recipe:
    """What to train: kind A (attention), N (norms without variance) or S (LayerNorm), and sizes.

    >>> Recipe.of("S2-n16-gelu")
    Recipe(kind='S', blocks=2, n=16, d=32, activation='gelu')
    """

    kind: str = "N"
    blocks: int = 1
    n: int = 8
    d: int = 32
    activation: ActivationName = "relu"

    @classmethod
    def of(cls, name: str) -> Recipe:
        """A recipe by its name."""
        first, *rest = name.split("-")
        sizes = {w[0]: int(w[1:]) for w in rest if w[1:].isdigit()}
        activation: ActivationName = "gelu" if "gelu" in rest else "relu"
        return cls(first[0], int(first[1:]), **sizes, activation=activation)


# --- networks in torch's own operations, as they are trained and as auto_LiRPA reads them


def first_maps(branch: Branch) -> list[Linear]:
    """The linear maps by which a branch reads the stream.

    Raises:
        NotImplementedError: For a part that is not written here in operations of torch.
    """
    part = branch.part
    if isinstance(part, Feed) and part.gate is None:
        return [(part.inner, part.inner_bias)]
    if isinstance(part, DotProduct) and part.output is not None and not part.causal:
        names = ("query", "key", "value")
        return [(getattr(part, name), getattr(part, f"{name}_bias")) for name in names]
    if part is not None:
        raise NotImplementedError(f"no form of {type(part).__name__}")
    return []


def scores(network: Network, x: Tensor, known: Sequence[Tensor] = ()) -> Tensor:
    """The scores ``(b, c)`` of a network at tokens ``(b, n, d)``.

    ``known``: what the maps that read ``x`` first give, if that is there already.
    """
    for branch in network.branches:
        x, known = _stream_after(branch, x, known), ()
    x = (network.share[:, None] * x).sum(1, keepdim=True)
    for branch in network.tail:
        x = _stream_after(branch, x)
    return nn.functional.linear(x[:, 0], network.head, network.bias)


def _stream_after(branch: Branch, x: Tensor, known: Sequence[Tensor] = ()) -> Tensor:
    part, norm, y = branch.part, branch.norm, x
    assert not isinstance(norm, Clip)
    if norm is not None:
        y = x - x.mean(-1, keepdim=True) if norm.centred else x
        if norm.scaled:
            # As a power: of a product of two factors, as `Norm` has it, CROWN's bound is looser.
            y = y / torch.sqrt(y.pow(2).mean(-1, keepdim=True) + norm.eps)
        y = norm.weight * y + norm.bias
    read = known or [nn.functional.linear(y, *one) for one in first_maps(branch)]
    if isinstance(part, DotProduct):
        q, k, v = (one.unflatten(-1, (part.num_heads, -1)).transpose(1, 2) for one in read)
        p = (q @ k.transpose(-1, -2) / (1 / part.scale)).softmax(-1)
        assert part.output is not None
        y = nn.functional.linear((p @ v).transpose(1, 2).flatten(2), part.output, part.output_bias)
    elif isinstance(part, Feed):
        hidden = ACTIVATIONS[part.activation](read[0])
        y = nn.functional.linear(hidden, part.outer, part.outer_bias)
    return x + y if branch.skip else y


# --- weights by DeepT's names, drawn here or its own

_LAYER = "bert.encoder.layer.{}."
_ATTENTION = [
    f"attention.{one}" for one in ("self.query", "self.key", "self.value", "output.dense")
]
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_LONGEST = {1: 16, 3: 12}  # tokens, by blocks: a certificate of three takes minutes, and gigabytes


def first_weights(recipe: Recipe) -> dict[str, Tensor]:
    """Weights to train, drawn as `torch.nn.Linear` does, part after part."""
    d, found = recipe.d, dict[str, Tensor]()
    parts: dict[str, tuple[int, ...]] = dict.fromkeys(_ATTENTION, (d, d))
    parts |= {"attention.output.LayerNorm": (d,), "intermediate.dense": (d, 2 * d)}
    parts |= {"output.dense": (2 * d, d), "output.LayerNorm": (d,)}
    layers = map(_LAYER.format, range(recipe.blocks))
    drawn = [(layer + name, sizes) for layer in layers for name, sizes in parts.items()]
    if recipe.kind == "A":  # its attention is drawn once more, after a whole block
        drawn += drawn[: len(_ATTENTION)]
    for name, sizes in (*drawn, ("classifier", (d, 2))):
        part = nn.Linear(sizes[0], sizes[1]) if len(sizes) > 1 else nn.LayerNorm(d)
        found |= part.state_dict(prefix=f"{name}.")
    return found


def network_of(weights: Mapping[str, Tensor], recipe: Recipe, n: int) -> Network:
    """The network of these weights for ``n`` tokens, to two scores: blocks, mean pool, linear head.

    With ``linear_in``, as in DeepT's networks, a linear map and a norm stand before the blocks, and
    the first token is read through a tanh pooler.
    """

    def of(name: str) -> tuple[Tensor, Tensor]:
        return weights[f"{name}.weight"], weights[f"{name}.bias"]

    head, bias = of("classifier")

    def norm(name: str) -> Branch:
        return Branch(norm=Norm(*of(f"{name}LayerNorm"), scaled=recipe.kind == "S"), skip=False)

    def map_alone(name: str, activation: ActivationName) -> Branch:
        nothing = torch.eye(recipe.d).to(head), torch.zeros(recipe.d).to(head)  # a second map
        return Branch(Feed(*of(name), *nothing, activation), skip=False)

    share, branches, tail = torch.full((n,), 1 / n).to(head), list[Branch](), ()
    if "linear_in.weight" in weights:
        branches += [map_alone("linear_in", "identity"), norm("")]
        share, tail = torch.eye(n)[0].to(head), (map_alone("bert.pooler.dense", "tanh"),)
    for at in map(_LAYER.format, range(recipe.blocks)):
        (q, q0), (k, k0), (v, v0), (o, o0) = (of(at + name) for name in _ATTENTION)
        part = DotProduct(
            q, k, v, o, heads=4, query_bias=q0, key_bias=k0, value_bias=v0, output_bias=o0
        )
        branches.append(Branch(part, skip=recipe.kind != "A"))
        if recipe.kind != "A":
            wide = *of(f"{at}intermediate.dense"), *of(f"{at}output.dense")
            feed = Branch(Feed(*wide, recipe.activation))
            branches += [norm(f"{at}attention.output."), feed, norm(f"{at}output.")]
    return Network(tuple(branches), share, head, bias, tail=tail)


@dataclass(frozen=True)
class Trained:
    """A classifier in float64 and the inputs it is asked about, all classified correctly."""

    recipe: Recipe
    weights: Mapping[str, Tensor]
    inputs: list[Tensor]  # embedded, (n, d) each
    labels: list[int]
    accuracy: float  # on the test windows

    @classmethod
    def of(cls, recipe: Recipe, texts: Sequence[str], steps: int = 300) -> Trained:
        """Train a recipe.

        Adam on float32, cosine decay; every fifth segment of 200 words is held out. The inputs are
        the first of the test windows in an order drawn with seed 0.
        """
        of = _windows(texts, recipe.n)
        torch.manual_seed(0)
        words, weights = nn.Embedding(of.vocabulary, recipe.d), first_weights(recipe)
        nn.init.normal_(words.weight, std=0.5)
        places = nn.Parameter(0.1 * torch.randn(recipe.n, recipe.d))
        network = network_of(weights, recipe, recipe.n)
        (ids, labels), source = of.train, torch.Generator().manual_seed(0)
        learnt = [one.requires_grad_() for one in weights.values()]
        adam = torch.optim.Adam([words.weight, *learnt, places], 2e-3)
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
        for _ in range(steps):
            some = torch.randint(len(ids), (64,), generator=source)
            found = scores(network, words(ids[some]) + places)
            adam.zero_grad()
            nn.functional.cross_entropy(found, labels[some]).backward()
            adam.step()
            decay.step()
        weights = {name: one.detach().double() for name, one in weights.items()}
        ids, labels = of.test
        with torch.no_grad():
            x = words.double()(ids) + places.double()
            right = scores(network_of(weights, recipe, recipe.n), x).argmax(1) == labels
        order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
        shown = order[right[order]][:SHOWN]
        accuracy = float(right.double().mean())
        return cls(recipe, weights, list(x[shown]), labels[shown].tolist(), accuracy)

    @classmethod
    def deept(cls, folder: Path, blocks: int) -> Trained:
        """A certifiably trained network of Bonaert et al. (2021), from a folder not shipped.

        The inputs are the first sentences of its SST test set that have at most 16 tokens, of three
        blocks 12, and are classified correctly; accuracy is that on its first 400 sentences.
        """
        path = folder / {1: "smaller_1.ckpt", 3: "bert_smaller3.ckpt"}[blocks]
        stored = torch.load(path, map_location="cpu", weights_only=True)
        recipe, held = Recipe("N", blocks, d=64), stored["state_dict_model_from_embeddings"]
        weights = {name: one.double() for name, one in held.items()}
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
            if int(scores(network_of(weights, recipe, len(x)), x[None]).argmax()) == label:
                right.append((x, label))
        shown = [one for one in right if len(one[0]) <= _LONGEST[blocks]][:SHOWN]
        inputs, labels = ([*some] for some in zip(*shown, strict=True))
        return cls(recipe, weights, inputs, labels, len(right) / len(asked))


def _windows(texts: Sequence[str], n: int) -> Task:
    """Windows of n words with the text that they are of."""
    found = [re.findall(r"[a-z]+|[^\sa-z]", text.lower())[:_MOST] for text in texts]
    counts = Counter(itertools.chain(*found))
    index = {word: i + 1 for i, (word, k) in enumerate(counts.most_common()) if k >= 3}
    parts: tuple[list[tuple[Tensor, Tensor]], ...] = ([], [])
    for label, words in enumerate(found):
        ids = torch.tensor([index.get(word, 0) for word in words])
        segments = ids.unfold(0, _SEGMENT, _SEGMENT)[:, :-1].unfold(1, n, _STRIDE)
        held = torch.arange(len(segments)) % 5 == 4
        for part, some in zip(parts, (~held, held), strict=True):
            windows = segments[some].flatten(0, 1)
            part.append((windows, torch.full((len(windows),), label)))
    (x, y), (tested, labels) = (map(torch.cat, zip(*part, strict=True)) for part in parts)
    return Task((x, y), (tested, labels), len(index) + 1)
