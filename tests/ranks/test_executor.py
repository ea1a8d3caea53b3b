"""The executor on ranks: the gradients of one process for random tables, edges and dtypes, and errors as they were raised."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fxpipe.errors import ScheduleError, UnsupportedError
from lightning_fxpipe.schedules.executor import Channels, Executor
from lightning_fxpipe.schedules.program import Edge, program_of
from lightning_fxpipe.simulation.actions import FORWARD, Action, ActionTable
from lightning_fxpipe.simulation.by_name import SimulatedSchedule, simulate, stages_of_ranks
from lightning_fxpipe.simulation.costs import StageCosts
from lightning_fxpipe.simulation.orders import gpipe
from lightning_fxpipe.stages.build import TensorSpec
from tests.ranks.pool import RankPool
from tests.schedules.small_stages import SPECS, Case, disturbed, in_one_process, on_rank, random_case

Ranks = Callable[[int], RankPool]
COST = StageCosts(forward_seconds=1, input_backward_seconds=1, weight_backward_seconds=1, activation_bytes=1, weight_bytes=0.5)


def channels() -> Channels:
    """One group, since gloo keeps both directions of two ranks apart."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return Channels(onward=None, back=None, global_ranks=tuple(range(dist.get_world_size())))


def run_cases(cases: Sequence[Case], **options: Any) -> list[dict[str, Tensor | None] | str]:
    """Runs on every rank: the gradients of each case, or why it is refused."""
    found: list[dict[str, Tensor | None] | str] = []
    between = channels()
    for case in cases:
        try:
            found.append(on_rank(case, dist.get_rank(), between, **options))
        except ScheduleError as error:
            found.append(str(error))
    return found


