"""Data flow of a forward pass: autograd carries the marks, and no value is kept for it.

Names of arguments tell little about what moves; the model's own computation tells it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Node = Any  # of autograd's graph


def _gone(_: None) -> Tensor:
    raise AssertionError("no value was kept for a backward pass")


@contextlib.contextmanager
def followed() -> Iterator[None]:
    """Record which tensors are made of which, without the values that a derivative needs."""
    drop = torch.autograd.graph.saved_tensors_hooks(lambda _: None, _gone)
    with torch.enable_grad(), drop:
        yield


def each_tensor(inputs: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A model's inputs with every tensor changed; one tensor stays one tensor."""
    once: dict[int, Tensor] = {}

    def changed(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in once:
            once[id(value)] = change(value)
        return once[id(value)]

    if isinstance(inputs, Mapping):
        return {name: changed(value) for name, value in inputs.items()}
    return tuple(changed(value) for value in inputs)


def marked(x: Tensor) -> Tensor:
    """A tensor whose consequences can be told from others."""
    if not x.is_floating_point():
        return x
    # A clone of a leaf is none, so that the model may write into it.
    return x.detach().clone().requires_grad_().clone()


def hook_embeddings(stack: contextlib.ExitStack, model: nn.Module, inputs: Any) -> None:
    """Mark what tables give for the model's own token ids; positions are not marked."""
    values = inputs.values() if isinstance(inputs, Mapping) else inputs
    places = {place(v) for v in values if isinstance(v, Tensor) and not v.is_floating_point()}

    def mark(_: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        given = args and isinstance(args[0], Tensor) and place(args[0]) in places
        return marked(out) if given and isinstance(out, Tensor) else None

    for module in model.modules() if places else ():
        if isinstance(module, nn.Embedding):
            stack.callback(module.register_forward_hook(mark).remove)


def depends(node: Node | None, on: Node | None) -> bool:
    """Whether what a node made depends on what another one made."""
    if node is None or on is None:
        return False
    seen, waiting = {node}, [node]
    while waiting:
        here = waiting.pop()
        if here is on:
            return True
        for before, _ in here.next_functions:
            if before is not None and before not in seen:
                seen.add(before)
                waiting.append(before)
    return False


def place(x: Tensor) -> int:
    """Where a tensor lies in memory; one that lies nowhere (sparse, inside `vmap`) is no other."""
    return x.data_ptr() if lies(x) else -id(x)


def lies(x: Tensor) -> bool:
    """Whether a tensor has a place in memory; inside `vmap`, where masks are made, none has."""
    try:
        x.data_ptr()
    except RuntimeError:
        return False
    return True


def alike(a: Any, b: Tensor) -> bool:
    """Whether a value is the same tensor, or a view of all of it in the same order."""
    if a is b:
        return True
    if not isinstance(a, Tensor) or a.shape != b.shape or a.dtype != b.dtype:
        return False
    if place(a) != place(b):
        return False
    steps = zip(a.stride(), b.stride(), a.shape, strict=True)
    return all(i == j or size == 1 for i, j, size in steps)


def bare(value: Any) -> Any:
    """An argument without its marks; tensors in tuples and lists too."""
    if isinstance(value, Tensor):
        return value.detach()
    if type(value) in (tuple, list):
        return type(value)(bare(one) for one in value)
    return value
