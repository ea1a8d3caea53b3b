"""Optimizers of every form that Lightning takes, made at any time, train in a pipeline as on one device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks as shipped
from torch import nn

from lightning_fxpipe import FxPipeStrategy, PartitionPlan, UnsupportedError, make_plan
from tests.lit import make_trainer
from tests.ranks.pool import RankPool
from tests.ranks.runs import Net, Run, compare, go

Ranks = Callable[[int], RankPool]


class MadeBefore(Net):
    """The optimizer is made with the module, and serves every run."""

    shuffle = False  # a resumed pipeline goes on with the random numbers of the checkpoint, which one device does not

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.Adam(
            [{"params": self.backbone.parameters()}, {"params": self.head.parameters(), "lr": 0.02}]
        )
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    def configure_optimizers(self) -> Any:
        return {"optimizer": self.optimizer, "lr_scheduler": self.scheduler}


class Given(Net):
    """``LitModule(optimizer)``: what makes it has the parameters already."""

    def __init__(self) -> None:
        super().__init__()
        self.make = partial(torch.optim.SGD, list(self.parameters()), lr=0.05, momentum=0.9)

    def configure_optimizers(self) -> Any:
        return self.make()


class Cached(Net):
    """The optimizer of the first run serves the second, momentum included."""

    optimizer: Any = None

    def configure_optimizers(self) -> Any:
        if self.optimizer is None:
            self.optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        return self.optimizer


class Kept(Net):
    """Lists of parameters, and copies of them, from before the run; hooks use them."""

    def __init__(self) -> None:
        super().__init__()
        self.mine = list(self.parameters())
        self.shadow = [parameter.detach().clone() for parameter in self.mine]

    def on_fit_start(self) -> None:
        self.second = [parameter.detach().clone() for parameter in self.parameters()]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", torch.stack([parameter.grad.norm() for parameter in self.mine]).norm())

    @torch.no_grad()
    def on_train_batch_end(self, *args: Any) -> None:
        for shadow, second, parameter in zip(self.shadow, self.second, self.mine, strict=True):
            shadow.lerp_(parameter, 0.3)
            second.lerp_(parameter.data, 0.5)
        self.log("ema", sum(float(value.abs().sum()) for value in (*self.shadow, *self.second)))

    @torch.no_grad()
    def on_validation_start(self) -> None:
        self.stored = [parameter.detach().clone() for parameter in self.mine]
        for parameter, shadow in zip(self.mine, self.shadow, strict=True):
            parameter.data.copy_(shadow)

    @torch.no_grad()
    def on_validation_end(self) -> None:
        for parameter, stored in zip(self.mine, self.stored, strict=True):
            parameter.copy_(stored)


class InOrder(MadeBefore):
    """A resumed pipeline goes on with the random numbers of the run that it resumes, and one device does not."""

    shuffle = False


class Forms(Net):
    """Hooks around the optimizer, and one of the forms in which ``configure_optimizers`` may give it."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        steps = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.9)
        forms = {
            "list": [optimizer],
            "two lists": ([optimizer], [steps]),
            "dict": {"optimizer": optimizer, "lr_scheduler": {"scheduler": steps, "interval": "step", "frequency": 3}},
            "list of a dict": [{"optimizer": optimizer, "lr_scheduler": steps}],
            "plateau": {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}},
            "plateau beside": {"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "val_loss"},
        }
        return forms[self.form]


class Hooked(Net):
    """Clips by hooks of the optimizer, which are registered in different places, and looks at gradients."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        optimizer.register_step_post_hook(self._shrink)
        return optimizer

    @torch.no_grad()
    def _shrink(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = torch.stack([p.norm() for p in parameters]).norm()
        for parameter in parameters:
            parameter.mul_(1 - 0.01 * float(norm))

    def on_train_start(self) -> None:
        self.norms: list[float] = []
        optimizer: Any = self.optimizers()
        optimizer.optimizer.register_step_pre_hook(
            lambda optimizer, *_: self.norms.append(len(optimizer.param_groups[0]["params"]))
        )

    def on_train_epoch_end(self) -> None:
        self.log("number", float(sum(self.norms)))


class Overrides(Net):
    """Warms up by hand, clips by hand, zeroes by hand and steps the scheduler by hand."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        if self.trainer.global_step < 5:
            for group in optimizer.param_groups:
                group["lr"] = 0.05 * (self.trainer.global_step + 1) / 5

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.log("total", torch.nn.utils.clip_grad_norm_(self.parameters(), 0.3))
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")


