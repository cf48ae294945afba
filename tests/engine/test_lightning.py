"""A monitor under Lightning's own Trainer."""

from __future__ import annotations

import pytest
import pytorch_lightning as pl
import torch

import lipscope as ls
from lipscope import InputError
from test_monitor import PROBE, batches, model

# Lightning warns of what it finds on the machine, and of what is not asked for.
pytestmark = pytest.mark.filterwarnings("ignore")


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = model()
        self.losses: list[float] = []

    def training_step(self, batch, index):
        loss = self.net(batch, labels=batch).loss
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Kept(pl.loggers.logger.DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.logs: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics, step=None):
        self.logs.append((step, dict(metrics)))


def fit(module: Module, tmp_path, **options):
    torch.manual_seed(3)
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        default_root_dir=tmp_path,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=Kept(),
        **options,
    )
    return trainer, torch.utils.data.DataLoader(batches(8), batch_size=None)


@pytest.mark.parametrize("gathered", [1, 2])
def test_lightning_calls_the_monitor_at_every_step_of_the_optimiser(tmp_path, gathered):
    module = Module()
    trainer, data = fit(module, tmp_path, accumulate_grad_batches=gathered)
    monitor = ls.Monitor(module.net, PROBE, every=2, out=tmp_path / "run")
    seen: list[float] = []
    see = monitor.see
    monitor.see = lambda loss: (seen.append(float(loss)), see(loss))[1]  # pyright: ignore
    callback = monitor.attach(trainer)
    assert isinstance(callback, pl.Callback)
    trainer.fit(module, data)
    steps = list(range(0, 8 // gathered + 1, 2))
    assert [*dict.fromkeys(one.step for one in monitor.readings)] == steps
    assert all(one.update_norm for one in monitor.readings if one.step)
    parts = torch.tensor(module.losses).reshape(-1, gathered).mean(1)
    assert seen == pytest.approx(parts.tolist(), rel=1e-5)
    logs = [(at, one) for at, one in trainer.logger.logs if "lipscope/layer1/sigma" in one]
    assert [at for at, _ in logs] == steps
    assert logs[-1][1]["lipscope/layer1/sigma"] == monitor.readings[-1].sigma
    assert (tmp_path / "run" / "rows.parquet").exists()  # closed at the end


def test_lightning_trains_the_same_with_a_monitor_to_the_last_bit(tmp_path):
    plain, watched = Module(), Module()
    for module in (plain, watched):
        trainer, data = fit(module, tmp_path)
        if module is watched:
            ls.Monitor(module.net, PROBE, every=2).attach(trainer)
        trainer.fit(module, data)
    assert plain.losses == watched.losses
    assert all(map(torch.equal, plain.parameters(), watched.parameters()))


def test_what_is_no_trainer_is_refused_in_one_line():
    monitor = ls.Monitor(model(), PROBE)
    with pytest.raises(InputError, match=r"`trainer` should be a Trainer.*Found `list`"):
        monitor.attach([])
