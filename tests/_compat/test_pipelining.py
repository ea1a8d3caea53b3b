"""A canary for what ``_compat.pipelining`` uses of torch's stages; see also ``tests/ranks/test_memory.py``."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import PipelineStage

from lightning_fxpipe._compat.pipelining import FrugalStage, TableSchedule, rows_of, unlogged, watched

OVERRIDDEN = [name for name, value in vars(FrugalStage).items() if inspect.isfunction(value) and not name.startswith("_")]


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_the_overridden_methods_are_torchs(name: str) -> None:
    theirs, ours = (list(inspect.signature(getattr(kind, name)).parameters) for kind in (PipelineStage, FrugalStage))
    assert theirs[:2] == ours[:2]


def test_a_stage_lists_what_it_receives() -> None:
    """Under the names that are used; `fwd_cache` is gone where torch makes its buffers late."""
    source = inspect.getsource(inspect.getmodule(PipelineStage) or torch)
    assert "self.args_recv_info: dict[int, tuple[" in source
    assert "self.grad_recv_info" in source
    assert "self.bwd_cache" in source
    assert "self.fwd_cache" in source or "release_fwd_send_outputs" in source


@pytest.mark.usefixtures("_no_group_is_left")
def test_the_only_rank_greets_nobody() -> None:
    """torch has a stage greet the ranks of its neighbours under this name until 2.15, before 2.13 on the only rank, too."""
    if torch.__version__ < (2, 15):
        assert callable(PipelineStage._get_init_p2p_neighbors_ops)
    for stage in table_schedule([["0F0", "1F0", "1B0", "0B0", "0F1", "1F1", "1B1", "0B1"]])._stages:
        assert FrugalStage._get_init_p2p_neighbors_ops(stage) == []


def table_schedule(rows: list[list[str]]) -> TableSchedule:
    """Of two stages on one rank."""
    one = torch.ones(1, 2)
    stages: list[PipelineStage] = [
        FrugalStage(torch.nn.Linear(2, 2), index, 2, torch.device("cpu"), input_args=one, output_args=one, group=group())
        for index in range(2)
    ]
    return TableSchedule(stages, 2, rows, loss_fn=None)


def group() -> torch.distributed.ProcessGroup:
    """Of this process alone."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    assert torch.distributed.group.WORLD is not None
    return torch.distributed.group.WORLD


@pytest.fixture
def _no_group_is_left() -> Iterator[None]:
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_no_group_is_left")
def test_torch_runs_a_table() -> None:
    rows = [["0F0", "1F0", "0F1", "1I0", "0B0", "1F1", "1W0", "1B1", "0B1"]]
    schedule = table_schedule(rows)
    assert rows_of(schedule) == rows
    with pytest.raises(AssertionError, match="B"):
        table_schedule([["0F0", "1F0", "0F1", "1F1"]])


@pytest.mark.usefixtures("_no_group_is_left")
def test_what_a_stage_computes_is_watched_in_the_block_only() -> None:
    rows = [["0F0", "1F0", "0F1", "1I0", "0B0", "1F1", "1W0", "1B1", "0B1"]]
    one, seen = torch.ones(1, 2, requires_grad=True), []
    stages = [
        FrugalStage(torch.nn.Linear(2, 2), index, 2, torch.device("cpu"), input_args=one, output_args=one, group=group())
        for index in range(2)
    ]
    schedule = TableSchedule(stages, 2, rows, loss_fn=lambda output, target: output.sum())

    @contextmanager
    def around(stage: int, kind: str, index: int) -> Iterator[None]:
        seen.append(f"{stage}{kind}{index}")
        yield
        seen.append("end")

    with ExitStack() as watches:
        for stage in stages:
            watches.enter_context(watched(stage, partial(around, stage.stage_index)))
        schedule.step(torch.ones(2, 2), target=torch.zeros(2), return_outputs=False)
    assert seen[::2] == rows[0]
    assert {*seen[1::2]} == {"end"}
    schedule.step(torch.ones(2, 2), target=torch.zeros(2), return_outputs=False)
    assert len(seen) == 2 * len(rows[0])
    assert not any(name.endswith("_one_chunk") for stage in stages for name in vars(stage))


