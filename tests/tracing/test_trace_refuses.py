"""What stays a whole module, and what is refused, with the reason and the user's line."""

from __future__ import annotations

import random
import secrets
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fxpipe._compat.torch import FakeTensor
from lightning_fxpipe.errors import TraceError, UnsupportedError
from lightning_fxpipe.tracing.recordable import RegionCall
from lightning_fxpipe.tracing.trace import trace_region
from lightning_fxpipe.user_code.objects import tensor_of
from tests.traces import BATCH, WIDTH, TwoLayers, batch, call_of, covers, line_of, names, trace
from tests.tracing.test_trace_restores import DISTURBANCES, AroundRestless, Restless

# ----------------------------------------------------------------------------- what stays whole, what is refused


class Gate(TwoLayers):
    """Looks at values."""

    def between(self, h: Tensor) -> Tensor:
        if h.sum() > 0:
            return torch.relu(h)
        return h


class Around(nn.Module):
    """A module below the called one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.embed, self.inner = nn.Linear(WIDTH, WIDTH), inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.embed(x))


def test_submodule_that_looks_at_values_stays_whole_with_a_reason() -> None:
    traced = trace(Around(Gate()), batch(), opened=("inner",))
    assert names(traced) == ["embed", "inner"]
    assert traced.opened == ()
    assert list(traced.kept_whole) == ["inner"]
    assert "reads a value" in traced.kept_whole["inner"]


def test_submodule_that_looks_at_values_may_stay_unopened() -> None:
    assert names(trace(Around(Gate()), batch(), opened=())) == ["embed", "inner"]


def test_called_module_that_looks_at_values_is_refused_with_file_and_line() -> None:
    with pytest.raises(TraceError, match="forward of Gate cannot be traced") as caught:
        trace(Gate(), batch())
    assert line_of(Gate.between, "if h.sum() > 0") in (caught.value.where or "")
    assert "reads a value" in (caught.value.observed or "")


def test_error_in_the_called_module_is_shown_with_file_and_line() -> None:
    class Broken(TwoLayers):
        def between(self, h: Tensor) -> Tensor:
            return h @ torch.ones(WIDTH + 1, 2)  # no such shape

    with pytest.raises(TraceError) as caught:
        trace(Broken(), batch())
    assert line_of(Broken.between, "no such shape") in (caught.value.where or "")
    assert isinstance(caught.value.__cause__, RuntimeError)


ASSIGNMENTS = {
    "count": DISTURBANCES["counts"],
    "mean": DISTURBANCES["replaces a buffer"],
    "last_input": DISTURBANCES["keeps a tensor"],
    "new": DISTURBANCES["adds an attribute"],
    "mask": DISTURBANCES["makes a buffer on first use"],
    "late": DISTURBANCES["registers a buffer"],
    # Not an assignment to the module, but as lost once the Python no longer runs.
    "seen": DISTURBANCES["appends to a list"],
    "cache": DISTURBANCES["fills a dict"],
}


@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_submodule_that_changes_itself_stays_whole_with_a_reason(name: str) -> None:
    traced = trace(AroundRestless(ASSIGNMENTS[name]), batch(), opened=("restless",))
    assert "restless" in names(traced)
    assert list(traced.kept_whole) == ["restless"]
    assert f"self.{name}" in traced.kept_whole["restless"]


@pytest.mark.parametrize("name", sorted(ASSIGNMENTS.keys() - {"last_input", "new"}))
def test_called_module_that_changes_itself_is_refused(name: str) -> None:
    with pytest.raises(TraceError, match=f"self.{name}"):
        trace(Restless(ASSIGNMENTS[name]), batch())


@pytest.mark.parametrize("name", ["last_input", "new"])
def test_a_tensor_that_the_called_module_leaves_is_a_result(name: str) -> None:
    assert trace(Restless(ASSIGNMENTS[name]), batch()).left == (name,)


def test_plain_tensor_changed_in_place_is_recorded_or_refused() -> None:
    try:
        traced = trace(Restless(DISTURBANCES["changes a plain tensor in place"]), batch())
    except TraceError:
        return
    assert "add_" in names(traced)


class LayerDrop(TwoLayers):
    """Python's generator chooses the path."""

    def between(self, h: Tensor) -> Tensor:
        return torch.relu(h) if random.random() < 0.5 else h


@pytest.mark.parametrize("seed", range(6))
def test_random_path_is_refused_whatever_comes_out_of_the_generator(seed: int) -> None:
    random.seed(seed)
    with pytest.raises(TraceError, match="LayerDrop"):
        trace(LayerDrop(), batch())


def test_random_path_inside_a_module_that_stays_whole_is_its_own_affair() -> None:
    random.seed(0)
    assert names(trace(Around(LayerDrop()), batch(), opened=())) == ["embed", "inner"]


