"""The two ways to an attention function: from its weights, or by running its modules again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lipscope.attention import Attention, Map, MultiheadAttention
from lipscope.errors import InputError
from lipscope.linalg import Operator, compose, linearise, over_leading
from lipscope.models.tracing.arguments import as_called
from lipscope.models.tracing.calls import BlockCall, Stream, as_tokens, first_tensor
from lipscope.models.tracing.prepare import exact_maths, undisturbed
from lipscope.models.tracing.sites import AttentionCall, is_plain

_OUT = ("out_proj.weight", "out_proj.bias")  # of torch's own attention


def count_heads(module: nn.Module) -> int | None:
    """Number of query heads of an attention module, as models spell it; None if unknown."""
    config = getattr(module, "config", None)
    sides = {getattr(config, f"{side}_attention_heads", None) for side in ("encoder", "decoder")}
    if len(sides) > 1:  # the configuration does not say which of them is meant
        config = None
    for owner in (module, config):
        for name in ("num_heads", "num_attention_heads", "n_heads", "n_head"):
            count = getattr(owner, name, None)
            if isinstance(count, int):
                return count
    return None


def projection_by_head(call: AttentionCall) -> Tensor:
    """The output projection's columns by head, ``(h, d_out, d_v)``."""
    count, projection = count_heads(call.module), call.projection
    assert count is not None and projection is not None
    if is_plain(projection):
        weight = projection.get_parameter("weight")
        weight = weight if isinstance(projection, nn.Linear) else weight.T
    else:  # an adapter's or a packed weight is no matrix: its values at the unit vectors
        assert call.heads is not None
        unit = torch.eye(call.heads.shape[-1], dtype=call.x.dtype, device=call.x.device)
        with torch.no_grad():
            weight = projected(projection, unit).mT
    return weight.unflatten(1, (count, -1)).transpose(0, 1)


def projected(projection: nn.Module, x: Tensor) -> Tensor:
    """The linear part of an affine module, at ``x``."""
    at_x, at_zero = (first_tensor(projection(value)) for value in (x, torch.zeros_like(x)))
    return at_x - at_zero


