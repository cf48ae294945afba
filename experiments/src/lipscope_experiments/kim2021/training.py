"""A decoder on characters, trained with any attention: one run, which goes on where it stopped."""

from __future__ import annotations

import contextlib
import io
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lipscope import InputError, Monitor, MultiheadAttention
from lipscope.attention import Distance
from lipscope.control import ContractiveAttention
from lipscope.models import LoadedModel
from lipscope.records import RunFolder, opened, replaced, stable_id
from lipscope_experiments.texts import Text

VARIANTS = ("dot product", "L2, untied", "L2, tied", "contractive L2")
CONSTANT = 0.9  # of the contractive blocks
_SHARE = 10  # one character of so many is held out, the last ones
_HELD = 64  # windows of the held-out part


@dataclass(frozen=True)
class Run:
    """Everything that decides on a run besides its text.

    Attributes:
        variant: One of `VARIANTS`.
        depth: Blocks.
        schedule: ``fixed`` rate, or ``warm-up`` over a fifth of the steps and ``1 / √step`` after.
        seed: Of weights and windows.
        steps: Of Adam.
        every: Steps between readings, each with a checkpoint.
        rate: The largest rate.
        width: Of a token.
        heads: Of a block.
        length: Characters of a window.
        batch: Windows of a step.
    """

    variant: str
    depth: int
    schedule: str
    seed: int
    steps: int
    every: int
    rate: float = 3e-3
    width: int = 32
    heads: int = 4
    length: int = 32
    batch: int = 8

    def rate_at(self, step: int) -> float:
        """The rate of a step, from 1."""
        if self.schedule == "fixed":
            return self.rate
        warm = max(self.steps // 5, 1)
        return self.rate * min(step / warm, math.sqrt(warm / step))


class UntiedL2(Distance):
    """``P X W_V`` with ``P_ij ∝ exp(-|x_i W_Q - x_j W_K|² / √k)``: not Lipschitz.

    Args:
        query: ``(heads * k, d)``.
        key: ``(heads * k, d)``.
        value: ``(heads * d_v, d)``.
        output: ``(d_out, heads * d_v)``, or None for concatenated heads.
        heads: Number of heads.
        causal: Token i reads tokens j <= i only.
        mask: ``(n, n)`` or ``(heads, n, n)``: True where i may read j.
    """

    def __init__(
        self,
        query: Float[Tensor, "hk d"],
        key: Float[Tensor, "hk d"],
        value: Float[Tensor, "hv d"],
        output: Float[Tensor, "d_out hv"] | None = None,
        *,
        heads: int = 1,
        causal: bool = False,
        mask: Bool[Tensor, "*h n n"] | None = None,
    ) -> None:
        super().__init__(
            query, key, value, output, heads=heads, scale=1.0, causal=causal, mask=mask
        )

    def projections(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys take up the scale."""
        factor = self.head_width**-0.25
        return self.query * factor, self.key * factor, self.value


class Block(nn.Module):
    """``LN(X + F(X))`` for the attention, then for two linear maps: the original Transformer's."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.attention = _attention(run)
        self.first, self.second = nn.LayerNorm(run.width), nn.LayerNorm(run.width)
        self.mlp = nn.Sequential(
            nn.Linear(run.width, 4 * run.width), nn.ReLU(), nn.Linear(4 * run.width, run.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """The tokens after the block."""
        if isinstance(self.attention, MultiheadAttention):
            x = self.first(x + self.attention(x, x, x, need_weights=False)[0])
        else:
            x = self.first(x + self.attention(x))
        return self.second(x + self.mlp(x))


class Decoder(nn.Module):
    """A causal decoder on characters.

    Args:
        run: Sizes and variant.
        characters: How many there are.
    """

    def __init__(self, run: Run, characters: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(characters, run.width)
        self.positions = nn.Parameter(torch.randn(run.length, run.width))
        self.blocks = nn.ModuleList(Block(run) for _ in range(run.depth))
        self.head = nn.Linear(run.width, characters)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits of the next character."""
        x = self.tokens(input_ids) + self.positions[: input_ids.shape[-1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _attention(run: Run) -> nn.Module:
    kind = ("dot-product", UntiedL2, "l2", "l2")[VARIANTS.index(run.variant)]
    module = MultiheadAttention(
        run.width, run.heads, kind, bias=False, batch_first=True, causal=True
    )
    if run.variant == VARIANTS[-1]:
        return ContractiveAttention(module.attention, CONSTANT)
    return module


@dataclass(frozen=True)
class Corpus:
    """A text as numbers.

    Attributes:
        text: The text.
        train: Characters before the held-out ones.
        held: Windows of the held-out part, ``(windows, length + 1)``.
        characters: How many there are; the last stands for those that training never saw.
    """

    text: Text
    train: Tensor
    held: Tensor
    characters: int

    @property
    def chance(self) -> float:
        """Bits per held-out character of what knows how often each occurs, and nothing else."""
        counts = torch.bincount(self.train, minlength=self.characters).double() + 1
        return float(-(counts / counts.sum()).log2()[self.held[:, 1:]].mean())


def corpus(text: Text, length: int) -> Corpus:
    """Cut a text into what is trained on and what is held out, its last tenth.

    Raises:
        InputError: If it is too short for the held-out windows to share no character.
    """
    least = _SHARE * _HELD * (length + 1)
    if len(text.content) < least:
        raise InputError(
            f"`--text` should have at least {least:,} characters, a tenth of them for {_HELD} "
            f"windows of {length}. Found {len(text.content):,} in `{text.name}`."
        )
    cut = len(text.content) * (_SHARE - 1) // _SHARE
    known = {c: i for i, c in enumerate(sorted(set(text.content[:cut])))}
    ids = torch.tensor([known.get(c, len(known)) for c in text.content])
    starts = torch.linspace(cut, len(ids) - length - 1, _HELD).long()
    held = torch.stack([ids[i : i + length + 1] for i in starts.tolist()])
    return Corpus(text, ids[:cut], held, len(known) + 1)


def train(run: Run, data: Corpus, folder: RunFolder) -> dict[str, Any]:
    """Train one decoder; rows of its attention layers go to the folder at every reading.

    Args:
        run: What to train.
        data: On what.
        folder: Where rows and checkpoints go. A run that was stopped goes on from its last one.

    Returns:
        ``curve``: steps, bits per character of training (mean since the last) and held out;
        ``stopped``: why it ended early, or None; ``bits``: the last held-out ones, None if
        it ended early.
    """
    state = _State(run, data, folder)
    monitor = Monitor(
        LoadedModel(state.name, state.net, None, None, "trained"),
        data.held[:1, :-1],
        every=run.every,
        out=folder,
        alert=None,
    )
    monitor.start(state.step)
    losses: list[float] = []
    for step in range(state.step + 1, run.steps + 1):
        loss = state.loss(state.windows())
        losses.append(float(loss.detach()) / math.log(2))
        state.optimiser.zero_grad()
        loss.backward()
        for group in state.optimiser.param_groups:
            group["lr"] = run.rate_at(step)
        try:
            with monitor.step(loss):
                state.optimiser.step()
        except InputError as problem:
            if math.isfinite(losses[-1]) and _finite(state.net):
                raise
            kept = state.path.name if state.path.exists() else "none"
            why = f"{problem} The last good checkpoint: {kept}."
            return {"curve": state.curve, "stopped": why, "bits": None}
        if step % run.every == 0 or step == run.steps:
            with torch.no_grad():
                held = float(state.loss(data.held)) / math.log(2)
            state.save(step, [step, sum(losses) / len(losses), held])
            losses = []
    state.path.unlink(missing_ok=True)  # done: the folder holds what came of it
    with contextlib.suppress(OSError):  # others are in it
        state.path.parent.rmdir()
    return {"curve": state.curve, "stopped": None, "bits": state.curve[-1][2]}


class _State:
    """All that a run goes on from: weights, moments, random numbers, the curve."""

    def __init__(self, run: Run, data: Corpus, folder: RunFolder) -> None:
        self.run, self.data = run, data
        self.name = f"{run.variant}, {run.depth} blocks, {run.schedule}, seed {run.seed}, "
        self.name += data.text.name
        self.path = _checkpoint(folder, asdict(run) | {"text": data.text.sha256})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(run.seed)
            self.net = Decoder(run, data.characters)
        self.optimiser = torch.optim.Adam(self.net.parameters(), lr=run.rate, fused=True)
        self.gen = torch.Generator().manual_seed(run.seed)
        self.step, self.curve = 0, []
        if self.path.exists():
            self._load()

    def windows(self) -> Tensor:
        """The windows of the next step."""
        last = len(self.data.train) - self.run.length
        starts = torch.randint(0, last, (self.run.batch,), generator=self.gen)
        span = torch.arange(self.run.length + 1)
        return self.data.train[starts[:, None] + span]

    def loss(self, windows: Tensor) -> Tensor:
        """Nats per character."""
        logits = self.net(windows[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    def save(self, step: int, point: list[float | int]) -> None:
        """Write a checkpoint in the place of the last one."""
        self.step = step
        self.curve.append(point)
        held = io.BytesIO()
        content = {"step": step, "curve": self.curve, "windows": self.gen.get_state()}
        content |= {"net": self.net.state_dict(), "optimiser": self.optimiser.state_dict()}
        torch.save(content, held)
        try:
            self.path.parent.mkdir(exist_ok=True)
            replaced(self.path, held.getvalue())
        except OSError as problem:
            raise InputError(f"`{self.path}` cannot be written ({problem.strerror}).") from problem

    def _load(self) -> None:
        try:
            with opened(self.path) as file:
                held = torch.load(file, weights_only=True)
            self.net.load_state_dict(held["net"])
            self.optimiser.load_state_dict(held["optimiser"])
            self.gen.set_state(held["windows"])
            self.step, self.curve = held["step"], held["curve"]
        except InputError:
            raise
        except Exception as problem:  # whatever a damaged file makes torch say
            raise InputError(
                f"`{self.path}` should be a checkpoint of this run. Found "
                f"{type(problem).__name__}; remove it, and the run starts anew."
            ) from None


def _checkpoint(folder: RunFolder, key: dict[str, Any]) -> Path:
    return folder.path / "checkpoints" / f"{stable_id(key)}.pt"


def _finite(net: nn.Module) -> bool:
    return all(bool(p.isfinite().all()) for p in net.parameters())
