"""The channel from the last stage to all ranks: every message arrives as it was sent; names travel only when they change."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_fxpipe.distributed.agreement import LateVote
from lightning_fxpipe.distributed.commands import Command, Commands
from lightning_fxpipe.metrics import step_log as metrics
from lightning_fxpipe.metrics.step_log import LogEntry, ResultChannel
from tests.ranks.pool import RankPool

Message = tuple[float | None, list[LogEntry], Any]

# How many numbers the first message of a step has room for; one of them is the loss, where there is one.
INLINE = metrics._INLINE_VALUES


def share_all(messages: list[Message], source: int) -> tuple[list[Message], list[bool]]:
    """Runs on every rank: what it received, and for each message whether names had to travel."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    # Stages run against ranks, so the group does too, and positions in it are no global ranks.
    group = dist.new_group(list(reversed(range(dist.get_world_size()))), sort_ranks=False)
    commands = Commands(group, source=source)
    channel = ResultChannel(commands)
    is_source = dist.get_rank() == source
    received: list[Message] = []
    described: list[bool] = []
    original = dist.broadcast_object_list

    def counted(*args: Any, **kwargs: Any) -> Any:
        described[-1] = True
        return original(*args, **kwargs)

    metrics.dist.broadcast_object_list = counted
    try:
        for loss, entries, news in messages:
            described.append(False)
            # As in a pipeline: the other ranks have neither loss nor entries.
            received.append(channel.share(loss, entries, news) if is_source else channel.share(None, [], None))
        commands.settle()
        dist.barrier(group)
    finally:
        metrics.dist.broadcast_object_list = original
        dist.destroy_process_group(group)
    return received, described


def entry(name: str, value: float, num_samples: int = 4, **options: Any) -> LogEntry:
    return LogEntry(name=name, value=value, options=tuple(options.items()), num_samples=num_samples)


def check(ranks: Callable[[int], RankPool], messages: list[Message], source: int = 0) -> list[bool]:
    """All ranks receive all messages; returns for which of them names travelled."""
    results = ranks(3).run(share_all, messages, source)
    for received, described in results:
        assert received == messages
        assert described == results[0][1]
    return results[0][1]


@pytest.mark.parametrize("source", [0, 2])
def test_every_rank_receives_what_the_last_stage_has(ranks: Callable[[int], RankPool], source: int) -> None:
    entries = [entry("loss", 0.1, prog_bar=True), entry("lr", 1e-30), entry("loss", -1 / 3, 9, reduce_fx=max)]
    check(ranks, [(0.1 + 0.2, entries, None)], source)


def test_names_travel_only_when_the_layout_changes(ranks: Callable[[int], RankPool]) -> None:
    messages: list[Message] = [
        (1.0, [entry("a", 1.0), entry("b", 2.0)], None),
        (2.0, [entry("a", 3.0), entry("b", 4.0)], None),  # only values differ
        (3.0, [entry("a", 5.0)], None),  # a name less
        (4.0, [entry("a", 6.0)], None),
        (5.0, [entry("c", 7.0)], None),  # another name
        (6.0, [entry("c", 8.0, 3)], None),  # the smaller last batch of an epoch
        (7.0, [entry("c", 9.0, 3, prog_bar=True)], None),  # another option
        (8.0, [entry("c", 9.5, 3, prog_bar=True)], None),
    ]
    assert check(ranks, messages) == [True, False, True, False, True, True, True, False]


def test_evaluation_has_no_loss(ranks: Callable[[int], RankPool]) -> None:
    """With and without a loss the same numbers mean different things."""
    messages: list[Message] = [
        (1.0, [entry("a", 2.0)], None),
        (None, [entry("a", 3.0)], None),
        (None, [entry("a", 4.0)], None),
        (5.0, [entry("a", 6.0)], None),
    ]
    assert check(ranks, messages) == [True, True, False, True]


def test_a_step_that_logs_nothing_still_has_its_loss(ranks: Callable[[int], RankPool]) -> None:
    assert check(ranks, [(1.0, [], None), (2.0, [], None), (None, [], None), (None, [], None)]) == [True, False, True, False]


@pytest.mark.parametrize("count", [INLINE - 1, INLINE, INLINE + 1, 3 * INLINE])
def test_any_number_of_values_arrives(ranks: Callable[[int], RankPool], count: int) -> None:
    """At and around the number of values that the first message has room for, with a loss among them and without."""
    many = [entry(f"metric_{i}", i + 1 / 3) for i in range(count)]
    again = [entry(f"metric_{i}", i - 1 / 7) for i in range(count)]
    few: list[Message] = [(0.5, many[:1], None)]
    messages: list[Message] = [(0.25, many, None), (0.75, again, None), *few, (None, many, None), (None, again, None)]
    assert check(ranks, messages) == [True, False, True, True, False]


