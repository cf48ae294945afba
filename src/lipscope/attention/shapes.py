"""Shapes of weights that fit together."""

from __future__ import annotations

from torch import Tensor

from lipscope.errors import InputError, check_count, shown


def check_shapes(
    query: Tensor, key: Tensor, value: Tensor, output: Tensor | None, heads: int, groups: int
) -> None:
    """Say which weight does not fit the number of heads or the other weights."""
    check_count("heads", heads)
    check_count("groups", groups)
    if heads % groups:
        raise InputError(
            "`heads` should be a positive multiple of `groups`. "
            f"Found `heads = {heads}`, `groups = {groups}`."
        )
    for name, weight, parts in (
        ("query", query, heads),
        ("key", key, groups),
        ("value", value, groups),
    ):
        if weight.shape[0] % parts or weight.shape[1] != query.shape[1]:
            raise InputError(
                f"`{name}` should have shape ({parts} * head width, {query.shape[1]}). "
                f"Found {tuple(weight.shape)}."
            )
    if query.shape[0] // heads != key.shape[0] // groups:
        raise InputError(
            "Queries and keys should have one head width. Found "
            f"{query.shape[0] // heads} and {key.shape[0] // groups}."
        )
    concat = heads * (value.shape[0] // groups)
    if output is not None and output.shape[1] != concat:
        raise InputError(f"`output` should have {concat} columns. Found {output.shape[1]}.")


def check_log_weights(log_weights: Tensor | None, keys: Tensor) -> None:
    """Say where there is not one number for each key."""
    if log_weights is None:
        return
    if not isinstance(log_weights, Tensor) or log_weights.shape != keys.shape[-2:-1]:
        found = tuple(log_weights.shape) if isinstance(log_weights, Tensor) else shown(log_weights)
        raise InputError(
            f"`log_weights` should be one number for each of {keys.shape[-2]} keys. Found {found}."
        )
