"""What an ordinary run says in a pipeline: what it says on one device, the plan, and nothing that this package has caused."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_fxpipe.pytree.sizes import plain_number
from lightning_fxpipe.reporting.messages import warn
from tests.ranks.pool import RankPool

Ranks = Callable[[int], RankPool]

_INNER = re.compile(r"(?<![\w/])[su]\d+\b|FakeTensor|SymInt")


class Talkative(L.LightningModule):
    """Prints, logs and warns in its steps, has metrics, dropout and a scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.GELU()) for _ in range(4)))
        self.head = nn.Linear(8, 4)
        self.accuracy = MulticlassAccuracy(num_classes=4)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        print("forward gets", x.shape)
        return self.head(self.body(self.embedding(x).mean(dim=1))) * self.scale

    def _loss(self, batch: Any, name: str) -> Tensor:
        print("step gets", batch[0].shape)
        logging.getLogger("users").info("step gets %s", batch[0].shape)
        warnings.warn(f"step gets {tuple(batch[0].shape)}", stacklevel=1)
        out = self(batch[0])
        loss = nn.functional.cross_entropy(out, batch[1])
        self.accuracy(out, batch[1])
        self.log(f"{name}_loss", loss)
        self.log(f"{name}_accuracy", self.accuracy)
        print("loss is", loss)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._loss(batch, "train")
        self.log("number", loss.item())
        self.last_loss = loss  # with its graph, as people do
        return loss

    def on_train_epoch_start(self) -> None:
        self.body.load_state_dict({name: value.clone() for name, value in self.body.state_dict().items()})  # as averages are

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("last_loss", self.last_loss)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._loss(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._loss(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(dim=1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class _Kept(logging.Handler):
    """Keeps records."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[tuple[str, str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append((record.name, record.levelname, record.getMessage()))


def _causing_module(frame: FrameType | None) -> str:
    """The module whose code has led to a warning: neither torch's nor the standard library's."""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        root = name.partition(".")[0]
        is_hook = frame.f_code.co_name == "show" and name == __name__
        if not is_hook and root != "torch" and root not in sys.stdlib_module_names:
            return str(name)
        frame = frame.f_back
    return ""


@contextlib.contextmanager
def heard() -> Iterator[dict[str, Any]]:
    """All that is said in the block."""
    shown: list[tuple[str, str, str]] = []
    kept, out = _Kept(), io.StringIO()

    def show(message: Any, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        shown.append((_causing_module(sys._getframe()), Path(filename).name, str(message)))

    said = {"warnings": shown, "records": kept.records}
    loggers = [logging.getLogger(name) for name in ("users", "lightning_fxpipe")]
    levels = [logger.level for logger in loggers]
    always = torch.is_warn_always_enabled()
    with warnings.catch_warnings(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        warnings.simplefilter("always")
        warnings.showwarning = show
        torch.set_warn_always(True)  # otherwise what another test has caused would be missing here
        for logger in loggers:
            logger.addHandler(kept)
            logger.setLevel(logging.INFO)
        try:
            yield said
        finally:
            torch.set_warn_always(always)
            for logger, level in zip(loggers, levels, strict=True):
                logger.removeHandler(kept)
                logger.setLevel(level)
    said["printed"] = out.getvalue()


def run(folder: str, stages: int, checkpoint: str) -> dict[str, Any]:
    """All kinds of runs; the last goes on from ``checkpoint``, which is one of one device."""
    L.seed_everything(1, verbose=False)
    # The last batch has one sample.
    data = DataLoader(TensorDataset(torch.randint(0, 20, (13, 5)), torch.randint(0, 4, (13,))), batch_size=4)
    place: dict[str, Any] = {"strategy": "fxpipe", "devices": stages} if stages else {"devices": 1}
    with heard() as said:
        trainer = L.Trainer(
            accelerator="cpu",
            max_epochs=2,
            logger=False,
            enable_progress_bar=False,
            gradient_clip_val=1.0,
            accumulate_grad_batches=2,
            default_root_dir=folder,
            callbacks=[ModelCheckpoint(monitor="val_loss", save_last=True)],
            **place,
        )
        module = Talkative()
        trainer.fit(module, data, data)
        trainer.validate(module, data, verbose=False)
        trainer.test(module, data, ckpt_path="best", verbose=False)
        trainer.predict(module, data)
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module, data, data, ckpt_path=checkpoint)
        other = Talkative()
        other.load_state_dict(module.state_dict())
    return said


def test_an_ordinary_run_says_what_it_says_on_one_device_and_the_plan(ranks: Ranks, tmp_path: Path) -> None:
    checkpoint = str(tmp_path / "alone" / "checkpoints" / "last.ckpt")
    alone = run(str(tmp_path / "alone"), 0, checkpoint)
    both = ranks(2).run(run, str(tmp_path / "both"), 2, checkpoint, timeout_seconds=150)
    for rank, said in enumerate(both):
        own = [warning for warning in said["warnings"] if warning[0].startswith("lightning_fxpipe")]
        assert not own, f"rank {rank}"
        known = {(file, _without_numbers(text)) for _, file, text in alone["warnings"]}
        more = [warning for warning in said["warnings"] if (warning[1], _without_numbers(warning[2])) not in known]
        # Lightning says some things once in a process only, so a test before this one may have heard them.
        assert not [warning for warning in more if not warning[0].startswith("lightning")], f"rank {rank}"
        assert any("step gets (" in text for *_, text in said["warnings"]), "a user's warning is lost"
        lines = said["printed"].splitlines() + [message for name, _, message in said["records"] if name == "users"]
        assert any(line.startswith("step gets torch.Size([") for line in lines)
        assert not [line for line in lines if _INNER.search(line)], f"rank {rank}"
    told = [[text for name, _, text in said["records"] if name == "lightning_fxpipe"] for said in both]
    assert told[1] == []
    # On a busy machine, a trace may take long enough to be logged.
    (plan,) = (line for line in told[0] if not line.startswith("Tracing the "))
    assert plan.startswith("Pipeline of")
    assert re.search(r"Schedule .*, \d microbatches of \d samples; rank 0: stage 1, rank 1: stage 0", " ".join(plan.split()))


def test_what_the_package_causes_is_heard() -> None:
    with heard() as said:
        assert plain_number(torch.ones((), requires_grad=True)) == 1
        assert not said["warnings"]
        warn("a warning of the package")
    ((module, file, text),) = said["warnings"]
    assert (module, text) == ("lightning_fxpipe.reporting.messages", "a warning of the package")
    assert file == "test_noise.py"  # the place is the user's


def _without_numbers(text: str) -> str:
    return re.sub(r"\d+", "N", text)
