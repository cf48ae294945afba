"""A Transformer whose matrices are capped, so that its bound at all inputs is known and small."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrize import type_before_parametrizations

from lipscope.attention import Attention, Clip, MultiheadAttention, arguments, spectral_norm
from lipscope.control.restraint import cap_singular_values
from lipscope.errors import InputError, check_count, check_positive, shown
from lipscope.models import ActivationName, Branch, Chain, Feed, Network, scaled
from lipscope.records import refuse_record
from lipscope.theorems import lipschitz_bound

Capping = Literal["parametrised", "after-step"]
_SLOPE = 1.1289  # of GELU, at the most
_PATHS = 3  # queries, keys and values: by as many ways a token moves an output
_SQUARINGS = 5  # of the Gram matrix
_WEIGHTS = ("query", "key", "value", "output")
_METADATA = "smooth_transformer"  # the key of the sizes in a file


class NormCap(nn.Module):
    """``W min(1, cap / N(W))`` as a parametrisation, ``‖W‖ ≤ N(W) ≤ rank^(1/128) ‖W‖``.

    ``N(W) = tr((W^T W)^64)^(1/128)``, the Schatten norm of order 128 by five squarings. It comes
    from above; a power iteration comes from below, and slowly where many singular values are alike,
    as `torch.optim.Muon` makes them. The cap holds at every step, however far the weights moved.

    >>> capped = NormCap(0.5)(torch.diag(torch.tensor([3.0, 0.1])))
    >>> round(torch.linalg.matrix_norm(capped, 2).item(), 6)
    0.5
    """

    def __init__(self, cap: float) -> None:
        super().__init__()
        check_positive("cap", cap)
        self.cap = cap

    def extra_repr(self) -> str:
        """The cap."""
        return f"cap={self.cap:g}"

    def forward(self, weight: Float[Tensor, "r c"]) -> Float[Tensor, "r c"]:
        """The matrix within its cap."""
        if weight.ndim != 2:
            raise InputError(f"A cap is of a matrix. Found the shape {tuple(weight.shape)}.")
        rows, columns = weight.shape
        tiny = torch.finfo(weight.dtype).tiny
        scale = weight.detach().abs().amax().clamp_min(tiny)  # so that no square leaves the range
        scaled = weight / scale
        gram = scaled @ scaled.mT if rows < columns else scaled.mT @ scaled
        part = torch.linalg.matrix_norm(gram).clamp_min(tiny)
        size = scale * part.sqrt()
        for k in range(1, _SQUARINGS + 1):
            gram = gram / part
            gram = gram @ gram
            part = torch.linalg.matrix_norm(gram).clamp_min(tiny)
            size = size * part ** (0.5 / 2**k)
        return weight * (self.cap / size).clamp_max(1.0)


class ResidualSum(nn.Module):
    """``(1 - α) x + α part(x)``: a mean, so that tokens grow only where those of the part do."""

    part: Any  # attention, or a network of two linear maps

    def __init__(self, part: MultiheadAttention | nn.Sequential, alpha: float) -> None:
        super().__init__()
        self.part, self.alpha = part, alpha

    def extra_repr(self) -> str:
        """The weight of the part."""
        return f"alpha={self.alpha:g}"

    def forward(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n d"]:
        """The tokens after the sum."""
        if isinstance(self.part, MultiheadAttention):
            y = self.part(x, x, x, need_weights=False)[0]
        else:
            y = self.part(x)
        return (1 - self.alpha) * x + self.alpha * y


class MeanPool(nn.Module):
    """The mean of all tokens."""

    def forward(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b d"]:
        """One vector a sequence."""
        return x.mean(-2)


class SmoothTransformer(nn.Module):
    """An encoder or decoder with a bound at all inputs, which training can read and limit.

    ``W_out pool(B_L(… B_1(clip(E + P))))``: token vectors and positions in the ball of radius
    ``√width``, blocks of attention and a GELU network, each ``(1 - α) x + α part(x)`` with
    ``α = 1 / (2 depth)``, no norms and no biases. Every matrix has

    ``‖W‖ ≤ cap √(rows / columns)``,

    so ``cap`` is the largest growth of the root mean square of a vector; of the output projection
    of attention a third of it, of the second map of a network what the slope of GELU, 1.1289,
    leaves.

    ``bound`` is `lipscope.lipschitz_bound` in the norm ``max-token``, of the tokens before the
    clip, at most ``length`` of them (of vectors times the norm of the map that embeds them): read
    from the weights as they are, whatever capped them.

    Caps act at once, by a parametrisation of every matrix (`NormCap`), or after a step of the
    optimiser, in `cap_weights`. Weights that `torch.optim.Muon` takes are `matrices`; all others
    are `others`.

    Holds for token ids ``(b, n)`` with ``vocabulary``, for vectors ``(b, n, features)`` else.

    Args:
        width: Of tokens.
        heads: Of every attention layer.
        depth: Blocks.
        outputs: Scores, of every token or of the pooled one.
        length: The most tokens.
        vocabulary: Number of token ids, where the input is such.
        features: Width of the input, where it is vectors.
        variant: Kind of attention, as for `MultiheadAttention`.
        causal: A decoder: a token reads none after it.
        pool: ``mean`` for one row of scores a sequence, None for one a token.
        cap: As above; None for no caps.
        capped: When: ``parametrised`` or ``after-step``.
        hidden: Width of the networks in blocks; four times that of tokens if None.
        activation: Of these networks.
        **options: Of the variant, such as ``temperature``. Of dot products ``scale`` is one over
            the width of a head unless given.

    Raises:
        InputError: If sizes do not fit, or neither or both of ``vocabulary`` and ``features``.

    Source: the architecture of [newhouse2025]; positions are learnt, from sines and cosines on.

    >>> model = SmoothTransformer(8, 2, 1, outputs=3, length=4, vocabulary=5)
    >>> model(torch.tensor([[0, 4, 1]])).shape
    torch.Size([1, 3, 3])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        depth: int,
        *,
        outputs: int,
        length: int,
        vocabulary: int | None = None,
        features: int | None = None,
        variant: str = "dot-product",
        causal: bool = False,
        pool: Literal["mean"] | None = None,
        cap: float | None = 1.0,
        capped: Capping = "parametrised",
        hidden: int | None = None,
        activation: Literal["gelu", "relu"] = "gelu",
        **options: Any,
    ) -> None:
        super().__init__()
        self.sizes: dict[str, Any] = {
            "width": width,
            "heads": heads,
            "depth": depth,
            "outputs": outputs,
            "length": length,
            "vocabulary": vocabulary,
            "features": features,
            "variant": variant,
            "causal": causal,
            "pool": pool,
            "cap": cap,
            "capped": capped,
            "hidden": hidden,
            "activation": activation,
            **options,
        }
        _check(self.sizes)
        hidden = hidden or 4 * width
        if cap is not None:  # a number of NumPy or torch would count in its own precision
            self.sizes["cap"] = cap = float(cap)
        if variant == "dot-product":
            options = {"scale": heads / width} | options
        if causal:
            options["causal"] = True
        self.cap, self.capped = cap, capped
        if vocabulary is not None:
            self.embedding: Any = nn.Embedding(vocabulary, width)
            nn.init.normal_(self.embedding.weight, std=0.5**0.5)
        else:
            assert features is not None
            self.embedding = nn.Linear(features, width, bias=False)
        self.positions = nn.Parameter(_waves(length, width))
        self.clip = Clip(width**0.5)
        alpha = 1 / (2 * depth)
        self.blocks = nn.ModuleList()
        for _ in range(depth):
            attention = MultiheadAttention(
                width, heads, variant, bias=False, batch_first=True, **options
            )
            network = nn.Sequential(
                nn.Linear(width, hidden, bias=False),
                nn.GELU() if activation == "gelu" else nn.ReLU(),
                nn.Linear(hidden, width, bias=False),
            )
            parts = ResidualSum(attention, alpha), ResidualSum(network, alpha)
            self.blocks.append(nn.Sequential(*parts))
        self.pool = MeanPool() if pool == "mean" else nn.Identity()
        self.head = nn.Linear(width, outputs, bias=False)
        for holder, name, factor in list(self._capped_weights()):
            nn.init.orthogonal_(getattr(holder, name), gain=(cap or 1.0) * factor)
            if cap is not None and capped == "parametrised":
                parametrize.register_parametrization(holder, name, NormCap(cap * factor))

    def forward(self, input_ids: Tensor) -> Tensor:
        """Scores, of every token or of the pooled one.

        Args:
            input_ids: Token ids ``(b, n)``, or vectors ``(b, n, features)``.
        """
        return self.scores(self.tokens(input_ids))

    def tokens(self, input_ids: Tensor) -> Float[Tensor, "b n d"]:
        """What the bound is a bound of moves of: token vectors with their positions."""
        x = self._embedded(input_ids)
        if x.shape[-2] > len(self.positions):
            raise InputError(
                f"A sequence should have at most {len(self.positions)} tokens. Found {x.shape[-2]}."
            )
        return x + self.positions[: x.shape[-2]]

    def _embedded(self, given: Any) -> Tensor:
        rows, columns = self.embedding.weight.shape
        of_ids = isinstance(self.embedding, nn.Embedding)
        wanted = f"vectors (b, n, {columns}), {str(self.embedding.weight.dtype)[6:]}"
        if of_ids:
            wanted = f"ids from 0 to {rows - 1}, (b, n), int64"
        found, fits = type(given).__name__, False
        if isinstance(given, Tensor):
            found = f"{given.dtype} of shape {tuple(given.shape)}"
            kinds = {torch.int32, torch.int64} if of_ids else {self.embedding.weight.dtype}
            axes = (1, 2) if of_ids else (2, 3)
            if not of_ids and torch.is_autocast_enabled(given.device.type):
                kinds |= {torch.float32, torch.bfloat16, torch.float16}
            fits = given.ndim in axes and given.dtype in kinds
        if fits and (of_ids or given.shape[-1] == columns):
            try:
                return self.embedding(given)
            except IndexError:  # what they are is asked only then: it may wait for a GPU
                found = f"ids from {int(given.min())} to {int(given.max())}"
        raise InputError(f"`input_ids` should be {wanted}. Found {found}.")

    def scores(self, tokens: Float[Tensor, "b n d"]) -> Tensor:
        """The model from there on, clip and all."""
        with parametrize.cached():
            x = self.clip(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(self.pool(x))

    @property
    def sums(self) -> list[ResidualSum]:
        """Attention and networks of all blocks, in turn."""
        return [one for one in self.blocks.modules() if isinstance(one, ResidualSum)]

    def as_network(self) -> Network | Chain:
        """The parts, from the tokens before the clip on: scores of all, or of the mean of all.

        Weights are the model's own, so that what is made of them has gradients.
        """
        branches = [Branch(norm=self.clip, skip=False)]
        for one in self.sums:
            branches.append(Branch(scaled(_as_part(one.part), one.alpha), skip=1 - one.alpha))
        head = self.head.weight
        none = head.new_zeros(len(head))
        if isinstance(self.pool, MeanPool):
            n = len(self.positions)
            share = head.new_full((n,), 1 / n)
            return Network(tuple(branches), share, head, none, of_any_number=True)
        eye = torch.eye(head.shape[1]).to(head)  # of a vocabulary squared it were too much
        last = Branch(Feed(eye, head.new_zeros(len(eye)), head, none, "identity"), skip=False)
        return Chain((*branches, last), len(self.positions))

    def _capped_weights(self) -> Iterator[tuple[Any, str, float]]:
        """Every matrix but the table of token vectors: who holds it, its name, cap over ``cap``."""
        found: list[tuple[Any, str, float]] = []
        for part in (one.part for one in self.sums):
            if isinstance(part, MultiheadAttention):
                layer = part.attention
                held = arguments(type_before_parametrizations(layer))
                names = [n for n in _WEIGHTS if n in held]
                found += [(layer, n, 1 / _PATHS if n == "output" else 1.0) for n in names]
            else:
                steep = _SLOPE if isinstance(part[1], nn.GELU) else 1.0
                found += [(part[0], "weight", 1.0), (part[2], "weight", 1 / steep)]
        ends = [self.embedding, self.head] if isinstance(self.embedding, nn.Linear) else [self.head]
        for holder, name, factor in [*found, *((one, "weight", 1.0) for one in ends)]:
            rows, columns = getattr(holder, name).shape
            yield holder, name, factor * (rows / columns) ** 0.5

    # --- training

    @property
    def bound(self) -> Float[Tensor, ""]:
        """How far any row of scores moves when no token, or given vector, moves by more than 1."""
        bound = lipschitz_bound(self.as_network(), norm="max-token").value
        enters = isinstance(self.embedding, nn.Linear)
        return bound * spectral_norm(self.embedding.weight.double()) if enters else bound

    @property
    def matrices(self) -> list[nn.Parameter]:
        """The parameters of capped matrices, as an optimiser takes them."""
        found = []
        for holder, name, _ in self._capped_weights():
            own = parametrize.is_parametrized(holder, name)
            found.append(holder.parametrizations[name].original if own else getattr(holder, name))
        return found

    @property
    def others(self) -> list[nn.Parameter]:
        """All other parameters: token vectors, positions, what the variant trains besides."""
        own = {id(one) for one in self.matrices}
        return [one for one in self.parameters() if id(one) not in own]

    @torch.no_grad()
    def cap_weights(self) -> None:
        """Bring singular values above the caps down to them: after a step of the optimiser.

        Nothing is done where there are no caps, or parametrisations keep them.
        """
        if self.cap is None or self.capped != "after-step":
            return
        for holder, name, factor in self._capped_weights():
            cap_singular_values(getattr(holder, name), self.cap * factor)

    # --- files

    def save(self, path: str | Path) -> None:
        """Write sizes and weights to a safetensors file, for `load`."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        weights = {name: one.contiguous() for name, one in self.state_dict().items()}
        try:
            sizes = json.dumps(self.sizes, default=lambda number: number.item())
        except (AttributeError, RuntimeError) as problem:  # such as a mask
            raise InputError(
                f"Options should be numbers or words to be in a file. Found another: {problem}; "
                "keep `state_dict()` by `torch.save` instead."
            ) from None
        try:
            refuse_record(Path(path))
            save_file(weights, path, metadata={_METADATA: sizes})
        except (OSError, SafetensorError, TypeError) as problem:
            raise InputError(
                f"`path` should be a file in a folder that is there. Found `{path}`: {problem}"
            ) from None

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As of any module; weights that do not fit are refused before one is taken over.

        Raises:
            InputError: If they are those of a model of other sizes.
        """
        if not isinstance(state_dict, Mapping):
            found = f"`{type(state_dict).__name__}`; give what `state_dict()` of a model gave"
            raise InputError(f"`state_dict` should be weights by their names. Found {found}.")
        own = self.state_dict()
        other = [
            f"`{name}` of shape {tuple(state_dict[name].shape)} instead of {tuple(one.shape)}"
            for name, one in own.items()
            if name in state_dict and state_dict[name].shape != one.shape
        ]
        if strict:
            other += [f"no `{name}`" for name in own if name not in state_dict]
            other += [f"`{name}`, which is not here" for name in state_dict if name not in own]
        if other:
            more = f" and {len(other) - 1} more that do not fit" if other[1:] else ""
            raise InputError(
                f"`state_dict` should be that of a model of the same `sizes`. Found {other[0]}"
                f"{more}; make this one as `SmoothTransformer(**sizes)` of the other."
            )
        return super().load_state_dict(state_dict, strict, assign)

    @classmethod
    def load(cls, path: str | Path) -> SmoothTransformer:
        """The model that `save` wrote, in eval mode.

        Raises:
            InputError: If the file is none of them.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                sizes = json.loads((file.metadata() or {})[_METADATA])
                weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            model = cls(**sizes)
            model.to(weights["positions"].dtype).load_state_dict(weights)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError):
            raise InputError(
                f"`path` should be a file that `SmoothTransformer.save` wrote. Found `{path}`."
            ) from None
        return model.eval()


def _waves(length: int, width: int) -> Float[Tensor, "n d"]:
    """Where positions begin: sines and cosines, that one map takes to those of the token before."""
    rates = 1e-3 ** (torch.arange((width + 1) // 2) * 2 / width)
    angles = torch.outer(torch.arange(length, dtype=rates.dtype), rates)
    return torch.cat([angles.sin(), angles.cos()], 1)[:, :width]


def _as_part(part: Any) -> Attention | Feed:
    """A part of a block, as a network is described."""
    if isinstance(part, MultiheadAttention):
        return part.attention
    inner, act, outer = part
    none = [w.new_zeros(len(w)) for w in (inner.weight, outer.weight)]
    name: ActivationName = "relu" if isinstance(act, nn.ReLU) else "gelu"
    return Feed(inner.weight, none[0], outer.weight, none[1], name)


def _check(sizes: dict[str, Any]) -> None:
    for name in ("width", "heads", "depth", "outputs", "length"):
        check_count(name, sizes[name])
    if not isinstance(sizes["causal"], bool):
        raise InputError(f"`causal` should be true or false. Found `{shown(sizes['causal'])}`.")
    for name in ("bias", "batch_first", "device", "dtype"):
        if name in sizes:
            raise InputError(
                f"`{name}` should be left out: matrices alone are capped, and the model is moved "
                f"by `to`. Found `{name} = {shown(sizes[name])}`."
            )
    width, heads = sizes["width"], sizes["heads"]
    if width % heads:
        raise InputError(
            f"`width` should be a multiple of `heads`. Found `{width = }` and `{heads = }`."
        )
    given = [n for n in ("vocabulary", "features") if sizes[n] is not None]
    if len(given) != 1:
        raise InputError(
            "The input should be token ids, `vocabulary`, or vectors, `features`. Found "
            f"{' and '.join(f'`{n}`' for n in given) or 'neither'}."
        )
    check_count(given[0], sizes[given[0]])
    if sizes["hidden"] is not None:
        check_count("hidden", sizes["hidden"])
    if sizes["cap"] is not None:
        check_positive("cap", sizes["cap"])
    for name, known in (
        ("pool", ("mean", None)),
        ("capped", get_args(Capping)),
        ("activation", ("gelu", "relu")),
    ):
        if sizes[name] not in known:
            said = " or ".join(map(str, known))
            raise InputError(f"`{name}` should be {said}. Found `{shown(sizes[name])}`.")
