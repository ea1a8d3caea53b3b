"""Steps whose result depends on Lightning's counters, on what callbacks set, or that return something else than a loss."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from tests.zoo.steps_case import Case, Sgd, classifier, cross_entropy, labelled


class Plain(Sgd):
    def __init__(self) -> None:
        super().__init__()
        self.model = classifier()
        self.temperature = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None | dict[str, Any]:
        return cross_entropy(self.model(batch[0]), batch[1])


class CountersBefore(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0] * (1 + self.global_step) + self.current_epoch + 0.1 * batch_idx
        return cross_entropy(self.model(x), batch[1])


class CountersAfter(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = cross_entropy(self.model(batch[0]), batch[1])
        self.log("counters", float(self.global_step + 10 * self.current_epoch + 100 * batch_idx))
        return loss * min(1.0, (self.global_step + 1) / 4) * (1 + batch_idx)


class CounterAsArgument(Plain):
    """A constant argument of the model that changes from step to step."""

    def forward(self, x: Tensor, factor: int) -> Tensor:
        return self.model(x * (1 + factor))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return cross_entropy(self(batch[0], self.global_step), batch[1])


class StepInForward(Plain):
    def forward(self, x: Tensor) -> Tensor:
        h = self.model(x)
        return h * 3 if self.global_step > 1 else h

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return cross_entropy(self(batch[0]), batch[1])


class EpochInForward(StepInForward):
    def forward(self, x: Tensor) -> Tensor:
        return self.model(x) * (1.0 + self.current_epoch)


class TrainerInForward(StepInForward):
    def forward(self, x: Tensor) -> Tensor:
        return self.model(x) * (1.0 + self.trainer.global_step)


class TemperatureAfter(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return cross_entropy(self.model(batch[0]) / self.temperature, batch[1])


class TemperatureInForward(StepInForward):
    def forward(self, x: Tensor) -> Tensor:
        return self.model(x) / self.temperature


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.temperature = classifier(), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) / self.temperature


class TemperatureInSubmodule(Plain):
    """The attribute belongs to the called module."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Block()


class ConfiguredTemperature(StepInForward):
    """The number lives in an object that the module holds."""

    def __init__(self) -> None:
        super().__init__()
        self.options = {"temperature": 1.0}

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x) / self.options["temperature"]


class Anneal(L.Callback):
    """Changes the temperature before each batch."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        temperature = 1.0 / (1 + trainer.global_step)
        pl_module.temperature = temperature
        if isinstance(pl_module.model, Block):
            pl_module.model.temperature = temperature
        if hasattr(pl_module, "options"):
            pl_module.options["temperature"] = temperature


class CountsInStep(Plain):
    """The step itself counts, so one microbatch it must be."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls += 1
        loss = cross_entropy(self.model(batch[0] * self.calls), batch[1])
        self.log("calls", float(self.calls))
        return loss / self.calls


class RemembersLoss(Plain):
    """Set after the model's call and used in the next step's loss: a mean that moves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("moving", torch.tensor(1.0))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = cross_entropy(self.model(batch[0]), batch[1])
        with torch.no_grad():
            self.moving.mul_(0.9).add_(0.1 * loss)
        return loss / self.moving


class UsesResultInHook(Plain):
    """Keeps a result for a hook, as people do since Lightning 2."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = cross_entropy(self.model(batch[0]), batch[1])
        self.last_loss = loss.detach()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("last_loss", self.last_loss)


class CollectsOutputs(Plain):
    """Collects results for the end of the epoch, as Lightning's migration guide says."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = cross_entropy(self.model(batch[0]), batch[1])
        self.outputs.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("epoch_loss", torch.stack(self.outputs).mean())
        self.outputs.clear()


class Curriculum(Plain):
    """What a step sets after the model's call decides what the next one gives to the model."""

    def __init__(self) -> None:
        super().__init__()
        self.difficulty = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = cross_entropy(self.model(batch[0] * self.difficulty), batch[1])
        self.difficulty = 1.0 + loss.item()
        return loss


class ExtraKeys(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        logits = self.model(batch[0])
        return {"loss": cross_entropy(logits, batch[1]), "preds": logits.argmax(1), "name": "train", "count": len(logits)}


class KeepsOutputs(L.Callback):
    """Callbacks get what the step returned."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.is_global_zero:  # the last stage
            assert outputs["preds"].shape == (8,)
            assert outputs["name"] == "train"


class LossOfAPart(Plain):
    """A second head whose result the loss leaves out: its gradient is None, not zero."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.model(x)
        return h, self.head(h)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return cross_entropy(self(batch[0])[0], batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.5)


class SumLoss(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1], reduction="sum") * 0.1


class Regularised(Plain):
    """A penalty on all parameters, in the step: no rank has them all."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = cross_entropy(self.model(batch[0]), batch[1])
        return loss + 1e-2 * sum(p.pow(2).sum() for p in self.parameters())


class LogsWeights(Plain):
    """Logs a weight of the first stage from the last one."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = cross_entropy(self.model(batch[0]), batch[1])
        self.log("norm", self.model[0].weight.norm())
        return loss


