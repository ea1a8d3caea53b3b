"""A step that changes parameters, or looks at gradients, is refused in discovery: before the first batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_fxpipe._compat.torch import storage_key
from lightning_fxpipe.microbatch.draws import BatchDraws
from lightning_fxpipe.runtime.replay import watched_step
from lightning_fxpipe.tracing.discovery import regions
from lightning_fxpipe.tracing.parameter_use import ParameterMisuse, check_call, check_same_parameters, parameters_by_name
from lightning_fxpipe.tracing.region import StepCall

BATCH = 4
Action = Callable[[Any], Any]


class Lit(L.LightningModule):
    """Does something with parameters before or after it calls its model."""

    def __init__(self, before: Action, after: Action) -> None:
        super().__init__()
        self.model, self.teacher = nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False)
        self.center = nn.Parameter(torch.zeros(6), requires_grad=False)
        self.register_buffer("mean", torch.zeros(6))
        self.before, self.after = before, after

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.before(self)
        hidden = self.model(batch)
        loss = (hidden - self.teacher(batch)).square().mean()
        self.after(self)
        return loss


def discover(before: Action = lambda _: None, after: Action = lambda _: None) -> None:
    module = Lit(before, after)
    next(regions(module, StepCall.of_training(module, torch.randn(BATCH, 6)), batch_size=BATCH))


@torch.no_grad()
def move_teacher(module: Any) -> None:
    for parameter, slow in zip(module.model.parameters(), module.teacher.parameters(), strict=True):
        slow.mul_(0.9).add_(parameter, alpha=0.1)


def replace_data(module: Any) -> None:
    module.teacher.weight.data = 0.9 * module.teacher.weight.data + 0.1 * module.model.weight.data


def clamp_data(module: Any) -> None:
    module.model.weight.data.clamp_(-0.1, 0.1)


@torch.no_grad()
def write_all(module: Any) -> None:
    nn.utils.vector_to_parameters(torch.zeros(42), module.model.parameters())


@torch.no_grad()
def other_memory(module: Any) -> None:
    module.model.bias.set_(torch.ones(6))


def by_name(module: Any) -> None:
    module.model.load_state_dict({name: value * 0.9 for name, value in module.model.state_dict().items()})


def caught(module: Any) -> None:
    try:
        module.model.weight.data.mul_(0.9)
    except Exception:
        return


CHANGES = {
    "moves a teacher": (move_teacher, "teacher.weight"),
    "replaces data": (replace_data, "teacher.weight"),
    "clamps data": (clamp_data, "model.weight"),
    "writes all": (write_all, "model.weight"),
    "a list of data": (lambda module: torch._foreach_mul_([p.data for p in module.model.parameters()], 0.9), "model.weight"),
    "a list of detached": (lambda module: torch._foreach_clamp_max_([module.model.bias.detach()], 0.1), "model.bias"),
    "a list, copied": (lambda module: torch._foreach_copy_([module.model.bias.data], [torch.zeros(6)]), "model.bias"),
    "under no_grad": (lambda module: torch.no_grad()(module.model.weight.mul_)(0.9), "model.weight"),
    "an operator": (lambda module: module.model.weight.data.__imul__(0.9), "model.weight"),
    "an item": (lambda module: module.model.weight.data.__setitem__(0, 0.0), "model.weight"),
    "a view": (lambda module: module.model.weight.data[0].zero_(), "model.weight"),
    "an output": (lambda module: torch.mul(module.model.bias.data, 2, out=module.model.bias.data), "model.bias"),
    "an initialiser": (lambda module: nn.init.normal_(module.model.weight), "model.weight"),
    "other memory": (other_memory, "model.bias"),
    "other memory of data": (lambda module: module.model.bias.data.set_(torch.zeros(6)), "model.bias"),
    "an operator by its schema": (lambda module: torch.ops.aten.mul_.Scalar(module.model.bias.data, 0.9), "model.bias"),
    "an array": (lambda module: module.model.bias.detach().numpy().fill(0), "model.bias"),
    "an array of numpy": (lambda module: np.asarray(module.model.bias.data).fill(0), "model.bias"),
    "by name": (by_name, "model.weight"),
    "a caught error": (caught, "model.weight"),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_step_that_changes_parameters_is_refused(name: str, when: str) -> None:
    """Where it stands after the model's call, it would change those of the last stage only."""
    action, fqn = CHANGES[name]
    with pytest.raises(ParameterMisuse, match=f"(?s)The step changes a parameter.*test_parameter_use.*{fqn}.*hook"):
        discover(**{when: action})