def assert_same(found: Sequence[dict[str, Tensor | None] | str], case: Case) -> None:
    expected = in_one_process(case)
    gradients = {name: gradient for one in found if isinstance(one, dict) for name, gradient in one.items()}
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        other = gradients[name]
        if gradient is None:  # a stage that gets zeros cannot know that one device would have nothing there
            assert other is None or not other.any()
        else:
            assert other is not None
            torch.testing.assert_close(other, gradient, rtol=1e-9, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("ahead_bytes", [0, 1 << 20])
@pytest.mark.parametrize(("num_ranks", "count"), [(2, 40), (3, 25), (4, 12)])
def test_random_tables_give_the_gradients_of_one_process(ranks: Ranks, num_ranks: int, count: int, ahead_bytes: int) -> None:
    """Placements, orders, splits, skips and dtypes by chance. None waits for ever, or the pool would say so."""
    cases = [random_case(1000 * num_ranks + seed, num_ranks) for seed in range(count)]
    results = ranks(num_ranks).run(run_cases, cases, ahead_bytes=ahead_bytes)
    for case, *found in zip(cases, *results, strict=True):
        assert_same(found, case)


def test_tables_that_wait_for_ever_are_refused_before_they_run(ranks: Ranks) -> None:
    """Exchanged actions: every rank refuses the same tables, naming what is waited for, and runs the others."""
    cases = [disturbed(random_case(seed, 3), seed) for seed in range(60)]
    results = ranks(3).run(run_cases, cases)
    num_refused = 0
    for case, *found in zip(cases, *results, strict=True):
        if isinstance(found[0], str):
            num_refused += 1
            assert len({*found}) == 1
            assert "its ranks wait for each other" in found[0]
        else:
            assert_same(found, case)
    assert 10 < num_refused < 50


SCHEDULES: list[tuple[SimulatedSchedule, int]] = [
    *((name, 2) for name in ("gpipe", "1f1b", "zb_h1", "zb_h2", "zero_bubble")),
    *((name, 2) for name in ("looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble")),
    *((name, 2) for name in ("zbv_zero_bubble", "dualpipev", "zero_bubble_v", "v_half", "v_min")),
    *((name, 3) for name in ("gpipe", "1f1b", "zb_h1", "interleaved_1f1b", "zbv_zero_bubble")),
]  # type: ignore[assignment]


def test_every_schedule_gives_the_gradients_of_one_process(ranks: Ranks) -> None:
    for num_ranks in (2, 3):
        cases = []
        for name, wanted in SCHEDULES:
            num_stages = sum(map(len, stages_of_ranks(name, num_ranks)))
            pairs = [(stage, stage + 1) for stage in range(num_stages - 1)] + [(0, num_stages - 1)]
            edges = tuple(Edge(source=s, target=t, spec=SPECS[i]) for s, t in pairs for i in (0, 3, 4))
            table = simulate(
                [COST] * num_stages, num_microbatches=6, schedule=name, stages_per_rank=num_stages // num_ranks
            ).table
            cases += [Case(table, edges)] if wanted == num_ranks else []
        results = ranks(num_ranks).run(run_cases, cases)
        for case, *found in zip(cases, *results, strict=True):
            assert_same(found, case)


# ------------------------------------------------------------------ messages

SPEC = TensorSpec(shape=(1000,), dtype=torch.float32, requires_grad=True)


def slow_receiver() -> float:
    """Runs on every rank: seconds until the first rank has sent all of its microbatches to one that takes its time."""
    between, edges = channels(), [Edge(source=0, target=1, spec=SPEC)]
    program = program_of(gpipe(2, 4), edges, dist.get_rank(), kinds={FORWARD})
    executor = Executor(program, device=torch.device("cpu"), channels=between)
    begin, seconds = time.perf_counter(), 0.0

    def compute(action: Action, received: tuple[Tensor, ...]) -> Sequence[Tensor]:
        nonlocal seconds
        seconds = time.perf_counter() - begin
        if action.stage == 0:
            return [torch.full((1000,), float(action.microbatch))]
        time.sleep(0.2)
        assert received[0].tolist() == [float(action.microbatch)] * 1000
        return ()

    executor.step(compute)
    return seconds


def test_nobody_waits_until_a_message_has_arrived(ranks: Ranks) -> None:
    first, last = ranks(2).run(slow_receiver)
    assert first < 0.3 < last


# ------------------------------------------------------------------ errors


class UserError(Exception):
    """An error of the user's own, with an argument that a wrapper would hide."""


def fail_with(cause: Exception | None) -> None:
    raise UserError("the user's own words") from cause


def fail() -> list[dict[str, Any]]:
    """Runs on every rank, each a pipeline of its own, so that no other waits: errors of actions, and of the step after."""
    found = []
    for fails_in in ("0F1", "0B0"):
        table = ActionTable.of([map(Action.parse, ("0F0", "0F1", "0B0", "0B1"))])
        executor = Executor(program_of(table, [], 0), device=torch.device("cpu"), channels=channels())

        def compute(action: Action, received: tuple[Tensor, ...], fails_in: str = fails_in) -> Sequence[Tensor]:
            if str(action) == fails_in:
                fail_with(KeyError("what led to it"))
            return ()

        with pytest.raises(UserError) as caught:
            executor.step(compute)
        with pytest.raises(UnsupportedError) as again:
            executor.step(lambda action, received: ())
        functions = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        found.append(
            {"text": str(caught.value), "cause": repr(caught.value.__cause__), "in": functions[-1], "again": str(again.value)}
        )
    return found


def test_errors_come_out_as_they_were_raised_and_end_the_pipeline(ranks: Ranks) -> None:
    """Messages of the failed step may be under way: a step after it would take them for its own."""
    for results in ranks(2).run(fail):
        for found in results:
            assert (found["text"], found["in"]) == ("the user's own words", "fail_with")
            assert found["cause"] == "KeyError('what led to it')"
            assert "The pipeline cannot continue after a failed step." in found["again"]
            assert "resume from a checkpoint" in found["again"]