class Logs(Plain):
    """``self.log`` in many ways, all of them means, sums or extremes over samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(batch[0])
        each = nn.functional.cross_entropy(logits, batch[1], reduction="none")
        self.log("tensor", each.mean(), on_step=True, on_epoch=True)
        self.log("number", 0.25, on_epoch=True)
        self.log("int", 3)
        self.log("one element", each.mean().reshape(1))
        self.log("sum", each.sum(), reduce_fx="sum", on_step=True, on_epoch=True)
        self.log("max", each.max(), reduce_fx=torch.max, on_epoch=True)
        self.log("min", each.min(), reduce_fx=min, on_epoch=True)
        self.log("epoch only", each.mean(), on_step=False, on_epoch=True, batch_size=len(each))
        self.log_dict({"a/b": each.mean(), "c": (logits.argmax(1) == batch[1]).float().mean()}, prog_bar=True)
        return each.mean()


class LogsBeforeTheCall(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("mean input", batch[0].mean())
        return cross_entropy(self.model(batch[0]), batch[1])


EPOCHS = {"max_epochs": 2}


class KeepsTheLast(Plain):
    """Hooks log what the step has left on the module."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(batch[0])
        loss = cross_entropy(logits, batch[1])
        self.last_loss, self.last_value = loss.detach(), loss.item()
        self.mean, self.hits, self.size = logits.mean(), int((batch[0] > 0).sum()), len(batch[0])
        self.kept = {"logits": logits.detach(), "index": batch_idx}
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.log_dict({"loss": self.last_loss, "value": self.last_value, "mean": self.mean, "hits": float(self.hits)})
        self.log_dict({"size": float(self.size), "norm": self.kept["logits"].norm(), "index": float(self.kept["index"])})


class CountsAndSums(Plain):
    """Attributes that go on from batch to batch."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.samples, self.total, self.correct = 0, 0, 0.0, torch.tensor(0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = cross_entropy(self.model(batch[0]), batch[1])
        self.steps += 1
        self.samples += len(batch[0])
        self.total = self.total + loss.item() * len(batch[0])
        self.correct = self.correct + (batch[0] > 0).sum()
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.log_dict({"steps": float(self.steps), "samples": float(self.samples), "total": self.total})
        self.log("correct", self.correct.float())


class MovingAverage(Plain):
    """Is another with microbatches, and a warning says so."""

    average = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = cross_entropy(self.model(batch[0]), batch[1])
        self.average = 0.5 * self.average + 0.5 * loss.item()
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.log("average", self.average)


CASES: dict[str, Case] = {
    "counters_before": Case(make=CountersBefore, batches=labelled, microbatches=(1, 4), trainer=EPOCHS),
    "counters_after": Case(make=CountersAfter, batches=labelled, microbatches=(1, 4), trainer=EPOCHS),
    "counter_as_argument": Case(make=CounterAsArgument, batches=labelled, microbatches=(2,)),
    "step_in_forward": Case(make=StepInForward, batches=labelled, microbatches=(2,)),
    "epoch_in_forward": Case(make=EpochInForward, batches=labelled, microbatches=(2,), trainer=EPOCHS),
    "trainer_in_forward": Case(make=TrainerInForward, batches=labelled, microbatches=(2,)),
    "temperature_after": Case(make=TemperatureAfter, batches=labelled, microbatches=(4,), callbacks=(Anneal,)),
    "temperature_in_forward": Case(make=TemperatureInForward, batches=labelled, microbatches=(2,), callbacks=(Anneal,)),
    "temperature_in_submodule": Case(make=TemperatureInSubmodule, batches=labelled, microbatches=(2,), callbacks=(Anneal,)),
    "temperature_in_a_dict": Case(make=ConfiguredTemperature, batches=labelled, microbatches=(2,), callbacks=(Anneal,)),
    "counts_in_step": Case(make=CountsInStep, batches=labelled, microbatches=(1,)),
    "remembers_loss": Case(make=RemembersLoss, batches=labelled, microbatches=(1,)),
    "uses_result_in_hook": Case(make=UsesResultInHook, batches=labelled, microbatches=(1,)),
    "collects_outputs": Case(make=CollectsOutputs, batches=labelled, microbatches=(1, 4), trainer=EPOCHS),
    "curriculum": Case(make=Curriculum, batches=labelled, microbatches=(1,)),
    "extra_keys": Case(make=ExtraKeys, batches=labelled, microbatches=(4,), callbacks=(KeepsOutputs,)),
    "loss_of_a_part": Case(make=LossOfAPart, batches=labelled, microbatches=(2,)),
    "sum_loss": Case(make=SumLoss, batches=labelled, microbatches=(1, 2)),
    "regularised": Case(make=Regularised, batches=labelled, microbatches=(1,)),
    "logs_weights": Case(make=LogsWeights, batches=labelled, microbatches=(1,)),
    "logs": Case(make=Logs, batches=lambda: labelled(8, 8, 5), microbatches=(1, 4), trainer=EPOCHS),
    "logs_before_the_call": Case(make=LogsBeforeTheCall, batches=labelled, microbatches=(4,)),
    "keeps_the_last": Case(make=KeepsTheLast, batches=lambda: labelled(8, 8, 5), microbatches=(1, 2, 4)),
    "counts_and_sums": Case(make=CountsAndSums, batches=lambda: labelled(8, 8, 5), microbatches=(1, 2, 4)),
    "moving_average": Case(make=MovingAverage, batches=labelled, microbatches=(1, 2)),
}
