"""Finding the pipelined call in a user's step, and replacing it: which call, with which arguments, and what is left behind."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import lightning as L
import numpy
import pytest
import torch
from torch import Tensor, nn

from lightning_fxpipe.errors import TraceError, UnsupportedError
from lightning_fxpipe.tracing.region import StageExit, StepCall, find_region, holds_any, replaced_region, trains

BATCH = 4


class Lit(L.LightningModule):
    """A module with a model; the tests give it the step that they are about."""

    def __init__(self, step: Callable[[Any, Any], Any] | None = None) -> None:
        super().__init__()
        self.model = nn.Linear(3, 2)
        self.teacher = nn.Linear(3, 3)
        self._step = step
        self.events: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self._step(self, batch) if self._step else None


def batch_of(seed: int = 0) -> Tensor:
    return torch.randn(BATCH, 3, generator=torch.Generator().manual_seed(seed))


def assert_equal(actual: Any, expected: Any) -> None:
    """Equal to the last bit; tensors and numbers, in containers too."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def find(module: nn.Module, batch: Any, **options: Any) -> Any:
    return find_region(module, StepCall.of_training(module, batch), batch_size=BATCH, **options)


# ------------------------------------------------------------------ which call


def test_the_call_of_the_module_itself_is_found() -> None:
    x = batch_of()
    call = find(Lit(lambda module, batch: module(batch)), x)
    assert call.path == ""
    assert_equal(call.args, (x,))
    assert (call.kwargs, call.batch_size, call.prelude_paths) == ({}, BATCH, ())


def test_the_call_of_a_submodule_is_found_with_its_arguments() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 2)

        def forward(self, x: Tensor, scale: float, *, options: dict[str, Any]) -> Tensor:
            return self.inner(x) * scale + options["bias"]

    bias, x = torch.ones(2), batch_of()
    module = Lit(lambda module, batch: module.model(batch, 0.5, options={"bias": bias, "name": "n"}))
    module.model = Wide()
    call = find(module, x)
    assert call.path == "model"
    assert_equal(call.args, (x, 0.5))
    assert call.kwargs["options"].pop("name") == "n"
    assert_equal(call.kwargs, {"options": {"bias": bias}})


def test_the_outermost_call_is_found_not_one_inside_it() -> None:
    module = Lit(lambda module, batch: module.model(batch))
    module.model = nn.Sequential(nn.Sequential(nn.Linear(3, 3)), nn.Linear(3, 2))
    assert find(module, batch_of()).path == "model"


def test_the_first_trainable_call_wins() -> None:
    module = Lit(lambda module, batch: module.second(module.first(batch)))
    module.first, module.second = nn.Linear(3, 3), nn.Linear(3, 2)
    assert find(module, batch_of()).path == "first"


def test_a_module_without_parameters_is_not_the_region() -> None:
    module = Lit(lambda module, batch: module.model(module.normalise(batch)))
    module.normalise = nn.LayerNorm(3, elementwise_affine=False)
    call = find(module, batch_of())
    assert call.path == "model"
    assert call.prelude_paths == ()


def test_a_module_outside_the_root_is_not_the_region() -> None:
    stranger = nn.Linear(3, 3).requires_grad_(False)
    module = Lit(lambda module, batch: module.model(stranger(batch)))
    call = find(module, batch_of())
    assert call.path == "model"
    assert call.prelude_paths == ()


def test_a_teacher_under_no_grad_is_a_prelude() -> None:
    def step(module: Lit, batch: Tensor) -> Tensor:
        with torch.no_grad():
            targets = module.teacher(batch)
        return module.model(batch).sum() + targets.sum()

    module = Lit(step)
    call = find(module, batch_of())
    assert call.path == "model"
    assert call.prelude_paths == ("teacher",)


def test_a_frozen_module_is_a_prelude_and_its_result_an_argument() -> None:
    module = Lit(lambda module, batch: module.model(module.teacher(batch)))
    module.teacher.requires_grad_(False)
    x = batch_of()
    call = find(module, x)
    assert call.path == "model"
    assert call.prelude_paths == ("teacher",)
    assert_equal(call.args, (module.teacher(x),))


