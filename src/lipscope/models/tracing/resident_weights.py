"""Block-by-block loading of weights: only the running block and a few others are in memory.

Concurrent passes of a model are synchronised, so that each loaded block serves all of them.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn

from lipscope.linalg import torch_state
from lipscope.models.loading import check_weight
from lipscope.models.stored_weights import StoredWeights
from lipscope.models.tracing.prepare import cast_to, copied
from lipscope.models.tracing.recorder import (
    Reached,
    Recorder,
    named_arguments,
    outer_blocks,
    signature_of,
)

Test = Callable[[], bool]
T = TypeVar("T")

# Smaller weights (norms, biases) stay in memory once loaded: theorems need them later.
_SMALL = 2**17
# Embedding tables with more entries are loaded by row, only for the tokens of the input.
_TABLE = 2**22
_BEGIN, _END = "to begin", "to end"  # synchronisation points of passes


@dataclass(frozen=True)
class ModuleWeights:
    """The weights of a module in memory, with the interface of `StoredWeights`."""

    module: nn.Module

    def read(self, names: Collection[str]) -> dict[str, Tensor]:
        """Weights by name."""
        return {name: self.module.get_parameter(name).detach() for name in names}

    def rows(self, name: str, index: list[int]) -> Tensor:
        """Some rows of a weight."""
        weight = self.module.get_parameter(name).detach()
        return weight[torch.tensor(index, device=weight.device)]

    def has_rows(self, name: str) -> bool:
        """Whether single rows of a weight can be read; always True."""
        return True

    def ahead(self, names: Collection[str]) -> None:
        """Prefetch nothing, as the weights are in memory."""


@dataclass
class _Weight:
    """A parameter of the model, with all modules that share it."""

    name: str
    places: list[tuple[nn.Module, str]]
    empty: nn.Parameter  # on the device `meta`, in the dtype of the run
    rows: set[int] = field(default_factory=set)  # loaded rows, if it is loaded by row

    @property
    def value(self) -> nn.Parameter:
        """The current parameter."""
        module, name = self.places[0]
        return cast(nn.Parameter, module._parameters[name])

    def put(self, parameter: nn.Parameter) -> None:
        for module, name in self.places:
            module._parameters[name] = parameter


class ResidentWeights:
    """A model without weights, which are loaded and released block by block.

    ``model`` gets its weights from ``source``, cast to the dtype of the run: those of a block when
    it is called, or requested by `fill`. A block is released when another one is loaded, unless it
    is one of the ``kept`` blocks and they fit in ``room`` bytes. Weights outside blocks are loaded
    immediately and stay, except large embedding tables, whose rows are loaded for each pass.
    """

    def __init__(
        self,
        model: nn.Module,
        source: StoredWeights | ModuleWeights,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.model, self.source, self.dtype, self.device = model, source, dtype, device
        self.kept: frozenset[str] = frozenset()
        self.room = 0  # bytes
        parts = outer_blocks(model).items()
        self.blocks = tuple(path for path, block in parts if [*block.parameters()])
        self.blocks_read = 0
        self.turns = Turns()
        self.order = tuple[str, ...]()  # the blocks of a pass, in call order
        # Block and part: only this part and small weights are loaded, until another part is called.
        self.part: tuple[str, str] | None = None
        self._tell: Callable[[str], Any] = _never
        self._ends: dict[int, tuple[Test, Test]] = {}  # stopping tests of passes, by thread
        self._resident: dict[str, int] = {}  # size in bytes of the blocks in memory
        # Blocks whose weights may be referenced elsewhere, and memory of released blocks without
        # references: it is reused for the next block, as new memory has to be cleared first.
        self._lent: set[str] = set()
        self._free: dict[tuple[int, ...], list[Tensor]] = {}
        self._weights: dict[str, list[_Weight]] = {block: [] for block in (*self.blocks, "")}
        self._experts: dict[str, list[_Weight]] = {block: [] for block in self.blocks}
        tables: list[_Weight] = []
        for one in _weights(model):
            block, by_row = self.block_of(one.name), source.has_rows(one.name)
            if by_row and _is_table(one):
                tables.append(one)
            elif by_row and block and _chosen_by(one) is not None:
                self._experts[block].append(one)
            else:
                self._weights[block].append(one)
        self._worker, self._ahead = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._hooks = Recorder(all_threads=True)
        before, partial = self._hooks.before, functools.partial
        for block in self.blocks:
            before(model.get_submodule(block), partial(self._enter, block))
            for one in self._weights[block]:
                for module, _ in one.places if one.empty.numel() > _SMALL else ():
                    before(module, partial(self._enter_part, one, block))
            for one in self._experts[block]:
                before(one.places[0][0], partial(self._choose, one, block))
        for one in tables:
            for module, _ in one.places:
                before(module, partial(self._embed, one))
                self._hooks.after(module, lambda *_, one=one: _empty_again(one))
        self._in_order(lambda: self._read(""))
        self._in_order(self._read_buffers)

    def block_of(self, path: str) -> str:
        """The block of a module or a weight; "" for none."""
        return next((b for b in self.blocks if f"{path}.".startswith(f"{b}.")), "")

    def part_of(self, path: str) -> tuple[str, str]:
        """The block of a module, and the outermost callable part of the block with the module."""
        block = self.block_of(path)
        last = block
        for name in path.removeprefix(f"{block}.").split("."):
            last = f"{last}.{name}"
            if not isinstance(self.model.get_submodule(last), nn.ModuleList | nn.ModuleDict):
                break
        return block, last

    def bytes_of(self, block: str) -> int:
        """Size of a block in bytes, in the dtype of the run."""
        return sum(one.empty.numel() for one in self._weights[block]) * self.dtype.itemsize

    def fill(self, block: str) -> None:
        """Load a block for a caller that may keep references to its weights; release others."""
        self._lent.add(block)
        self._fill(block)

    def _fill(self, block: str) -> None:
        if block in self._resident or not block:
            if block and (self.part is None or block != self.part[0]):
                self._in_order(lambda: self._read(block))
            return
        size = self.bytes_of(block)
        for other in [*self._resident]:
            if other not in self.kept or sum(self._resident.values()) + size > self.room:
                self._let_go(other)
        self._tell(block)
        place = self.order.index(block) if block in self.order else len(self.order)
        for one in (block, *self.order[place + 1 : place + 2]):
            self._ahead.submit(self.source.ahead, [w.name for w in self._wanted(one)])
        self._in_order(lambda: self._read(block))
        self._resident[block] = size
        self.blocks_read += 1

    @contextlib.contextmanager
    def passing(self, enough: Test, inside: Test) -> Iterator[None]:
        """A forward pass that stops before the next block once ``enough()`` is true.

        Once ``inside()`` is true, it stops within a block before more of its weights are loaded.
        """
        thread = threading.get_ident()
        self._ends[thread] = enough, inside
        try:
            yield
        finally:
            del self._ends[thread]

    @contextlib.contextmanager
    def progress(self, tell: Callable[[str], Any]) -> Iterator[None]:
        """Call ``tell`` with every block before it is loaded."""
        self._tell = tell
        try:
            yield
        finally:
            self._tell = _never

    def _ends_here(self, which: int) -> None:
        if self._ends.get(threading.get_ident(), (_never, _never))[which]():
            raise Reached

    def _enter(self, block: str, *_: Any) -> None:
        self._ends_here(0)
        self.turns.wait_at(block)
        self._fill(block)

    def _enter_part(self, one: _Weight, block: str, *_: Any) -> None:
        if one.value.is_meta and block in self._resident:
            self._ends_here(1)
            self._in_order(lambda: self._read(block, whole=True))

    def _choose(self, one: _Weight, block: str, module: nn.Module, *called: Any) -> None:
        """Load the experts selected for the tokens of a block; they are released with the block."""
        index = named_arguments(module, *called)[str(_chosen_by(one))]
        if one.value.is_meta:
            self._ends_here(1)
        before = len(one.rows)
        self._in_order(lambda: self._look_up(one, index))
        if block in self._resident:
            read = (len(one.rows) - before) * one.empty[0].numel()
            self._resident[block] += read * self.dtype.itemsize

    def _embed(self, one: _Weight, _: nn.Module, args: Any, kwargs: Any) -> None:
        self._in_order(lambda: self._look_up(one, (*args, *kwargs.values())[0]))

    def _wanted(self, block: str, *, whole: bool = False) -> list[_Weight]:
        """Weights of a block that have to be loaded."""
        of, part = self.part or ("none", "")
        whole = whole or block != of
        return [
            one
            for one in self._weights[block]
            if one.value.is_meta
            and (whole or one.empty.numel() <= _SMALL or one.name.startswith(f"{part}."))
        ]

    def _read(self, block: str, *, whole: bool = False) -> None:
        wanted = {one.name: one for one in self._wanted(block, whole=whole)}
        if not wanted:
            return
        tensors = self.source.read([*wanted])
        for name in [*tensors]:
            tensor = tensors.pop(name)  # release it after the cast
            if name in wanted:
                wanted[name].put(self._parameter(name, tensor))

    def _read_buffers(self) -> None:
        names = [name for name, b in self.model.named_buffers() if b.is_meta]
        for name, tensor in self.source.read(names).items() if names else ():
            path, _, last = name.rpartition(".")
            own = cast_to(tensor, self.device, self.dtype)
            self.model.get_submodule(path)._buffers[last] = own

    def _parameter(self, name: str, tensor: Tensor) -> nn.Parameter:
        floats = tensor.is_floating_point()
        free = self._free.get(tuple(tensor.shape)) if floats else None
        if free:
            own = free.pop().copy_(tensor)
        else:
            own = tensor.to(self.device, self.dtype if floats else tensor.dtype, copy=True)
        if floats:
            check_weight(name, own)
        return nn.Parameter(own, requires_grad=False)

    def _let_go(self, block: str) -> None:
        held = block in self._lent
        for one in self._weights[block]:
            if one.empty.numel() > _SMALL:
                if not held and one.empty.is_floating_point() and not one.value.is_meta:
                    self._free.setdefault(tuple(one.empty.shape), []).append(one.value.data)
                one.put(one.empty)
        for one in self._experts[block]:
            _empty_again(one)
        self._lent.discard(block)
        del self._resident[block]

    def _in_order(self, work: Callable[[], Any]) -> Any:
        """Run work in a separate thread, where the hooks and modes of a pass do not apply."""
        return self._worker.submit(work).result()

    def _look_up(self, one: _Weight, ids: Tensor) -> None:
        """Load missing rows; rows that are not loaded take no memory and have no values."""
        if one.value.is_meta:
            table = torch.empty(one.empty.shape, dtype=self.dtype, device=self.device)
            one.put(nn.Parameter(table, requires_grad=False))
        new = [i for i in ids.unique().tolist() if 0 <= i < len(one.empty) and i not in one.rows]
        if new:  # the module itself reports invalid ids
            # `data`: not part of the graph of an earlier call, which used other rows.
            one.value.data[new] = self._parameter(one.name, self.source.rows(one.name, new)).data
            one.rows.update(new)


def _never(*_: Any) -> bool:
    return False


def _empty_again(one: _Weight) -> None:
    one.put(one.empty)
    one.rows.clear()


def _weights(model: nn.Module) -> Iterator[_Weight]:
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(parameter, []).append((module, name))
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            yield _Weight(name, places[parameter], parameter)


def _is_table(one: _Weight) -> bool:
    """Whether a weight is a large table that is only read by row."""
    return one.empty.numel() > _TABLE and all(
        type(module).forward is nn.Embedding.forward
        or type(module).__name__.endswith("ScaledWordEmbedding")
        for module, _ in one.places
    )


def _chosen_by(one: _Weight) -> str | None:
    """The argument of a module that selects rows of a stack of experts; None if all are used."""
    if one.empty.ndim < 3 or len(one.places) > 1:
        return None
    takes = signature_of(one.places[0][0]).parameters
    return next((name for name in ("top_k_index", "router_indices") if name in takes), None)


def without_weights(model: nn.Module, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A copy with parameters on the `meta` device, without values; buffers keep their values."""

    def empty(p: Tensor) -> nn.Parameter:
        kind = dtype if p.is_floating_point() else p.dtype
        return nn.Parameter(torch.empty_like(p, dtype=kind, device="meta"), requires_grad=False)

    bare = copied(model, {id(p): empty(p) for p in model.parameters()})
    return bare._apply(lambda t: t if t.is_meta else cast_to(t, device, dtype))


