"""A canary for each private name of Lightning that the package uses; see `test_compat` for those of torch."""

from __future__ import annotations

import ast
import warnings
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_fxpipe.strategy.strategy
from lightning_fxpipe._compat import lightning as _compat_lightning
from lightning_fxpipe._compat import torch as _compat
from tests.lit import LitModel, make_trainer

# ------------------------------------------------------------------ Lightning: processes


@pytest.fixture
def lonely_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[LightningEnvironment]:
    """The environment of one process alone; the process group that a test makes is gone afterwards."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    # Lightning sets these itself, past monkeypatch, so they are set here to be taken away in the end.
    environment = LightningEnvironment()
    monkeypatch.setenv("MASTER_PORT", str(environment.main_port))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    yield environment
    if dist.is_initialized():
        dist.destroy_process_group()


def test_init_dist_connection_chooses_gloo_for_cpus(lonely_environment: LightningEnvironment) -> None:
    assert not dist.is_initialized()
    _compat_lightning.init_process_group(lonely_environment, None, torch.device("cpu"), timedelta(seconds=20))
    assert (dist.get_backend(), dist.get_world_size()) == ("gloo", 1)
    # The second run of a Trainer comes here again.
    _compat_lightning.init_process_group(lonely_environment, None, torch.device("cpu"), timedelta(seconds=20))


def test_rank_zero_only_of_every_lightning_package_learns_the_rank() -> None:
    from lightning.fabric.utilities.rank_zero import rank_zero_only as of_fabric
    from lightning.pytorch.utilities.rank_zero import rank_zero_only as of_pytorch
    from lightning_utilities.core.rank_zero import rank_zero_only as of_utilities

    decorated = [decorator(lambda: "ran") for decorator in (of_fabric, of_pytorch, of_utilities)]
    try:
        _compat_lightning.set_rank_zero_only(1)
        assert [function() for function in decorated] == [None, None, None]
    finally:
        _compat_lightning.set_rank_zero_only(0)
    assert [function() for function in decorated] == ["ran", "ran", "ran"]


def test_processes_are_started_with_the_script_and_their_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr("subprocess.Popen", lambda command, env, cwd: started.append((command, env)))
    for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "WORLD_SIZE", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "0")  # restored afterwards
        monkeypatch.delenv(name)
    threads = torch.get_num_threads()
    try:
        assert len(_compat_lightning.start_processes(LightningEnvironment(), 3, 1)) == 2
    finally:
        torch.set_num_threads(threads)
    assert [environment["LOCAL_RANK"] for _, environment in started] == ["1", "2"]


def test_process_groups_can_be_aborted() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        _compat.abort_process_groups()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_a_note_of_sigterm_replaces_what_the_trainer_does() -> None:
    noted: list[int] = []

    class Asked(L.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 1:
                _compat_lightning.note_sigterm(trainer, lambda: noted.append(trainer.global_step))
                trainer._signal_connector._sigterm_notifier_fn(15, None)

    trainer = make_trainer(max_epochs=1, callbacks=[Asked()])
    trainer.fit(Counted(), loader())
    assert noted == [1]
    assert trainer.fit_loop.epoch_loop.total_batch_idx == 2, "it goes on"


def test_private_methods_that_the_strategy_overrides_are_lightnings() -> None:
    """An override that nothing calls any more would be silent: no launcher, so no processes."""
    tree = ast.parse(Path(lightning_fxpipe.strategy.strategy.__file__).read_text(encoding="utf-8"))
    overridden = [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and node.name.startswith("_")
        and any(ast.unparse(decorator) == "override" for decorator in node.decorator_list)
    ]
    assert "_configure_launcher" in overridden
    assert [name for name in overridden if not callable(getattr(Strategy, name, None))] == []
    strategy = make_trainer(strategy="fxpipe", devices=1).strategy
    assert strategy._launcher is strategy.launcher is not None


# ------------------------------------------------------------------ Lightning: the first batch


class Counted(L.LightningModule):
    """Keeps the batches that its steps get; its own hook changes them before."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: list[Tensor] = []

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Tensor:
        return batch[0] + 100

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append(batch)
        return self.layer(batch).sum()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.seen.append(batch)

    test_step = predict_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def loader(*, shuffle: bool = False, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(10.0).unsqueeze(1)), batch_size=4, shuffle=shuffle, **options)


