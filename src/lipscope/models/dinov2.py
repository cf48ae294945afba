"""DINOv2 as a model of transformers, from the weights of an exported graph."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor, nn

from lipscope.errors import InputError
from lipscope.models.onnx import Graph, read_onnx

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