# --- synchronised passes


class _Stopped(BaseException):
    """Stops a pass after the failure of another. A `BaseException`: models do not catch it."""


class _Pass(threading.Thread, Generic[T]):
    """A pass in its own thread, which runs step by step."""

    def __init__(self, work: Callable[[], T]) -> None:
        super().__init__(daemon=True)
        self.place: str | None = _BEGIN  # where it waits; None when done
        self.stopped = False
        self.found: T | BaseException = _Stopped()
        self._work = functools.partial(contextvars.copy_context().run, work)
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)

    def run(self) -> None:
        self._go.acquire()
        try:
            if not self.stopped:
                self.found = self._work()
        except BaseException as problem:
            self.found = problem
        self.place = None
        self._back.release()

    def wait(self, place: str) -> None:
        """Called in the pass: let others run until its next turn."""
        self.place = place
        self._back.release()
        self._go.acquire()
        if self.stopped:
            raise _Stopped

    def step(self) -> None:
        """Run it until it waits again, or is done."""
        self._go.release()
        self._back.acquire()

    def stop(self) -> None:
        """Stop it at its current or next waiting point."""
        self.stopped = True
        while self.place is not None:
            self.step()


class Turns:
    """Run passes one at a time, each up to the place where the others wait.

    A place is a block of the model. All passes begin before the first continues, and end in reverse
    order, so that their temporary settings (dtypes, kernels, random state) are nested.
    """

    def __init__(self) -> None:
        self._passes: dict[int | None, _Pass] = {}

    def run(self, works: Sequence[Callable[[], T]]) -> list[T | BaseException]:
        """The result of each pass, or its exception."""
        with torch_state():  # shared by all passes, which hold it in turns
            return self._run([_Pass(work) for work in works])

    def _run(self, passes: list[_Pass[T]]) -> list[T | BaseException]:
        try:
            for one in passes:
                one.start()
                self._passes[one.ident] = one
            while waiting := [one for one in passes if one.place is not None]:
                at = {one.place for one in waiting}
                place = next((one for one in at if one not in (_BEGIN, _END)), None)
                place = place or (_END if _END in at else _BEGIN)
                turn = [one for one in waiting if one.place == place]
                for one in reversed(turn) if place == _END else turn:
                    one.step()
        finally:
            for one in reversed(passes):
                one.stop()
            self._passes.clear()
        return [one.found for one in passes]

    def begin(self) -> None:
        """Wait until all other passes have begun."""
        self.wait_at(_BEGIN)

    def end(self) -> None:
        """Wait until all other passes are at their end."""
        self.wait_at(_END)

    def wait_at(self, place: str) -> None:
        """Wait until all other passes have reached a place; returns immediately without others."""
        mine = self._passes.get(threading.get_ident())
        if mine is not None:
            mine.wait(place)