def test_values_arrive_to_the_last_bit(ranks: Callable[[int], RankPool]) -> None:
    values = [math.pi, -0.0, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, 2.0**53 - 1]
    check(ranks, [(values[0], [entry(f"v{i}", value) for i, value in enumerate(values)], None)])


def test_a_diverged_loss_arrives_as_nan(ranks: Callable[[int], RankPool]) -> None:
    for received, _ in ranks(3).run(share_all, [(math.nan, [entry("a", math.nan)], None)], 0):
        ((loss, (logged,), _),) = received
        assert loss is not None
        assert math.isnan(loss)
        assert math.isnan(logged.value)


def test_news_travel_once_and_with_any_message(ranks: Callable[[int], RankPool]) -> None:
    news = {"python": (3, (1, 2), None), "note": "state of a generator"}
    messages: list[Message] = [
        (1.0, [entry("a", 1.0)], news),
        (2.0, [entry("a", 2.0)], None),
        (3.0, [entry("a", 3.0)], news),
        (4.0, [entry("b", 4.0)], None),
    ]
    assert check(ranks, messages) == [True, False, True, True]


def test_tensors_travel_as_news(ranks: Callable[[int], RankPool]) -> None:
    state = torch.get_rng_state()
    for received, _ in ranks(3).run(share_all, [(1.0, [], {"torch": state})], 0):
        torch.testing.assert_close(received[0][2]["torch"], state, rtol=0, atol=0)


def listen(source: int) -> list[Any]:
    """Runs on every rank: the commands, as a rank hears them."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    group = dist.new_group(list(reversed(range(dist.get_world_size()))), sort_ranks=False)
    commands = Commands(group, source=source)
    if dist.get_rank() == source:
        commands.tell(Command.FORWARD)
        dist.barrier(group)
        commands.tell(Command.BACKWARD, 3, True)
        commands.tell(Command.DONE, 0.1 + 0.2)
        commands.tell(Command.RESULT)
        found: list[Any] = []
    else:
        for _ in range(2):  # the second time it is expected already
            commands.expect()
        dist.barrier(group)  # a message under way is in nobody's way
        found = [commands.hears_of(Command.DONE), commands.hears_of(Command.FORWARD), commands.hears_of(Command.FORWARD)]
        found += [commands.hear(), commands.hear(), commands.hears_of(Command.FORWARD), commands.hear()]
    commands.settle()
    dist.barrier(group)
    dist.destroy_process_group(group)
    return found


@pytest.mark.parametrize("source", [0, 2])
def test_a_command_that_is_not_meant_is_left_to_who_hears_next(ranks: Callable[[int], RankPool], source: int) -> None:
    results = ranks(3).run(listen, source)
    for found in results[:source] + results[source + 1 :]:
        assert found[:3] == [False, True, False]
        assert found[3:5] == [(Command.BACKWARD, [3.0, 1.0]), (Command.DONE, [0.1 + 0.2])]
        assert found[5:] == [False, (Command.RESULT, [])]


def vote_late() -> list[Any]:
    """Runs on every rank: what it hears where rank 1 says yes in the second of five calls, and all in the fourth."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    group = dist.new_group()
    vote = LateVote(group)
    rank = dist.get_rank()
    found = [vote.largest(number == 3 or (number == 1 and rank == 1), number * rank) for number in range(5)]
    dist.barrier()
    dist.destroy_process_group(group)
    return found


def test_a_late_vote_is_told_to_all_ranks_at_the_next_call(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(3).run(vote_late) == [[None, [0, 0], [1, 2], [0, 4], [1, 6]]] * 3


def test_a_rank_alone_hears_its_vote_at_once() -> None:
    assert [LateVote(None).largest(vote, 3) for vote in (True, False)] == [[1, 3], [0, 3]]


def profile_what_arrives_late() -> list[str]:
    """Runs on every rank: the transfers that a profiler has noted, of which none ends before it does."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    group = dist.new_group()
    commands, vote = Commands(group, source=0), LateVote(group)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        vote.largest(False)
        commands.expect()
        if commands.is_source:
            commands.tell(Command.DONE)
        dist.barrier(group)
    if not commands.is_source:
        commands.hear()
    commands.settle()
    vote.largest(False)
    dist.barrier()
    dist.destroy_process_group(group)
    return sorted({event.name for event in profiler.events() if event.name.startswith("gloo:")})


def test_what_arrives_late_is_in_no_profile(ranks: Callable[[int], RankPool]) -> None:
    """A transfer that a profiler has noted writes its end into the notes, which are freed by then: the process dies."""
    assert ranks(2).run(profile_what_arrives_late) == [["gloo:barrier"]] * 2
