"""Between the split and the first step: restored weights, optimizers, layers and dtypes are what one device has there."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, ModelCheckpoint
from torch import Tensor, nn

from lightning_fxpipe import FxPipeStrategy
from tests.lit import make_trainer
from tests.ranks.pool import RankPool
from tests.ranks.runs import Net, Run, assert_same, compare, go

Ranks = Callable[[int], RankPool]


class Anchored(Net):
    """A penalty towards the weights with which the run begins, which ``configure_optimizers`` copies."""

    shuffle = False  # a plain Trainer resumes with other random numbers

    def configure_optimizers(self) -> Any:
        self.anchor = {fqn: parameter.detach().clone() for fqn, parameter in self.named_parameters()}
        return super().configure_optimizers()

    def on_after_backward(self) -> None:
        with torch.no_grad():
            for fqn, parameter in self.named_parameters():
                parameter.grad.add_(parameter - self.anchor[fqn], alpha=0.1)  # type: ignore[union-attr]


class AnchoredLater(Anchored):
    """Its layers are made in ``configure_model``, where a pipeline makes them without data."""

    def __init__(self) -> None:
        super().__init__()
        del self.backbone, self.head

    def configure_model(self) -> None:
        if not hasattr(self, "head"):
            made = Net()
            self.backbone, self.head = made.backbone, made.head


class Teacher(L.Callback):
    """A copy of the head as a run finds it, moved along."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.head = copy.deepcopy(pl_module.head)
        self.groups = [len(group["params"]) for group in trainer.optimizers[0].param_groups]

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        for mine, other in zip(self.head.parameters(), pl_module.head.parameters(), strict=True):  # type: ignore
            mine.data.lerp_(other.data, 0.5)


class Finetuned(Net):
    shuffle = False  # a plain Trainer resumes with other random numbers

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


class Exchanged(Net):
    """Another optimizer in the second epoch, the first one again in the third."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 0:
            self.first = self.trainer.optimizers
        elif self.current_epoch == 1:
            self.trainer.optimizers = [torch.optim.AdamW(self.parameters(), lr=0.01)]
        else:
            self.trainer.optimizers = self.first


class MadeAgain(Net):
    """Lightning's way to another optimizer (Lightning #3095): it needs all parameters, as hooks see them."""

    def configure_optimizers(self) -> Any:
        if self.current_epoch == 0:
            return super().configure_optimizers()
        return torch.optim.LBFGS(self.parameters(), lr=0.05, max_iter=2)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.strategy.setup_optimizers(self.trainer)


class Lazy(Net):
    """Layers whose sizes a run in ``configure_model`` finds."""

    def __init__(self) -> None:
        super().__init__()
        del self.backbone, self.head

    def configure_model(self) -> None:
        if not hasattr(self, "head"):
            torch.manual_seed(4)
            self.backbone = nn.Sequential(nn.LazyLinear(12), nn.Tanh(), nn.Linear(12, 12))
            self.head = nn.Sequential(nn.LazyLinear(12), nn.LazyBatchNorm1d(), nn.LazyLinear(5))
            with torch.no_grad():
                self(torch.zeros(2, 12))


def keep(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)


def teachers(trainer: L.Trainer, module: Any, folder: Path) -> Any:
    found = [callback for callback in trainer.callbacks if isinstance(callback, Teacher)]  # type: ignore[attr-defined]
    return [(dict(each.head.state_dict()), each.groups) for each in found], getattr(module, "anchor", None)


def saved_states(trainer: L.Trainer, module: Any, folder: Path) -> Any:
    """What others read with ``torch.load``, as of one device."""
    checkpoint = torch.load(trainer.checkpoint_callback.best_model_path)  # type: ignore[union-attr]
    (states,) = [state["state"] for state in checkpoint["optimizer_states"]]
    return checkpoint["state_dict"], {key: {k: v for k, v in state.items() if k != "al"} for key, state in states.items()}


SAVES = {"enable_checkpointing": True}


def resumed(module: Callable[[], L.LightningModule], *callbacks: Callable[[], L.Callback], **strategy: Any) -> Run:
    return Run(
        module=module,
        callbacks=lambda folder: [*(make() for make in callbacks), keep(folder)],
        resume_from="epoch=0.ckpt",
        look=teachers,
        strategy={"num_microbatches": 2, **strategy},
        options=SAVES,
    )


RUNS = {
    "anchored": resumed(Anchored, Teacher),
    "anchored later, from a folder": resumed(AnchoredLater, Teacher, save_distributed_checkpoint=True),
    "finetuned": resumed(Finetuned, lambda: BackboneFinetuning(1, lambda epoch: 1.0), Teacher, schedule="1f1b"),
    "exchanged": Run(
        module=Exchanged, callbacks=lambda folder: [keep(folder)], options={"max_epochs": 3, **SAVES}, look_at_zero=saved_states
    ),
    "made again": Run(module=MadeAgain, options=SAVES, callbacks=lambda folder: [keep(folder)], look_at_zero=saved_states),
    "lazy": Run(module=Lazy, strategy={"num_microbatches": 1}),
}


def do(name: str, folder: str, stages: int) -> Any:
    return go(RUNS[name], Path(folder) / f"{name} {stages}", stages)


def test_hooks_of_a_run_see_restored_weights_and_may_exchange_its_optimizers(ranks: Ranks, tmp_path: Path) -> None:
    """A checkpoint was loaded after on_fit_start, so copies that a hook or configure_optimizers made had initial weights; an
    optimizer that a hook set was unknown to the next checkpoint; lazy layers got memory while there should be none."""
    compare(ranks, do, list(RUNS), tmp_path, 2)


