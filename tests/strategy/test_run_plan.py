"""The plan of a run: a given one is checked, and that of the run before holds where it fits."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn

from lightning_fxpipe import PartitionError, PartitionPlan, UnsupportedError, make_plan
from lightning_fxpipe.distributed.topology import Placement, Topology
from lightning_fxpipe.strategy import search_space
from lightning_fxpipe.strategy.run_plan import PlanOptions, RunPlans
from tests.lit import LitModel, make_trainer
from tests.models import make_samples


def plan_of(model: str = "mlp", num_stages: int = 2) -> PartitionPlan:
    return make_plan(LitModel(model), make_samples(model, 4), num_stages=num_stages)


def plans(given: PartitionPlan, batch_dim: int = 0, num_stages: Any = "auto") -> RunPlans:
    return RunPlans(
        PlanOptions(given=given, num_stages=num_stages, stages_per_rank="auto", num_microbatches=None, batch_dim=batch_dim)
    )


def make(one: RunPlans, module: Any, fn: TrainerFn = TrainerFn.FITTING) -> PartitionPlan:
    trainer = make_trainer()
    trainer.state.fn = fn
    placement = one.options.placement(2)
    first: Any = None  # a given plan needs no batch
    device = torch.device("cpu")
    planned = one.make(
        trainer, module, placement=placement, device=device, context=lambda kind: nullcontext(), first_batches=first
    )
    return planned.plan


def test_a_given_plan_is_checked() -> None:
    plan = plan_of()
    assert make(plans(plan), LitModel("mlp")) is plan
    with pytest.raises(PartitionError, match="made for a different model"):
        make(plans(plan_of("unet")), LitModel("mlp"))
    with pytest.raises(UnsupportedError, match="cannot be distributed evenly over the devices"):
        make(plans(plan_of(num_stages=3)), LitModel("mlp"))
    with pytest.raises(UnsupportedError, match="does not have the requested number of stages"):
        make(plans(plan, num_stages=4), LitModel("mlp"))
    assert make(plans(plan_of(num_stages=4)), LitModel("mlp")).num_stages == 4
    with pytest.raises(UnsupportedError, match="a different batch dimension"):
        make(plans(plan, batch_dim=1), LitModel("mlp"))
    assert make(plans(replace(plan, batch_dim=1), batch_dim=1), LitModel("mlp")).batch_dim == 1


def test_memory_that_nobody_knows_is_no_limit_in_silence() -> None:
    def options(memory: Any) -> PlanOptions:
        counts: dict[str, Any] = {"num_stages": "auto", "stages_per_rank": "auto", "num_microbatches": None}
        return PlanOptions(given=None, batch_dim=0, device_memory_gib=memory, **counts)

    with pytest.raises(UnsupportedError, match="The free memory of the devices is unknown"):
        options("auto").memory_of((), 2)
    assert options("auto").memory_of((5, 6), 2) == (5, 6)
    assert options(None).memory_of((), 2) == ()
    assert options(1).memory_of((5, 6), 2) == (2**30, 2**30)


def test_memory_is_shared_by_all_processes_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of other replicas take theirs, too."""
    monkeypatch.setattr(search_space, "memory_for_rank", lambda device, num_ranks: 1000 // num_ranks)
    alone = Topology(group=None, control_group=None, rank=0, placement=Placement(num_ranks=1), device=torch.device("cpu"))
    assert [search_space.memory_left(alone, count) for count in (1, 4)] == [(900,), (225,)]


@pytest.mark.parametrize(("shards", "kept"), [(False, 2.0), (True, 0.5)])
def test_what_a_replica_keeps_of_the_optimizer_counts(shards: bool, kept: float) -> None:
    options = PlanOptions(
        given=None, num_stages=2, stages_per_rank="auto", num_microbatches=None, batch_dim=0, shard_optimizer_state=shards
    )
    assert options.optimizer_bytes_per_byte(4) == kept
    assert options.optimizer_bytes_per_byte(1) == 2.0


def test_a_plan_for_validation_does_not_hold_for_a_fit() -> None:
    """What trains decides what is pipelined."""
    module, trainer = LitModel("mlp"), make_trainer()
    for first, holds in ((TrainerFn.FITTING, True), (TrainerFn.VALIDATING, False)):
        one = plans(plan_of())
        plan = make(one, module, first)
        trainer.state.fn = TrainerFn.VALIDATING
        assert one.last_plan(trainer, module) is plan
        assert one.last_plan(trainer, LitModel("mlp")) is None
        trainer.state.fn = TrainerFn.FITTING
        assert (one.last_plan(trainer, module) is plan) == holds


def test_a_saved_plan_knows_the_dimension_of_the_batch(tmp_path: Path) -> None:
    replace(plan_of(), batch_dim=1).save(tmp_path / "plan.json")
    assert PartitionPlan.load(tmp_path / "plan.json").batch_dim == 1
