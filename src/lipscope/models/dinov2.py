"""DINOv2 as a model of transformers, from the weights of an exported graph."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

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
    """A ``Dinov2Model`` in float32 from an exported graph; what follows the backbone is left out.

    An export drops the names of all matrices that are multiplied from the right: each takes
    the name of the bias that is added next. Holds for DINOv2 of any size without registers whose
    weights are named ``backbone.…``.
    """
    from transformers import Dinov2Config, Dinov2Model

    state = _renamed(_read_onnx(file))
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
        raise InputError(f"`{file}` should hold a DINOv2. Found: {str(problem)[:200]}") from problem
    return model.eval()


_LAYER = re.compile(r"encoder\.layer\.(\d+)\.")


def _renamed(graph: _Graph) -> dict[str, Tensor]:
    """The weights under the names of today's transformers."""
    state: dict[str, Tensor] = {}
    for name, tensor in _weights_by_name(graph).items():
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


def _weights_by_name(graph: _Graph) -> dict[str, Tensor]:
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


# --- ONNX: protobuf messages, of fields of a number and an integer, bytes or another message

# Field numbers of nodes and weights in the format's messages (onnx.proto).
_GRAPH = 7
_NODE, _WEIGHT = 1, 5
_INPUT, _OUTPUT, _KIND = 1, 2, 4
_DIMS, _TYPE, _NAME, _RAW = 1, 2, 8, 9
_FLOAT32 = 1
_VARINT, _EIGHT_BYTES, _MESSAGE, _FOUR_BYTES = 0, 1, 2, 5


class _Node(NamedTuple):
    """One operation: its kind, and the names of the values that it takes and gives."""

    kind: str
    inputs: list[str]
    outputs: list[str]


class _Graph(NamedTuple):
    """The operations of a file in their order, and its float32 weights by name."""

    nodes: list[_Node]
    weights: dict[str, Tensor]


def _read_onnx(file: Path) -> _Graph:
    """Nodes and float32 weights of a file; weights kept in other files are not read."""
    found = _Graph([], {})
    try:
        for graph in _messages(memoryview(file.read_bytes()), _GRAPH):
            for part in _messages(graph, _NODE):
                kind, *ends = (_strings(part, number) for number in (_KIND, _INPUT, _OUTPUT))
                found.nodes.append(_Node("".join(kind), *ends))
            found.weights.update(map(_weight, filter(_is_float, _messages(graph, _WEIGHT))))
        if not found.nodes:
            raise ValueError("no graph in it")
    except (OSError, IndexError, ValueError) as problem:
        raise InputError(
            f"`{file}` should be an ONNX file. Found: {str(problem)[:200]}"
        ) from problem
    return found


def _is_float(part: memoryview) -> bool:
    return any(value == _FLOAT32 for number, value in _fields(part) if number == _TYPE)


def _weight(part: memoryview) -> tuple[str, Tensor]:
    shape: list[int] = []
    for number, value in _fields(part):
        if number == _DIMS:  # one by one, or all in one field
            shape += [value] if isinstance(value, int) else _varints(value)
    raw = next(_messages(part, _RAW), memoryview(b""))
    values = np.frombuffer(raw, dtype="<f4").astype(np.float32)
    return _strings(part, _NAME)[0], torch.from_numpy(values).reshape(shape)


def _strings(part: memoryview, wanted: int) -> list[str]:
    return [str(text, "utf-8") for text in _messages(part, wanted)]


def _messages(part: memoryview, wanted: int) -> Iterator[memoryview]:
    """The values of one field that are texts, bytes or messages."""
    for number, value in _fields(part):
        if number == wanted and isinstance(value, memoryview):
            yield value


def _fields(part: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Number and value of every field."""
    at = 0
    while at < len(part):
        key, at = _varint(part, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = _varint(part, at)
            yield number, value
            continue
        size = {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}.get(kind)
        if kind == _MESSAGE:
            size, at = _varint(part, at)
        if size is None or at + size > len(part):
            raise ValueError("a field that is cut off or of no known kind")
        yield number, part[at : at + size]
        at += size


def _varints(part: memoryview) -> list[int]:
    found, at = [], 0
    while at < len(part):
        value, at = _varint(part, at)
        found.append(value)
    return found


def _varint(part: memoryview, at: int) -> tuple[int, int]:
    """Seven bits a byte, the lowest first; the eighth says that more follow."""
    value = shift = 0
    while True:
        byte = part[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
