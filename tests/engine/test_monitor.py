"""A monitor reads what `measure` and the attention weights say, disturbs nothing, and tells."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import lipscope as ls
from lipscope import InputError
from tiny import encoder

PROBE = torch.randint(0, 50, (2, 7), generator=torch.Generator().manual_seed(0))
# A run of the Trainer warns of what it finds on the machine.
NOISE = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def model() -> GPT2LMHeadModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = GPT2Config(
            n_embd=12, n_head=3, n_layer=2, n_positions=16, vocab_size=50, bos_token_id=0
        )
        return GPT2LMHeadModel(config).train()


def batches(steps: int) -> list[Tensor]:
    gen = torch.Generator().manual_seed(1)
    return [torch.randint(0, 50, (4, 7), generator=gen) for _ in range(steps)]


def train(net: Any, monitor: ls.Monitor | None, steps: int, rate: float = 0.05) -> list[float]:
    torch.manual_seed(3)  # of the dropout
    optimiser = torch.optim.AdamW(net.parameters(), lr=rate)
    losses = []
    for ids in batches(steps):
        optimiser.zero_grad()
        loss = net(ids, labels=ids).loss
        loss.backward()
        if monitor is None:
            optimiser.step()
        else:
            with monitor.step(loss):
                optimiser.step()
        losses.append(loss.item())
    return losses


def test_a_reading_is_what_measure_and_the_attention_weights_say():
    net: Any = model()
    monitor = ls.Monitor(net, PROBE, every=3)
    train(net, None, 2)
    before = [copy.deepcopy(block.attn.state_dict()) for block in net.transformer.h]
    monitor.start(2)
    optimiser = torch.optim.SGD(net.parameters(), lr=1.0)
    net(PROBE, labels=PROBE).loss.backward()
    with monitor.step():
        optimiser.step()
    found = [one for one in monitor.readings if one.step == 3]
    rows = ls.measure(net, PROBE, tol=1e-4)
    net.set_attn_implementation("eager")
    with torch.no_grad():
        p = torch.stack(net.eval()(PROBE, output_attentions=True).attentions).double()
    for i, one in enumerate(found):
        own = [row for row in rows if row.layer == i]
        assert one.module == own[0].module
        for name in ("sigma", "relative", "top_share"):  # the monitor's tolerance is 1e-2
            expected = max(getattr(row, name) for row in own)
            assert getattr(one, name) == pytest.approx(expected, rel=2e-2)
        assert one.radius == pytest.approx(max(row.radius_max for row in own), rel=1e-5)
        entropy = torch.special.entr(p[i]).sum(-1).mean(2).amin(0)  # of the worst entry, as all
        assert one.entropies == pytest.approx(entropy.tolist(), rel=1e-5)
        assert one.entropy == min(one.entropies)
        sinks = p[i].mean(2).amax(-1).amax(0)
        assert one.sinks == pytest.approx(sinks.tolist(), rel=1e-5)
        assert one.sink_mass == max(one.sinks)
        now = net.transformer.h[i].attn.state_dict()
        moved = sum(float((now[k] - before[i][k]).square().sum()) for k in now)
        size = sum(float(now[k].square().sum()) for k in now)
        assert one.update_norm == pytest.approx(moved**0.5, rel=1e-4)
        assert one.weight_norm == pytest.approx(size**0.5, rel=1e-5)


def test_the_largest_logit_of_a_head_is_over_the_pairs_that_see_each_other():
    torch.manual_seed(0)
    q, k, v = (torch.randn(6, 6) for _ in range(3))
    layer, x = ls.DotProduct(q, k, v, heads=2, causal=True), torch.randn(5, 6)
    from lipscope.control import largest_logits

    found = largest_logits(layer, x)
    for h in (0, 1):
        part = slice(3 * h, 3 * h + 3)
        s = (x @ q[part].T) @ (x @ k[part].T).T / 3**0.5
        expected = max(float(s[i, j]) for i in range(5) for j in range(i + 1))
        assert float(found[h]) == pytest.approx(expected, rel=1e-5)


def test_training_is_the_same_with_a_monitor_to_the_last_bit():
    plain, watched = model(), model()
    monitor = ls.Monitor(watched, PROBE, every=2)
    assert train(plain, None, 6) == train(watched, monitor, 6)
    pairs = zip(plain.parameters(), watched.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert watched.training and all(p.requires_grad for p in watched.parameters())
    assert [one.step for one in monitor.readings] == [0, 0, 2, 2, 4, 4, 6, 6]


def test_a_run_folder_is_shown_while_training_goes_on(tmp_path):
    net, said = model(), []
    out = tmp_path / "run"
    monitor = ls.Monitor(net, PROBE, every=2, out=out, log=said.append)
    train(net, monitor, 4)
    run = ls.read_run(out)  # not closed yet
    assert sorted({*run.rows["step"]}) == [0, 2, 4]
    assert run.values("monitor")["update_norm"].null_count() == 2  # at step 0
    page = tmp_path / "page.html"
    ls.report([out], page)
    assert "GPT2LMHeadModel during training" in page.read_text(encoding="utf-8")
    assert [one["lipscope/step"] for one in said] == [0.0, 2.0, 4.0]
    assert said[2]["lipscope/layer1/sigma"] == monitor.readings[-1].sigma
    monitor.close()
    assert len(ls.read_run(out).rows) == 12  # two entries, two layers, three steps
    # Another training in the same folder is another curve.
    again = model()
    with ls.Monitor(again, PROBE, every=2, out=out) as second:
        train(again, second, 2, rate=0.1)
    names = {*ls.read_run(out).rows["model"]}
    assert names > {"GPT2LMHeadModel@0", "GPT2LMHeadModel@2", "GPT2LMHeadModel#2@2"}
    with pytest.raises(InputError, match="another"):
        ls.Monitor(again, PROBE, every=5, out=out)


def test_a_module_that_was_replaced_has_no_update_norm():
    model = encoder()
    monitor = ls.Monitor(model, torch.randn(1, 5, 8), every=1)
    with monitor.step():
        pass
    assert all(one.update_norm == 0 for one in monitor.readings[-2:])
    with monitor.step():
        model.layers[0].self_attn = nn.MultiheadAttention(8, 4, bias=False, batch_first=True)
    assert [one.update_norm for one in monitor.readings[-2:]] == [None, 0]
    assert monitor.readings[-2].sigma != monitor.readings[-4].sigma


def test_an_update_in_float64_is_measured_in_float64():
    net = encoder().double()
    monitor = ls.Monitor(net, torch.randn(1, 5, 8).double(), every=1)
    with monitor.step(), torch.no_grad():
        for weight in net.parameters():
            weight.add_(1e-10)
    for one in monitor.readings[-2:]:
        count = sum(p.numel() for p in net.layers[one.layer].self_attn.parameters())
        assert one.update_norm == pytest.approx(1e-10 * count**0.5, rel=1e-4)


def test_an_alert_names_layer_and_signal(caplog):
    net: Any = model()
    monitor = ls.Monitor(net, PROBE, every=1)
    train(net, monitor, 12, rate=1e-4)
    assert not monitor.alerts
    usual = [one.sigma or 0.0 for one in monitor.readings if one.layer == 1]
    with torch.no_grad():
        net.transformer.h[1].attn.c_proj.weight.mul_(5.0)
    train(net, monitor, 3, rate=1e-4)  # alerted once, though it stays that large
    (one,) = [one for one in monitor.alerts if one.signal == "sigma"]
    assert (one.step, one.layer, one.also) == (13, 1, ())
    assert (one.low, one.high) == (min(usual), max(usual))
    assert one.excess == pytest.approx(5.0, rel=0.05)
    said = "`sigma` of layer 1 (transformer.h.1.attn) is"
    (line,) = [text for text in caplog.messages if said in text]
    assert f"usually {one.low:.4g} to {one.high:.4g}. Look at the learning rate" in line
    assert len([text for text in caplog.messages if text.startswith("Step")]) <= 5
    monitor.close()
    assert f"16 readings, steps 0 to 15; {len(monitor.alerts)} alert" in caplog.messages[-1]


def test_a_loss_far_above_the_others_raises_an_alert():
    net = model()
    monitor = ls.Monitor(net, PROBE, every=1)
    for i in range(20):
        monitor.see(1.0 + 0.01 * (i % 2))
    monitor.see(1.1)  # 1.005 is the mean, 0.005 the deviation
    (one,) = monitor.alerts  # at once, not at the next reading
    assert (one.layer, one.signal) == (None, "loss")
    assert one.excess == pytest.approx(19.0)


def test_a_loss_among_equal_or_enormous_ones_has_no_score_of_others():
    monitor = ls.Monitor(model(), PROBE, every=1)
    for value in [1.0, 2.0] * 6:
        monitor.see(value)
    assert monitor._alarm.z_score == pytest.approx(6 / 30**0.5)
    for value in [3.0] * 101:
        monitor.see(value)
    assert monitor._alarm.z_score is None
    for value in [1e308] * 101:  # their sum is no number
        monitor.see(value)
    assert monitor._alarm.z_score is None


def test_a_loss_that_is_no_number_names_the_layer_that_went_furthest():
    net: Any = model()
    monitor = ls.Monitor(net, PROBE, every=1)
    train(net, monitor, 1, rate=1e-3)
    with torch.no_grad():
        net.transformer.h[1].attn.c_proj.weight.mul_(30.0)
    monitor.read()
    layer = r"sigma of layer 1 \(transformer\.h\.1\.attn\) changed"
    words = rf"finite loss\. Found nan at step 1; {layer}"
    with pytest.raises(InputError, match=words):
        monitor.see(float("nan"))
    with pytest.raises(InputError, match=r"`loss` should be one number\. Found `\(4,\)`"):
        monitor.see(torch.ones(4))
    with torch.no_grad():
        net.transformer.h[0].attn.c_proj.weight.fill_(float("inf"))
    with pytest.raises(InputError, match=r"Step 1: The weights should be finite.*sigma of layer 1"):
        monitor.read()


def test_a_loss_that_is_no_number_ends_the_run_and_names_no_layer_after_one_reading(tmp_path):
    monitor = ls.Monitor(model(), PROBE, every=5, out=tmp_path / "run")
    monitor.read()
    with pytest.raises(InputError, match=r"Found nan at step 0\.$"):
        monitor.see(float("nan"))
    with ls.Monitor(model(), PROBE, every=5, out=tmp_path / "run") as again:  # the folder is free
        again.read()


def test_a_loss_that_is_no_number_stops_before_the_weights_move():
    net: Any = model()
    monitor = ls.Monitor(net, PROBE, every=5)
    with (
        pytest.raises(InputError, match=r"finite loss\. Found nan at step 1"),
        monitor.step(torch.tensor(float("nan"))),
    ):
        pytest.fail("the optimiser would step")


def test_training_begins_at_a_number(unchecked):
    with pytest.raises(InputError, match="`step` should be a whole number, not negative"):
        ls.Monitor(model(), PROBE).start("40")


def test_a_layer_of_an_unknown_kind_has_no_logits_but_all_the_rest():
    from tiny import tiny

    ids = torch.randint(3, 300, (1, 6))
    (one, _) = ls.Monitor(tiny("olmo").model, ids).read()
    assert one.largest_logit is None and one.entropy is None
    assert one.sigma and one.relative and one.weight_norm
    padded = {"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0]])}
    (one, _) = ls.Monitor(tiny("bert").model, padded).read()
    assert one.largest_logit is None and one.sigma


def test_mistakes_are_one_line(unchecked):
    net, words = model(), "It was late."
    for message, data, options in (
        (r"`every` should be", PROBE, {"every": 0}),
        (r"`alert` should be above 1\. Found `alert = 1`", PROBE, {"alert": 1}),
        (r"`log` should be a function", PROBE, {"log": "wandb"}),
        (r"`data` should be a batch.*Found `str`", words, {}),
        (r"`layers` should be between 0 and 1.*Found 9", PROBE, {"layers": [9]}),
        (r"`modules` should match", PROBE, {"modules": "nothing"}),
        (r"`map` should be one of layers", PROBE, {"map": "model"}),
    ):
        with pytest.raises(InputError, match=message):
            ls.Monitor(net, data, **options).read()


def test_a_signal_is_told_once_until_it_was_calm_and_another_layer_if_it_goes_further():
    from lipscope.control.alarm import CALM, Alarm, Reading

    def reading(step: int, layer: int, sigma: float) -> Reading:
        rest = dict.fromkeys(
            ("relative", "top_share", "radius", "largest_logit", "entropy", "sink_mass")
        )
        return Reading(step, layer, f"h.{layer}", sigma, **rest, weight_norm=1.0, update_norm=None)

    alarm = Alarm(1.5)
    sigmas = [(1.0, 1.0)] * 3 + [(9.0, 1.0)]  # in the first ten readings ten times is what counts
    sigmas += [(1.0, 1.0)] * 16 + [(2.0, 1.6), (4.0, 1.0), (1.0, 9.0), (1.0, 30.0)]
    sigmas += [(1.0, 1.0)] * CALM + [(2.0, 1.0)]
    told = [
        (step, one.layer, one.also, one.excess)
        for step, pair in enumerate(sigmas)
        for one in alarm.signals([reading(step, i, sigma) for i, sigma in enumerate(pair)])
    ]
    last = len(sigmas) - 1
    assert told == [(20, 0, (1,), 2.0), (last, 0, (), 2.0)]
    alone = Alarm(1.5)
    some = [1.0] * 15 + [2.0, 1.0]
    for step, sigma in enumerate(some):
        alone.signals([reading(step, 0, sigma), reading(step, 1, 1.0)])
    (one,) = alone.signals([reading(17, 0, 2.0), reading(17, 1, 5.0)])
    assert (one.layer, one.excess) == (1, 5.0)  # twice as far as layer 0 went


def test_a_run_has_five_alerts_at_most_and_the_summary_counts_the_others():
    from lipscope.control.alarm import CALM, Alarm

    alarm = Alarm()
    told = 0
    for k in range(7):
        for i in range(100 if not k else 3 * CALM):
            assert not alarm.loss(i, 1.0 + 0.01 * (i % 2))
        told += len(alarm.loss(100, 100.0 ** (k + 1)))
    assert told == len(alarm.alerts) == 5
    words = "5 alerts (`loss` 5), the first at step 100: `loss`; 2 more suppressed (`loss` 2)"
    assert alarm.summary() == words
    # Before there are ten losses, one that is far beyond all of them raises an alert.
    early = Alarm()
    assert not early.loss(1, 5.37)
    (one,) = early.loss(2, 119.5)
    assert str(one).startswith(
        "Step 2: the loss is 119.5, 22.25 times the largest before; usually 5.37 to 5.37. Look at"
    )


def test_a_layer_that_float32_cannot_measure_is_measured_in_float64(tmp_path, caplog):
    net: Any = model()
    monitor = ls.Monitor(net, PROBE, every=1, out=tmp_path / "run")
    train(net, monitor, 1, rate=1e-3)
    with torch.no_grad():
        # What queries and keys have in common: large scores, whose differences are rounded away.
        net.transformer.h[1].attn.c_attn.bias[:24] = 1e3
    (first, second) = monitor.read()
    assert first.problem is None
    assert second.problem and "cannot be measured in float32" in second.problem
    rows = ls.measure(net, PROBE, dtype="float64", tol=1e-4)
    expected = max(row.sigma or 0.0 for row in rows if row.layer == 1)
    assert second.sigma == pytest.approx(expected, rel=2e-2)
    (alert,) = [one for one in monitor.alerts if one.signal == "measured"]
    assert alert.layer == 1
    assert any(
        "layer 1 (transformer.h.1.attn) cannot be measured in float32" in m for m in caplog.messages
    )
    kept = ls.read_run(tmp_path / "run").values("alerts")
    assert kept["signal"].to_list() == [one.signal for one in monitor.alerts]


def test_what_needs_no_jacobian_is_read_of_a_layer_that_nothing_can_measure(monkeypatch):
    from lipscope.engine.session import Session

    net, at = model(), Session.at
    monitor = ls.Monitor(net, PROBE, every=1)
    train(net, monitor, 1, rate=1e-3)

    def broken(self, job):
        if job.layer == 0:
            raise InputError("The derivative should be finite. Found none.")
        return at(self, job)

    monkeypatch.setattr(Session, "at", broken)
    usual = monitor.readings[-2]
    (first, second) = monitor.read()
    assert first.sigma is None and second.sigma is not None
    for name in ("largest_logit", "entropy", "sink_mass", "radius", "weight_norm"):
        assert getattr(first, name) == pytest.approx(getattr(usual, name), rel=1e-6)
    (alert,) = monitor.alerts
    assert (alert.signal, alert.layer) == ("measured", 0)
    assert "layer 0 (transformer.h.0.attn) cannot be measured (The derivative" in str(alert)


# --- the Trainer


class Steps(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        ids = torch.randint(0, 50, (7,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids}


class Heard(TrainerCallback):
    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args, state, control, logs=None, **more):
        self.logs.append(dict(logs or {}))


def trainer(net: nn.Module, out: Path, **options: Any) -> Trainer:
    arguments = TrainingArguments(
        str(out),
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **{"max_steps": 6, "logging_steps": 1, "save_strategy": "no"} | options,
    )
    return Trainer(net, arguments, train_dataset=Steps())


@NOISE
@pytest.mark.parametrize("bf16", [False, True])
def test_a_trainer_logs_the_readings_to_its_own_loggers(tmp_path, bf16):
    net = model()
    run = trainer(net, tmp_path, bf16=bf16, gradient_accumulation_steps=2, learning_rate=1e-3)
    heard = Heard()
    run.add_callback(heard)
    monitor = ls.Monitor(net, PROBE, every=2, out=tmp_path / "run")
    monitor.attach(run)
    run.train()
    steps = [one["step"] for one in run.state.log_history if "lipscope/layer0/sigma" in one]
    assert steps == [0, 2, 4, 6]
    assert [one for one in heard.logs if "lipscope/layer1/entropy" in one]
    assert sorted({*ls.read_run(tmp_path / "run").rows["step"]}) == [0, 2, 4, 6]
    updates = [one.update_norm for one in monitor.readings if one.step == 2]
    assert all(one is not None and one > 0 for one in updates)
    assert monitor._alarm.z_score is None  # six losses are too few
    assert (tmp_path / "run" / "rows.parquet").exists()  # closed at the end


class Mean(nn.Module):
    """A model whose loss is a mean: it takes no number of items in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model()

    def forward(self, input_ids, labels=None):
        return {"loss": self.inner(input_ids, labels=labels).loss}


