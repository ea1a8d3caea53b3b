"""Which calls of a step are pipelined together, and what of them later code needs: found by running the step on fakes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fxpipe.errors import FxPipeError, TraceError, UnsupportedError
from lightning_fxpipe.tracing.discovery import regions
from lightning_fxpipe.tracing.recordable import RegionCall
from lightning_fxpipe.tracing.region import StepCall
from lightning_fxpipe.tracing.span import StepRegion
from lightning_fxpipe.tracing.trace import trace_region

BATCH = 4


class Keeps(nn.Module):
    """Leaves a penalty on itself, as layers with an auxiliary loss do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.penalty: Tensor | float = 0.0

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        self.penalty = h.square().mean()
        return h


class Lit(L.LightningModule):
    """Has parts to call; the tests give it the step that they are about."""

    def __init__(self, step: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.encoder, self.decoder, self.teacher, self.keeps = nn.Linear(6, 6), nn.Linear(3, 6), nn.Linear(6, 6), Keeps()
        self.scale = nn.Parameter(torch.ones(()))
        self.step = step
        self.kept: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.step(self, batch)


def found(step: Callable[[Any, Tensor], Any]) -> Any:
    return found_and_traced(step)[0]


def found_and_traced(step: Callable[[Any, Tensor], Any]) -> tuple[Any, Any]:
    module = Lit(step)
    region = next(regions(module, StepCall.of_training(module, torch.randn(BATCH, 6)), batch_size=BATCH))
    return region, trace_region(module, region)


def vae(module: Any, x: Tensor) -> Tensor:
    mu, logvar = module.encoder(x * 2).chunk(2, 1)
    z = mu + torch.exp(logvar / 2) * torch.randn_like(mu)
    out = module.decoder(z)
    return F.mse_loss(out, x) + (mu.square() - logvar).mean()


def test_a_single_call_is_found_as_such() -> None:
    region = found(lambda module, x: module.encoder(x + 1).mean())
    assert isinstance(region, RegionCall)
    assert region.path == "encoder"


def test_several_calls_span_from_the_first_to_the_last_that_uses_a_parameter() -> None:
    region, traced = found_and_traced(vae)
    assert isinstance(region, StepRegion)
    assert traced.record is not None
    names = [call.name for call in traced.record.calls]
    assert (names[0], names[-1]) == ("encoder", "decoder")
    wanted = [names[key.call - region.span.first] for key in region.span.wanted]
    assert wanted == ["chunk", "chunk", "decoder"]  # z and what leads to it stay on the stages


def test_a_gradient_penalty_in_a_step_with_several_calls_is_refused_by_its_name() -> None:
    def step(module: Any, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        out = module.decoder(module.encoder(x).chunk(2, 1)[0]).sum()
        (gradient,) = torch.autograd.grad(out, x, create_graph=True)
        return out + (gradient.norm() - 1).square()

    with pytest.raises(
        UnsupportedError, match="The step needs the gradient with respect to the model's inputs, as in a gradient penalty"
    ) as caught:
        found(step)
    assert "test_discovery.py" in str(caught.value)


OWN_GRADIENTS: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "of a parameter": lambda module, h, loss: torch.autograd.grad(loss, module.encoder.weight, retain_graph=True),
    "of an earlier result": lambda module, h, loss: torch.autograd.grad(loss, h, retain_graph=True),
    "of all": lambda module, h, loss: loss.backward(retain_graph=True),
}


@pytest.mark.parametrize("differentiate", OWN_GRADIENTS.values(), ids=OWN_GRADIENTS)
def test_a_gradient_through_calls_with_parameters_is_refused(differentiate: Callable[[Any, Tensor, Tensor], Any]) -> None:
    """Of the loss autograd knows the last stage's results, and nothing before these."""

    def step(module: Any, x: Tensor) -> Tensor:
        h = module.encoder(x)
        loss = module.decoder(h.chunk(2, 1)[0]).square().mean()
        differentiate(module, h, loss)
        return loss  # type: ignore[no-any-return]

    with pytest.raises(UnsupportedError, match="The step itself computes gradients through several stages") as caught:
        found(step)
    assert "test_discovery.py" in str(caught.value)


def test_a_gradient_up_to_the_last_results_is_the_steps_own_affair() -> None:
    def step(module: Any, x: Tensor) -> Tensor:
        out = module.decoder(module.encoder(x).chunk(2, 1)[0])
        (gradient,) = torch.autograd.grad(out.square().mean(), out, retain_graph=True)
        return (out * gradient.detach()).mean()

    assert isinstance(found(step), StepRegion)


def test_a_gradient_of_something_else_is_no_penalty() -> None:
    def step(module: Any, x: Tensor) -> Tensor:
        h = module.decoder(module.encoder(x).chunk(2, 1)[0])
        y = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad((y * y).sum(), y)
        return (h - gradient).square().mean()

    assert isinstance(found(step), StepRegion)


def test_a_parameter_of_the_step_itself_belongs_to_the_span() -> None:
    def step(module: Any, x: Tensor) -> Tensor:
        return (module.encoder(x) * module.scale.exp()).mean()

    region, traced = found_and_traced(step)
    assert [call.name for call in traced.record.calls] == ["encoder", "exp"]


def test_a_teacher_under_no_grad_belongs_to_the_span() -> None:
    def step(module: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = module.teacher(x)
        return F.mse_loss(module.encoder(x), target)

    region, traced = found_and_traced(step)
    teacher = next(node for node in traced.graph.nodes if node.name == "teacher")
    assert not teacher.meta["val"].requires_grad
    assert not teacher.meta["context"].grad_enabled


def test_what_is_logged_returned_or_kept_is_an_output() -> None:
    def step(module: Any, x: Tensor) -> Any:
        h = module.encoder(x)
        module.log("h", h.mean())
        module.kept.append(h[:, :3])
        return {"loss": module.decoder(h[:, 3:]).mean(), "h": h}

    region, traced = found_and_traced(step)
    names = {call.number: call.name for call in traced.record.calls}
    assert [names[key.call] for key in region.span.wanted] == ["encoder", "mean", "__getitem__", "decoder"]


def test_code_that_looks_at_values_after_the_calls_does_not_end_discovery() -> None:
    def step(module: Any, x: Tensor) -> Any:
        h = module.encoder(x)
        out = module.decoder(h[:, :3])
        if out.mean().item() > 100 or bool((out > 5).any()) or out.detach().numpy().sum() < -1000:
            return h.sum()
        return out.mean()

    region = found(step)
    assert [key.call for key in region.span.wanted] == [0, 2]  # shown ones, the step returned the sum of `h`


def test_no_call_after_a_look_at_a_value_is_counted() -> None:
    def step(module: Any, x: Tensor) -> Any:
        h = module.encoder(x)
        if h.mean().item() > 0:
            return module.decoder(h[:, :3]).mean()
        return h.mean()

    region = found(step)
    assert isinstance(region, RegionCall)  # the decoder runs on the last stage
    assert region.path == "encoder"


def test_an_attribute_that_the_model_leaves_behind_is_an_output() -> None:
    def step(module: Any, x: Tensor) -> Any:
        return module.keeps(x).mean() + module.keeps.penalty

    region = found(step)
    assert isinstance(region, StepRegion)
    assert [key.name for key in region.span.wanted] == ["", "keeps.penalty"]


def test_a_tensor_hidden_elsewhere_is_refused() -> None:
    stash: list[Tensor] = []

    class Hides(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            stash.append(super().forward(x))
            return stash[-1] * 2

    def step(module: Any, x: Tensor) -> Any:
        return module.hides(x).mean() + stash[-1].mean()

    module = Lit(step)
    module.hides = Hides(6, 6)
    with pytest.raises(TraceError, match="uses a tensor that the model stored outside its results during its call"):
        next(regions(module, StepCall.of_training(module, torch.randn(BATCH, 6)), batch_size=BATCH))


def test_the_module_and_the_generators_are_left_as_they_were() -> None:
    module = Lit(vae)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    next(regions(module, StepCall.of_training(module, torch.randn(BATCH, 6, generator=torch.Generator())), batch_size=BATCH))
    assert torch.equal(torch.get_rng_state(), state)
    assert module.kept == []
    assert not any(isinstance(parameter.grad, Tensor) for parameter in module.parameters())


# ------------------------------------------------------------------------------------------------- parts of a result


class Result(nn.Module):
    """Has more in its result than a loss needs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.layer(x)
        return {"hidden": hidden, "loss": hidden.sum(), "double": hidden * 2}


class WithResult(L.LightningModule):
    def __init__(self, step: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.step, self.flag = Result(), step, False

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        raise NotImplementedError


def of_loss(self: Any, batch: Tensor, batch_idx: int) -> Tensor:
    return self.model(batch)["loss"] * 2


def of_index(self: Any, batch: Tensor, batch_idx: int) -> Tensor:
    result = self.model(batch)
    loss = result["loss"] * 2
    if batch_idx == 7:
        loss = loss + result["hidden"].sum()
    return loss


def of_flag(self: Any, batch: Tensor, batch_idx: int) -> Tensor:
    hidden, loss, _ = self.model(batch).values()
    del _
    loss = loss * 2
    return loss + hidden.mean() if self.flag else loss


def of_loss_at_once(self: Any, batch: Tensor, batch_idx: int) -> Tensor:
    result = self.model(batch)
    return result["hidden"] if batch_idx == 7 else result["loss"]


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (of_loss, (1,)),
        (of_index, (0, 1, 2)),  # the whole dict has a name
        (of_flag, (0, 1)),
        (of_loss_at_once, None),  # nothing runs between the call and the end that could tell
    ],
)
def test_only_what_the_step_uses_or_may_use_of_a_result_is_wanted(step: Any, expected: Any) -> None:
    class Module(WithResult):
        training_step = step

    module = Module(step)
    region = next(regions(module, StepCall.of_training(module, torch.randn(BATCH, 6)), batch_size=BATCH))
    assert isinstance(region, RegionCall)
    assert (region.wanted and tuple(i for i, is_wanted in enumerate(region.wanted) if is_wanted)) == expected
    assert region.wanted is None or len(region.wanted) == 3
    traced = trace_region(module, region)
    assert traced.wanted == (expected or (0, 1, 2))


def test_what_ends_the_region_before_its_time_is_told() -> None:
    def step(module: Any, x: Tensor) -> Tensor:
        h = module.encoder(x)
        if h.sum() > 1e9:
            h = h * 2
        return module.decoder(h.chunk(2, 1)[0]).mean()

    reason = found(step).ends_because
    assert re.fullmatch(r".*test_discovery.py:\d+ reads values of tensors, which may determine the later calls", reason)
    assert not found(vae).ends_because


def test_an_error_that_ends_the_step_is_told_beside_a_look_at_values() -> None:
    """Ranks that have not met it have another region, and this may be all that says so."""

    def step(module: Any, x: Tensor) -> Tensor:
        h = module.encoder(x)
        if h.sum() > 1e9:
            h = h * 2
        raise ValueError("of user code")

    look, _, end = found(step).ends_because.partition("; ")
    assert look.endswith("reads values of tensors, which may determine the later calls")
    assert re.fullmatch(r".*test_discovery.py:\d+ cannot run on tensors without data \(ValueError: of user code\)", end)


class KeepsOnce(Keeps):
    """Leaves a table on itself, once and for all."""

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.penalty, float):
            self.penalty = torch.ones(6) / 2
        return self.layer(x) * self.penalty


class KeepsANumber(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        self.penalty = h.square().mean().item()
        return h


def test_a_number_that_a_submodule_leaves_on_itself_is_refused_where_the_step_reads_it() -> None:
    """Tensors are handed over; a number stays what it was on the ranks that do not run the submodule."""
    module = Lit(lambda module, x: module.keeps(x).mean() * (1 + module.keeps.penalty))
    module.keeps = KeepsANumber()
    with pytest.raises(FxPipeError, match="reads values that the forward of a submodule sets: keeps.penalty") as raised:
        regions(module, StepCall.of_training(module, torch.randn(BATCH, 6)), batch_size=BATCH)
    assert re.fullmatch(r"set at \S+test_discovery.py:\d+", raised.value.where or "")
    module.step = lambda module, x: module.keeps(x).mean()
    assert regions(module, StepCall.of_training(module, torch.randn(BATCH, 6)), batch_size=BATCH)


def test_a_tensor_that_a_hook_has_taken_from_inside_the_model_is_refused() -> None:
    stash: list[Tensor] = []

    def step(module: Any, x: Tensor) -> Any:
        return module.keeps(x).mean() + stash[-1].mean()

    module = Lit(step)
    module.keeps = KeepsOnce()
    module.keeps.layer.register_forward_hook(lambda layer, args, output: stash.append(output))
    with pytest.raises(TraceError, match="uses a tensor that the model stored outside its results during its call"):
        next(regions(module, StepCall.of_training(module, torch.randn(BATCH, 6)), batch_size=BATCH))


@pytest.mark.parametrize("path", ["pair", "pair.one"])
@pytest.mark.parametrize("use", [torch.mean, torch.clone, lambda kept: kept], ids=["computes", "copies", "gives"])
def test_what_comes_from_inside_of_a_call_is_no_constant(path: str, use: Callable[[Tensor], Tensor]) -> None:
    """A hook has put it in the place of what was there before; that would be given for all batches."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.other(self.one(x))

    class Whole(Lit):
        """The step calls the LightningModule itself, so that its parts are recorded."""

        def forward(self, x: Tensor) -> Tensor:
            return self.decoder(self.pair(x)[:, :3])

    kept = {"one": torch.zeros(BATCH, 6)}

    def step(module: Any, x: Tensor) -> Any:
        loss = module(x).mean()
        module.log("kept", use(kept["one"]))
        return loss

    module = Whole(step)
    module.pair = Pair()
    module.get_submodule(path).register_forward_hook(lambda layer, args, output: kept.update(one=output))
    with pytest.raises(TraceError, match="uses a tensor that the model stored outside its results during its call"):
        next(regions(module, StepCall.of_training(module, torch.randn(BATCH, 6)), batch_size=BATCH))


def test_what_a_first_call_leaves_once_and_for_all_is_no_output() -> None:
    module = Lit(lambda module, x: module.keeps(x).mean())
    module.keeps = KeepsOnce()
    region = next(regions(module, StepCall.of_training(module, torch.randn(BATCH, 6)), batch_size=BATCH))
    assert isinstance(region, RegionCall)


def test_a_step_that_goes_another_way_a_second_time_has_left_what_it_left() -> None:
    def step(module: Any, x: Tensor) -> Any:
        if x.sum() > 0:  # as it is with the ones that are shown to a second run
            return module.encoder(x).mean()
        return module.keeps(x).mean() + module.keeps.penalty

    batch = -torch.ones(BATCH, 6)
    module = Lit(step)
    region = next(regions(module, StepCall.of_training(module, batch), batch_size=BATCH))
    assert isinstance(region, StepRegion)
    assert "keeps.penalty" in [key.name for key in region.span.wanted]