def test_a_prelude_is_listed_once_however_often_it_is_called() -> None:
    module = Lit(lambda module, batch: module.model(module.teacher(module.teacher(batch))))
    module.teacher.requires_grad_(False)
    assert find(module, batch_of()).prelude_paths == ("teacher",)


def test_nothing_trains_without_gradients_but_a_module_still_holds_parameters() -> None:
    module = nn.Linear(2, 2)
    assert trains(module)
    with torch.no_grad():
        assert not trains(module)
        assert holds_any(module)
    assert not trains(module.requires_grad_(False))
    assert not holds_any(nn.ReLU())


def test_evaluation_finds_the_call_by_another_rule() -> None:
    module = Lit(lambda module, batch: module.model(batch))
    with torch.no_grad():
        assert find(module, batch_of(), is_region=holds_any).path == "model"
        with pytest.raises(TraceError):
            find(module, batch_of())


# ------------------------------------------------------------------ how the step is called


def test_the_step_gets_the_indices_that_it_asks_for() -> None:
    class Indexed(Lit):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int, note: str = "default") -> None: ...

    batch = object()
    assert StepCall.of_step(Indexed().validation_step, batch).args == (batch, 0, 0)


def test_a_plain_module_is_called_with_the_batch_as_its_arguments() -> None:
    module, x, y = nn.Bilinear(3, 3, 2), batch_of(0), batch_of(1)
    by_position = find(module, (x, y))
    assert_equal(by_position.args, (x, y))
    by_name = find(module, {"input1": x, "input2": y})
    assert by_name.args == ()
    assert_equal(by_name.kwargs, {"input1": x, "input2": y})
    alone = find(nn.Linear(3, 2), x)
    assert alone.path == ""
    assert_equal(alone.args, (x,))


# ------------------------------------------------------------------ what finding leaves behind


def test_the_step_ends_at_the_region() -> None:
    events: SimpleQueue[str] = SimpleQueue()  # what is Python's own is not put back

    def step(module: Lit, batch: Tensor) -> Tensor:
        events.put("before")
        try:
            loss = module.model(batch).sum()
        except Exception:
            # A step that guards against bad batches must not swallow the end of the search.
            events.put("handler")
            raise
        events.put("after")
        return loss

    module = Lit(step)
    find(module, batch_of())
    assert [events.get_nowait() for _ in range(events.qsize())] == ["before"]


def generator_states() -> tuple[Any, ...]:
    numpy_state = numpy.random.get_state()
    return random.getstate(), torch.get_rng_state().tolist(), numpy_state[1].tolist(), numpy_state[2]  # type: ignore[index]


def draw_everywhere() -> None:
    random.random()
    numpy.random.rand()
    torch.rand(1)


def drawing_step(module: Lit, batch: Tensor) -> Tensor:
    draw_everywhere()
    return module.model(batch + torch.rand_like(batch)).sum()


def failing_step(module: Lit, batch: Tensor) -> Tensor:
    draw_everywhere()
    module.log("a", 1.0)
    raise KeyError("the user's own")


def endless_step(module: Lit, batch: Tensor) -> Tensor:
    draw_everywhere()
    return batch.sum()


@pytest.mark.parametrize(
    ("step", "error"),
    [(drawing_step, None), (failing_step, KeyError), (endless_step, TraceError)],
    ids=["found", "raises", "none"],
)
def test_generators_and_attributes_are_as_they_were(step: Callable[[Any, Any], Any], error: type[Exception] | None) -> None:
    module = Lit(step)
    before, attributes, original_call = generator_states(), set(vars(module)), nn.Module.__call__
    if error is None:
        find(module, batch_of())
    else:
        with pytest.raises(error):
            find(module, batch_of())
    assert generator_states() == before
    assert set(vars(module)) == attributes  # log and log_dict are the class's again
    assert module.log.__func__ is L.LightningModule.log  # type: ignore[attr-defined]
    assert nn.Module.__call__ is original_call


