"""Blocks of a model in one run, whose outputs can stand in for them in the next."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lipscope.models.tracing.recorder import Inputs, Reached, Recorder, data_address, each_tensor

BlockOutputs = Mapping[str, Any]  # by the paths of the blocks


@dataclass(frozen=True)
class BlockRun:
    """What the blocks of a model gave in one run: the elements of its outermost module lists."""

    outputs: BlockOutputs  # of those that were called once, in the order in which they ended
    ended: Mapping[str, int]  # how many had ended when a block began that was called once

    def below(self, module: str) -> BlockOutputs:
        """Of the blocks that had ended when the one around a module began; none without one."""
        block = next((one for one in self.ended if f"{module}.".startswith(f"{one}.")), None)
        if block is None:
            return {}
        return dict([*self.outputs.items()][: self.ended[block]])


def run_of_blocks(
    model: nn.Module, inputs: Inputs, dtype: torch.dtype, until: str | None = None
) -> BlockRun:
    """Run a model, up to the first call of ``until`` if it is given; keep what its blocks give."""

    def end(*_: Any) -> None:
        raise Reached

    with watched_blocks(model) as found, Recorder() as recorder, torch.no_grad():
        if until is not None:
            recorder.before(model.get_submodule(until), end)
        with contextlib.suppress(Reached):
            recorder.run(model, each_tensor(inputs, torch.clone), dtype, differentiable=False)
    return found()


@contextlib.contextmanager
def watched_blocks(model: nn.Module) -> Iterator[Callable[[], BlockRun]]:
    """Keep what the blocks of a model give in the run that follows; ask for it after the run.

    Nothing is kept of a model two of whose blocks give the same memory, which copies would part,
    that calls a block more than once, or whose blocks give anything but tensors.
    """
    outputs, began, calls = dict[str, Any](), dict[str, int](), Counter[str]()

    def start(path: str) -> None:
        calls[path] += 1
        began.setdefault(path, len(outputs))

    def finish(path: str, out: Any) -> None:
        outputs[path] = out

    def found() -> BlockRun:
        places = Counter(place for out in outputs.values() for place in {*_places(out)})
        if any(count > 1 for count in (*places.values(), *calls.values())) or -1 in places:
            return BlockRun({}, {})
        return BlockRun({path: _copy(out) for path, out in outputs.items()}, began)

    with Recorder() as recorder:
        for path, block in _outer_blocks(model).items():
            recorder.before(block, lambda *_, path=path: start(path))
            recorder.after(block, lambda _, __, out, path=path: finish(path, out))
        yield found


@contextlib.contextmanager
def standing_in(model: nn.Module, outputs: BlockOutputs) -> Iterator[None]:
    """A model some of whose blocks do not run: what they gave before stands in for them."""
    lists = {path: model.get_submodule(path.rpartition(".")[0]) for path in outputs}
    blocks = {path: model.get_submodule(path) for path in outputs}
    try:
        for path, block in blocks.items():
            lists[path]._modules[path.rpartition(".")[2]] = _KnownBlock(block, outputs[path])
        yield
    finally:
        for path, block in blocks.items():
            lists[path]._modules[path.rpartition(".")[2]] = block


class _KnownBlock(nn.Module):
    """In the place of a block: its settings, and what it gave before."""

    def __init__(self, block: nn.Module, output: Any) -> None:
        super().__init__()
        self.__dict__ |= {"block": block, "output": output}

    def forward(self, *_: Any, **__: Any) -> Any:
        """The same again."""
        return _copy(self.output)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["block"], name)


def _outer_blocks(model: nn.Module) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{one}.") for one in found)
        if isinstance(module, nn.ModuleList) and not inside:
            found |= {f"{path}.{index}": block for index, block in enumerate(module)}
    return found


def _places(output: Any) -> list[int]:
    """Where the tensors of an output lie; -1 for what is no tensor."""
    if type(output) in (tuple, list):
        return [place for one in output for place in _places(one)]
    if isinstance(output, Tensor):
        return [data_address(output)]
    return [] if output is None else [-1]


def _copy(output: Any) -> Any:
    """What a module gives, in memory of its own: a model may write into it."""
    if type(output) in (tuple, list):
        return type(output)(_copy(one) for one in output)
    return output.detach().clone() if isinstance(output, Tensor) else output