@NOISE
@pytest.mark.parametrize("kind", [model, Mean])
@pytest.mark.parametrize("gathered", [2, 5])  # of six batches: the last step has fewer
def test_a_trainer_logs_its_own_losses_where_the_monitor_logs_too(tmp_path, kind, gathered):
    net = kind()
    run = trainer(net, tmp_path, gradient_accumulation_steps=gathered)
    monitor = ls.Monitor(net, PROBE, every=1)
    seen: list[float] = []
    see = monitor.see
    monitor.see = lambda loss: (seen.append(float(loss)), see(loss))[1]  # pyright: ignore
    monitor.attach(run)
    run.train()
    logged = [one["loss"] for one in run.state.log_history if "loss" in one]
    assert len(logged) == 6
    assert seen == pytest.approx(logged, rel=1e-4)  # as rounded in the log


@NOISE
@pytest.mark.parametrize("every", [1, 10])
def test_a_trainer_run_at_a_rate_that_diverges_keeps_its_readings_and_alerts(tmp_path, every):
    net = model()
    steps = {"max_steps": 20, "logging_steps": 500, "learning_rate": 3.0}
    run = trainer(net, tmp_path, **steps, lr_scheduler_type="constant")
    monitor = ls.Monitor(net, PROBE, every=every)
    monitor.attach(run)
    run.train()
    assert len(monitor.readings) == 2 * (20 // every + 1)
    assert all(one.sigma is not None for one in monitor.readings)
    assert 1 <= len(monitor.alerts) <= 5
    assert "loss" in {one.signal for one in monitor.alerts}  # which the Trainer never logged


@NOISE
def test_a_trainer_run_whose_loss_is_no_number_stops_in_one_line(tmp_path):
    net: Any = model()
    run = trainer(net, tmp_path, learning_rate=1e-3)

    class Break(TrainerCallback):
        def on_step_end(self, args, state, control, **more):
            if state.global_step == 3:
                with torch.no_grad():
                    net.lm_head.weight.fill_(float("nan"))

    run.add_callback(Break())
    ls.Monitor(net, PROBE, every=2).attach(run)
    with pytest.raises(InputError, match=r"nan at step 4.*sigma of layer \d|Step 4: The weights"):
        run.train()
    assert not net._forward_hooks


@NOISE
def test_a_trainer_is_attached_to_once_and_trains_the_model_of_the_monitor(tmp_path):
    run = trainer(model(), tmp_path)
    monitor = ls.Monitor(model(), PROBE, every=2)
    monitor.attach(run)
    with pytest.raises(InputError, match=r"once per Trainer\. Found a second call"):
        monitor.attach(run)  # steps would count twice
    with pytest.raises(InputError, match=r"Found another `GPT2LMHeadModel`; give"):
        run.train()


@NOISE
def test_a_run_that_goes_on_from_a_checkpoint_counts_on(tmp_path):
    net = model()
    first = trainer(net, tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    first.train()
    net = model()
    second = trainer(net, tmp_path, max_steps=6)
    monitor = ls.Monitor(net, PROBE, every=2)
    monitor.attach(second)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [*dict.fromkeys(one.step for one in monitor.readings)] == [2, 4, 6]
