"""A monitor's signals in TensorBoard and in Weights & Biases, through the Trainer.

What `Monitor(log=...)` takes is a function of a dictionary of numbers. Without one, `attach` logs
to whatever the Trainer logs to (`report_to="tensorboard"` or `"wandb"`), and no line is needed.

Run: python examples/log_a_monitor.py
"""

import logging
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import Dataset
from torch.utils.tensorboard import SummaryWriter
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import lipscope as ls

Log = Callable[[dict[str, float]], None]


def to_tensorboard(writer: SummaryWriter) -> Log:
    """A log that adds every number as a scalar."""

    def log(values: dict[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, int(values["lipscope/step"]))

    return log


def to_wandb(run: Any) -> Log:
    """A log that a run of Weights & Biases takes: ``run = wandb.init(project=...)``."""

    def log(values: dict[str, float]) -> None:
        run.log(dict(values), step=int(values["lipscope/step"]))

    return log


class Words(Dataset[Mapping[str, torch.Tensor]]):
    """Sequences of tokens, of class 1 where the first is above the last."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(5, 50, (8,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": (ids[0] > ids[-1]).long()}


class Kept:
    """In the place of a run of Weights & Biases, which needs an account."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def log(self, values: dict[str, float], step: int) -> None:
        """Keep the step."""
        self.steps.append(step)


def train(log: Log | None, folder: Path) -> ls.Monitor:
    """A small classifier for ten steps, read at every second one."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16,
    )  # fmt: skip
    arguments = TrainingArguments(
        str(folder / "checkpoints"), max_steps=10, per_device_train_batch_size=8, use_cpu=True,
        save_strategy="no", disable_tqdm=True, report_to=[], logging_strategy="no",
    )  # fmt: skip
    trainer = Trainer(BertForSequenceClassification(config), arguments, train_dataset=Words())
    probe = torch.stack([Words()[i]["input_ids"] for i in range(2)])
    monitor = ls.Monitor(trainer.model, probe, every=2, log=log)
    monitor.attach(trainer)
    trainer.train()
    return monitor


def main() -> None:
    """Train twice, and read back what was logged."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        with SummaryWriter(str(folder / "board")) as writer:
            monitor = train(to_tensorboard(writer), folder)
        board = EventAccumulator(str(folder / "board")).Reload()
        seen = board.Scalars("lipscope/layer1/sigma")
        print("TensorBoard, layer 1:")
        for one in seen:
            print(f"  step {one.step:2d}: sigma {one.value:.4g}")
        assert [one.step for one in seen] == [0, 2, 4, 6, 8, 10]
        assert abs(seen[-1].value - monitor.readings[-1].sigma) < 1e-5 * seen[-1].value
        run = Kept()
        train(to_wandb(run), folder)
        assert run.steps == [0, 2, 4, 6, 8, 10]


if __name__ == "__main__":
    main()