class Averaged(torch.optim.Optimizer):
    """Schedule-free in short: gradients are those of a point between, and ``eval`` puts the average in its place."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "count": 0, "trains": False})

    @torch.no_grad()
    def _set(self, trains: bool) -> None:
        for group in self.param_groups:
            for p in group["params"] if group["trains"] is not trains else ():
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], 0.1 if trains else 1 - 1 / 0.9)
            group["trains"] = trains

    def train(self) -> None:
        self._set(True)

    def eval(self) -> None:
        self._set(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if not self.param_groups[0]["trains"]:
            raise RuntimeError("call train() before a step")
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            group["count"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, 1 / group["count"]).sub_(p.grad, alpha=group["lr"] * 0.1)
                z.sub_(p.grad, alpha=group["lr"])
        return loss


class ScheduleFree(Net):
    def configure_optimizers(self) -> Any:
        return Averaged(self.parameters(), lr=0.1)

    def _optimizer(self) -> Any:
        return self.optimizers().optimizer  # type: ignore[union-attr]

    def on_train_epoch_start(self) -> None:
        self._optimizer().train()

    def on_validation_epoch_start(self) -> None:
        self._optimizer().eval()

    def on_validation_epoch_end(self) -> None:
        self._optimizer().train()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._optimizer().eval()


class TrainsOn(L.Callback):
    """Lets a second ``fit`` go on for two epochs."""

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        if stage == "fit" and trainer.current_epoch:
            trainer.fit_loop.max_epochs = trainer.current_epoch + 2


AGAIN: dict[str, Any] = {"callbacks": lambda folder: [TrainsOn()], "calls": ("fit", "validate", "fit")}


class SavesInValidation(L.Callback):
    """Saves in a ``validate`` after ``fit``."""

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.state.fn == "validate":
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "kept" / "validated.ckpt")


class NoOptimizer(Net):
    def configure_optimizers(self) -> None:
        return None


class Unfreeze(shipped.BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze([pl_module.backbone])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone[2], optimizer, lr=0.01)
        if epoch == 2:
            self.unfreeze_and_add_param_group(pl_module.backbone[:2], optimizer)


class HeadOnly(Net):
    shuffle = False

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam((p for p in self.parameters() if p.requires_grad), lr=0.01)


def checkpoints(folder: Path) -> shipped.ModelCheckpoint:
    return shipped.ModelCheckpoint(dirpath=folder / "kept", filename="{epoch}", save_top_k=-1)


def names_in(trainer: L.Trainer, module: Any, folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("kept/*"))


SAVING: dict[str, Any] = {"options": {"enable_checkpointing": True, "max_epochs": 4}, "look_at_zero": names_in}
BACKBONE = partial(shipped.BackboneFinetuning, 2, lambda epoch: 1.5, backbone_initial_ratio_lr=0.2)

FORMS = ("list", "two lists", "dict", "list of a dict", "plateau", "plateau beside")

RUNS: dict[str, Run] = {
    "made before": Run(module=MadeBefore, **AGAIN),
    "made before, saving": Run(
        module=MadeBefore, callbacks=lambda f: [checkpoints(f)], resume_from="kept/epoch=1.ckpt", **SAVING
    ),
    "saved in validate": Run(
        module=InOrder,
        callbacks=lambda f: [SavesInValidation(), TrainsOn()],
        calls=("fit", "validate"),
        resume_from="kept/validated.ckpt",
    ),
    "given": Run(module=Given, **AGAIN),
    "cached": Run(module=Cached, **AGAIN),
    "kept": Run(module=Kept),
    "none": Run(module=NoOptimizer),
    "hooks": Run(module=Hooked),
    "overrides": Run(module=Overrides),
    "schedule-free": Run(module=ScheduleFree, callbacks=lambda f: [checkpoints(f)], **SAVING),
    **{name: Run(module=partial(Forms, name), options={"max_epochs": 3}) for name in FORMS},
    "none, saving": Run(module=NoOptimizer, callbacks=lambda f: [checkpoints(f)], **SAVING),
    "BaseFinetuning": Run(
        module=HeadOnly, callbacks=lambda f: [Unfreeze(), checkpoints(f)], resume_from="kept/epoch=1.ckpt", **SAVING
    ),
    "BackboneFinetuning": Run(
        module=HeadOnly, callbacks=lambda f: [BACKBONE(), checkpoints(f)], resume_from="kept/epoch=2.ckpt", **SAVING
    ),
    "BaseFinetuning, later": Run(
        module=HeadOnly, callbacks=lambda f: [Unfreeze(), checkpoints(f)], resume_from="kept/epoch=2.ckpt", **SAVING
    ),
}


def do(name: str, folder: str, stages: int) -> dict[str, Any]:
    path = Path(folder) / f"{stages}"
    path.mkdir(exist_ok=True)
    return go(RUNS[name], path, stages)


SLOW = {"given", "none", "list", "two lists", "list of a dict", "plateau beside", "BaseFinetuning, later"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in RUNS])
def test_it_trains_as_on_one_device(ranks: Ranks, tmp_path: Path, name: str) -> None:
    compare(ranks, do, [name], tmp_path, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cached", "kept", "BaseFinetuning", "BackboneFinetuning", "schedule-free"])
def test_three_stages_train_as_one_device(ranks: Ranks, tmp_path: Path, name: str) -> None:
    compare(ranks, do, [name], tmp_path, 3)


@pytest.mark.parametrize("name", ["none, saving", "BaseFinetuning"])
def test_one_stage_saves_what_callbacks_and_no_optimizer_leave(ranks: Ranks, tmp_path: Path, name: str) -> None:
    compare(ranks, do, [name], tmp_path, 1)


class Other(Net):
    """Trains a parameter that no attribute of the module has."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), nn.Parameter(torch.ones(3))], lr=0.1)


