"""A step that changes parameters, or looks at gradients, is refused when it is surveyed: before the first batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_fxpipe.parameteruse import ParameterMisuse, check_call
from lightning_fxpipe.randomness import BatchDraws
from lightning_fxpipe.region import StepCall
from lightning_fxpipe.replay import watched_step
from lightning_fxpipe.survey import locate_region

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


def survey(before: Action = lambda _: None, after: Action = lambda _: None) -> None:
    module = Lit(before, after)
    locate_region(module, StepCall.of_training(module, torch.randn(BATCH, 6)), batch_size=BATCH)


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


CHANGES = {
    "moves a teacher": (move_teacher, "teacher.weight"),
    "replaces data": (replace_data, "teacher.weight"),
    "clamps data": (clamp_data, "model.weight"),
    "writes all": (write_all, "model.weight"),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_step_that_changes_parameters_is_refused(name: str, when: str) -> None:
    """Where it stands after the model's call, it would change those of the last stage only, between two microbatches."""
    action, fqn = CHANGES[name]
    with pytest.raises(ParameterMisuse, match=f"(?s)changes a parameter.*test_parameteruse.*{fqn}.*hook"):
        survey(**{when: action})


def test_a_step_that_looks_at_gradients_is_refused() -> None:
    """They are put together for the batch after the step; in it there are none, and it would log zeros."""
    with pytest.raises(ParameterMisuse, match=r"(?s)gradient of a parameter.*model\.weight"):
        survey(after=lambda module: module.model.weight.grad)


def test_what_a_step_may_do() -> None:
    @torch.no_grad()
    def harmless(module: Any) -> None:
        module.center.mul_(0.9).add_(1.0)  # its own
        module.mean.add_(1.0)
        module.seen = module.model.weight.norm(), module.model.weight.data.mean(), module.model.weight.shape
        module.copied = {name: value.clone() for name, value in module.model.state_dict().items()}

    survey(after=harmless)


def test_the_parameters_of_other_stages_cannot_be_used_but_asked_about() -> None:
    """They are placeholders without data; torch's own error would speak of the meta device."""
    module = nn.ModuleDict({"here": nn.Linear(2, 2), "there": nn.Linear(2, 2, device="meta")})
    parameters = list(module.parameters())
    with watched_step(module, BatchDraws(BATCH, 0)):
        assert sum(p.numel() for p in parameters if p.requires_grad) == 12
        assert parameters[0].norm() > 0
        with pytest.raises(ParameterMisuse, match=r"(?s)another rank holds.*there\.weight"):
            parameters[2].norm()
        with pytest.raises(ParameterMisuse, match=r"there\.weight"):
            torch.nn.utils.get_total_norm(parameters)
    check_call(module, torch.add, (parameters[0], 1))