def test_random_number_of_python_as_a_factor_is_refused() -> None:
    class Noisy(TwoLayers):
        def between(self, h: Tensor) -> Tensor:
            return h * random.random()

    with pytest.raises(TraceError, match="may take a different path each time it runs"):
        trace(Noisy(), batch())


def test_numbers_from_out_of_sight_are_refused() -> None:
    """No generator of ours has drawn; a second recording gives another graph."""

    class Noisy(TwoLayers):
        def between(self, h: Tensor) -> Tensor:
            return h * secrets.randbelow(10**12)

    with pytest.raises(TraceError, match="a different path each time"):
        trace(Noisy(), batch())


def test_a_recording_that_was_made_before_is_compared_with_a_new_one() -> None:
    """A plan has recorded the call once when it asks for a graph that may be used."""

    class Noisy(TwoLayers):
        def between(self, h: Tensor) -> Tensor:
            return h * secrets.randbelow(10**12)

    model, call = Noisy(), call_of(batch())
    unchecked = trace_region(model, call, opened=(), check=False)
    with pytest.raises(TraceError, match="a different path each time"):
        trace_region(model, call, opened=(), earlier=unchecked)


def test_recording_leaves_the_generators() -> None:
    class Draws(TwoLayers):
        def between(self, h: Tensor) -> Tensor:
            return h + random.random()

    random.seed(3)
    before = random.getstate()
    with pytest.raises(TraceError):
        trace(Draws(), batch())
    assert random.getstate() == before


def test_number_taken_out_of_a_tensor_is_refused() -> None:
    # It would be a constant of the trace, or have to cross a cut as a number.
    class Item(TwoLayers):
        def build(self) -> None:
            self.scale = nn.Parameter(torch.tensor(2.0))

        def between(self, h: Tensor) -> Tensor:
            return h * self.scale.item()  # here

    with pytest.raises(TraceError) as caught:
        trace(Item(), batch())
    assert line_of(Item.between, "# here") in (caught.value.where or "")


def test_hook_on_a_gradient_is_refused() -> None:
    # The graph has no place for it; left out, the gradients would be wrong without a word.
    class Hooked(TwoLayers):
        def between(self, h: Tensor) -> Tensor:
            h.register_hook(lambda gradient: gradient * 2)
            return h

    with pytest.raises(TraceError, match="hook"):
        trace(Hooked(), batch())
    assert names(trace(Around(Hooked()), batch(), opened=("inner",))) == ["embed", "inner"]


def test_size_as_a_result_has_the_value_of_each_batch() -> None:
    class Sizes(TwoLayers):
        def forward(self, x: Tensor) -> Any:
            return self.last(self.first(x)), x.shape[0]

    traced = trace(Sizes(), batch())
    for size in (4, 7):
        sizes = traced.bind_sizes(((size, *traced.input_shapes[0][1:]),))
        assert traced.result(["logits"], sizes) == ("logits", size)


class Opaque:
    """Nothing that torch knows how to look into."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def test_tensors_of_an_object_that_is_an_argument_are_inputs() -> None:
    class Net(TwoLayers):
        def forward(self, x: Tensor, extra: Opaque) -> Tensor:
            return self.last(self.first(x) + extra.tensor)

    traced = trace(Net(), batch(), Opaque(batch()))
    assert [tuple(node.meta["val"].shape[1:]) for node in traced.input_nodes] == [(WIDTH,), (WIDTH,)]
    assert covers(traced, call_of(batch(7), Opaque(batch(7))))
    assert not covers(traced, call_of(batch(7), (batch(7),)))


def test_object_goes_from_module_to_module_as_its_tensors() -> None:
    class Make(TwoLayers):
        def forward(self, x: Tensor) -> Opaque:
            return Opaque(self.first(x))

    class Take(TwoLayers):
        def forward(self, made: Opaque) -> Tensor:
            return self.first(made.tensor)

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.make, self.take = Make(), Take()

        def forward(self, x: Tensor) -> Tensor:
            return self.take(self.make(x))

    traced = trace(Around(Inner()), batch(), opened=("inner",))
    assert names(traced) == ["embed", "inner.make", "tensor_inside", "refilled", "getitem", "inner.take"]
    assert not traced.kept_whole


def test_result_has_the_type_that_the_module_returns() -> None:
    class Net(TwoLayers):
        def forward(self, x: Tensor) -> Any:
            return Opaque(self.first(x))

    result = trace(Net(), batch()).result([torch.ones(2)])
    assert type(result) is Opaque
    assert torch.equal(result.tensor, torch.ones(2))


def test_results_that_nobody_wants_are_left_out_and_cannot_be_used() -> None:
    class Net(TwoLayers):
        def forward(self, x: Tensor) -> Any:
            hidden = self.first(x)
            return {"hidden": Opaque(hidden), "out": self.last(hidden)}

    traced = trace_region(Net(), replace(call_of(batch()), wanted=(False, True)))
    assert [str(node.target) for node in traced.output_node.args[0]] == ["last"]
    result = traced.result([torch.ones(2)])
    assert torch.equal(result["out"], torch.ones(2))
    assert result["hidden"].tensor.detach() is result["hidden"].tensor  # as Lightning does with whatever a step returns
    with pytest.raises(UnsupportedError, match="Tensor 0 in the result of the module is used"):
        _ = result["hidden"].tensor + 1
    with pytest.raises(UnsupportedError, match="is used here, but it is on another stage"):
        _ = result["hidden"].tensor.shape


def test_tensor_put_into_an_argument_is_refused() -> None:
    class Net(TwoLayers):
        def forward(self, x: dict[str, Tensor]) -> Tensor:
            x["hidden"] = self.first(x["x"])
            return self.last(x["hidden"])

    with pytest.raises(TraceError, match="stores a tensor in one of its arguments"):
        trace_region(Net(), RegionCall(path="", args=({"x": batch()},), kwargs={}, batch_size=BATCH))


def test_models_own_exception_handler_does_not_hide_that_a_call_cannot_be_recorded() -> None:
    class Handled(TwoLayers):
        def between(self, h: Tensor) -> Tensor:
            try:
                h.data = h.detach() * 2
            except Exception:
                return h
            return h

    with pytest.raises(TraceError, match="assigning to Tensor.data"):
        trace(Handled(), batch())


class Checked(TwoLayers):
    """Asks about its input before it computes."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.isfinite(x).all():
            return x
        return super().forward(x)