class SlowList(torch.optim.SGD):
    """As Lookahead is often written."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.slow_weights = [[p.clone().detach() for p in group["params"]] for group in self.param_groups]

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Looking(Net):
    def configure_optimizers(self) -> Any:
        return SlowList(self.parameters(), 0.1)


REFUSED: dict[str, tuple[type[Net], str]] = {
    "a parameter of nobody": (Other, "a parameter that the LightningModule does not have"),
    "lists beside the groups": (Looking, "slow_weights"),
}


def refusals(folder: str) -> list[str]:
    found = []
    for make, _ in REFUSED.values():
        callbacks = [shipped.OnExceptionCheckpoint(folder), shipped.ModelCheckpoint(folder, save_on_exception=True)]
        trainer = make_trainer(
            strategy="fxpipe", devices=2, max_epochs=1, callbacks=callbacks, enable_checkpointing=True, default_root_dir=folder
        )
        with pytest.raises(UnsupportedError) as caught:
            trainer.fit(make())
        found.append(str(caught.value))
    return found


def test_refused_before_the_first_step_whatever_would_be_saved_then(ranks: Ranks, tmp_path: Path) -> None:
    for messages in ranks(2).run(refusals, str(tmp_path)):
        for (_, words), message in zip(REFUSED.values(), messages, strict=True):
            assert words in message
    assert not list(tmp_path.rglob("*.ckpt"))


class Spread(Net):
    """An optimizer with states that comes to a run whose stages are others than those of the last one."""

    optimizer: Any = None

    configure_optimizers = Cached.configure_optimizers


def states_after(sizes: tuple[int, int]) -> list[float]:
    """The second stage's first parameter after two fits, in the second of which the cut is elsewhere."""
    module = Spread()
    plans = [cut_after(module, size) for size in sizes]
    for plan in plans:
        L.seed_everything(3, verbose=False)
        trainer = make_trainer(strategy=FxPipeStrategy(plan=plan, num_microbatches=2), devices=2, max_epochs=1)
        trainer.fit(module)
    return [float(parameter.double().sum()) for parameter in module.parameters()]


def cut_after(module: L.LightningModule, num_layers: int) -> PartitionPlan:
    """A plan with so many layers of the backbone in the first stage."""
    plan = make_plan(module, next(iter(module.train_dataloader())), num_stages=2, num_microbatches=2)
    first = tuple(
        fqn for fqn, _ in module.named_parameters() if fqn.split(".")[0] == "backbone" and int(fqn.split(".")[1]) < num_layers
    )
    fqns = (first, tuple(fqn for fqn, _ in module.named_parameters() if fqn not in first))
    stages = tuple(dataclasses.replace(stage, fqns=names) for stage, names in zip(plan.stages, fqns, strict=True))
    return dataclasses.replace(plan, stages=stages)


def test_states_of_a_cached_optimizer_follow_the_parameters_to_other_stages(ranks: Ranks) -> None:
    expected = Spread()
    for _ in range(2):
        L.seed_everything(3, verbose=False)
        make_trainer(max_epochs=1).fit(expected)
    values = [float(parameter.detach().double().sum()) for parameter in expected.parameters()]
    for found in ranks(2).run(states_after, (1, 3)):
        assert found == pytest.approx(values, rel=1e-5, abs=1e-5)