@pytest.mark.parametrize("count", [1, 2])
def test_batch_counter_counts_training_batches_over_epochs_whatever_is_accumulated(count: int) -> None:
    class Counting(L.Callback):
        def __init__(self) -> None:
            self.found: list[int] = []

        def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
            self.found.append(_compat_lightning.batch_counter(trainer, "training_step"))

    counting = Counting()
    make_trainer(max_epochs=2, accumulate_grad_batches=count, callbacks=[counting]).fit(Counted(), loader())
    assert counting.found == list(range(counting.found[0], counting.found[0] + 6))


def test_batch_counter_continues_after_a_checkpoint(tmp_path: Path) -> None:
    """It is part of the key of the stages' random numbers: a resumed run must not draw the first epoch's again."""

    class Counting(L.Callback):
        def __init__(self) -> None:
            self.found: list[int] = []

        def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
            self.found.append(_compat_lightning.batch_counter(trainer, "training_step"))

    whole, second = Counting(), Counting()
    make_trainer(max_epochs=2, callbacks=[whole]).fit(Counted(), loader())
    first = make_trainer(max_epochs=1)
    first.fit(Counted(), loader())
    first.save_checkpoint(tmp_path / "half.ckpt")
    make_trainer(max_epochs=2, callbacks=[second]).fit(Counted(), loader(), ckpt_path=tmp_path / "half.ckpt")
    assert second.found == whole.found[3:]


@pytest.mark.parametrize("count", [1, 2])
def test_gradients_are_zeroed_between_a_step_and_its_backward_pass_where_it_is_said(count: int) -> None:
    class Says(Counted):
        def __init__(self) -> None:
            super().__init__()
            self.events: list[Any] = []

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.events.append(_compat_lightning.zeroes_gradients(self.trainer))
            return super().training_step(batch, batch_idx)

        def on_before_zero_grad(self, optimizer: Any) -> None:
            self.events.append("zeroes")

        def on_before_backward(self, loss: Tensor) -> None:
            self.events.append("backward")

    module = Says()
    make_trainer(max_epochs=2, accumulate_grad_batches=count).fit(module, loader())
    first, other = [True, "zeroes", "backward"], [False, "backward"]
    assert module.events == {1: 6 * first, 2: 2 * (first + other + first)}[count]


def test_gradients_are_not_zeroed_in_manual_optimization() -> None:
    class Manual(Counted):
        automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            assert not _compat_lightning.zeroes_gradients(self.trainer)
            super().training_step(batch, batch_idx)

    module = Manual()
    make_trainer(max_epochs=1).fit(module, loader())
    assert len(module.seen) == 3


