"""DINOv2 as a model of transformers, from the weights of an exported graph."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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

    state = _renamed(_graph_in(file))
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


def _graph_in(file: Path) -> Any:
    """The graph of a file; weights kept in other files are not read."""
    try:
        graph = importlib.import_module("onnx").load(file, load_external_data=False).graph
    except Exception as problem:  # protobuf's own errors have no class in common
        raise InputError(
            f"`{file}` should be an ONNX file. Found: {str(problem)[:200]}"
        ) from problem
    if not graph.node:
        raise InputError(f"`{file}` should be an ONNX file. Found no graph in it.")
    return graph


def _renamed(graph: Any) -> dict[str, Tensor]:
    """The weights under the names of today's transformers."""
    onnx, state = importlib.import_module("onnx"), dict[str, Tensor]()
    weights = {
        one.name: torch.from_numpy(onnx.numpy_helper.to_array(one).copy())
        for one in graph.initializer
        if one.data_type == onnx.TensorProto.FLOAT
    }
    for name, tensor in _weights_by_name(graph, weights).items():
        if not name.startswith(_PREFIX):
            continue
        plain = name.removeprefix(_PREFIX)
        for pattern, today in _RENAMED:
            plain = re.sub(pattern, today, plain)
        state[plain] = tensor
    # Position embeddings of the class token and of the patches: what is left with three axes.
    tables = [t for name, t in weights.items() if t.ndim == 3 and _PREFIX not in name]
    if tables:
        tables.sort(key=lambda t: t.shape[1])
        state["embeddings.position_embeddings"] = torch.cat(tables, dim=1)
    return state


def _weights_by_name(graph: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All weights, every matrix under the name that its bias tells, transposed."""
    named = dict(weights)
    products = {
        node.output[0]: weights[node.input[1]]
        for node in graph.node
        if node.op_type == "MatMul" and node.input[1] in weights
    }
    for node in graph.node:
        bias = next((name for name in node.input if name.endswith(".bias")), None)
        product = next((name for name in node.input if name in products), None)
        if node.op_type == "Add" and bias is not None and product is not None:
            named[bias.removesuffix("bias") + "weight"] = products[product].T.contiguous()
    return named