def test_question_about_an_input_is_answered_as_in_the_traced_call_and_another_answer_needs_another_trace() -> None:
    traced = trace(Checked(), batch())
    assert names(traced)[-1] == "last"
    assert traced.sees_the_same([batch()])
    assert not traced.sees_the_same([batch() / 0])


def test_question_about_a_random_number_is_answered_only_where_the_answer_is_always_the_same() -> None:
    class Drop(TwoLayers):
        probability = 0.0

        def forward(self, x: Tensor) -> Tensor:
            return x if torch.rand([]) < self.probability else super().forward(x)

    traced = trace(Drop(), batch())
    assert "last" in names(traced)
    (check,) = [node for node in traced.graph.nodes if node.meta.get("checks")]
    check.target(torch.tensor(False))
    with pytest.raises(UnsupportedError, match="The model would take a different path than when it was traced") as caught:
        check.target(torch.tensor(True))
    assert caught.value.where == line_of(Drop.forward, "torch.rand")
    model = Drop()
    model.probability = 0.5
    with pytest.raises(TraceError, match="a path at random"):
        trace(model, batch())


def test_module_that_looks_at_integers_sees_those_of_the_example() -> None:
    seen: SimpleQueue[list[int]] = SimpleQueue()  # what is Python's own is not put back

    class Lengths(TwoLayers):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            if not isinstance(lengths, FakeTensor):
                seen.put(lengths.tolist())
            return self.first(x)[:, : max(1, int(lengths.min()))]

    class Net(TwoLayers):
        def __init__(self) -> None:
            super().__init__()
            self.cut = Lengths()

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            return self.cut(x, lengths + 1).sum()

    lengths = torch.tensor([2, 3, 4, 4])
    traced = trace(Net(), batch(), lengths, opened=())
    values = [seen.get_nowait() for _ in range(seen.qsize())]
    assert [3, 4, 5, 5] in values
    assert [3, 3, 3, 3] in values  # tells whether a size depends on them
    assert names(traced)[-2:] == ["cut", "sum"]


def test_a_function_that_holds_a_tensor_is_no_argument_that_can_be_recorded() -> None:
    class Net(TwoLayers):
        def forward(self, x: Tensor, scale: Any) -> Tensor:
            return self.last(scale(self.first(x)))

    factor = torch.ones(1)
    with pytest.raises(TraceError, match="has an argument that cannot be traced") as caught:
        trace(Net(), batch(), lambda x: x * factor)
    assert "captures a tensor from the enclosing code" in str(caught.value.observed)
    assert "Pass the tensors as separate arguments" in str(caught.value.todo)


def test_an_object_with_another_number_of_tensors_than_recorded_is_refused() -> None:
    take = tensor_of(0, 1)
    assert torch.equal(take(Opaque(torch.ones(1))), torch.ones(1))
    with pytest.raises(
        UnsupportedError, match="A Opaque holds a different number of tensors than when the model was traced"
    ) as caught:
        take(Opaque([torch.ones(1), torch.ones(1)]))  # type: ignore[arg-type]
    assert (caught.value.observed, caught.value.expected) == ("2 tensors", "1 tensors")