@pytest.mark.usefixtures("_no_group_is_left")
@pytest.mark.parametrize(
    "rows",
    [["0F0", "1F0", "1B0", "0B0", "0F1", "1F1", "1B1", "0B1"], ["0F1", "1F1", "1B1", "0F0", "0B1", "1F0", "1I0", "0B0", "1W0"]],
)
def test_a_table_may_take_microbatches_in_any_order(rows: list[str]) -> None:
    """torch looks for the loss of the second one where the second loss is, and finds none."""
    torch.manual_seed(1)
    given, modules = torch.randn(2, 2), [torch.nn.Linear(2, 2) for _ in range(2)]
    weights = torch.tensor([[1.0], [3.0]])
    (modules[1](modules[0](given)) * weights).sum().backward()
    expected = [[parameter.grad for parameter in module.parameters()] for module in modules]
    one = torch.ones(1, 2, requires_grad=True)
    for module in modules:
        module.zero_grad()
    stages = [
        FrugalStage(module, index, 2, torch.device("cpu"), input_args=one, output_args=one, group=group())
        for index, module in enumerate(modules)
    ]
    schedule = TableSchedule(stages, 2, [rows], loss_fn=lambda found, weight: (found * weight).sum(), scale_grads=False)
    schedule.step(given, target=weights, return_outputs=False)
    assert not schedule._losses
    found = [[parameter.grad for parameter in module.parameters()] for module in modules]
    torch.testing.assert_close(found, expected)


class _OneMore:
    """Adds an input to each backward pass, and a result that is three times that."""

    def __init__(self) -> None:
        self.given = torch.ones(1, 2, requires_grad=True)
        self.names = {"stage_output", "output_grads", "input_values"}
        self.gradients: dict[int, list[float]] = {}

    def extended(self, index: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
        assert {*arguments} == self.names
        return {
            "stage_output": (*arguments["stage_output"], 3 * (index + 1) * self.given),
            "output_grads": (*arguments["output_grads"], torch.ones(1, 2)),
            "input_values": [*arguments["input_values"], self.given],
        }

    def send_back(self, index: int, gradients: Sequence[torch.Tensor | None]) -> None:
        (gradient,) = gradients
        assert gradient is not None
        self.gradients[index] = gradient.flatten().tolist()


@pytest.mark.usefixtures("_no_group_is_left")
@pytest.mark.parametrize("backward", [["1B0"], ["1I0", "1W0"]], ids=["whole", "split"])
def test_a_stage_differentiates_what_torch_does_not_know_of(backward: list[str]) -> None:
    """Under these names, wherever gradients of inputs come: of a stage in the middle at once or in the first half."""
    one, skips = torch.ones(1, 2, requires_grad=True), _OneMore()
    stages = [
        FrugalStage(
            torch.nn.Linear(2, 2),
            index,
            3,
            torch.device("cpu"),
            input_args=one,
            output_args=one,
            group=group(),
            skips=skips if index == 1 else None,
        )
        for index in range(3)
    ]
    later = [action.replace("0", "1") for action in ("F0", *(action[1:] for action in backward))]
    rows = ["0F0", "1F0", "2F0", "2B0", *backward, "0B0", "0F1", *(f"1{action}" for action in later[:1]), "2F1", "2B1"]
    rows += [*(f"1{action}" for action in later[1:]), "0B1"]
    schedule = TableSchedule(stages, 2, [rows], loss_fn=lambda output, target: output.sum())
    schedule.step(torch.ones(2, 2), target=torch.zeros(2), return_outputs=False)
    assert skips.gradients == {0: [3, 3], 1: [6, 6]}
    assert all(parameter.grad is not None for stage in stages for parameter in stage.submod.parameters())


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.mark.usefixtures("_no_group_is_left")
def test_a_stage_that_fails_prints_no_schedule() -> None:
    schedule, records = table_schedule([["0F0", "1F0", "1B0", "0B0", "0F1", "1F1", "1B1", "0B1"]]), _Records()
    logger = logging.getLogger("torch.distributed.pipelining.schedules")
    logger.addHandler(records)
    try:
        with pytest.raises(RuntimeError), unlogged():
            schedule.step(torch.ones(2, 3))
        assert not records.messages
        with pytest.raises(RuntimeError):
            schedule.step(torch.ones(2, 3))
        assert any("Full Schedule" in message for message in records.messages)
    finally:
        logger.removeHandler(records)