def test_a_run_that_is_to_stop_ends_with_its_batch() -> None:
    class Stops(L.Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            _compat_lightning.stop_after_batch(trainer)

    trainer = make_trainer(max_epochs=1, callbacks=[Stops()])
    with pytest.raises(SystemExit):
        trainer.fit(Counted(), loader())
    assert trainer.fit_loop.epoch_loop.total_batch_idx == 0


def test_lightnings_own_class_is_found_behind_the_users() -> None:
    assert _compat_lightning.lightning_class(LitModel("mlp")) is L.LightningModule
    assert _compat_lightning.lightning_class(nn.Linear(1, 1)) is None


def test_lightnings_own_log_is_replaced_for_one_module_and_below_what_it_overrides() -> None:
    class Renaming(L.LightningModule):
        def log(self, name: str, value: Any, **kwargs: Any) -> None:  # type: ignore[override]
            super().log(f"train/{name}", value, **kwargs)

    module, other, logged = Renaming(), Renaming(), []
    original = L.LightningModule.log

    def log(*args: Any, **kwargs: Any) -> None:
        logged.append((args, kwargs))

    with _compat.patched_attributes(*_compat_lightning.own_replaced(module, log, "log")):
        module.log("loss", 1.0, prog_bar=True)
        module.log_dict({"accuracy": 2.0})
        with pytest.warns(UserWarning, match="not registered"):
            other.log("loss", 3.0)
    assert [args for args, _ in logged] == [("train/loss", 1.0), ("train/accuracy", 2.0)]
    assert logged[0][1] == {"prog_bar": True}
    assert L.LightningModule.log is original
    assert _compat_lightning.own_replaced(nn.Linear(1, 1), log, "log") == []


# ------------------------------------------------------------------ the first batch of a loader


@pytest.mark.parametrize("kind", [None, torch.optim.SGD])
def test_has_no_optimizer_knows_what_lightning_takes_for_none(kind: Any) -> None:
    class Configured(Counted):
        def configure_optimizers(self) -> Any:
            return kind and kind([nn.Parameter(torch.ones(1))], lr=0.1)

    trainer = make_trainer(max_steps=0)
    trainer.fit(Configured(), loader())
    assert _compat_lightning.has_no_optimizer(trainer.optimizers) is (kind is None)


# ------------------------------------------------------------------ Lightning: checkpoints


def test_metadata_filename_is_the_one_that_consolidate_checkpoint_looks_for(tmp_path: Path) -> None:
    from lightning.fabric.utilities.load import _load_distributed_checkpoint
    from lightning.pytorch.utilities.consolidate_checkpoint import _format_checkpoint, _process_cli_args
    from torch.distributed.checkpoint.state_dict_saver import save

    folder, weight = tmp_path / "folder", torch.randn(3)
    save({"model": {"weight": weight}}, checkpoint_id=folder, no_dist=True)
    arguments = Namespace(checkpoint_folder=str(folder), output_file=None)
    with pytest.raises(SystemExit):
        _process_cli_args(arguments)
    torch.save({"epoch": 3}, folder / _compat_lightning.metadata_filename())
    config = _process_cli_args(arguments)
    checkpoint = _format_checkpoint(_load_distributed_checkpoint(config.checkpoint_folder))
    assert checkpoint["epoch"] == 3
    torch.testing.assert_close(checkpoint["state_dict"]["weight"], weight, rtol=0, atol=0)


# ------------------------------------------------------------------ Lightning: callbacks and arguments


def test_averaged_modules_are_the_copies_that_callbacks_keep() -> None:
    callback = L.pytorch.callbacks.EMAWeightAveraging()
    trainer = make_trainer(callbacks=[callback])
    assert _compat_lightning.averaged_modules(trainer) == []  # before a fit
    module = LitModel("mlp")
    callback.setup(trainer, module, "fit")
    (copied,) = _compat_lightning.averaged_modules(trainer)
    assert type(copied) is LitModel
    assert [name for name, _ in copied.named_parameters()] == [name for name, _ in module.named_parameters()]


def test_throughputs_are_those_of_the_monitors() -> None:
    callback = L.pytorch.callbacks.ThroughputMonitor(len)
    trainer = make_trainer(callbacks=[callback])
    trainer.state.fn, trainer.state.stage = TrainerFn.FITTING, RunningStage.TRAINING
    callback.setup(trainer, LitModel("mlp"), "fit")
    found = _compat_lightning.throughputs(trainer)
    assert {throughput.world_size for _, throughput in found} == {1}
    assert {id(monitor) for monitor, _ in found} == {id(callback)}


@pytest.mark.parametrize(("interval", "by_time"), [(2, False), (0.5, False), ("00:00:00:10", True)])
def test_validates_by_time_tells_times_from_numbers(interval: Any, by_time: bool) -> None:
    assert _compat_lightning.validates_by_time(make_trainer(val_check_interval=interval)) is by_time


@pytest.mark.parametrize("synced", [True, False])
def test_syncs_batch_norm_tells_what_the_user_has_said(synced: bool) -> None:
    assert _compat_lightning.syncs_batch_norm(make_trainer(strategy="fxpipe", sync_batchnorm=synced)) is synced


# ------------------------------------------------------------------ torchmetrics


def test_the_launcher_for_notebooks_starts_processes_of_each_kind() -> None:
    strategy = make_trainer().strategy
    for method, in_notebooks in (("fork", True), ("spawn", False)):
        launcher = _compat_lightning.multiprocessing_launcher(strategy, method)
        assert launcher.is_interactive_compatible is in_notebooks
        assert callable(launcher.launch)


def test_a_checkpoint_callback_asks_for_files_and_makes_links_by_these_methods(tmp_path: Path) -> None:
    started: list[str] = []
    links: list[tuple[str, str]] = []

    class Begins(L.Callback):
        def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
            def is_started(path: str) -> bool:
                started.append(Path(path).name)
                return path.endswith("epoch=0.ckpt")

            block = _compat_lightning.checkpoints_in_background(trainer, is_started, lambda *link: links.append(link))
            self.block = ExitStack()
            self.block.enter_context(block)

    keep, begins = ModelCheckpoint(dirpath=tmp_path, filename="{epoch}", save_last="link"), Begins()
    trainer = make_trainer(max_epochs=1, callbacks=[keep, begins], enable_checkpointing=True)
    trainer.fit(Counted(), loader())
    assert started[:2] == ["epoch=0.ckpt", "epoch=0-v1.ckpt"]  # the first is taken
    assert [tuple(Path(path).name for path in link) for link in links] == [("epoch=0-v1.ckpt", "last.ckpt")]
    begins.block.close()
    assert not {"file_exists", "_link_checkpoint"} & vars(keep).keys()


def test_checkpoint_folders_are_those_of_the_callbacks_and_the_defaults(tmp_path: Path) -> None:
    trainer = make_trainer(
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(dirpath=tmp_path / "mine"), ModelCheckpoint(monitor="x")],
        default_root_dir=tmp_path,
    )
    expected = [str(tmp_path), str(tmp_path / "checkpoints"), str(tmp_path / "mine")]
    assert _compat_lightning.checkpoint_folders(trainer) == expected


