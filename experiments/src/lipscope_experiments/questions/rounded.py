"""A model with one block rounded, beside the model as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lipscope.models import Rounds, inputs_of, rounding
from lipscope_experiments.experiment import Source
from lipscope_experiments.findings import Record


def decides(config: Any) -> bool:
    """Whether the next token is what a model is for."""
    return hasattr(config, "vocab_size") and config.model_type != "bert"


class Run:
    """A model on all windows at once, as it is and with one block rounded.

    Args:
        source: The model and what it reads.
        asked: How that is cut into windows.
    """

    def __init__(self, source: Source, asked: Mapping[str, Any]) -> None:
        self.loaded = source.model
        items = inputs_of(
            source.model,
            source.asked.get("data"),
            lengths=asked.get("lengths"),
            samples=asked.get("samples"),
            windows="spread",
            special_tokens=True,
            images=source.asked.get("images"),
        )
        arguments = [dict(one.arguments) for one in items]
        self.arguments = {
            name: torch.cat([one[name] for one in arguments])
            if isinstance(value, Tensor)
            else value
            for name, value in arguments[0].items()
        }
        self.ids = self.arguments.get("input_ids") if decides(source.model.config) else None
        self.blocks: dict[str, Tensor] = {}
        self.before = self._hidden()
        self.log_p = None if self.ids is None else self._log_p(self.before)

    @torch.no_grad()
    def _hidden(self) -> Tensor:
        """The last hidden state."""
        model: Any = self.loaded.model
        return model(**self.arguments).last_hidden_state

    @torch.no_grad()
    def _log_p(self, hidden: Tensor) -> Tensor:
        model: Any = self.loaded.model
        return (hidden @ model.get_input_embeddings().weight.T).log_softmax(-1)

    def _block(self, path: str) -> tuple[Tensor, Tensor]:
        """The last hidden state, and the output of one block on the way."""
        block, held = self.loaded.model.get_submodule(path), []

        def keep(module: nn.Module, given: Any, output: Any) -> None:
            held.append(output if isinstance(output, Tensor) else output[0])

        hook = block.register_forward_hook(keep)
        try:
            return self._hidden(), held[0]
        finally:
            hook.remove()

    @torch.no_grad()
    def rounded(self, path: str, bits: int, what: Rounds) -> Record:
        """What rounding one block does, by window.

        Args:
            path: Of the block.
            bits: Of each number.
            what: ``weights`` or ``inputs`` of its linear maps.

        Returns:
            ``local`` and ``hidden``: relative changes of the block's output and of the last hidden
            state. Of encoders ``cosine``: 1 less the cosine of mean tokens. Of decoders
            ``divergence``: of the next token, mean over places; ``loss``: its change.
        """
        if path not in self.blocks:
            self.blocks = {path: self._block(path)[1]}
        own = self.blocks[path]
        with rounding(self.loaded.model.get_submodule(path), what, bits):
            hidden, block = self._block(path)
        found = {"local": _relative(block, own), "hidden": _relative(hidden, self.before)}
        if self.log_p is None or self.ids is None:
            means = self.before.double().mean(1), hidden.double().mean(1)
            cosine = torch.cosine_similarity(*means)
            return found | {"cosine": (1 - cosine).tolist()}
        log_q = self._log_p(hidden)
        divergence = (self.log_p.exp() * (self.log_p - log_q)).sum(-1).mean(1)
        lost = _loss(log_q, self.ids) - _loss(self.log_p, self.ids)
        return found | {"divergence": divergence.tolist(), "loss": lost.tolist()}


def _relative(after: Tensor, before: Tensor) -> list[float]:
    change = (after - before).flatten(1).norm(dim=1) / before.flatten(1).norm(dim=1)
    return change.tolist()


def _loss(log_p: Tensor, ids: Tensor) -> Tensor:
    """Mean surprise of every window's next tokens."""
    return -log_p[:, :-1].gather(-1, ids[:, 1:, None]).mean((1, 2))
