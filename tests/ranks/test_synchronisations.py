"""How often a training step makes the host wait for its device; docs/benchmarks.md has the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MaxMetric, MeanMetric

from lightning_fxpipe import FxPipeStrategy
from lightning_fxpipe._compat.torch import patched_attributes
from lightning_fxpipe.runtime.region_pass import StageRun
from tests.lit import make_trainer
from tests.ranks.pool import RankPool
from tests.ranks.synchronisations import DEVICE, counted, renamed_device

Ranks = Callable[[int], RankPool]

# --------------------------------------------------------------------------- what counts

X, MASK = torch.arange(3.0), torch.tensor([True, False, True])

WAITS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.sum()),
    "int": lambda x: int(x.sum()),
    "bool": lambda x: bool(x.sum()),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "numpy": lambda x: x.numpy(),
    "to the host": lambda x: x.to("cpu"),
    "to where a tensor of the host is": lambda x: x.to(X),
    "a copy to the host": lambda x: torch.zeros(3).copy_(x),
    "a copy to the device": lambda x: x.copy_(X),
    "to the device": lambda x: X.to(x.device),
    "a tensor made of a number": lambda x: torch.tensor(1.0, device=DEVICE),
    "equal": lambda x: torch.equal(x, x),
    "nonzero": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 0],
    "a mask of the host": lambda x: x[MASK],
    "what an operator makes": lambda x: torch.zeros_like(x).add(1).max().item(),
    "a view": lambda x: x.view(3, 1)[0].item(),
    "a gradient": lambda x: torch.autograd.grad((w := x.detach().requires_grad_()).sum(), w)[0].sum().item(),
}
GOES_ON: dict[str, Callable[[Tensor], Any]] = {
    "arithmetic": lambda x: (x * 2 + 1).sum().sqrt(),
    "a tensor filled with a number": lambda x: torch.full((), 1.0, device=DEVICE),
    "filled with a number of the host": lambda x: x.fill_(torch.tensor(2.0)),
    "to where it is": lambda x: x.to(DEVICE),
    "another dtype": lambda x: x.to(torch.float64),
    "to the device, without waiting": lambda x: X.to(DEVICE, non_blocking=True),
    "a value of the host": lambda x: X.sum().item(),
}


@pytest.mark.parametrize("code", WAITS.values(), ids=WAITS)
def test_what_waits_for_the_device_is_noted(code: Callable[[Tensor], Any]) -> None:
    with renamed_device() as device:
        x = torch.arange(3.0, device=DEVICE)
        code(x)
    (noted,) = device.batches[0]
    assert noted.where.startswith("user test_synchronisations.py")


@pytest.mark.parametrize("code", GOES_ON.values(), ids=GOES_ON)
def test_what_does_not_wait_is_not_noted(code: Callable[[Tensor], Any]) -> None:
    with renamed_device() as device:
        x = torch.arange(3.0, device=DEVICE)
        code(x)
    assert device.batches == [[]]


def test_tensors_of_two_devices_are_an_error_as_on_a_cuda_device() -> None:
    with renamed_device(), pytest.raises(RuntimeError, match="add gets tensors of the device and of the host"):
        torch.arange(3.0, device=DEVICE) + X


# --------------------------------------------------------------------------- steps

EPOCH = {"on_step": False, "on_epoch": True}


class Net(L.LightningModule):
    """Logs what it is told to."""

    def __init__(self, logged: dict[str, dict[str, Any]]) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.logged = logged
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(5)), nn.Linear(12, 5))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        for name, options in self.logged.items():
            self.log(name, (logits.argmax(1) == batch[1]).float().mean() if name == "accuracy" else loss, **options)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Counting(Net):
    """Counts with torchmetrics, and keeps a tensor."""

    def __init__(self, logged: dict[str, dict[str, Any]]) -> None:
        super().__init__(logged)
        self.mean, self.largest = MeanMetric(), MaxMetric()
        self.last: Tensor | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.mean(loss)
        self.largest(loss)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.last = loss.detach()
        return loss


class Tied(Net):
    """The first and the last but one layer have the same weight, which two stages hold."""

    def __init__(self, logged: dict[str, dict[str, Any]]) -> None:
        super().__init__(logged)
        self.model.insert(5, nn.Linear(12, 12))
        self.model[5].weight = self.model[0][0].weight


def fit(
    stages: int,
    logged: dict[str, dict[str, Any]] | None = None,
    module: str = "Net",
    options: dict[str, Any] | None = None,
    scaled: bool = False,
    **strategy: Any,
) -> list[dict[str, int]]:
    """Trains eight batches; what the host has waited for in each, after what it did before the first."""
    L.seed_everything(3, verbose=False)
    samples = torch.randn(64, 12, generator=torch.Generator().manual_seed(4))
    loader = DataLoader(TensorDataset(samples, torch.arange(64) % 5), batch_size=8)
    pipeline = {"strategy": FxPipeStrategy(num_microbatches=4, **strategy), "devices": stages}
    place = pipeline if stages else {"strategy": SingleDeviceStrategy(DEVICE)}
    if scaled:
        place["plugins"] = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]
    with renamed_device() as device:
        make_trainer(max_epochs=1, **(options or {}), **place).fit(globals()[module](logged or {}), loader)
    return [counted(batch) for batch in device.batches]


class Hooked(Net):
    """Logs in a hook, too."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log_dict({"twice": outputs["loss"] * 2, "thrice": outputs["loss"] * 3}, **EPOCH)