def test_logging_is_muted_while_searching() -> None:
    def step(module: Lit, batch: Tensor) -> Tensor:
        # Without a Trainer, Lightning warns about log and raises on nothing; a log that counts shows whether it was called.
        module.log("a", batch.mean(), prog_bar=True)
        module.log_dict({"b": 1.0})
        return module.model(batch).sum()

    class Counting(Lit):
        def log(self, *args: Any, **kwargs: Any) -> None:
            self.events.append("logged")

    module = Counting(step)
    assert find(module, batch_of()).path == "model"
    assert module.events == []
    module.log("a", 1.0)
    assert module.events == ["logged"]


def test_a_log_that_the_user_set_on_the_instance_comes_back() -> None:
    module = Lit(lambda module, batch: module.model(batch))
    mine = module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    find(module, batch_of())
    assert module.log is mine


def test_a_prelude_that_changes_the_batch_in_place_does_not_change_the_callers() -> None:
    """The step runs once more than on one device; were its changes kept, the first microbatch would be scaled twice."""

    def step(module: Lit, batch: dict[str, Tensor]) -> Tensor:
        return module.model(batch["x"].mul_(2.0)).sum()

    x = batch_of()
    call = find(Lit(step), {"x": x})
    assert_equal(call.args, (2 * batch_of(),))
    assert_equal(x, batch_of())


def test_a_prelude_that_changes_buffers_leaves_them_as_they_were() -> None:
    """A frozen BatchNorm in training mode tracks its statistics; the search must not count as a batch."""
    module = Lit(lambda module, batch: module.model(module.norm(batch)).sum())
    module.norm = nn.BatchNorm1d(3, affine=True).requires_grad_(False)
    before = {name: buffer.clone() for name, buffer in module.norm.named_buffers()}
    assert find(module, batch_of()).prelude_paths == ("norm",)
    assert_equal(dict(module.norm.named_buffers()), before)


# ------------------------------------------------------------------ refusals


def test_a_step_that_never_calls_a_model_is_refused_with_its_source_line() -> None:
    module = Lit()
    with pytest.raises(TraceError) as caught:
        find(module, batch_of())
    line = Lit.training_step.__code__.co_firstlineno
    assert f"{__file__}:{line}" in str(caught.value)
    assert "training_step" in str(caught.value)
    assert "self(x)" in str(caught.value)


def test_a_call_of_forward_as_a_method_is_no_call_of_the_module() -> None:
    """Hooks would not run either; the message tells to call the module itself."""
    module = Lit(lambda module, batch: module.model.forward(batch).sum())
    with pytest.raises(TraceError, match="Call the module itself"):
        find(module, batch_of())


def test_parameters_trained_before_the_region_are_refused() -> None:
    class Scaled(Lit):
        def __init__(self) -> None:
            super().__init__(lambda module, batch: module.model(batch * module.scale).sum())
            self.scale = nn.Parameter(torch.ones(3))

    with pytest.raises(UnsupportedError, match="uses trainable parameters before it calls model") as caught:
        find(Scaled(), batch_of())
    assert "requires a gradient" in str(caught.value)
    assert "training_step" in str(caught.value)


def test_a_trained_input_inside_a_container_is_refused() -> None:
    module = Lit(lambda module, batch: module.holder({"deep": [batch, module.model.weight * 2]}))

    class Holder(nn.Linear):
        def forward(self, inputs: dict[str, list[Tensor]]) -> Tensor:  # type: ignore[override]
            return super().forward(inputs["deep"][0])

    module.holder = Holder(3, 2)
    with pytest.raises(UnsupportedError, match="uses trainable parameters before it calls holder"):
        find(module, batch_of())


def test_an_input_that_requires_a_gradient_of_its_own_is_refused_by_its_name() -> None:
    with pytest.raises(
        UnsupportedError, match="The step needs the gradient with respect to the model's inputs, as in a gradient penalty"
    ) as caught:
        find(Lit(lambda module, batch: module.model(batch.requires_grad_()).sum()), batch_of())
    assert "training_step" in str(caught.value)
    assert "detach" in str(caught.value)