def test_a_step_that_looks_at_gradients_is_refused() -> None:
    """They are put together for the batch after the step; in it there are none, and it would log zeros."""
    with pytest.raises(ParameterMisuse, match=r"(?s)reads or sets the gradient of a parameter.*model\.weight"):
        discover(after=lambda module: module.model.weight.grad)


def test_a_step_that_sets_gradients_is_refused() -> None:
    with pytest.raises(ParameterMisuse, match=r"(?s)reads or sets the gradient of a parameter.*model\.bias"):
        discover(before=lambda module: setattr(module.model.bias, "grad", torch.zeros(6)))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_step_that_freezes_parameters_is_refused(when: str) -> None:
    with pytest.raises(ParameterMisuse, match=r"(?s)The step freezes or unfreezes a parameter.*model\.weight"):
        discover(**{when: lambda module: module.model.requires_grad_(False)})


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_step_that_replaces_parameters_is_refused(when: str) -> None:
    with pytest.raises(ParameterMisuse, match=r"(?s)The step creates, replaces or removes a parameter.*model\.bias"):
        discover(**{when: lambda module: setattr(module.model, "bias", nn.Parameter(torch.zeros(6)))})


RUNNING = (
    "clamps data",
    "a list of data",
    "a list of detached",
    "an item",
    "a view",
    "an output",
    "an initialiser",
    "an array",
)


def run_watched(module: nn.Module, step: Action, is_caught: bool) -> None:
    """A step at run time, which may catch what the check of its calls raises."""
    with watched_step(module, BatchDraws(BATCH, 0)):
        try:
            step(module)
        except ParameterMisuse:
            if not is_caught:
                raise
        else:
            pytest.fail("nothing was raised where it happens")


@pytest.mark.parametrize("is_caught", [False, True], ids=["", "caught"])
@pytest.mark.parametrize("name", RUNNING)
def test_a_change_that_comes_later_is_refused_where_it_is_made(name: str, is_caught: bool) -> None:
    """A step may make it for the hundredth batch only, and then on the last stage. It may also catch what we raise."""
    module = Lit(lambda _: None, lambda _: None)
    action, fqn = CHANGES[name]
    before = [parameter.detach().clone() for parameter in module.parameters()]
    with pytest.raises(ParameterMisuse, match=f"(?s)The step changes a parameter.*test_parameter_use.*{fqn}"):
        run_watched(module, action, is_caught)
    for parameter, value in zip(module.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.detach(), value, rtol=0, atol=0)


def test_other_memory_under_a_parameter_is_found_after_the_step() -> None:
    """No call of torch shows it."""
    for change in (other_memory, lambda module: torch.utils.swap_tensors(module.model.bias, nn.Parameter(torch.ones(6)))):
        module = Lit(lambda _: None, lambda _: None)
        names = parameters_by_name(module)
        check_same_parameters(module, names)
        change(module)
        with pytest.raises(ParameterMisuse, match=r"(?s)The step changes a parameter.*model\.bias has different memory.*hook"):
            check_same_parameters(module, names)


def test_the_steps_own_centre_may_have_other_memory() -> None:
    module = Lit(lambda _: None, lambda _: None)
    names = parameters_by_name(module)
    with torch.no_grad():
        module.center.set_(torch.ones(6))
    check_same_parameters(module, names)


