"""A Transformer with norm-capped weights and a global Lipschitz bound."""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrize import type_before_parametrizations

from lipscope.attention import Attention, Clip, MultiheadAttention, arguments, spectral_norm
from lipscope.control.restraint import cap_singular_values
from lipscope.errors import InputError, check_count, check_finite_numbers, check_positive, shown
from lipscope.linalg import NormInterval, linearise, max_token_norm, start_named
from lipscope.models import ActivationName, Branch, Chain, Feed, Network, own_parts, scaled
from lipscope.records import refuse_record
from lipscope.theorems import lipschitz_bound

Capping = Literal["parametrised", "after-step"]
_SLOPE = 1.1289  # upper bound of the slope of GELU
_PATHS = 3  # paths from a token to an output: queries, keys and values
_SQUARINGS = 5  # of the Gram matrix
_WEIGHTS = ("query", "key", "value", "output")
_METADATA = "smooth_transformer"  # the key of the sizes in a file, and in metadata of a state
_UNSEEN = ("heads", "cap", "variant", "causal", "pool", "activation")  # in no shape of a weight


class NormCap(nn.Module):
    """``W min(1, cap / N(W))`` as a parametrisation, ``‖W‖ ≤ N(W) ≤ rank^(1/128) ‖W‖``.

    ``N(W) = tr((W^T W)^64)^(1/128)``, the Schatten norm of order 128 by five squarings: an upper
    bound. A power iteration would give a lower bound, with slow convergence for clustered singular
    values, as from `torch.optim.Muon`. The cap holds at every step, however far the weights moved.

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
        """Apply the cap to the matrix."""
        if weight.ndim != 2:
            raise InputError(f"A cap is of a matrix. Found the shape {tuple(weight.shape)}.")
        rows, columns = weight.shape
        tiny = torch.finfo(weight.dtype).tiny
        scale = weight.detach().abs().amax().clamp_min(tiny)  # avoids overflow in squares
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
    """``(1 - α) x + α part(x)``: a mean, so that tokens grow only if those of the part do."""

    part: Any  # attention, or two linear maps

    def __init__(self, part: MultiheadAttention | nn.Sequential, alpha: float) -> None:
        super().__init__()
        self.part, self.alpha = part, alpha

    def extra_repr(self) -> str:
        """The weight ``α``."""
        return f"alpha={self.alpha:g}"

    def forward(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n d"]:
        """The tokens after the sum."""
        attends = isinstance(self.part, MultiheadAttention)
        y = self.part(x, x, x, need_weights=False)[0] if attends else self.part(x)
        return (1 - self.alpha) * x + self.alpha * y


class MeanPool(nn.Module):
    """The mean of all tokens."""

    def forward(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b d"]:
        """One vector per sequence."""
        return x.mean(-2)


_ENDS = Clip, MeanPool | nn.Identity, nn.Linear, nn.Linear | nn.Embedding
_NETWORK = nn.Linear, nn.GELU | nn.ReLU, nn.Linear


class SmoothTransformer(nn.Module):
    """An encoder or decoder with a global Lipschitz bound that training can monitor and limit.

    ``W_out pool(B_L(… B_1(clip(E + P))))``: token vectors and positions in the ball of radius
    ``√width``, blocks of attention and a GELU network, each ``(1 - α) x + α part(x)`` with
    ``α = 1 / (2 depth)``, no norms and no biases. Every matrix has

    ``‖W‖ ≤ cap √(rows / columns)``,

    so ``cap`` limits the growth of the root mean square of a vector; the output projection of
    attention gets a third of it, the second map of a network divides it by 1.1289, the slope of
    GELU.

    ``bound`` is `lipscope.lipschitz_bound` in the norm ``max-token``, for the tokens before the
    clip, at most ``length`` of them (for vector inputs times the norm of their embedding): computed
    from the current weights, however they were capped.

    Caps act at once, by a parametrisation of every matrix (`NormCap`), or after an optimiser step,
    in `cap_weights`. `matrices` are the weights for `torch.optim.Muon`, `others` all other
    parameters.

    Holds for token ids ``(b, n)`` with ``vocabulary``, otherwise for vectors ``(b, n, features)``.

    Args:
        width: Token width.
        heads: Number of heads per attention layer.
        depth: Number of blocks.
        outputs: Number of scores, per token or for the pooled token.
        length: Maximum number of tokens.
        vocabulary: Number of token ids, for token inputs.
        features: Input width, for vector inputs.
        variant: Kind of attention, as for `MultiheadAttention`.
        causal: Decoder: tokens attend only to earlier ones and themselves.
        pool: ``mean`` for one row of scores per sequence, None for one per token.
        cap: As above; None: no caps.
        capped: ``parametrised`` or ``after-step``.
        hidden: Hidden width of the networks in blocks; None: four times the token width.
        activation: Activation of these networks.
        **options: Options of the variant, such as ``temperature``. For dot products ``scale``
            defaults to one over the head width.

    Raises:
        InputError: If sizes do not fit, or neither or both of ``vocabulary`` and ``features``.

    Source: the architecture of [newhouse2025]; positions are learnt, initialised by sinusoids.

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
        sizes = locals() | options
        super().__init__()
        self.sizes = {n: v for n, v in sizes.items() if n not in ("self", "options", "__class__")}
        _check(self.sizes)
        hidden = hidden or 4 * width
        if cap is not None:  # NumPy or torch scalars would use their own precision
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
        self.register_state_dict_post_hook(SmoothTransformer._describe_state)
        self.register_load_state_dict_pre_hook(SmoothTransformer._check_state)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Scores, per token or for the pooled token.

        Args:
            input_ids: Token ids ``(b, n)``, or vectors ``(b, n, features)``.
        """
        return self.scores(self.tokens(input_ids))

    def tokens(self, input_ids: Tensor) -> Float[Tensor, "*b n d"]:
        """Token vectors with positions, the inputs to which the bound refers."""
        x = self._embedded(input_ids)
        self._check_length(x.shape[-2])
        return x + self.positions[: x.shape[-2]]

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens > len(self.positions):
            raise InputError(
                f"A sequence should have at most {len(self.positions)} tokens. Found {num_tokens}."
            )

    def _embedded(self, inputs: Any) -> Tensor:
        rows, columns = self.embedding.weight.shape
        of_ids = isinstance(self.embedding, nn.Embedding)
        wanted = f"vectors (b, n, {columns}), {str(self.embedding.weight.dtype)[6:]}"
        if of_ids:
            wanted = f"ids from 0 to {rows - 1}, (b, n), int64"
        found, fits = type(inputs).__name__, False
        if isinstance(inputs, Tensor):
            found = f"{inputs.dtype} of shape {tuple(inputs.shape)}"
            kinds = {torch.int32, torch.int64} if of_ids else {self.embedding.weight.dtype}
            axes = (1, 2) if of_ids else (2, 3)
            if not of_ids and torch.is_autocast_enabled(inputs.device.type):
                kinds |= {torch.float32, torch.bfloat16, torch.float16}
            fits = inputs.ndim in axes and inputs.dtype in kinds
        if fits and (of_ids or inputs.shape[-1] == columns):
            try:
                return self.embedding(inputs)
            except IndexError:  # inspect the ids only now: it may synchronise with a GPU
                found = f"ids from {int(inputs.min())} to {int(inputs.max())}"
        raise InputError(f"`input_ids` should be {wanted}. Found {found}.")

    def scores(self, tokens: Float[Tensor, "*b n d"]) -> Tensor:
        """The scores from these tokens, starting with the clip."""
        self._check_length(tokens.shape[-2])
        with parametrize.cached():
            x = self.clip(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(self.pool(x))

    @property
    def sums(self) -> list[ResidualSum]:
        """Attention and networks of all blocks, in order."""
        return [one for one in self.blocks.modules() if isinstance(one, ResidualSum)]

    def as_network(self) -> Network | Chain:
        """The parts from the clip on: scores of all tokens, or of their mean.

        Weights are the model's own, so that bounds computed from them have gradients.
        """
        self._check_parts()
        branches = [Branch(norm=self.clip, skip=False)]
        for one in self.sums:
            branches.append(Branch(scaled(_as_part(one.part), one.alpha), skip=1 - one.alpha))
        head = self.head.weight
        none = head.new_zeros(len(head))
        if isinstance(self.pool, MeanPool):
            n = len(self.positions)
            share = head.new_full((n,), 1 / n)
            return Network(tuple(branches), share, head, none, of_any_number=True)
        eye = torch.eye(head.shape[1]).to(head)  # over the vocabulary it would be too large
        last = Branch(Feed(eye, head.new_zeros(len(eye)), head, none, "identity"), skip=False)
        return Chain((*branches, last), len(self.positions))

    def _check_parts(self) -> None:
        """Refuse parts that replaced others: an adapter has a weight, and adds to it."""
        ends, blocks = (self.clip, self.pool, self.head, self.embedding), list[Any](self.blocks)
        wanted: list[tuple[Any, Any]] = list(zip(ends, _ENDS, strict=True))
        for block in blocks:
            wanted += [(block, nn.Sequential), *((one, ResidualSum) for one in block)]
        for part in (one.part for one in self.sums):
            if not isinstance(part, MultiheadAttention):
                wanted += [(part, nn.Sequential), *itertools.zip_longest(part, _NETWORK)]
        for one, of in wanted:
            kind = type_before_parametrizations(one)
            biased = isinstance(one, nn.Linear) and one.bias is not None
            other = biased or getattr(one, "approximate", "none") != "none"
            if other or (kind not in get_args(of) and kind is not of):
                raise InputError(
                    "A `SmoothTransformer` should have the parts that it was built of. Found "
                    f"`{one}` among them; put the original back, or merge an adapter."
                )

    def _capped_weights(self) -> Iterator[tuple[Any, str, float]]:
        """Every matrix except the token embedding: module, name, and cap relative to ``cap``."""
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

    # --- training, and values beside the bound

    @property
    def bound(self) -> Float[Tensor, ""]:
        """Largest move of a row of scores if no token, or input vector, moves by more than 1."""
        bound = lipschitz_bound(own_parts(self), norm="max-token").value
        enters = isinstance(self.embedding, nn.Linear)
        return bound * spectral_norm(self.embedding.weight.double()) if enters else bound

    @property
    def matrices(self) -> list[nn.Parameter]:
        """The parameters of capped matrices, for an optimiser."""
        return [
            holder.parametrizations[name].original
            if parametrize.is_parametrized(holder, name)
            else getattr(holder, name)
            for holder, name, _ in self._capped_weights()
        ]

    @property
    def others(self) -> list[nn.Parameter]:
        """All other parameters: token vectors, positions, further parameters of the variant."""
        capped = {id(one) for one in self.matrices}
        return [one for one in self.parameters() if id(one) not in capped]

    @torch.no_grad()
    def cap_weights(self) -> None:
        """Reduce singular values above the caps to them; call after an optimiser step.

        Does nothing without caps, or if parametrisations enforce them.
        """
        if self.cap is None or self.capped != "after-step":
            return
        for holder, name, factor in self._capped_weights():
            cap_singular_values(getattr(holder, name), self.cap * factor)

    @torch.inference_mode(False)
    def sigma(self, input_ids: Tensor, **options: int) -> NormInterval:
        """How far a row of scores moves at one input, in the norm of `bound`.

        ``max_i max_{|e_j| ≤ 1} |Σ_j ∂y_i/∂x_j e_j|`` for the tokens, or input vectors, that `bound`
        refers to: a lower value, and an upper one where the Jacobian is small.

        Args:
            input_ids: Token ids ``(n,)``, or vectors ``(n, features)``.
            **options: Options of `lipscope.linalg.max_token_norm`.
        """
        with torch.no_grad():
            x = self.tokens(input_ids)
        if x.ndim != 2:
            raise InputError(f"`input_ids` should be one input. Found shape {input_ids.shape}.")
        own, of_ids = copy.deepcopy(self).eval().double(), isinstance(self.embedding, nn.Embedding)
        return _norm_at(own.scores, x, **options) if of_ids else _norm_at(own, input_ids, **options)

    @torch.inference_mode(False)
    def attack(
        self, num_tokens: int | None = None, *, starts: int = 4, steps: int = 100
    ) -> tuple[float, Float[Tensor, "n d"]]:
        """The largest `sigma` that an ascent finds, in float64, and where: a value below `bound`.

        Inputs and moves climb together by Adam, from normal inputs: tokens of no text.

        Args:
            num_tokens: Number of tokens; None: 16, or ``length`` if that is smaller.
            starts: Number of inputs that climb at once, ``steps`` steps each.
        """
        num_tokens = min(16, len(self.positions)) if num_tokens is None else num_tokens
        for name, count in (("num_tokens", num_tokens), ("starts", starts), ("steps", steps)):
            check_count(name, count)
        own, gen = copy.deepcopy(self).eval(), start_named(f"{starts} starts")
        of_ids = isinstance(self.embedding, nn.Embedding)
        width = self.head.in_features if of_ids else self.embedding.in_features
        drawn = torch.randn(2, starts, num_tokens, width, generator=gen, dtype=torch.float64)
        both = drawn.to(self.positions.detach()).requires_grad_()
        adam, most, best = torch.optim.Adam([both], lr=0.1), -math.inf, both[0, 0]
        for step in range(steps):
            adam.param_groups[0]["lr"] = 0.1 * (1 - step / steps)
            inside = 0.999 * own.clip(both[0]) if of_ids else both[0]
            move = both[1] / both[1].norm(dim=-1, keepdim=True)
            moved = torch.func.jvp(own.scores if of_ids else own, (inside,), (move,))[1]
            found = moved.reshape(starts, -1, moved.shape[-1]).norm(dim=-1).amax(-1)
            (both.grad,) = torch.autograd.grad(-found.log().sum(), both)
            if (value := float(found.detach().max())) > most:
                most, best = value, inside[int(found.argmax())].detach().clone()
            adam.step()
        own = own.double()
        return _norm_at(own.scores if of_ids else own, best, dense=0).lower, best

    # --- files

    def save(self, path: str | Path) -> None:
        """Write sizes and weights to a safetensors file, for `load`."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        weights = {name: one.contiguous() for name, one in self.state_dict().items()}
        try:
            sizes = json.dumps(self.sizes, default=lambda number: number.item())
        except (AttributeError, RuntimeError) as problem:  # e.g. for a mask
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
        """As for any module, but weights are checked before any is loaded.

        Raises:
            InputError: If the weights belong to a model of other sizes.
        """
        if not isinstance(state_dict, Mapping):
            found = f"`{type(state_dict).__name__}`; give what `state_dict()` of a model gave"
            raise InputError(f"`state_dict` should be weights by their names. Found {found}.")
        weights = self.state_dict()
        if strict:
            other = [f"no `{name}`" for name in weights if name not in state_dict]
            other += [f"`{name}`, which is not here" for name in state_dict if name not in weights]
            _refuse(other)
        return super().load_state_dict(state_dict, strict, assign)

    def _describe_state(self, _: Any, prefix: str, about: dict[str, Any]) -> None:
        """Keep the sizes that no shape shows; as text, which is always safe to load."""
        about[_METADATA] = {name: str(self.sizes[name]) for name in _UNSEEN}

    def _check_state(self, state: Mapping[str, Any], prefix: str, about: Any, *_: Any) -> None:
        """Require the weights of a model of the same sizes, alone or inside of a module."""
        found = about.get(_METADATA, {})  # none in older files, or in a copied dictionary
        own = {name: str(self.sizes[name]) for name in found}
        other = [f"`{n} = {found[n]}` instead of {own[n]}" for n in found if found[n] != own[n]]
        other += [
            f"`{name}` of shape {tuple(state[name].shape)} instead of {tuple(one.shape)}"
            for name, one in self.state_dict(prefix=prefix).items()
            if name in state and state[name].shape != one.shape
        ]
        _refuse(other)

    @classmethod
    def load(cls, path: str | Path) -> SmoothTransformer:
        """Load a model written by `save`, in eval mode.

        Raises:
            InputError: If the file was not written by `save`.
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


def _norm_at(f: Callable[[Tensor], Tensor], x: Tensor, **options: int) -> NormInterval:
    x = x.detach().double().clone()
    check_finite_numbers("scores", f(x[None]))
    return max_token_norm(linearise(lambda x: f(x[None]).flatten(0, -2), x), **options)


def _refuse(other: Sequence[str]) -> None:
    """Refuse weights of another model, by the first of what is other in it."""
    if other:
        more = f" and {len(other) - 1} more that do not fit" if other[1:] else ""
        raise InputError(
            f"`state_dict` should be that of a model of the same `sizes`. Found {other[0]}"
            f"{more}; make this one as `SmoothTransformer(**sizes)` of the other."
        )


def _waves(length: int, width: int) -> Float[Tensor, "n d"]:
    """Initial positions: sines and cosines, which a fixed map shifts by one token."""
    rates = 1e-3 ** (torch.arange((width + 1) // 2) * 2 / width)
    angles = torch.outer(torch.arange(length, dtype=rates.dtype), rates)
    return torch.cat([angles.sin(), angles.cos()], 1)[:, :width]


def _as_part(part: Any) -> Attention | Feed:
    """The description of a part of a block for a network."""
    if isinstance(part, MultiheadAttention):
        return part.as_layer()
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
    kinds = [n for n in ("vocabulary", "features") if sizes[n] is not None]
    if len(kinds) != 1:
        raise InputError(
            "The input should be token ids, `vocabulary`, or vectors, `features`. Found "
            f"{' and '.join(f'`{n}`' for n in kinds) or 'neither'}."
        )
    check_count(kinds[0], sizes[kinds[0]])
    for name, check in (("hidden", check_count), ("cap", check_positive)):
        if sizes[name] is not None:
            check(name, sizes[name])
    for name, known in (
        ("pool", ("mean", None)),
        ("capped", get_args(Capping)),
        ("activation", ("gelu", "relu")),
    ):
        if sizes[name] not in known:
            allowed = " or ".join(map(str, known))
            raise InputError(f"`{name}` should be {allowed}. Found `{shown(sizes[name])}`.")
