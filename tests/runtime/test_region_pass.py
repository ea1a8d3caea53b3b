"""One rank's part of a pass: what it draws, what it may send, and which gradients it gives back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from lightning_fxpipe import UnsupportedError
from lightning_fxpipe.distributed.topology import Placement, Topology
from lightning_fxpipe.microbatch.batch_norms import DeferredNorms
from lightning_fxpipe.microbatch.split import Pass, plan_passes
from lightning_fxpipe.rng import isolated_rng
from lightning_fxpipe.runtime.late_exchanges import LateExchanges
from lightning_fxpipe.runtime.left_state import LeftState
from lightning_fxpipe.runtime.region_pass import Crossing, Leg, PassSetup, RegionPass, StageRun
from lightning_fxpipe.schedules.executor import Compute
from lightning_fxpipe.simulation.actions import BACKWARD, FORWARD, Action, Kind
from lightning_fxpipe.stages.build import Stage, TensorSpec

CPU = torch.device("cpu")
ALONE = Topology(group=None, control_group=None, rank=0, placement=Placement(num_ranks=1), device=CPU)
WIDTH = 3


class Alone:
    """Runs a pass of one stage."""

    def __init__(self, part: Pass, stage: int, kind: Kind) -> None:
        self.part, self.stage, self.kind = part, stage, kind

    def step(self, compute: Compute) -> None:
        for index in range(self.part.count):
            compute(Action(self.stage, self.kind, index), ())


def spec(*shape: int, dtype: torch.dtype = torch.float32, requires_grad: bool = False) -> TensorSpec:
    return TensorSpec(shape=shape, dtype=dtype, requires_grad=requires_grad)


def result_node() -> fx.Node:
    node = fx.Graph().placeholder("result")
    node.meta.update(module_path="model.layer", source="model.py:3")
    return node


def setup_of(
    module: nn.Module, rows: int, count: int, *specs: TensorSpec, index: int = 0, joined: tuple[int | None, ...] = (0,)
) -> PassSetup:
    """A stage that gets rows of one tensor, and gives one result for each spec, by the rows of a microbatch."""
    legs, start = [], 0
    for part in plan_passes(rows, count):
        sent = tuple(
            spec(*(part.size, *each.shape[1:]), dtype=each.dtype, requires_grad=each.requires_grad) if dim == 0 else each
            for each, dim in zip(specs, joined, strict=True)
        )
        forward: Any = Alone(part, index, FORWARD)
        backward: Any = Alone(part, index, BACKWARD)
        legs.append(
            Leg(
                part=part,
                start=start,
                rows=part.size,
                crossings={index: Crossing(received=(), sent=sent)},
                sizes={},
                admits_one_more=False,
                forward=forward,
                backward=lambda results: backward,
                interleaved=None,
            )
        )
        start += part.count * part.size
    stage: Any = Stage(
        index=index, module=module, region_inputs=(0,), boundary_in=(), boundary_out=tuple(result_node() for _ in specs)
    )
    return PassSetup(
        stages={index: stage},
        tail=None,
        last_stage=index,
        legs=tuple(legs),
        input_dims=(0,),
        joined_dims=joined,
        joined_specs=specs,
        input_shapes=(),
        input_sources=(),
        sample_dims={},
        fixed=frozenset(),
        carries_random_state=False,
        device=CPU,
        norms=DeferredNorms(()),
        late_exchanges=LateExchanges(nn.Module(), (), ()),
        left=LeftState(nn.Module(), ALONE, frozenset(), print),
        carried=frozenset(),
    )


class Gives(nn.Module):
    def __init__(self, calls: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self._calls = calls

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        found = self._calls(x * self.scale)
        return found if isinstance(found, tuple) else (found,)


OTHER: dict[str, Callable[[Tensor], Tensor]] = {
    "dtype": lambda h: h.double(),
    "narrower dtype": lambda h: h.bfloat16(),
    "shape": lambda h: h[:, :2],
    "shape of as many elements": lambda h: h.t(),
    "gradient": lambda h: h,
}


@pytest.mark.parametrize("what", OTHER)
def test_a_stage_that_gives_another_tensor_than_planned_is_refused(what: str) -> None:
    """The next stage receives into a buffer of the planned shape and dtype, and a transport compares neither."""
    setup = setup_of(Gives(OTHER[what]), 4, 2, spec(4, WIDTH, requires_grad=what != "gradient"))
    run = StageRun(setup, [torch.ones(4, WIDTH)], (0,))
    with pytest.raises(UnsupportedError, match="a tensor with a different shape, dtype or gradient than expected") as caught:
        run.compute(setup.legs[0], setup.stages[0], 0, (), state=None, training=True)
    assert caught.value.where == "model.layer, model.py:3"
    assert caught.value.observed is not None
    assert caught.value.observed != caught.value.expected


def masks(stage: int, batch: int) -> list[tuple[float, ...]]:
    """Which elements dropout keeps in each microbatch; of eleven samples two have four, and the last three."""
    setup = setup_of(Gives(lambda h: nn.functional.dropout(h.detach())), 11, 3, spec(11, WIDTH), index=stage)
    run, found = StageRun(setup, [torch.ones(11, WIDTH)], (5, batch)), []
    with isolated_rng():
        for leg in setup.legs:
            for index in range(leg.part.count):
                (output,), _ = run.compute(leg, setup.stages[stage], index, (), state=None, training=False)
                found.append(tuple(output[:3].flatten().tolist()))
    return found


def test_each_stage_and_microbatch_draws_numbers_of_its_own() -> None:
    """Nothing else would show it: a model with the same mask everywhere trains, only worse."""
    found = {(stage, batch): masks(stage, batch) for stage in range(2) for batch in range(2)}
    assert [len(each) for each in found.values()] == [3] * 4
    numbers = [mask for each in found.values() for mask in each]
    assert len(set(numbers)) == len(numbers)
    assert masks(1, 0) == found[1, 0]  # a resumed run repeats itself


def run(setup: PassSetup, x: Tensor) -> tuple[Tensor, ...]:
    results = RegionPass(setup, [x], random_key=(0,), training=True).forward()
    assert results is not None
    return results


def test_the_results_and_gradients_of_a_batch_are_those_of_the_whole() -> None:
    """Also where the last microbatch is another size than the others."""
    x = torch.randn(7, WIDTH)
    module = Gives(torch.sin)
    (result,) = run(setup_of(module, 7, 3, spec(7, WIDTH, requires_grad=True)), x)
    result.square().sum().backward()
    found, module.scale.grad = module.scale.grad, None
    expected = torch.sin(x * module.scale)
    expected.square().sum().backward()
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(found, module.scale.grad)


def test_what_all_microbatches_give_alike_has_its_gradient_once() -> None:
    module = Gives(lambda h: (h, module.scale * 2))
    specs = (spec(4, WIDTH, requires_grad=True), spec(WIDTH, requires_grad=True))
    _, weight = run(setup_of(module, 4, 2, *specs, joined=(0, None)), torch.ones(4, WIDTH))
    weight.sum().backward()
    assert module.scale.grad is not None
    assert module.scale.grad.tolist() == [2.0] * WIDTH


def test_results_that_do_not_train_need_no_gradient() -> None:
    specs = (spec(4, WIDTH, requires_grad=True), spec(4, WIDTH))
    trained, detached = run(setup_of(Gives(lambda h: (h, h.detach())), 4, 2, *specs, joined=(0, 0)), torch.ones(4, WIDTH))
    assert trained.requires_grad
    assert not detached.requires_grad


def test_a_second_backward_pass_is_refused_in_words_of_torch() -> None:
    one = RegionPass(
        setup_of(Gives(torch.sin), 4, 2, spec(4, WIDTH, requires_grad=True)),
        [torch.ones(4, WIDTH)],
        random_key=(0,),
        training=True,
    )
    assert one.forward() is not None
    one.backward(frozenset({0}), [torch.ones(4, WIDTH)])
    with pytest.raises(RuntimeError, match="a second time"):
        one.backward(frozenset({0}), [torch.ones(4, WIDTH)])


def anchors_of(result: Tensor) -> list[Any]:
    """Where a backward pass through the stages ends for autograd."""
    assert result.grad_fn is not None
    return [torch.autograd.graph.GradientEdge(*edge) for edge in result.grad_fn.next_functions if edge[0] is not None]


def test_a_derivative_of_the_gradients_is_refused() -> None:
    module = Gives(torch.sin)
    (result,) = run(setup_of(module, 4, 2, spec(4, WIDTH, requires_grad=True)), torch.ones(4, WIDTH))
    with pytest.raises(UnsupportedError):
        torch.autograd.grad(result.sum(), anchors_of(result), create_graph=True)
