"""Planning while the module is on the CPU and the batch on its device already, as in a run on GPUs."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from lightning_fxpipe import make_plan
from lightning_fxpipe._compat.torch import FakeWorld
from lightning_fxpipe.distributed import topology
from lightning_fxpipe.optim.precision import step_context
from lightning_fxpipe.planner.plan import PartitionPlan
from lightning_fxpipe.strategy import run_plan as runplan
from lightning_fxpipe.strategy.run_plan import PlanOptions, RunPlans
from lightning_fxpipe.user_code.placement import Placement, device_of, move
from tests.devicemodules import MODULES, Batch, Lit, Mlp, Recurrent
from tests.simulated import CUDA, simulated_cuda


def batch_on(device: torch.device) -> Batch:
    return torch.ones(8, 12, device=device), torch.zeros(8, dtype=torch.long, device=device)


def outline(plan: PartitionPlan) -> Any:
    """What does not depend on the device."""
    stages = [(s.first_module, s.last_module, s.fqns, [(o.name, o.shape) for o in s.outputs]) for s in plan.stages]
    return stages, plan.outside_fqns, plan.prelude_fqns, plan.kept_whole, [r.name for r in plan.recomputed]


@pytest.mark.parametrize("name", MODULES)
def test_the_plan_is_that_of_a_run_on_the_cpu(name: str) -> None:
    module = MODULES[name]()
    before = {key: (value, value.device) for key, value in (*module.named_parameters(), *module.named_buffers())}
    with simulated_cuda():
        plan = make_plan(module, batch_on(CUDA), num_stages=2, num_microbatches=2)
        now = dict((*module.named_parameters(), *module.named_buffers()))
        assert all(now[key] is value and value.device == device for key, (value, device) in before.items())
        assert module.device == torch.device("cpu")
    if "autocast" in name or "cuda" in name:
        assert plan.num_stages == 2
    else:
        assert outline(plan) == outline(make_plan(module, batch_on(torch.device("cpu")), num_stages=2, num_microbatches=2))


@pytest.mark.parametrize(
    ("precision", "dtype"), [(Precision(), "float32"), (MixedPrecision("bf16-mixed", "cuda"), "bfloat16")], ids=["32", "bf16"]
)
@pytest.mark.parametrize("fn", [TrainerFn.FITTING, TrainerFn.PREDICTING])
@pytest.mark.parametrize("name", ["plain", "before: a buffer", "several calls"])
def test_the_strategy_plans_for_its_device(
    name: str, fn: TrainerFn, precision: Any, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = MODULES[name]()
    module.predict_step = type(module).training_step.__get__(module)  # type: ignore[method-assign]
    trainer: Any = SimpleNamespace(state=SimpleNamespace(fn=fn), lightning_module=module)
    plans = RunPlans(PlanOptions(given=None, num_stages="auto", stages_per_rank="auto", num_microbatches=2, batch_dim=0))
    with simulated_cuda():
        monkeypatch.setattr(runplan, "run_state_stood_in", lambda *args: nullcontext(set()))
        first: Any = SimpleNamespace(batch=lambda *args, **kwargs: batch_on(CUDA), shown=nullcontext, set_up_validation=int)
        context, placement = partial(step_context, precision), topology.Placement(num_ranks=2)
        plan = plans.make(trainer, module, placement=placement, device=CUDA, context=context, first_batches=first).plan
    assert {output.dtype for output in plan.stages[0].outputs} <= {dtype, "float32"}
    assert any(output.dtype == dtype for output in plan.stages[0].outputs)


def test_parameters_buffers_and_what_moves_along_lie_on_the_device() -> None:
    module = Lit(Mlp())
    module.loss_mean(torch.tensor(1.0))
    with simulated_cuda():
        placement = Placement(module, CUDA)
        for tensor in (module.model.head.weight, module.scale, module.loss_mean.mean_value, module.rotary.freqs):
            assert placement.device_of(tensor) == CUDA
            assert placement.moves(tensor)
            assert FakeWorld().static(tensor, placement.device_of(tensor)).device == CUDA
        for tensor in (module.model.table, module.model.temperature):
            assert placement.device_of(tensor) == torch.device("cpu")
            assert not placement.moves(tensor)


def test_asking_what_moves_along_changes_nothing() -> None:
    module = Lit(Recurrent())
    module.loss_mean(torch.tensor(3.0))
    before = {path: dict(vars(child)) for path, child in module.named_modules()}
    Placement(module, torch.device("meta"))
    for path, child in module.named_modules():
        assert {key: id(value) for key, value in vars(child).items()} == {key: id(value) for key, value in before[path].items()}
    assert float(module.loss_mean.compute()) == 3.0


def test_torch_calls_on_the_module_s_tensors_get_copies_on_the_device() -> None:
    module = Lit(Mlp())
    with simulated_cuda(), Placement(module, CUDA).pretending():
        assert module.device == module.scale.device == next(module.parameters()).device == CUDA
        assert (module.scale * torch.ones(12, device=CUDA)).device == CUDA
        assert module.model(torch.ones(2, 12, device=CUDA)).requires_grad
        assert module.model.table.device == torch.device("cpu")
    assert module.device == module.scale.device == torch.device("cpu")


def test_a_module_that_is_where_it_should_be_is_left_alone() -> None:
    module = Lit(Mlp())
    with Placement(module, torch.device("cpu")).pretending():
        assert module.scale.sum() == 12
        module.scale.add_(1)
    assert module.scale.sum() == 24


def test_the_device_is_that_of_the_first_tensor_that_is_not_on_the_cpu() -> None:
    with simulated_cuda():
        lengths, x = torch.ones(3), torch.ones(3, device=CUDA)
        assert device_of([lengths, x]) == CUDA
    assert device_of([torch.ones(3)]) == device_of([]) == torch.device("cpu")


def test_a_module_moves_as_a_whole_and_placeholders_stay() -> None:
    module = Lit(Mlp())
    weight = module.model.head.weight
    module.second[0].weight = nn.Parameter(torch.empty(5, 5, device="meta"))
    placeholder = module.second[0].weight
    move(module, torch.device("cpu"))
    assert module.model.head.weight is weight
    assert module.second[0].weight is placeholder
    assert placeholder.is_meta


def test_what_moves_says_so() -> None:
    module = Lit(Mlp())
    move(module, torch.device("meta"))
    assert module.device == module.loss_mean.device == module.rotary.freqs.device == torch.device("meta")
    assert module.model.table.device == torch.device("cpu")
    assert module.model.mean is dict(module.named_buffers())["model.mean"]
    assert module.model.mean.is_meta
