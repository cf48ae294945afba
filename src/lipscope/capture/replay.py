"""The two ways to an attention function: from its weights, or by running its modules again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lipscope.attention import Attention
from lipscope.capture.sites import AttentionCall
from lipscope.capture.trace import BlockCall, as_tokens, exact_maths, first_tensor
from lipscope.errors import InputError
from lipscope.operator import Operator, compose, linearise, over_leading


def count_heads(module: nn.Module) -> int | None:
    """Number of query heads of an attention module, as models spell it."""
    config = getattr(module, "config", None)
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
    weight = projection.weight
    assert isinstance(weight, Tensor)
    weight = weight if isinstance(projection, nn.Linear) else weight.T
    return weight.unflatten(1, (count, -1)).transpose(0, 1)


class ClosedForm:
    """The attention of a known family, from its weights."""

    def __init__(self, call: AttentionCall, attention: Attention) -> None:
        self.attention = attention
        attention.to(call.x)

    def attend(self, x: Tensor) -> Tensor:
        """The map ``attention``."""
        return self.attention(x)

    def heads(self, x: Tensor) -> Tensor:
        """The map ``heads``."""
        return self.attention.heads(x)

    def linearise_attention(self, x: Tensor, memory: int, per_head: bool) -> Operator:
        """The Jacobian of `attend`."""
        return self.attention.linearise(x, memory=memory, per_head=per_head)

    def linearise_heads(self, x: Tensor, memory: int, per_head: bool) -> Operator:
        """The Jacobian of `heads`."""
        return self.attention.linearise(x, memory=memory, per_head=per_head, part="heads")


class Replayed:
    """The attention of any other family, by running its own modules again."""

    def __init__(self, call: AttentionCall, per_head: bool) -> None:
        self.call = call
        if per_head and (call.heads is None or count_heads(call.module) is None):
            raise InputError(
                f"Single heads need a known head count and output projection. Found "
                f"neither in `{call.name}`; leave out `per_head`."
            )

    def _run(self, x: Tensor) -> Tensor:
        call = self.call
        shaped = x.unsqueeze(1 - call.token_axis)
        arguments = {**call.arguments, **dict.fromkeys(call.hidden, shaped)}
        with exact_maths(x.dtype):
            return as_tokens(first_tensor(_apply(call.module, arguments)), call.token_axis)

    def attend(self, x: Tensor) -> Tensor:
        """The map ``attention``."""
        out = self._run(x)
        if self.call.projection is not None and not self.call.projection_inside:
            out = self.call.projection(out)
        return out

    def heads(self, x: Tensor) -> Tensor:
        """The map ``heads``."""
        if not self.call.projection_inside:
            return self._run(x)
        assert self.call.projection is not None
        seen: list[Tensor] = []
        handle = self.call.projection.register_forward_pre_hook(
            lambda _, args: seen.append(args[0])
        )
        try:
            self._run(x)
        finally:
            handle.remove()
        return as_tokens(seen[0], self.call.token_axis)

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

        def mv(e: Tensor) -> Tensor:
            return torch.stack([op.mv(e[h])[:, h * width : (h + 1) * width] for h in range(count)])

        def rmv(g: Tensor) -> Tensor:
            padded = g.new_zeros(count, n, concat)
            for h in range(count):
                padded[h, :, h * width : (h + 1) * width] = g[h]
            return op.rmv(padded)

        return Operator(
            over_leading(mv, 3),
            over_leading(rmv, 3),
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
            return first_tensor(self.module(x.reshape(self.shape))).reshape(x.shape[0], -1)


def replay_block(block: BlockCall, axis: int) -> Callable[[Tensor], Tensor]:
    """A block as a function of its input, all other arguments as the model passed them."""

    def function(x: Tensor) -> Tensor:
        arguments = {**block.arguments, block.hidden: x.unsqueeze(1 - axis)}
        with exact_maths(x.dtype):
            return as_tokens(first_tensor(_apply(block.module, arguments)), axis)

    return function


def _apply(module: nn.Module, arguments: dict[str, Any]) -> Any:
    """Call a module with bound arguments, variable positional ones included."""
    positional = arguments.get("args", ())
    named = {k: v for k, v in arguments.items() if k != "args"}
    return (
        module.forward(**named) if not positional else module.forward(*named.values(), *positional)
    )
