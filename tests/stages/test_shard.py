"""A rank's share of the module: its own stage's tensors untouched, those of other stages placeholders without data."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_fxpipe import PartitionPlan, make_plan
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.planner.planning import plan_region
from lightning_fxpipe.stages.shard import drop_other_stages
from lightning_fxpipe.tracing.region import StepCall, find_region
from tests.models import make_model, make_samples

CPU = torch.device("cpu")


class Recurrent(nn.Module):
    """An LSTM in the middle; it keeps a second list of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.lstm = nn.LSTM(8, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, 200)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.stem(x))[0])


class Mixed(nn.Module):
    """Every kind of tensor: frozen, half precision, buffers that are saved and not, an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh())
        self.second = Shifted(16, 16)
        self.last = nn.Linear(16, 4)
        self.first[0].bias.requires_grad_(False)
        self.unused = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x)))


class Shifted(nn.Module):
    """Adds two buffers, one of them not part of the state dict."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.register_buffer("saved", torch.randn(outputs))
        self.register_buffer("unsaved", torch.randn(outputs), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.saved + self.unsaved


class Distilled(L.LightningModule):
    """Uses tensors outside of the pipelined call: a frozen teacher before it, a projection and a buffer after it."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(6, 6).requires_grad_(False)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4))
        self.projection = nn.Linear(4, 2)
        self.register_buffer("class_weights", torch.rand(2))

    def training_step(self, batch: Tensor) -> Tensor:
        return (self.projection(self.model(self.teacher(batch))) * self.class_weights).sum()


def case(name: str) -> tuple[nn.Module, Any]:
    """A module and a batch for it."""
    if name in ("mlp", "gpt"):
        return make_model(name), (make_samples(name, 4)[0],)
    torch.manual_seed(0)
    if name == "lstm":
        return Recurrent(), (torch.randn(4, 5, 6),)
    return (Distilled(), torch.randn(4, 6)) if name == "distilled" else (Mixed(), (torch.randn(4, 6),))


@cache
def plan_of(name: str, num_stages: int) -> PartitionPlan:
    """Tracing takes seconds, and a plan speaks of names only: it fits every module made alike."""
    module, batch = case(name)
    if name == "distilled":  # as for a step that cannot run on fakes: only the first call that trains is pipelined
        call = find_region(module, StepCall.of_training(module, batch), batch_size=len(batch))
        return plan_region(module, call, num_stages=num_stages)
    return make_plan(module, batch, num_stages=num_stages)


def planned(name: str, num_stages: int) -> tuple[nn.Module, PartitionPlan]:
    return case(name)[0], plan_of(name, num_stages)


def all_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers under all of their names."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def holders(plan: PartitionPlan, names: set[str]) -> tuple[int, ...]:
    """Stages that hold a tensor with these names, read from the plan's lists; all of them where none claims it."""
    stages = tuple(stage.index for stage in plan.stages if names & set(stage.fqns))
    last = plan.num_stages - 1
    return stages or ((last,) if names & set(plan.outside_fqns) else tuple(range(plan.num_stages)))


def names_of(tensors: dict[str, Tensor]) -> Iterator[tuple[str, set[str]]]:
    """Each name, with all names of the same tensor."""
    for fqn, tensor in tensors.items():
        yield fqn, {other for other, candidate in tensors.items() if candidate is tensor}


CASES = [("mlp", 3), ("gpt", 3), ("lstm", 2), ("distilled", 2), ("mixed", 2), ("mixed", 1)]


@pytest.mark.parametrize(("name", "num_stages"), CASES)
def test_a_rank_keeps_exactly_the_tensors_of_its_stage(name: str, num_stages: int) -> None:
    for stage in range(num_stages):
        module, plan = planned(name, num_stages)
        before = all_tensors(module)
        expected = {fqn for fqn, names in names_of(before) if stage in holders(plan, names)}
        drop_other_stages(module, plan, [stage], CPU)
        after = all_tensors(module)
        assert {fqn for fqn, tensor in after.items() if not tensor.is_meta} == expected
        # Nothing that stays is copied: the optimizer, hooks and the user's own references see the same objects.
        assert all(after[fqn] is before[fqn] for fqn in expected)


@pytest.mark.parametrize(("name", "num_stages"), CASES)
def test_every_stage_leaves_something_and_together_they_keep_everything(name: str, num_stages: int) -> None:
    kept: list[set[str]] = []
    for stage in range(num_stages):
        module, plan = planned(name, num_stages)
        drop_other_stages(module, plan, [stage], CPU)
        kept.append({fqn for fqn, tensor in all_tensors(module).items() if not tensor.is_meta})
    everything = all_tensors(case(name)[0]).keys()
    assert set.union(*kept) == everything
    if num_stages > 1:
        assert all(part < everything for part in kept)


@pytest.mark.parametrize(("name", "num_stages"), CASES)
def test_placeholders_look_like_the_tensors_that_they_stand_for(name: str, num_stages: int) -> None:
    def described(tensors: dict[str, Tensor]) -> dict[str, Any]:
        return {fqn: (tuple(t.shape), t.dtype, t.requires_grad, type(t)) for fqn, t in tensors.items()}

    for stage in range(num_stages):
        module, plan = planned(name, num_stages)
        before, state = described(all_tensors(module)), list(module.state_dict())
        parameters = [fqn for fqn, _ in module.named_parameters()]
        drop_other_stages(module, plan, [stage], CPU)
        assert described(all_tensors(module)) == before
        assert list(module.state_dict()) == state  # the unsaved buffer is still not among them
        assert [fqn for fqn, _ in module.named_parameters()] == parameters


def test_what_no_stage_claims_stays_on_every_rank_and_what_comes_after_with_the_last() -> None:
    for stage in range(2):
        module, plan = planned("distilled", 2)
        drop_other_stages(module, plan, [stage], CPU)
        assert not module.teacher.weight.is_meta
        assert not module.class_weights.is_meta
        assert module.projection.weight.is_meta == (stage == 0)


def test_tied_weights_stay_tied_on_every_stage() -> None:
    for stage in range(3):
        module, plan = planned("gpt", 3)
        assert plan.stages_of("tok.weight") == (0, 2)
        drop_other_stages(module, plan, [stage], CPU)
        assert module.head.weight is module.tok.weight
        # The first stage embeds with it and the last computes the logits; the one between has nothing to do with it.
        assert module.tok.weight.is_meta == (stage == 1)


@pytest.mark.parametrize("stage", [0, 1])
def test_the_second_list_of_an_lstms_weights_follows(stage: int) -> None:
    module, plan = planned("lstm", 2)
    (holder,) = plan.stages_of("lstm.weight_ih_l0")
    drop_other_stages(module, plan, [stage], CPU)
    flat, registered = module.lstm._flat_weights, list(module.lstm.parameters())
    assert len(flat) == len(registered) == 8
    assert all(one is other for one, other in zip(flat, registered, strict=True))
    assert all(weight.is_meta == (stage != holder) for weight in flat)


@pytest.mark.parametrize("stage", [0, 1])
def test_the_second_list_follows_in_the_module_that_was_planned(stage: int) -> None:
    """Planning runs the module on fake tensors; none of them may stay behind, or the stage would compute with fakes."""
    module, batch = case("lstm")
    expected = module(*batch)
    plan = make_plan(module, batch, num_stages=2)
    drop_other_stages(module, plan, [stage], CPU)
    assert all(one is other for one, other in zip(module.lstm._flat_weights, module.lstm.parameters(), strict=True))
    if plan.stages_of("lstm.weight_ih_l0") == (stage,):
        restored = case("lstm")[0]
        restored.stem, restored.lstm = module.stem, module.lstm
        torch.testing.assert_close(restored(*batch), expected, rtol=0, atol=0)


def test_an_optimizer_can_still_group_all_parameters() -> None:
    module, plan = planned("mixed", 2)
    drop_other_stages(module, plan, [0], CPU)
    decay = [parameter for parameter in module.parameters() if parameter.dim() > 1]
    rest = [parameter for parameter in module.parameters() if parameter.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": decay}, {"params": rest}])
    assert [len(group["params"]) for group in optimizer.param_groups] == [3, 6]


def test_a_module_that_has_lost_its_parameters_is_refused() -> None:
    module, plan = planned("mlp", 3)
    drop_other_stages(module, plan, [1], CPU)
    lost = [fqn for fqn, parameter in module.named_parameters() if parameter.is_meta]
    kept = all_tensors(module)
    with pytest.raises(UnsupportedError) as caught:
        drop_other_stages(module, plan, [0], CPU)
    assert f"no data for {lost[0]} and {len(lost) - 1} others" in str(caught.value)
    assert all(all_tensors(module)[fqn] is tensor for fqn, tensor in kept.items())


def test_a_single_lost_parameter_is_named_alone() -> None:
    module, plan = planned("mixed", 2)
    module.last.bias = nn.Parameter(torch.empty(4, device="meta"))
    with pytest.raises(UnsupportedError, match=r"no data for last\.bias\n") as caught:
        drop_other_stages(module, plan, [0], CPU)
    assert "others" not in str(caught.value)


def test_nothing_of_its_own_stage_is_exchanged() -> None:
    module, plan = planned("mixed", 2)
    before = all_tensors(module)
    drop_other_stages(module, plan, [1], CPU)
    assert all(tensor.is_meta or tensor is before[fqn] for fqn, tensor in all_tensors(module).items())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_parameter_moves_in_place_so_that_references_see_it() -> None:
    module, plan = planned("mixed", 2)
    weight = module.last.weight
    values = weight.detach().clone()
    drop_other_stages(module, plan, [1], torch.device("cuda", 0))
    assert module.last.weight is weight
    assert weight.is_cuda
    torch.testing.assert_close(weight.detach().cpu(), values, rtol=0, atol=0)