def test_what_a_step_may_do() -> None:
    @torch.no_grad()
    def harmless(module: Any) -> None:
        module.center.mul_(0.9).add_(1.0)  # its own
        module.teacher.requires_grad_(False)  # as it is
        torch._foreach_add_([module.mean], 1.0)
        module.outside = torch.zeros(6).numpy()
        module.mean.add_(1.0)
        module.seen = module.model.weight.norm(), module.model.weight.data.mean(), module.model.weight.shape
        module.copied = {name: value.clone() for name, value in module.model.state_dict().items()}

    discover(after=harmless)


@pytest.mark.parametrize("is_caught", [False, True], ids=["", "caught"])
def test_the_parameters_of_other_stages_cannot_be_used_but_asked_about(is_caught: bool) -> None:
    """They are placeholders without data; torch's own error would speak of the meta device."""
    module = nn.ModuleDict({"here": nn.Linear(2, 2), "there": nn.Linear(2, 2, device="meta")})
    parameters = list(module.parameters())
    with watched_step(module, BatchDraws(BATCH, 0)):
        assert sum(p.numel() for p in parameters if p.requires_grad) == 12
        assert parameters[0].norm() > 0
    for use in (lambda: parameters[2].norm(), lambda: torch.nn.utils.get_total_norm(parameters)):
        with pytest.raises(ParameterMisuse, match=r"(?s)uses another rank's parameter outside the model's call.*there\.weight"):
            run_watched(module, lambda _, use=use: use(), is_caught=is_caught)
    check_call(module, torch.add, (parameters[0], 1))


def test_a_buffer_of_another_stage_is_named_with_what_works_in_a_step() -> None:
    module = nn.Module()
    module.register_buffer("alpha", torch.zeros((), device="meta"))
    with pytest.raises(ParameterMisuse, match="(?s)uses another rank's buffer.*alpha.*a new tensor before the model's call"):
        run_watched(module, lambda _: module.alpha.fill_(1.0), is_caught=False)  # type: ignore[operator, union-attr]


def test_a_step_that_writes_into_a_parameter_by_out_is_refused() -> None:
    module = Lit(lambda _: None, lambda _: None)
    weight = module.model.weight
    with pytest.raises(ParameterMisuse, match="The step changes a parameter"):
        check_call(module, torch.add, (weight, weight), {"out": weight})
    check_call(module, torch.add, (weight, weight), {"out": torch.empty(6, 6)})


@pytest.mark.parametrize("changes", [True, False])
@pytest.mark.parametrize(
    "call",
    [
        lambda x, mean, var, on: nn.functional.batch_norm(x, mean, var, training=on),
        lambda x, mean, var, on: nn.functional.batch_norm(x, mean, var, None, None, on),
        lambda x, mean, var, on: nn.functional.instance_norm(x, running_var=var, running_mean=mean, use_input_stats=on),
        lambda x, mean, var, on: torch.batch_norm(x, None, None, mean, var, on, 0.1, 1e-5, False),
        lambda x, mean, var, on: torch.instance_norm(x, None, None, mean, var, on, 0.1, 1e-5, False),
        lambda x, mean, var, on: torch.native_batch_norm(x, None, None, mean, var, on, 0.1, 1e-5),
    ],
    ids=["named", "in places", "instances", "torch", "torch, instances", "kernel"],
)
def test_running_statistics_are_written_to(call: Callable[..., Any], changes: bool) -> None:
    """The versions of batch norm's do not show it, so the places where functions have them are known, as torch has them."""
    mean, var, x = torch.zeros(6), torch.ones(6), torch.randn(4, 6, 5)
    written: set[int] = set()
    with watched_step(nn.Linear(6, 6), BatchDraws(BATCH, 0), written):
        call(x, mean, var, changes)
    assert mean.any() == (var != 1).any() == changes
    assert written == ({storage_key(mean), storage_key(var)} if changes else set())