def weigh(batch: Any) -> Tensor:
    """As a number of tokens, which is known on the device only."""
    return torch.ones_like(batch[1]).sum()


# What a step is, and how often the host may wait in one: on the last stage's rank, and on each other.
CASES: dict[str, tuple[dict[str, Any], int, int]] = {
    "nothing logged": ({}, 1, 0),
    "a mean over the epoch logged": ({"logged": {"loss": EPOCH}}, 1, 0),
    "two means logged": ({"logged": {"loss": EPOCH, "accuracy": EPOCH}}, 1, 0),
    # Lightning reads what the progress bar shows, on one device, too.
    "a progress bar": ({"logged": {"loss": {"prog_bar": True, "on_step": True}}}, 2, 1),
    "accumulation": ({"options": {"accumulate_grad_batches": 2}}, 1, 0),
    "clipping": ({"options": {"gradient_clip_val": 0.1}}, 1, 0),
    "a weight of two stages": ({"module": "Tied"}, 1, 0),
    # torch's scaler asks before it steps, on one device, too; 1F1B asks for the scale, and for a gradient that is scaled.
    "a time limit": ({"options": {"max_time": "00:01:00:00"}}, 1, 0),
    # Whether a hook logs the same on all ranks is asked for each call.
    "two values logged in a hook": ({"module": "Hooked"}, 2, 1),
    "a scaled loss": ({"scaled": True}, 2, 1),
    # Metrics' states go together, a tensor that the step keeps by itself; MeanMetric and MaxMetric ask for nan, six times.
    "metrics and an attribute": ({"module": "Counting"}, 3 + 6, 0),
}


def fit_all(stages: int, names: list[str], **strategy: Any) -> list[dict[str, int]]:
    """For each case what the host has waited for in the last batch but one."""
    return [fit(stages, **CASES[name][0], **strategy)[-2] for name in names]


@pytest.mark.parametrize(("schedule", "stages"), [("gpipe", 2), ("1f1b", 2), pytest.param("1f1b", 3, marks=pytest.mark.slow)])
def test_a_step_waits_once_on_the_last_stage_and_never_on_the_others(ranks: Ranks, schedule: str, stages: int) -> None:
    results = ranks(stages).run(fit_all, stages, list(CASES), schedule=schedule, timeout_seconds=200)
    # A metric asks once for each microbatch, too, when 1F1B runs the rest of the step on them.
    more = {"a scaled loss": 2, "metrics and an attribute": 4 * 6} if schedule == "1f1b" else {}
    for rank, found in enumerate(results):
        for (name, (_, on_last, elsewhere)), waits in zip(CASES.items(), found, strict=True):
            limit = elsewhere if rank else on_last + more.get(name, 0)
            assert sum(waits.values()) == limit, f"{name}, rank {rank}: {waits}"


def fit_reading(stages: int) -> list[dict[str, int]]:
    """As :func:`fit`, with a stage that reads a value of each microbatch."""
    compute = StageRun.compute

    def reading(*args: Any, **kwargs: Any) -> Any:
        outputs, state = compute(*args, **kwargs)
        outputs[0].sum().item()
        return outputs, state

    with patched_attributes((StageRun, "compute", reading)):
        return fit(stages)


def test_a_value_that_a_stage_reads_is_noted(ranks: Ranks) -> None:
    expected = [1, 0]
    for waits, without in zip(ranks(2).run(fit_reading, 2), expected, strict=True):
        assert sum(waits[-2].values()) == without + 4


def test_weights_of_microbatches_are_read_at_once(ranks: Ranks) -> None:
    found = ranks(2).run(fit, 2, schedule="1f1b", loss_weight=weigh)
    assert [sum(waits[-2].values()) for waits in found] == [2, 0]
