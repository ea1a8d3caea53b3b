"""Which ranks record a step anew: agreed before any waits for another, over real lifelines and without a pipeline."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from lightning_fxpipe import TraceError
from lightning_fxpipe.distributed.decisions import Decisions
from lightning_fxpipe.distributed.handshake import Gather
from lightning_fxpipe.distributed.lifeline import Lifeline, connect
from lightning_fxpipe.distributed.news import Decision
from tests.thread_ranks import ThreadRanks

WORLD = 3


def _connect(rank: int, gather: Gather) -> Lifeline:
    found = connect(rank, WORLD, "127.0.0.1", gather, lambda failure: None, 120.0)
    assert found is not None
    return found


@pytest.fixture
def decisions() -> Iterator[list[Decisions]]:
    lifelines = ThreadRanks(WORLD).run([partial(_connect, rank) for rank in range(WORLD)])
    yield [Decisions(rank, range(WORLD), lifeline) for rank, lifeline in enumerate(lifelines)]
    for lifeline in reversed(lifelines):
        lifeline.leave()
        lifeline.close_in_fork()


def decide(decisions: Decisions, *, records: bool, waits_for: threading.Event | None = None) -> str:
    """Decides about one batch; returns what was refused."""
    try:
        with decisions.batch():
            if waits_for is not None:
                assert waits_for.wait(30)
            if records:
                decisions.agree_to_record(["mode"])
    except TraceError as error:
        return str(error.observed)
    return ""


def of_all(decisions: list[Decisions], records: list[bool], late: int | None = None) -> list[str]:
    """What each rank decides about one batch; the ``late`` one when the others have decided, or wait for it."""
    others = threading.Event()
    done: list[int] = []

    def job(rank: int, gather: Gather) -> str:
        found = decide(decisions[rank], records=records[rank], waits_for=others if rank == late else None)
        done.append(rank)
        if len(done) == WORLD - 1 or any(records):
            others.set()
        return found

    return ThreadRanks(WORLD).run([partial(job, rank) for rank in range(WORLD)])


def test_all_go_on_where_all_record_and_where_none_does(decisions: list[Decisions]) -> None:
    for records in (False, True, False, True):
        assert of_all(decisions, [records] * WORLD) == [""] * WORLD


@pytest.mark.parametrize("alone", range(WORLD))
def test_a_rank_that_records_alone_says_why_and_who_does_not(decisions: list[Decisions], alone: int) -> None:
    """It waited in a collective for ranks that waited for its stage."""
    of_all(decisions, [False] * WORLD)
    found = of_all(decisions, [rank == alone for rank in range(WORLD)], late=alone)
    others = ", ".join(str(rank) for rank in range(WORLD) if rank != alone)
    assert found[alone] == f"rank {alone} would retrace it, since mode changed; rank {others} has a matching trace"
    assert [text for rank, text in enumerate(found) if rank != alone] == ["", ""]


def test_a_rank_that_decides_later_answers_then(decisions: list[Decisions]) -> None:
    recording = threading.Event()

    def first(gather: Gather) -> str:
        recording.set()
        return decide(decisions[0], records=True)

    later = [lambda gather, r=rank: decide(decisions[r], records=False, waits_for=recording) for rank in (1, 2)]
    found = ThreadRanks(WORLD).run([first, *later])
    assert "rank 1, 2 has a matching trace" in found[0]
    assert found[1:] == ["", ""]


class AheadByABatch:
    """A lifeline to a rank that hears what this one decides, and then decides about two batches before this one looks."""

    on_decision: Callable[[Decision], None]

    def tell(self, decision: Decision) -> None:
        for batch in (decision.batch, decision.batch + 1):
            self.on_decision(Decision(rank=1, batch=batch, records=True))


@pytest.mark.timeout(30)
def test_the_next_batch_of_another_rank_does_not_hide_what_it_decided_about_this_one() -> None:
    """Both waited for ever, now and then, where validation calls no model: nothing else makes ranks meet between batches."""
    lifeline: Any = AheadByABatch()
    decisions = Decisions(0, range(2), lifeline)
    assert [decide(decisions, records=True) for _ in range(3)] == ["", "", ""]


def test_without_a_lifeline_nothing_is_asked() -> None:
    alone = Decisions(0, [0, 1], None)
    assert decide(alone, records=True) == ""
