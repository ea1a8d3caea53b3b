"""Errors of user code come out of a schedule as they were raised."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B

from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.schedules.pipelining import Pipeline
from lightning_fxpipe.schedules.places import Place
from tests.ranks.pool import RankPool
from tests.ranks.test_schedule import CPU, Data, LastStage, Rank, make_group


class UserError(Exception):
    """An error of the user's own, with an argument that a wrapper would hide."""


def fail_with(cause: Exception | None = None) -> None:
    raise UserError("the user's own words") from cause


def described(error: Exception) -> dict[str, Any]:
    """What is left of an error when it has come out; errors themselves do not travel with their tracebacks."""
    return {
        "type": type(error).__name__,
        "text": str(error),
        "cause": repr(error.__cause__),
        "functions": [frame.name for frame in traceback.extract_tb(error.__traceback__)],
    }


def assert_as_raised(found: dict[str, Any] | None) -> None:
    assert found is not None
    assert (found["type"], found["text"]) == ("UserError", "the user's own words")
    assert found["functions"][-1] == "fail_with"


def fail_in_evaluation() -> dict[str, Any] | None:
    """Runs on every rank: the last stage fails on the last microbatch, when the other has nothing to wait for any more."""
    rank = Rank(make_group())
    data = Data.make(2, 3, seed=0)
    if rank.is_last:

        def failing(*args: Any) -> Any:
            if len(rank.result.order) == 2:
                fail_with()
            return LastStage.forward(rank.stage, *args)

        rank.stage.forward = failing
    pipeline = rank.pipeline(2, 3, training=False)
    try:
        rank.step(pipeline, data)
    except Exception as error:
        return described(error)
    return None


def test_an_error_in_evaluation_comes_out_as_it_was_raised(ranks: Callable[[int], RankPool]) -> None:
    last, first = ranks(2).run(fail_in_evaluation)
    assert first is None
    assert_as_raised(last)


def alone() -> dist.ProcessGroup:
    """A group of each rank by itself: a pipeline of one stage, where no other rank waits when it fails."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]


def single_stage() -> Pipeline:
    return Pipeline(
        [Place(stage=0, index=0, received=(), sent=None)],
        num_places=1,
        num_microbatches=2,
        order=Schedule1F1B,
        has_backward=True,
        device=CPU,
        group=alone(),
    )


def fail_in_training(where: str, cause: Exception | None) -> dict[str, Any] | None:
    """Runs on every rank: an error in the forward or the backward of the second microbatch."""
    weight = nn.Parameter(torch.ones(()))

    def hook(gradient: Tensor) -> None:
        fail_with(cause)

    def run(_: int, index: int, received: tuple[Tensor, ...]) -> Tensor:
        loss = weight * 2
        if index == 1 and where == "backward":
            loss.register_hook(hook)
        elif index == 1:
            fail_with(cause)
        return loss

    try:
        single_stage().step(run)
    except Exception as error:
        return described(error)
    return None


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_in_training_comes_out_as_it_was_raised(ranks: Callable[[int], RankPool], where: str) -> None:
    for result in ranks(2).run(fail_in_training, where, None):
        assert_as_raised(result)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_what_led_to_the_users_error_is_kept(ranks: Callable[[int], RankPool], where: str) -> None:
    """``raise ... from ...`` in the user's code: half of what the traceback tells."""
    for result in ranks(2).run(fail_in_training, where, KeyError("what led to it")):
        assert result is not None
        assert result["cause"] == "KeyError('what led to it')"


def fail_with_runtime_error() -> dict[str, Any]:
    """Runs on every rank: an error of the type that torch wraps others in."""

    def run(_: int, index: int, received: tuple[Tensor, ...]) -> Tensor:
        raise RuntimeError("shape mismatch in the user's code")

    try:
        single_stage().step(run)
    except RuntimeError as error:
        return described(error)
    raise AssertionError("nothing was raised")


def test_a_runtime_error_of_the_user_is_not_taken_for_the_wrapper(ranks: Callable[[int], RankPool]) -> None:
    for result in ranks(2).run(fail_with_runtime_error):
        assert (result["type"], result["text"]) == ("RuntimeError", "shape mismatch in the user's code")


def step_after_error() -> str:
    """Runs on every rank: the error of a step after one that failed."""
    weight = nn.Parameter(torch.ones(()))
    fails = [True, False]

    def run(_: int, index: int, received: tuple[Tensor, ...]) -> Tensor:
        if index == 1 and fails.pop(0):
            fail_with()
        return weight * (index + 2)

    pipeline = single_stage()
    with pytest.raises(UserError):
        pipeline.step(run)
    with pytest.raises(UnsupportedError) as caught:
        pipeline.step(run)
    return str(caught.value)


def test_a_step_after_a_failed_one_is_refused(ranks: Callable[[int], RankPool]) -> None:
    """torch keeps the losses of microbatches that ran before an error, and would run their backward in the next step."""
    for message in ranks(2).run(step_after_error):
        assert "The pipeline cannot continue after a failed step." in message
        assert "resume from a checkpoint" in message
