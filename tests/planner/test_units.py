"""Which calls of a step with manual optimization are pipelined, and the plan for all of them."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_fxpipe.errors import PartitionError, TraceError
from lightning_fxpipe.planner.step_plan import plan_jointly
from lightning_fxpipe.planner.units import UnitNotRecorded, find_units, plan_units
from lightning_fxpipe.tracing.region import NoModelCall, StepCall


def net(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False)))


class Pair(L.LightningModule):
    """Calls one network by the module's own forward, the other and a part of it by name, and trains between."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.one, self.other, self.idle = net(4, 6, 6, 4), net(4, 8, 8, 1), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        made = self(batch)
        loss = self.other(made).mean()
        self.manual_backward(loss)
        (slope,) = torch.autograd.grad(loss, made)
        if loss.item() > 0:
            self.other[0](made + slope)


def units_of(module: nn.Module, batch: Any, num_samples: int = 6) -> list[Any]:
    return find_units(module, StepCall.of_step(module.training_step, batch), num_samples=num_samples)


def test_the_first_call_of_each_module_is_found_and_nothing_is_trained() -> None:
    module = Pair()
    units = units_of(module, torch.ones(6, 4))
    assert [(unit.path, tuple(unit.args[0].shape)) for unit in units] == [("", (6, 4)), ("other", (6, 4)), ("other.0", (6, 4))]
    assert all(parameter.grad is None for parameter in module.parameters())


def test_each_module_is_planned_over_all_stages() -> None:
    module = Pair()
    plan = plan_units(module, units_of(module, torch.ones(6, 4)), num_stages=2)
    held = [sorted({".".join(fqn.split(".")[:2]) for fqn in stage.fqns}) for stage in plan.stages]
    assert held == [["one.0", "one.1", "other.0", "other.1"], ["one.2", "other.2"]] or held == [
        ["one.0", "other.0"],
        ["one.1", "one.2", "other.1", "other.2"],
    ]
    assert plan.outside_fqns == ("idle.weight", "idle.bias")
    assert plan.num_parameters == sum(p.numel() for part in (module.one, module.other) for p in part.parameters())


class Short(Pair):
    """Each network has two layers, and between them a call without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
        self.other = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


def test_no_stage_is_left_without_parameters_by_calls_that_have_none() -> None:
    """Cut in three, each network would have parameters in the first and the last stage only."""
    module = Short()
    plan = plan_units(module, units_of(module, torch.ones(6, 4)), num_stages=3)
    assert all(stage.num_parameters for stage in plan.stages)


class Single(Pair):
    """Calls two modules that cannot be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 1)  # type: ignore[assignment]

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.other(self.one(batch))


def test_a_module_that_cannot_be_cut_so_often_is_where_the_least_is() -> None:
    class Small(Pair):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = net(4, 8, 8, 2, 4), nn.Linear(4, 1)  # type: ignore[assignment]

    for module, num_stages in ((Small(), 3), (Single(), 2)):
        step = StepCall.of_step(Single.training_step.__get__(module), torch.ones(6, 4))
        plan = plan_units(module, find_units(module, step, num_samples=6), num_stages=num_stages)
        (holder,) = [stage for stage in plan.stages if "other.weight" in stage.fqns]
        others = [stage.num_parameters for stage in plan.stages if stage is not holder]
        assert holder.num_parameters - 5 <= min(others)
        assert min(others) > 0


class Breaks(Pair):
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self(batch)
        raise KeyError("nothing here")


class MovesInForward(Pair):
    """Its forward cannot be recorded: it writes to parameters."""

    def forward(self, x: Tensor) -> Tensor:
        self.idle.weight.data = self.idle.weight.data * 0.9
        return self.one(x)


def test_a_module_that_cannot_be_recorded_is_planned_by_the_calls_inside() -> None:
    module = MovesInForward()
    before = module.idle.weight.detach().clone()
    plan = plan_jointly(module, StepCall.of_step(module.training_step, torch.ones(6, 4)), torch.ones(6, 4), num_stages=2)
    assert plan.regions == ("one", "other")
    torch.testing.assert_close(module.idle.weight.detach(), before)