# ------------------------------------------------------------------ replacing the call


def test_the_region_is_replaced_inside_the_block_only() -> None:
    module, x = Lit(), batch_of()
    expected = module.model(x)
    seen: list[Any] = []

    def run(*args: Any, **kwargs: Any) -> str:
        seen.append((args, kwargs))
        return "replaced"

    with replaced_region(module, "model", run):
        assert module.model(x, note=1) == "replaced"
    assert seen == [((x,), {"note": 1})]
    assert "forward" not in vars(module.model)
    assert_equal(module.model(x), expected)


def test_the_root_itself_can_be_replaced() -> None:
    module = Lit()
    with replaced_region(module, "", lambda x: x + 1):
        assert module(1) == 2
    assert "forward" not in vars(module)


def test_other_modules_run_as_always_inside_the_block() -> None:
    module, x = Lit(), batch_of()
    with replaced_region(module, "model", lambda x: None):
        torch.testing.assert_close(module.teacher(x), nn.functional.linear(x, module.teacher.weight, module.teacher.bias))


@pytest.mark.parametrize("leaving", [ValueError("user"), StageExit((torch.zeros(1),))], ids=["error", "stage exit"])
def test_forward_is_restored_when_the_block_is_left_by_an_exception(leaving: BaseException) -> None:
    module = Lit()

    def run(x: Any) -> Any:
        raise leaving

    def leave() -> None:
        with replaced_region(module, "model", run):
            module.model(batch_of())

    with pytest.raises(type(leaving)) as caught:
        leave()
    assert caught.value is leaving
    assert "forward" not in vars(module.model)


def test_a_forward_set_on_the_instance_comes_back() -> None:
    module = Lit()
    mine = module.model.forward = lambda x: "mine"  # type: ignore[method-assign,assignment,return-value]
    with replaced_region(module, "model", lambda x: "pipeline"):
        assert module.model(1) == "pipeline"
    assert module.model.forward is mine
    assert module.model(1) == "mine"


def test_hooks_on_the_module_run_around_the_replacement() -> None:
    module = Lit()
    module.model.register_forward_pre_hook(lambda _, args: (args[0] + 1,))
    module.model.register_forward_hook(lambda _, args, output: output * 10)
    with replaced_region(module, "model", lambda x: x + 0.5):
        assert module.model(1.0) == 25.0


def call_twice(module: Lit, x: Any, caught: type[Exception] = KeyError) -> None:
    """A step that calls its model twice, and catches some errors."""
    with replaced_region(module, "model", lambda x: x), contextlib.suppress(caught):
        module.model(x)
        module.model(x)


def test_a_second_call_is_refused_at_the_users_line() -> None:
    module, x = Lit(), batch_of()
    with pytest.raises(UnsupportedError, match="The step calls model more often than when it was traced") as caught:
        call_twice(module, x)
    assert caught.value.where is not None
    path, _, line = caught.value.where.rpartition(":")
    assert path == __file__
    assert "module.model(x)" in Path(__file__).read_text(encoding="utf-8").splitlines()[int(line) - 1]


def test_a_refusal_that_the_step_catches_is_raised_at_its_end() -> None:
    with pytest.raises(UnsupportedError, match="The step calls model more often than when it was traced"):
        call_twice(Lit(), batch_of(), caught=Exception)


def test_each_block_counts_its_own_calls() -> None:
    module = Lit()
    for _ in range(2):
        with replaced_region(module, "model", lambda x: x):
            assert module.model(3) == 3


def test_a_stage_exit_passes_the_users_own_handlers() -> None:
    def step(module: Lit, batch: Tensor) -> str:
        try:
            module.model(batch)
        except Exception:
            return "swallowed"
        return "returned"

    module, outputs = Lit(), (torch.ones(2),)

    def run(x: Tensor) -> Tensor:
        raise StageExit(outputs)

    with replaced_region(module, "model", run), pytest.raises(StageExit) as caught:
        step(module, batch_of())
    assert caught.value.outputs is outputs