class ClosedForm:
    """The attention of a known family, from its weights."""

    def __init__(self, call: AttentionCall, attention: Attention) -> None:
        self.attention, self.call = attention, call
        attention.to(call.x)

    def attend(self, x: Tensor) -> Tensor:
        """The map ``attention``."""
        return self.attention(*self._sides(x))

    def heads(self, x: Tensor) -> Tensor:
        """The map ``heads``."""
        return self.attention.heads(*self._sides(x))

    def linearise_attention(self, x: Tensor, memory: int, per_head: bool) -> Operator:
        """The Jacobian of `attend`."""
        return self._linearise(x, memory, per_head, "attention")

    def linearise_heads(self, x: Tensor, memory: int, per_head: bool) -> Operator:
        """The Jacobian of `heads`."""
        return self._linearise(x, memory, per_head, "heads")

    def _sides(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Tokens of the queries, and of keys and values where these are others."""
        context = self.call.context
        return (context, x) if context is not None and self.call.side == "key" else (x, context)

    def _linearise(self, x: Tensor, memory: int, per_head: bool, map: Map) -> Operator:
        queries, context = self._sides(x)
        return self.attention.linearise(
            queries,
            memory=memory,
            per_head=per_head,
            map=map,
            context=context,
            side="key" if self.call.side == "key" else "query",
        )


def called_again(
    call: AttentionCall, changed: Mapping[str, Tensor], weights: Mapping[str, Tensor] | None = None
) -> Tensor:
    """The output of an attention module, as tokens, with some arguments and weights changed."""
    # One copy of each tensor: a module may write into its input, and may ask whether two are one.
    copies = {id(value): value.clone() for value in changed.values()}
    arguments = {**call.arguments, **{name: copies[id(v)] for name, v in changed.items()}}
    args, kwargs = as_called(call.module, arguments)
    with exact_maths(call.x.dtype), undisturbed(call.module):
        out = functional_call(call.module, dict(weights or {}), args, kwargs)
        return as_tokens(first_tensor(out, call.out_at), call.token_axis)


class Replayed:
    """The attention of any other family, by running its own modules again."""

    def __init__(self, call: AttentionCall, per_head: bool) -> None:
        self.call = call
        if per_head and (call.projection is None or count_heads(call.module) is None):
            raise InputError(
                f"Single heads need a known head count and output projection. Found "
                f"neither in `{call.name}`; leave out `per_head`."
            )

    def _run(self, x: Tensor, weights: Mapping[str, Tensor] | None = None) -> Tensor:
        shaped = x.unsqueeze(1 - self.call.token_axis)
        return called_again(self.call, dict.fromkeys(self.call.hidden, shaped), weights)

    def attend(self, x: Tensor) -> Tensor:
        """The map ``attention``."""
        projection = self.call.projection
        if projection is None:
            return self._run(x)
        if self.call.goes_on:
            return self._seen_at(projection, x)[1]
        if self.call.projection_inside:
            return self._run(x)
        return first_tensor(projection(self._before_projection(x)))

    def _before_projection(self, x: Tensor) -> Tensor:
        """What a projection beside the module takes: heads may come on an axis of their own."""
        out, heads = self._run(x), self.call.heads
        return out if heads is None else out.reshape(heads.shape)

    def heads(self, x: Tensor) -> Tensor:
        """The map ``heads``."""
        if isinstance(self.call.module, nn.MultiheadAttention):
            # It never calls its projection: an identity in its place leaves the heads.
            own = isinstance(self.call.module, MultiheadAttention)
            names = ("attention.output", "attention.output_bias") if own else _OUT
            weight, bias = self.call.module.out_proj.weight, self.call.module.out_proj.bias
            identity = torch.eye(len(weight), dtype=weight.dtype, device=weight.device)
            bare: dict[str, Tensor] = {names[0]: identity}
            if bias is not None:
                bare[names[1]] = torch.zeros_like(bias)
            return self._run(x, bare)
        if not self.call.projection_inside:
            return self._before_projection(x)
        assert self.call.projection is not None
        return self._seen_at(self.call.projection, x)[0]

    def _seen_at(self, leaf: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        """Input and output of a module inside, when the attention runs at ``x``."""
        seen: list[tuple[Tensor, Tensor]] = []

        def look(_: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            seen.append((args[0], out))

        handle = leaf.register_forward_hook(look)
        try:
            self._run(x)
        finally:
            handle.remove()
        source, result = seen[-1]
        return as_tokens(source, self.call.token_axis), as_tokens(result, self.call.token_axis)

    def linearise_attention(self, x: Tensor, memory: int, per_head: bool) -> Operator:
        """The Jacobian of `attend`."""
        if not per_head:
            return linearise(self.attend, x)
        heads, projection = self.linearise_heads(x, memory, True), projection_by_head(self.call)
        return compose(
            Operator(
                lambda e: e @ projection.mT,
                lambda g: g @ projection,
                heads.out_shape,
                (heads.out_shape[0], projection.shape[1]),
                heads.dtype,
                heads.device,
            ),
            heads,
        )

    def linearise_heads(self, x: Tensor, memory: int, per_head: bool) -> Operator:
        """The Jacobian of `heads`."""
        op = linearise(self.heads, x)
        if not per_head:
            return op
        count = count_heads(self.call.module)
        assert count is not None
        n, concat = op.out_shape
        width = concat // count

        def matvec(e: Tensor) -> Tensor:
            return torch.stack(
                [op.matvec(e[h])[:, h * width : (h + 1) * width] for h in range(count)]
            )

        def rmatvec(g: Tensor) -> Tensor:
            padded = g.new_zeros(count, n, concat)
            for h in range(count):
                padded[h, :, h * width : (h + 1) * width] = g[h]
            return op.rmatvec(padded)

        return Operator(
            over_leading(matvec, 3),
            over_leading(rmatvec, 3),
            op.in_shape,
            (n, width),
            op.dtype,
            op.device,
        )


class TokenModule:
    """A module as a function of a token matrix, in the shape in which the model called it."""

    def __init__(self, module: nn.Module, like: Tensor) -> None:
        self.module, self.shape = module, like.shape

    def __call__(self, x: Tensor) -> Tensor:
        """The module's output at ``x``, as a token matrix."""
        with exact_maths(x.dtype):
            return first_tensor(self.module(x.reshape(self.shape).clone())).reshape(x.shape[0], -1)


def replay_block(block: BlockCall, axis: int, moved: Streams) -> Callable[[Tensor], Tensor]:
    """A block as a function of these streams, all other arguments as the model passed them."""

    def function(x: Tensor) -> Tensor:
        # Copies: a block may write into its input.
        still = {n: one.x.clone() for one in block.streams for n in one.names}
        arguments = {**block.arguments, **still, **moved.arguments(x)}
        args, kwargs = as_called(block.module, arguments)
        with exact_maths(x.dtype), undisturbed(block.module):
            return as_tokens(first_tensor(block.module.forward(*args, **kwargs)), axis)

    return function


class Streams:
    """Several tensors as one matrix of tokens, one after the other; those of one sample."""

    def __init__(self, streams: Sequence[Stream], axis: int) -> None:
        for one in streams:
            if one.x.ndim == 3 and 1 not in one.x.shape[:2]:
                raise InputError(
                    "A block should see one sample at a time, (1, tokens, width). Found "
                    f"{tuple(one.x.shape)} in `{one.names[0]}`: frames or windows instead of "
                    "samples are not covered; measure the part of the model after them."
                )
        self.streams = streams
        self.parts = [as_tokens(one.x, axis) for one in streams]
        self.x = self.parts[0] if len(streams) == 1 else torch.cat(self.parts)
        self.names = tuple(name for one in streams for name in one.names)
        self.firsts = tuple(one.names[0] for one in streams)

    def arguments(self, x: Tensor) -> dict[str, Tensor]:
        """The arguments that hold them, each in the shape in which the model passed it."""
        parts = x.split([len(part) for part in self.parts])
        shaped = [
            part.reshape(one.x.shape).clone() for part, one in zip(parts, self.streams, strict=True)
        ]
        return {n: t for one, t in zip(self.streams, shaped, strict=True) for n in one.names}