# ------------------------------------------------------------------ how a step is called, and what it can ask before the run


class Steps(L.LightningModule):
    def batch_only(self, batch: Any) -> None: ...

    def named(self, batch: Any, batch_idx: int) -> None: ...

    def renamed(self, batch: Any, i: int) -> None: ...

    def arguments(self, *args: Any) -> None: ...

    def all_arguments(self, *args: Any, **kwargs: Any) -> None: ...

    def loader(self, dataloader_iter: Any) -> None: ...


@pytest.mark.parametrize("name", ["batch_only", "named", "renamed", "arguments", "all_arguments"])
def test_steps_get_the_index_where_they_take_it(name: str) -> None:
    """As the loop decides itself."""
    module = Steps()
    module.training_step = getattr(module, name)  # type: ignore[method-assign]
    trainer = make_trainer()
    module.trainer = trainer
    trainer.strategy.connect(module)
    given = trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), "batch", 0)
    assert _compat_lightning.takes_batch_idx(module.training_step) == ("batch_idx" in given)
    assert not _compat_lightning.takes_loader(module.training_step)


def test_steps_that_take_the_loader_are_known() -> None:
    assert _compat_lightning.takes_loader(Steps().loader)


class Asks(L.Callback):
    """Asks the Trainer before its loops begin, and once they run."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.set_up: list[int] = []

    def ask(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        rates = [optimizer.param_groups[0]["lr"] for optimizer in trainer.optimizers]
        loaders = trainer.train_dataloader is not None, trainer.val_dataloaders is not None
        module_sees = bool(module.optimizers()), bool(module.lr_schedulers())
        self.answers.append((rates, len(trainer.lr_scheduler_configs), loaders, module_sees))

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        stand_in = SimpleNamespace(param_groups=[{"lr": 0.5}], scheduler="scheduler")
        with _compat_lightning.run_state_stood_in(trainer, stand_in, lambda: self.set_up.append(1)) as answered:
            self.ask(trainer, pl_module)
        assert answered == {"optimizers", "lr_scheduler_configs"}
        self.validates = _compat_lightning.has_validation(trainer)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        with _compat_lightning.run_state_stood_in(trainer, None, lambda: None):
            self.ask(trainer, pl_module)


def test_what_the_trainer_is_asked_before_the_run_has_an_answer() -> None:
    class WithScheduler(Counted):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 100)]

    asks = Asks()
    make_trainer(max_epochs=2, num_sanity_val_steps=0, callbacks=[asks]).fit(WithScheduler(), loader(), loader())
    assert asks.validates
    assert asks.set_up  # once it is asked for the dataloaders
    assert asks.answers[0] == ([0.5], 1, (False, False), (True, True))
    assert asks.answers[-1] == ([0.5], 1, (True, True), (True, True))


def test_optimizers_are_counted_in_whatever_form_they_are_configured() -> None:
    one = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(one, 1)
    forms = [one, [one, one], ([one], [schedule]), {"optimizer": one, "lr_scheduler": schedule}]
    assert [_compat_lightning.num_optimizers(form) for form in forms] == [(1, 0), (2, 0), (1, 1), (1, 1)]


@pytest.mark.filterwarnings("always")
def test_deprecations_of_lightnings_own_code_are_ignored() -> None:
    from lightning.pytorch.utilities._pytree import _map_and_unflatten, _tree_flatten

    def warned() -> list[str]:
        with warnings.catch_warnings(record=True) as seen:
            leaves, spec = _tree_flatten([torch.ones(1), {"length": 2}])
            _map_and_unflatten(lambda leaf: leaf, leaves, spec)
        return [str(warning.message) for warning in seen]

    with warnings.catch_warnings():
        assert all("is deprecated" in message for message in warned())
        _compat_lightning.silence_lightning()
        assert warned() == []
