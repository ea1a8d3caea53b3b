"""``FxPipeStrategy``: Lightning's hooks, each a few lines that hand over to the modules above."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_fxpipe._compat.lightning import init_process_group, silence_lightning
from lightning_fxpipe.data.loading import in_step
from lightning_fxpipe.data.skip_loading import Sparing
from lightning_fxpipe.deferred_init.materialise import Constructions
from lightning_fxpipe.distributed.failure import begin_run, end_run, has_failed, noted_connections, num_failed_runs
from lightning_fxpipe.distributed.replica import Replica
from lightning_fxpipe.distributed.topology import shared_topology
from lightning_fxpipe.errors import no_end_of_epoch
from lightning_fxpipe.hooks.hook_code import early_hooks
from lightning_fxpipe.launch.launching import make_launcher, resolve
from lightning_fxpipe.metrics.metric_states import among_replicas
from lightning_fxpipe.optim.precision import PipelinePrecision, step_context
from lightning_fxpipe.planner.plan import PartitionPlan
from lightning_fxpipe.planner.planning import Planned
from lightning_fxpipe.reporting.messages import inform
from lightning_fxpipe.rng import rng_state, set_rng_state
from lightning_fxpipe.strategy.batch_votes import votes_before_batches
from lightning_fxpipe.strategy.configured_strategy import ConfiguredStrategy
from lightning_fxpipe.strategy.first_batch import FirstBatches
from lightning_fxpipe.strategy.first_values import init_context, materials_of
from lightning_fxpipe.strategy.run_plan import RunPlans, check_compile, step_of_run
from lightning_fxpipe.strategy.search_space import memory_left
from lightning_fxpipe.strategy.session import Session
from lightning_fxpipe.strategy.step_call import step_of_call
from lightning_fxpipe.strategy.support import (
    check_converted,
    check_sampler,
    check_trainer,
    report_unsaved,
    seeded_alike,
)
from lightning_fxpipe.user_code.step import Step, StepKind


class PipelineStrategy(ConfiguredStrategy):  # noqa: D101
    __doc__ = ConfiguredStrategy.__doc__

    def __deepcopy__(self, memo: dict[int, Any]) -> PipelineStrategy:
        """One with the same options that has not run; it belongs to the same process groups, which cannot be copied."""
        copied: PipelineStrategy = object.__new__(type(self))
        memo[id(self)] = copied
        fresh: dict[str, Any] = dict.fromkeys(("_session", "_precision", "_vote"))
        fresh |= {"_topology": self._topology, "_loss": self._loss, "_run_optimizers": self._run_optimizers.copy()}
        fresh |= {"_patches": ExitStack(), "_constructions": Constructions(), "_plans": RunPlans(self._plans.options)}
        fresh["_checkpoints"] = self._checkpoints.copy()
        if self._topology is not None:
            fresh["_sparing"] = memo[id(self._sparing)] = Sparing(self._topology, inform)  # loaders have it, too
            fresh["_replica"] = memo[id(self._replica)] = Replica(copied.broadcast_in_pipeline, self._topology)
        for name, value in vars(self).items():
            vars(copied)[name] = fresh[name] if name in fresh else copy.deepcopy(value, memo)
        return copied

    # ------------------------------------------------------------------ environment

    @property
    def session(self) -> Session:
        """The module in its pipeline, after setup."""
        if self._session is None:
            raise RuntimeError("The strategy is not set up yet: the module is split into stages in its setup.")
        return self._session

    @property
    def plan(self) -> PartitionPlan:
        """The plan in use, after setup."""
        return self.session.plan

    @property
    def module(self) -> Any:
        """The user's LightningModule, once the Trainer has connected it."""
        assert self.lightning_module is not None
        return self.lightning_module

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        count = self._num_machines * self.num_processes
        starts_none = self.cluster_environment.creates_processes_externally or count == 1
        method = None if starts_none else resolve(self._start_method)
        self._launcher = make_launcher(self, method, gathers=self._gather_after_run is not False)
        if method not in (None, "popen"):
            self._gather_after_run = True  # the processes end with the run

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        assert self.cluster_environment is not None
        self.set_world_ranks()
        start = partial(init_process_group, self.cluster_environment, self._backend, self.root_device, self._timeout)
        begin_run(start, self.cluster_environment.main_address, self._heartbeat)
        self._checkpoints.forget_run()
        self._run_optimizers.begin_run()
        self._take_place()
        self._patches.close()  # where a run before this one ended without a teardown
        self._patches.callback(self.offer_mesh(self.module))
        if self.topology.num_ranks > 1 or self.replicas.are_several:
            self._patches.enter_context(self.replica.answering())
            self._patches.enter_context(early_hooks(self.module.trainer, self.module, self.replica))
        if self.replicas.are_several:
            reset_seed()  # as DDP: what has been drawn for the weights changes nothing of what is drawn in the run
        # Lock step: samplers and user code must draw the same numbers on all ranks of a pipeline, seeded or not.
        self._checkpoints.seed, state = self.broadcast_in_pipeline((torch.initial_seed(), rng_state()))
        if not self.topology.is_last:
            set_rng_state(state)  # the device's, too: what a step draws there before the model's call must be the same

    def _take_place(self, plan: PartitionPlan | None = None) -> None:
        """Joins the process groups of all runs, once there is a plan those of its stages; a split module stays in its own."""
        placement = self._plans.options.placement(self._num_machines * self.num_processes, plan)
        with noted_connections():
            topology = shared_topology(self.root_device, self._timeout, placement, num_failed_runs())
        if self._topology is not None and (topology is self._topology or self._is_in_stages()):
            return
        self._topology = topology
        if plan is None:
            self._sparing = Sparing(topology, inform)
            self._replica = Replica(self.broadcast_in_pipeline, topology)
        else:
            self._sparing.move_to(topology)  # loaders have it

    @override
    def process_dataloader(self, dataloader: object) -> object:
        check_sampler(dataloader, self.replicas)
        if self._topology is None:
            return dataloader  # asked for before a run, as to count its batches
        return seeded_alike(in_step(dataloader, self._sparing, self.replica.computing), self.replicas)

    # ------------------------------------------------------------------ setup

    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Any:
        return init_context(self._constructions, self.precision_plugin, self.lightning_module, self.root_device, empty_init)

    @override
    def setup(self, trainer: Trainer) -> None:
        if not self._checkpoints.are_of_a_run:
            self._bring_into_stages(trainer)
        self.session.complete_values()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            self._run_optimizers.follow(self.optimizers, self.session, self.topology)
        else:
            self._run_optimizers.keep(self.session, self.topology)
        self.name_profile(trainer)
        self.setup_precision_plugin()
        outside = self.session.hooks.outside
        self._precision = PipelinePrecision(self.precision_plugin, self.topology.group, self._clip_grad_by_norm, outside)
        self._patches.callback(self._precision.detach)
        self.barrier("setup")

    def _bring_into_stages(self, trainer: Trainer) -> None:
        """Begins a run: in :meth:`setup`, or before, where Lightning reads the checkpoint, of which a rank needs its part."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self._vote = votes_before_batches(trainer, self.topology)
        self._patches.enter_context(among_replicas(self.replicas))
        check_trainer(trainer, self.module)
        silence_lightning(logs_alike=not self.replicas.are_several)
        with self._constructions.changing(self.module):
            self.model = check_converted(self.precision_plugin.convert_module(self.module), self.module)
        if not self._is_in_stages():
            self._split(trainer)
        self._recording.begin_run(trainer, self.topology, self.plan, self.num_processes)
        self.session.prepare(trainer)
        self._patches.enter_context(self._checkpoints.begin_run(trainer, self.session, self.topology, self._run_optimizers))

    def _split(self, trainer: Trainer) -> None:
        """Begins a session. After the module's last run with this strategy the plan holds on, where it fits."""
        materials = materials_of(self._constructions, self.module)
        with noted_connections():
            planned: Planned | None = None
            plan = self._plans.last_plan(trainer, self.module)
            if plan is None:
                with self.replica.computing():
                    planned = self._plans.make(
                        trainer,
                        self.module,
                        placement=self.topology.placement,
                        device=self.root_device,
                        memory_left=memory_left(self.topology, self.num_processes) if self._plans.options.needs_memory else (),
                        num_replicas=self.replicas.count,
                        context=partial(step_context, self.precision_plugin),
                        first_batches=FirstBatches(self._sparing, self._patches),
                    )
                plan, self._schedule = self.broadcast((planned.plan, self._schedule))  # else ranks would not find each other
                self._num_microbatches = self._schedule.num_microbatches or self._num_microbatches
                check_compile(self._plans.options, plan, self.module)
                placement = self._plans.options.placement(self._num_machines * self.num_processes, plan)
                self._plans.report(plan, self.module, placement, self.num_processes, self.topology)
            self._take_place(plan)
            self.offer_mesh(self.module)
            self._session = Session(
                self.module,
                plan,
                self.topology,
                replica=self.replica,
                num_microbatches=self._num_microbatches,
                schedule=self._schedule,
                loss=self._loss,
                sparing=self._sparing,
                materials=materials,
                recorder=self._recording.recorder,
                compiles=self._plans.options.compile,
                optimizer_bytes_per_byte=self._plans.options.optimizer_bytes_per_byte(self.replicas.count),
            )
            if planned is not None:
                self._session.begin_with(step_of_run(trainer), planned)

    def _is_in_stages(self) -> bool:
        """Returns True if the module is in stages since a run before this one."""
        return self._session is not None and self._session.module is self.module and self._session.is_split

    @override
    def model_to_device(self) -> None:
        """Nothing to do: the session has moved this rank's stage to its device."""

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        self.optimizers, self.lr_scheduler_configs = [], []
        super().setup_optimizers(trainer)

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        with self.session.hooks.together("clip_gradients", changes_gradients=True):
            self.session.clip_gradients(self.precision_plugin.main_params(optimizer), clip_val)

    @override
    def teardown(self) -> None:
        # Not the base class's, which moves the module to the CPU: placeholders cannot be moved.
        assert self.cluster_environment is not None and self.accelerator is not None
        self._checkpoints.end_run()
        self._recording.end_run()
        self._patches.close()
        if self._session is not None:
            self._session.end_run(self._run_optimizers, num_copies=self.num_processes, gathers=self._gather_after_run)
        self.cluster_environment.teardown()
        self.checkpoint_io.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        end_run()

    # ------------------------------------------------------------------ checkpoints

    @override
    def on_train_start(self) -> None:
        self._checkpoints.begin_training()

    @override
    def on_train_end(self) -> None:
        self._checkpoints.end_training()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self._checkpoints.module_state()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self._run_optimizers.are_followed and not has_failed():
            self._run_optimizers.follow(self.optimizers, self.session, self.topology)
        return self._checkpoints.optimizer_state(optimizer)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None) -> None:
        if self._checkpoints.saves_nothing:  # not every rank may come here
            report_unsaved(filepath, self.global_rank)
        else:
            self._checkpoints.save(checkpoint, self.broadcast(filepath), storage_options)

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        if self.is_global_zero:
            self._checkpoints.remove(filepath, otherwise=partial(super().remove_checkpoint, filepath))

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        if not self._checkpoints.are_of_a_run and checkpoint_path == self.module.trainer.ckpt_path:
            self._bring_into_stages(self.module.trainer)
        return self._checkpoints.load(self.broadcast(checkpoint_path), weights_only=weights_only)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._checkpoints.load_model(checkpoint, strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self._checkpoints.load_optimizers(checkpoint)

    # ------------------------------------------------------------------ steps

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._recording.begin_step()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._checkpoints.has_trained = True
        return self._run_step(StepKind.TRAIN, partial(self.session.train, averages=self._averages), args, kwargs)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        plugin, module = self.precision_plugin, self.module
        with no_end_of_epoch("backward"), self._recording.during("backward"), self.session.around_backward():
            loss: Tensor = plugin.pre_backward(closure_loss, module)
            run, retains = partial(plugin.backward, loss, module, optimizer, *args, **kwargs), bool(kwargs.get("retain_graph"))
            self.session.backward(run, retains=retains, averages=self._averages)
            return plugin.post_backward(loss, module)

    @override
    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        self._run_optimizers.follow(self.optimizers, self.session, self.topology)
        stage_optimizer = self._run_optimizers.of(optimizer)
        noted = self._recording.during("optimizer step")
        with no_end_of_epoch("optimizer_step"), noted, self.session.around_optimizer_step(stage_optimizer):
            return super().optimizer_step(optimizer, *args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run_step(StepKind.VALIDATE, self.session.evaluate, args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run_step(StepKind.TEST, self.session.evaluate, args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run_step(StepKind.PREDICT, self.session.evaluate, args, kwargs)

    @override
    def on_validation_end(self) -> None:
        self.session.end_evaluation()

    on_test_end = on_predict_end = on_validation_end

    def _run_step(self, kind: StepKind, run: Callable[[Step, Any], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._vote is not None
        self._vote(self.session.decisions.graphs(), kind is StepKind.TRAIN)
        noted = self._recording.during(kind.value, trains=kind is StepKind.TRAIN)
        with no_end_of_epoch(kind.value), noted, self.session.around_step(kind), self.replica.computing():
            seed, precision = self._checkpoints.seed, self._precision
            return run(step_of_call(self.module, kind, args[1:], kwargs, seed=seed, precision=precision), args[0])


class FxPipeStrategy(PipelineStrategy, ParallelStrategy):  # noqa: D101
    __doc__ = PipelineStrategy.__doc__