# ------------------------------------------------------------------ dtypes

DTYPES = (torch.int16, torch.uint16, torch.uint64, torch.float8_e4m3fn, torch.complex32)


def bits(dtype: torch.dtype, count: int) -> Tensor:
    return (torch.arange(count * dtype.itemsize) % 100).to(torch.uint8).view(dtype)


class Block(nn.Module):
    """Uses values of one dtype as a table of small numbers, as layers with quantised weights do."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)
        self.register_buffer("table", bits(dtype, 50_000))  # more than what is sent with its description
        self.frozen = nn.Parameter(bits(dtype, 12), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) + self.frozen.view(torch.uint8)[:12].float() / 100


class RareDtypes(Net):
    shuffle = False  # a plain Trainer resumes with other random numbers

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.backbone = nn.Sequential(*map(Block, DTYPES))
        for index, dtype in enumerate(DTYPES):
            self.register_buffer(f"unused{index}", bits(dtype, 6))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)


def values_of(module: Any) -> dict[str, Tensor]:
    """The state, with the memory of what ``torch.testing`` cannot compare."""
    return {
        fqn: value.detach().clone() if value.dtype is torch.float32 else value.detach().contiguous().view(-1).view(torch.uint8)
        for fqn, value in module.state_dict().items()
    }


def train_rare(folder: str, stages: int) -> list[dict[str, Tensor]]:
    """A run, and another one that goes on from its checkpoint; returns what is left of each."""
    found = []
    for epochs, ckpt_path in ((1, None), (2, f"{folder}/epoch=0.ckpt")):
        L.seed_everything(3, verbose=False)
        strategy = FxPipeStrategy(num_microbatches=2, gather_after_run=True) if stages else "auto"
        trainer = make_trainer(
            max_epochs=epochs,
            strategy=strategy,
            devices=max(stages, 1),
            callbacks=[keep(Path(folder))],
            enable_checkpointing=True,
        )
        module = RareDtypes()
        if ckpt_path is not None:
            for buffer in module.buffers():
                buffer.view(torch.uint8).zero_()
        trainer.fit(module, ckpt_path=ckpt_path)
        found.append(values_of(module))
    return found


def test_tensors_of_all_dtypes_are_sent_saved_and_gathered(ranks: Ranks, tmp_path: Path) -> None:
    """gloo broadcasts no int16; torch cannot read unsigned integers and eight-bit floats from a pickle, and has no absolute
    values of them."""
    expected = train_rare(str(tmp_path / "one"), 0)
    for rank, results in enumerate(ranks(2).run(train_rare, str(tmp_path / "two"), 2)):
        for result, other in zip(results, expected, strict=True):
            assert result.keys() == other.keys()
            for fqn, value in other.items():
                assert_same(result[fqn], value, f"rank {rank}: {fqn}")


# ------------------------------------------------------------------ refusals, and the form of checkpoints


class Late(Net):
    """Makes layers in ``configure_optimizers``, which comes after the split."""

    def configure_optimizers(self) -> Any:
        self.head[0] = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12))
        return super().configure_optimizers()


def train_late(hook: str) -> str:
    module = Net()
    if hook == "configure_optimizers":
        module = Late()
    else:
        late = nn.Linear(12, 12) if hook == "on_fit_start" else nn.Identity()
        setattr(module, hook, lambda: setattr(module.head, "0", late))
    with pytest.raises(Exception) as caught:  # noqa: PT011 (the rank with the stage is stopped by the other)
        make_trainer(max_epochs=1, strategy=FxPipeStrategy(num_microbatches=2), devices=2).fit(module)
    return str(caught.value)


def save_without_room(folder: str) -> tuple[bool, list[str]]:
    with (
        warnings.catch_warnings(record=True) as caught,
        mock.patch("lightning_fxpipe.strategy.checkpoint_hooks.has_room", return_value=False),
    ):
        warnings.simplefilter("always")
        options: dict[str, Any] = {"callbacks": [keep(Path(folder))], "enable_checkpointing": True}
        make_trainer(max_epochs=2, strategy=FxPipeStrategy(num_microbatches=2), devices=2, **options).fit(Net())
    return Path(folder, "epoch=1.ckpt").is_dir(), [str(each.message) for each in caught if "are folders" in str(each.message)]


def refuse_and_save(folder: str) -> Any:
    saved = save_without_room(folder)
    late = train_late("configure_optimizers"), train_late("on_train_start")
    return *late, train_late("on_fit_start"), saved  # where ranks fail apart no run follows


def test_late_layers_are_refused_and_checkpoints_are_folders_without_memory_for_a_file(ranks: Ranks, tmp_path: Path) -> None:
    """Each rank kept its own values of parameters that no stage has, or of another stage's that have been replaced."""
    pool = ranks(2)
    results = pool.run(refuse_and_save, str(tmp_path))
    pool.kill()  # the ranks have lost each other
    for made, removed, _, (is_folder, _) in results:
        assert "Parameters were removed from the module after it was split into stages." in removed
        assert "Observed: head.0.bias and 1 others" in removed
        assert "Parameters were added to the module after it was split into stages." in made
        assert "Observed: head.0.0.weight and 3 others" in made
        assert "created in the constructor, setup or configure_model" in made
        assert is_folder
    # A replaced parameter is a fault where its stage is not.
    assert any("Observed: head.0.weight and 1 others" in replaced for *_, replaced, _ in results)
    messages = [message for *_, (_, found) in results for message in found]
    assert len(messages) == 1
    assert "A single file would need 0.0 GiB" in messages[0]