class CannotBeRecorded(Pair):
    """Neither its forward can be, nor is there a call inside."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data * 0.9
        return x * self.weight

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.manual_backward(self(batch).sum())


def test_where_nothing_inside_can_be_planned_the_first_reason_is_told() -> None:
    module = CannotBeRecorded()
    with pytest.raises(TraceError, match=r"assigning to Tensor\.data"):
        plan_jointly(module, StepCall.of_step(module.training_step, torch.ones(6, 4)), torch.ones(6, 4), num_stages=2)


class FailsInside(CannotBeRecorded):
    """Once its code is taken for the step's, that fails without data."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data * 0.9
        raise ValueError("not without data")


def test_an_error_of_opened_code_does_not_hide_the_first_reason() -> None:
    module = FailsInside()
    with pytest.raises(TraceError, match=r"assigning to Tensor\.data"):
        plan_jointly(module, StepCall.of_step(module.training_step, torch.ones(6, 4)), torch.ones(6, 4), num_stages=2)


def test_an_error_of_the_step_ends_the_search_or_is_raised() -> None:
    step = StepCall.of_step(Breaks().training_step, torch.ones(6, 4))
    assert [unit.path for unit in find_units(step.function.__self__, step, num_samples=6)] == [""]
    with pytest.raises(KeyError, match="nothing here"):
        find_units(step.function.__self__, step, num_samples=6, accepts_part=False)


def test_a_step_without_a_call_is_refused() -> None:
    class Calls(Pair):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            self.seen = batch.sum()

    with pytest.raises(NoModelCall, match="nothing to pipeline"):
        units_of(Calls(), torch.ones(6, 4))


def test_more_stages_than_the_modules_have_parts_are_refused() -> None:
    module = Single()
    with pytest.raises(PartitionError, match="stages of the modules that the step calls: 1 of one, 1 of other"):
        plan_units(module, units_of(module, torch.ones(6, 4)), num_stages=3)


class Hooked(Pair):
    """A hook keeps what a block returns, and the step uses that."""

    def __init__(self, keep: Any) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        self.one[1].register_forward_hook(lambda module, args, output: self.kept.append(keep(output)))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.kept.clear()
        self.manual_backward(self.one(batch).mean() + self.kept[0].mean())


@pytest.mark.parametrize("keep", [lambda output: output, lambda output: output.abs()], ids=["the result", "what follows"])
def test_a_call_that_leaves_the_step_a_tensor_by_a_hook_is_opened(keep: Any) -> None:
    """Where the hook runs in a stage, only that stage's rank would have the tensor, and of a microbatch."""
    module, batch = Hooked(keep), torch.ones(6, 4)
    with pytest.raises(UnitNotRecorded) as raised:
        units_of(module, batch)
    assert raised.value.path == "one"
    assert raised.value.error.what == "The step uses a tensor that its call of one computes but does not return."
    assert "test_units.py:" in str(raised.value.error.where)
    found = find_units(module, StepCall.of_step(module.training_step, batch), num_samples=6, opened={"one", "one.1"})
    assert [unit.path for unit in found] == ["one.0", "one.2"]


def test_a_result_that_a_hook_has_kept_is_not_the_call_s_own() -> None:
    class KeepsResults(Pair):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            kept: list[Tensor] = []
            handle = self.one.register_forward_hook(lambda module, args, output: kept.append(output))
            self.manual_backward(self.one(batch).mean() + kept[0].mean())
            handle.remove()

    with pytest.raises(UnitNotRecorded):
        units_of(KeepsResults(), torch.ones(6, 4))


def test_a_hooked_call_whose_result_the_step_uses_stays_as_it_is() -> None:
    class Looks(Hooked):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            self.manual_backward(self.one(batch).mean())

    assert [unit.path for unit in units_of(Looks(torch.abs), torch.ones(6, 4))] == ["one"]


def test_a_call_that_leaves_the_step_a_tensor_as_an_attribute_is_opened() -> None:
    """The module with the attribute is another one on the other ranks."""

    class Keeps(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            result = super().forward(x)
            self.penalty, self.penalties = result.square().mean(), [result.abs().mean()]
            return result

    class Adds(Pair):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            result = self.one(batch)
            self.manual_backward(result.mean() + (self.one[0].penalties[0] if self.takes_from_list else self.one[0].penalty))

    module = Adds()
    module.one[0] = Keeps(4, 6)
    for module.takes_from_list in (False, True):
        with pytest.raises(UnitNotRecorded) as raised:
            units_of(module, torch.ones(6, 4))
        assert raised.value.path == "one"
