"""DINOv2 as a model of transformers, from the weights of an exported graph."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from lipscope.errors import InputError

_PREFIX = "backbone."
_HEAD_WIDTH = 64  # of every DINOv2
# What transformers called its modules when the graph was exported, and calls them now.
_RENAMED = (
    (r"attention\.attention\.(query|key|value)\.", lambda m: f"attention.{m[1][0]}_proj."),
    (r"attention\.output\.dense\.", lambda m: "attention.o_proj."),
)


def dinov2_from_onnx(file: Path) -> nn.Module:
    """Rebuild the backbone of an exported graph; what follows it is left out.

    An export drops the names of all matrices that are multiplied from the right: each takes
    the name of the bias that is added next.

    Args:
        file: ONNX file of a DINOv2 of any size without registers, its weights named
            ``backbone.…``.

    Returns:
        A ``Dinov2Model`` in eval mode, float32.

    Raises:
        InputError: If the file holds no such model.
    """
    from transformers import Dinov2Config, Dinov2Model

    state = _state(read_onnx(file))
    try:
        patches = state["embeddings.patch_embeddings.projection.weight"]
        positions = state["embeddings.position_embeddings"]
        width, channels, patch, _ = patches.shape
        config = Dinov2Config(
            hidden_size=width,
            num_attention_heads=width // _HEAD_WIDTH,
            num_hidden_layers=1 + max(int(m[1]) for m in map(_LAYER.match, state) if m),
            mlp_ratio=state["encoder.layer.0.mlp.fc1.bias"].shape[0] // width,
            image_size=patch * round((positions.shape[1] - 1) ** 0.5),
            patch_size=patch,
            num_channels=channels,
            use_mask_token=False,
        )
        model = Dinov2Model(config)
        model.load_state_dict(state)
    except (KeyError, ValueError, RuntimeError) as problem:
        text = " ".join(str(problem).split())[:200]
        raise InputError(f"`{file}` should hold a DINOv2. Found: {text}") from problem
    return model.eval()


_LAYER = re.compile(r"encoder\.layer\.(\d+)\.")


def _state(graph: Graph) -> dict[str, Tensor]:
    """The weights under the names of today's transformers."""
    state: dict[str, Tensor] = {}
    for name, tensor in _named(graph).items():
        if not name.startswith(_PREFIX):
            continue
        plain = name.removeprefix(_PREFIX)
        for pattern, today in _RENAMED:
            plain = re.sub(pattern, today, plain)
        state[plain] = tensor
    # Position embeddings of the class token and of the patches: what is left with three axes.
    tables = [t for name, t in graph.weights.items() if t.ndim == 3 and _PREFIX not in name]
    if tables:
        tables.sort(key=lambda t: t.shape[1])
        state["embeddings.position_embeddings"] = torch.cat(tables, dim=1)
    return state


def _named(graph: Graph) -> dict[str, Tensor]:
    """All weights, every matrix under the name that its bias tells, transposed."""
    named = dict(graph.weights)
    products = {
        node.outputs[0]: graph.weights[node.inputs[1]]
        for node in graph.nodes
        if node.kind == "MatMul" and node.inputs[1] in graph.weights
    }
    for node in graph.nodes:
        bias = next((name for name in node.inputs if name.endswith(".bias")), None)
        product = next((name for name in node.inputs if name in products), None)
        if node.kind == "Add" and bias is not None and product is not None:
            named[bias.removesuffix("bias") + "weight"] = products[product].T.contiguous()
    return named


# --- nodes and weights of an ONNX file, read from its bytes: no package for it is needed ---

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
