"""Nodes and weights of an ONNX file, read from its bytes: no package for it is needed.

An ONNX file is a protobuf message: fields of a number and a value, which is an integer, a few
bytes, or another message. Only the fields that carry nodes and weights are looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lipscope.errors import InputError

# Field numbers of the format's messages (onnx.proto).
_GRAPH = 7
_NODE, _WEIGHT = 1, 5
_INPUT, _OUTPUT, _KIND = 1, 2, 4
_DIMS, _TYPE, _NAME, _RAW = 1, 2, 8, 9
_FLOAT32 = 1
_VARINT, _EIGHT_BYTES, _MESSAGE, _FOUR_BYTES = 0, 1, 2, 5


@dataclass(frozen=True)
class Node:
    """One operation: its kind, and the names of the values that it takes and gives."""

    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Graph:
    """The operations of a file in their order, and its float32 weights by name."""

    nodes: tuple[Node, ...]
    weights: dict[str, Tensor]


def read_onnx(file: Path) -> Graph:
    """Nodes and float32 weights of an ONNX file.

    Args:
        file: The file; weights that it keeps in other files are not read.

    Returns:
        The graph.

    Raises:
        InputError: If it cannot be read, or is no such file.
    """
    try:
        return _graph(memoryview(file.read_bytes()))
    except (OSError, IndexError, ValueError) as problem:
        text = " ".join(str(problem).split())[:200]
        raise InputError(f"`{file}` should be an ONNX file. Found: {text}") from problem


def _graph(content: memoryview) -> Graph:
    nodes: list[Node] = []
    weights: dict[str, Tensor] = {}
    for graph in _messages(content, _GRAPH):
        nodes += [_node(part) for part in _messages(graph, _NODE)]
        weights.update(_weight(part) for part in _messages(graph, _WEIGHT) if _is_float(part))
    if not nodes:
        raise ValueError("no graph in it")
    return Graph(tuple(nodes), weights)


def _node(part: memoryview) -> Node:
    def names(number: int) -> tuple[str, ...]:
        return tuple(str(text, "utf-8") for text in _messages(part, number))

    return Node("".join(names(_KIND)), names(_INPUT), names(_OUTPUT))


def _is_float(part: memoryview) -> bool:
    return any(value == _FLOAT32 for number, value in _fields(part) if number == _TYPE)


def _weight(part: memoryview) -> tuple[str, Tensor]:
    shape: list[int] = []
    for number, value in _fields(part):
        if number == _DIMS:  # one by one, or all in one field
            shape += [value] if isinstance(value, int) else _integers(value)
    name = str(next(_messages(part, _NAME)), "utf-8")
    raw = next(_messages(part, _RAW), memoryview(b""))
    values = np.frombuffer(raw, dtype="<f4").astype(np.float32)
    return name, torch.from_numpy(values).reshape(shape)


def _messages(part: memoryview, wanted: int) -> Iterator[memoryview]:
    """The values of one field that are texts, bytes or messages."""
    for number, value in _fields(part):
        if number == wanted and isinstance(value, memoryview):
            yield value


def _fields(part: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Number and value of every field."""
    place = 0
    while place < len(part):
        key, place = _integer(part, place)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, place = _integer(part, place)
            yield number, value
            continue
        size = {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}.get(kind)
        if kind == _MESSAGE:
            size, place = _integer(part, place)
        if size is None or place + size > len(part):
            raise ValueError("a field that is cut off or of no known kind")
        yield number, part[place : place + size]
        place += size


def _integers(part: memoryview) -> list[int]:
    found, place = [], 0
    while place < len(part):
        value, place = _integer(part, place)
        found.append(value)
    return found


def _integer(part: memoryview, place: int) -> tuple[int, int]:
    """Seven bits a byte, the lowest first; the eighth says that more follow."""
    value = shift = 0
    while True:
        byte = part[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value, place
