"""Values that code looks at while it is recorded: known where they follow from the inputs, and looked up for later calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fxpipe import PartitionError, TraceError, make_plan
from lightning_fxpipe.tracing.recordable import RegionCall
from lightning_fxpipe.tracing.trace import TracedRegion, trace_region
from tests.traces import covers

Look = Callable[[Tensor, Tensor], Any]


class Looks(nn.Module):
    """What is returned shows what was seen."""

    def __init__(self, look: Look) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.look = look

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        seen = self.look(x, lengths)
        return self.last(self.first(x)) * (sum(seen) if isinstance(seen, list) else seen)


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.inner(x, lengths)


LOOKS: dict[str, Look] = {
    "int": lambda x, lengths: int(lengths.max()),
    "item": lambda x, lengths: lengths.max().item(),
    "list": lambda x, lengths: lengths.tolist(),
    "float": lambda x, lengths: float(lengths.float().mean()),
    "condition": lambda x, lengths: 2 if (lengths > 3).any() else 3,
    "slice": lambda x, lengths: x[0, : lengths.min()].sum() * 0 + x[0, : lengths.min()].shape[0],
    "size": lambda x, lengths: torch.arange(lengths.max()).shape[0],
}


def call_of(*lengths: int) -> RegionCall:
    return RegionCall(path="", args=(torch.ones(3, 3), torch.tensor(lengths)), kwargs={}, batch_size=3)


def computed(traced: TracedRegion, call: RegionCall, root: nn.Module) -> Tensor:
    values: dict[Any, Any] = dict(zip((node.name for node in traced.input_nodes), call.args, strict=True))
    (output,) = torch.fx.Interpreter(torch.fx.GraphModule(root, traced.graph)).run(*values.values())
    return output


@pytest.mark.parametrize("name", LOOKS)
def test_a_trace_serves_calls_in_which_the_code_sees_the_same(name: str) -> None:
    module = Looks(LOOKS[name])
    traced = trace_region(module, call_of(2, 1, 3))
    assert covers(traced, call_of(2, 1, 3))
    assert not covers(traced, call_of(4, 4, 4))


@pytest.mark.parametrize("name", ["int", "item", "list", "condition"])
def test_the_code_sees_what_the_inputs_give(name: str) -> None:
    module = Looks(LOOKS[name])
    for call in (call_of(2, 1, 3), call_of(4, 4, 4)):
        traced = trace_region(module, call)
        torch.testing.assert_close(computed(traced, call, module), module(*call.args))


class Pads(nn.Module):
    """Looks at what a parameter-free module of torch makes of the inputs."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.first, self.last, self.between = nn.Linear(3, 3), nn.Linear(3, 3), between

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.last(self.first(x)) * int(self.between(lengths.float()[None]).sum())


def test_a_module_of_torch_without_parameters_gives_a_known_value() -> None:
    module = Pads(nn.ConstantPad1d((0, 1), 2.0))
    call = call_of(2, 1, 3)
    torch.testing.assert_close(computed(trace_region(module, call), call, module), module(*call.args))


@pytest.mark.parametrize("between", [nn.Dropout(0.5), nn.RReLU(), nn.PReLU()], ids=lambda module: type(module).__name__)
def test_one_that_draws_or_has_weights_gives_none(between: nn.Module) -> None:
    with pytest.raises(TraceError, match="not known in advance"):
        trace_region(Pads(between), call_of(2, 1, 3))


def test_a_module_inside_stays_whole_where_no_cut_must_fall_into_it() -> None:
    traced = trace_region(Around(Looks(LOOKS["int"])), call_of(1, 2, 3), opened=("inner",), answers_looks=False)
    assert traced.kept_whole["inner"].startswith("its Python reads values that depend on the inputs, ")
    assert "test_value_looks.py:" in traced.kept_whole["inner"]
    assert not traced.looks


def test_it_is_opened_where_there_would_be_too_few_stages() -> None:
    plan = make_plan(Around(Looks(LOOKS["int"])), call_of(1, 2, 3).args, num_stages=2)
    assert plan.opened == ("inner",)


def test_the_region_ends_where_code_looks_at_what_the_model_computes() -> None:
    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            hidden = self.second(self.first(x))
            return self.last(hidden if hidden.sum() > 0 else -hidden)

    plan = make_plan(Around(Chooses()), call_of(1, 2, 3).args, num_stages=2)
    assert [stage.fqns for stage in plan.stages] == [
        ("inner.first.weight", "inner.first.bias"),
        ("inner.second.weight", "inner.second.bias"),
    ]
    assert plan.outside_fqns == ("inner.last.weight", "inner.last.bias")


class Untouchable:
    """Something of the caller's that may be large, or may not be taken apart."""

    num_looks = 0

    def __reduce_ex__(self, protocol: Any) -> Any:
        type(self).num_looks += 1
        return super().__reduce_ex__(protocol)


def test_too_few_stages_are_explained_by_what_stays_whole() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            self.hidden = self.first(x)
            return self.last(self.hidden)

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Reads()

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            return self.model(x)

    callers_own = Untouchable()  # a step's variables are searched for results; its callers' are not
    with pytest.raises((PartitionError, TraceError), match=r"not split: model \(its forward changes self.hidden"):
        make_plan(Calls(), call_of(1, 2, 3).args, num_stages=4)
    assert not callers_own.num_looks
