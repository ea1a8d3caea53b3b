"""LightningModules that log in many ways, and what is recorded of a run to compare it with one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torchmetrics import (
    AUROC,
    Accuracy,
    CatMetric,
    ConfusionMatrix,
    F1Score,
    MaxMetric,
    MeanMetric,
    Metric,
    MetricCollection,
    Precision,
    Recall,
    SumMetric,
)
from torchmetrics.aggregation import RunningMean
from torchmetrics.text import Perplexity
from torchmetrics.wrappers import ClasswiseWrapper, MetricTracker, MinMaxMetric

from tests.inmemory import Experiment

CLASSES = 4
KIND: dict[str, Any] = {"task": "multiclass", "num_classes": CLASSES}
MACRO = {**KIND, "average": "macro"}


class Base(L.LightningModule):
    """A classifier; its variants log."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, CLASSES))
        self.make_metrics()

    def make_metrics(self) -> None:
        """Sets the metrics."""

    def common(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, logits and labels."""
        x, y = batch
        logits = self.model(x)
        return nn.functional.cross_entropy(logits, y), logits, y

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, _, _ = self.common(batch)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.model(batch[0])

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.validation_step(batch, batch_idx, dataloader_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)


class Options(Base):
    """Numbers and tensors with the options of ``self.log``."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, logits, y = self.common(batch)
        correct = (logits.argmax(1) == y).float()
        self.log("default", loss)
        self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("epoch", correct.mean(), on_step=False, on_epoch=True)
        self.log("quiet", correct.mean(), logger=False, prog_bar=True)
        self.log("sum", correct.sum(), reduce_fx="SUM", on_epoch=True)
        self.log("max", logits.max(), reduce_fx=max, on_epoch=True, on_step=True)
        self.log("min", logits.min(), reduce_fx=torch.min, on_epoch=True, sync_dist=True)
        self.log("weighted", loss, batch_size=len(y) * 3, on_epoch=True)
        self.log("rank_zero", correct.mean(), rank_zero_only=True)
        self.log("double", loss.double(), on_epoch=True)
        self.log("graph", loss * 2, enable_graph=True)
        self.log_dict({"python": 3, "float": 2.5, "tensor": correct.mean()}, on_epoch=True, on_step=False)
        return {"loss": loss, "mean": correct.mean(), "labels": y}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        loss, logits, y = self.common(batch)
        self.log("v_loss", loss)
        self.log("v_step", loss, on_step=True, on_epoch=True)
        self.log("v_only_step", loss, on_step=True, on_epoch=False)
        self.log("v_bar", (logits.argmax(1) == y).float().mean(), prog_bar=True, add_dataloader_idx=dataloader_idx > 5)
        return {"logits": logits}


class Objects(Base):
    """Metrics logged as objects."""

    def make_metrics(self) -> None:
        self.train_f1 = F1Score(**MACRO)
        self.train_acc = Accuracy(**KIND)
        self.val = nn.ModuleDict({"f1": F1Score(**MACRO), "auroc": AUROC(**KIND)})
        self.mean_loss = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, logits, y = self.common(batch)
        self.train_f1(logits, y)
        self.log("f1", self.train_f1, on_step=True, on_epoch=True, prog_bar=True)
        self.train_acc.update(logits, y)
        self.log("acc", self.train_acc, on_step=False, on_epoch=True)
        self.mean_loss(loss)
        self.log("mean_loss", self.mean_loss, on_step=True, on_epoch=True, metric_attribute="mean_loss")
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        loss, logits, y = self.common(batch)
        self.val["f1"](logits, y)
        self.val["auroc"].update(logits.softmax(1), y)
        self.log("v_f1", self.val["f1"], prog_bar=True)
        self.log_dict({"v_auroc": self.val["auroc"], "v_loss": loss})


class Values(Base):
    """What metrics give, logged as values, and what is computed from them."""

    def make_metrics(self) -> None:
        self.f1 = F1Score(**MACRO)
        self.v_f1 = F1Score(**MACRO)
        self.running = F1Score(**MACRO)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, logits, y = self.common(batch)
        value = self.f1(logits, y)
        self.log("f1", value, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict(
            {"error": 1 - value, "item": value.item(), "float": float(value), "percent": (100 * value).detach().cpu()}
        )
        self.running.update(logits, y)
        self.log("so_far", self.running.compute())
        self.last = value
        return {"loss": loss, "f1": value}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        _, logits, y = self.common(batch)
        value = self.v_f1(logits, y)
        self.log("v_f1", value)
        self.log("v_error", 1 - value, on_step=True, on_epoch=True)
        return {"f1": value, "logits": logits}

    def on_train_epoch_end(self) -> None:
        self.log("epoch_f1", self.f1.compute())
        self.log("last", self.last)
        self.f1.reset()
        self.running.reset()

    def on_validation_epoch_end(self) -> None:
        self.log("v_epoch_f1", self.v_f1.compute(), prog_bar=True)
        self.v_f1.reset()


class Collections(Base):
    """MetricCollections, with compute groups and prefixes."""

    def make_metrics(self) -> None:
        metrics = MetricCollection(
            {"p": Precision(**MACRO), "r": Recall(**MACRO), "acc": Accuracy(**KIND), "auroc": AUROC(**KIND)}
        )
        self.train_metrics = metrics.clone(prefix="train/")
        self.val_metrics = metrics.clone(prefix="val/")
        self.object_metrics = MetricCollection([Precision(**MACRO), F1Score(**MACRO)], prefix="object/", postfix="_x")
        self.separate = MetricCollection([Precision(**MACRO), Recall(**MACRO)], prefix="separate/", compute_groups=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, logits, y = self.common(batch)
        self.log_dict(self.train_metrics(logits.softmax(1), y), on_step=True, on_epoch=True)
        self.object_metrics.update(logits, target=y)
        self.log_dict(self.object_metrics, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        _, logits, y = self.common(batch)
        self.val_metrics.update(logits.softmax(1), y)
        self.separate(logits, y)
        self.log_dict(self.separate)

    def on_train_epoch_end(self) -> None:
        self.log_dict({f"epoch_{name}": value for name, value in self.train_metrics.compute().items()})
        self.train_metrics.reset()

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.val_metrics.compute())
        self.val_metrics.reset()


class Aggregates(Base):
    """Metrics that count their updates, and numbers given to them."""

    def make_metrics(self) -> None:
        self.mean, self.weighted, self.total = MeanMetric(), MeanMetric(), SumMetric()
        self.largest, self.all, self.count = MaxMetric(), CatMetric(), SumMetric()
        self.running = RunningMean(window=3)
        self.own = Ratio()
        self.correct = Ratio()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, logits, y = self.common(batch)
        correct = logits.argmax(1) == y
        self.mean.update(loss)
        self.weighted.update(loss, len(y))
        self.total.update(correct.sum())
        self.count.update(0.5)
        self.largest(loss)
        self.log("running", self.running(loss))
        self.log("largest", self.largest, on_step=True, on_epoch=True)
        self.own(correct.sum(), y.numel())
        self.log("own", self.own, on_step=True, on_epoch=True)
        self.correct(loss.detach() * len(y), len(y))
        self.log("ratio", self.correct, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        _, logits, y = self.common(batch)
        self.all.update(nn.functional.cross_entropy(logits, y, reduction="none"))
        self.own.update(int((logits.argmax(1) == y).sum()), len(y))

    def on_train_epoch_end(self) -> None:
        for name in ("mean", "weighted", "total", "count"):
            self.log(f"epoch_{name}", getattr(self, name).compute())
            getattr(self, name).reset()

    def on_validation_epoch_end(self) -> None:
        values = self.all.compute()
        self.log_dict(
            {"all_first": values[0], "all_std": values.std(), "all_num": float(values.numel()), "own": self.own.compute()}
        )
        self.all.reset()
        self.own.reset()


class Ratio(Metric):
    """A user's own metric: a sum and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("number", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("of", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, number: Any, of: Any) -> None:
        self.number += number
        self.of += of

    def compute(self) -> Tensor:
        return self.number / self.of


class Wrapped(Base):
    """Wrappers, metrics in plain containers, a confusion matrix in a hook, perplexity."""

    def make_metrics(self) -> None:
        self.minmax = MinMaxMetric(Accuracy(**KIND))
        self.classwise = ClasswiseWrapper(F1Score(**KIND, average=None))
        self.tracker = MetricTracker(MetricCollection([F1Score(**MACRO), Accuracy(**KIND)]), maximize=[True, True])
        self.listed = [F1Score(**MACRO), Accuracy(**KIND)]
        self.named = {"a": {"b": F1Score(**MACRO)}}
        self.confusion = ConfusionMatrix(**KIND)
        self.perplexity = Perplexity()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, logits, y = self.common(batch)
        self.log_dict({f"minmax_{k}": v for k, v in self.minmax(logits, y).items()})
        self.log("listed", self.listed[0](logits, y), on_step=True, on_epoch=True)
        self.listed[1].update(logits, y)
        return loss

    def on_validation_epoch_start(self) -> None:
        self.tracker.increment()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        _, logits, y = self.common(batch)
        self.log_dict(self.classwise(logits, y))
        self.tracker.update(logits, y)
        self.named["a"]["b"].update(logits, y)
        self.confusion.update(logits, y)
        self.perplexity.update(logits[:, None, :], y[:, None])
        self.log("perplexity", self.perplexity)

    def on_train_epoch_end(self) -> None:
        self.log("listed_epoch", self.listed[0].compute())
        self.log("listed_acc", self.listed[1].compute())
        for metric in self.listed:
            metric.reset()

    def on_validation_epoch_end(self) -> None:
        matrix = self.confusion.compute()
        self.log_dict({f"confusion_{i}": float(matrix[i, i]) for i in range(CLASSES)})
        self.confusion.reset()
        self.log_dict({f"tracked_{k}": v for k, v in self.tracker.compute().items()})
        best = self.tracker.best_metric()
        self.log_dict({f"best_{k}": v for k, v in best.items()})
        self.log("named", self.named["a"]["b"].compute())
        self.named["a"]["b"].reset()


class Hooks(Base):
    """``self.log`` in other hooks than steps, and metrics that are made there."""

    def make_metrics(self) -> None:
        self.kept: list[Tensor] = []
        self.v_losses: list[Tensor] = []

    def on_train_start(self) -> None:
        self.log("train_start", 1.0)

    def on_train_epoch_start(self) -> None:
        self.log("epoch_start", float(self.current_epoch))
        self.made = MeanMetric()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("batch_start", float(batch_idx), on_epoch=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, logits, y = self.common(batch)
        self.made.update(loss)
        self.kept.append(logits.detach().mean())
        return loss

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.log("before_zero_grad", 2.0)

    def on_after_backward(self) -> None:
        self.log("after_backward", self.kept[-1])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("lr", optimizer.param_groups[0]["lr"], prog_bar=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("batch_end", outputs["loss"], on_step=True, on_epoch=True)
        other = SumMetric()
        other.update(outputs["loss"])
        self.log("batch_sum", other.compute())

    def on_train_epoch_end(self) -> None:
        self.log("made", self.made.compute())
        self.log("epoch_end", float(len(self.kept)))

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        loss, _, _ = self.common(batch)
        self.v_losses.append(loss)

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("v_batch_end", batch[0].mean(), batch_size=len(batch[0]))

    def on_validation_epoch_end(self) -> None:
        self.log("v_end", torch.stack(self.v_losses).mean())
        self.log("v_num", float(len(self.v_losses)))
        self.v_losses.clear()


class OwnLogger(Base):
    """Calls of the loggers in steps and hooks."""

    def make_metrics(self) -> None:
        self.f1 = F1Score(**MACRO)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.logger.log_metrics({"inputs": float(batch[0].mean())}, step=self.global_step)
        loss, logits, y = self.common(batch)
        f1 = self.f1(logits, y)
        self.logger.log_metrics({"own_loss": loss.item(), "epoch": self.current_epoch, "f1": f1}, self.global_step)
        self.logger.experiment.add_scalar("experiment", loss.detach(), global_step=self.global_step)
        assert isinstance(self.logger.experiment, Experiment)
        assert self.logger.experiment.written is not None
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        loss, logits, _ = self.common(batch)
        self.logger.experiment.add_histogram("logits", logits)
        for logger in self.loggers:
            logger.log_metrics({"v_own": loss})

    def on_validation_epoch_end(self) -> None:
        self.logger.log_metrics({"hook": 1.0}, step=3)


class BeforeTheModel(Base):
    """Metrics and logging before the model's call, which every rank runs."""

    def make_metrics(self) -> None:
        self.samples, self.spread = SumMetric(), MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.samples.update(len(batch[1]))
        self.log("inputs", self.spread(batch[0].mean()), on_step=True, on_epoch=True)
        self.log("samples", self.samples, on_step=False, on_epoch=True)
        loss, _, _ = self.common(batch)
        self.log("loss", loss)
        return loss


class SeveralModels(Base):
    """A region of several calls, whose numbers must not depend on the metrics."""

    def make_metrics(self) -> None:
        self.decoder = nn.Linear(CLASSES, CLASSES)
        self.spread, self.f1, self.v_f1 = MeanMetric(), F1Score(**MACRO), F1Score(**MACRO)

    def common(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        x, y = batch
        self.spread.update(x.abs().mean(1))
        logits = self.decoder(self.model(x).tanh())
        return nn.functional.cross_entropy(logits, y), logits, y

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, logits, y = self.common(batch)
        self.log("f1", self.f1(logits, y), on_step=True, on_epoch=True)
        self.log("spread", self.spread, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        _, logits, y = self.common(batch)
        self.v_f1.update(logits, y)
        self.log("v_f1", self.v_f1)


class Loader2(Objects):
    """A metric for each of several validation loaders."""

    def make_metrics(self) -> None:
        super().make_metrics()
        self.each = nn.ModuleList(F1Score(**MACRO) for _ in range(2))

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        loss, logits, y = self.common(batch)
        self.each[dataloader_idx](logits, y)
        self.log("v_f1", self.each[dataloader_idx])
        self.log("v_loss", loss)
        self.log(f"own_{dataloader_idx}", loss, add_dataloader_idx=False)


class LossFromMetric(Base):
    """The loss is what a metric gives."""

    def make_metrics(self) -> None:
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = self.mean(nn.functional.cross_entropy(self.model(x), y, reduction="none"))
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


VARIANTS: dict[str, Callable[[], Base]] = {
    cls.__name__: cls
    for cls in (
        Options,
        Objects,
        Values,
        Collections,
        Aggregates,
        Wrapped,
        Hooks,
        OwnLogger,
        BeforeTheModel,
        SeveralModels,
        Loader2,
        LossFromMetric,
    )
}
