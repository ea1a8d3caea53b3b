"""Ranks of a pipeline agree on recording a step anew before any of them waits for another.

Each rank decides by itself whether a graph that it has computes a batch; all come to the same, as their state is the same. A
rank that records alone would wait in a collective for ranks that wait for its stage. So it asks over the lifeline first, whose
threads answer for ranks that wait:

    rank 0, batch 7: records it    ->  Decision(rank=0, batch=7, records=True)   waits for answers
    rank 1, batch 7: has a graph   ->  Decision(rank=1, batch=7, records=False)  rank 0 raises

Nothing is sent in batches that no rank records. Ranks that all have a graph, but not the same one, or not with the same numbers
as its inputs, would compute a wrong step without waiting for each other. So :meth:`Decisions.graphs` goes into a vote before
the next batch, which is counted before the one after it (``strategy.batch_votes``).
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch.distributed.distributed_c10d as dist

from lightning_fxpipe.distributed.failure import current_watch
from lightning_fxpipe.distributed.lifeline import Lifeline
from lightning_fxpipe.distributed.news import Decision
from lightning_fxpipe.distributed.topology import Topology
from lightning_fxpipe.errors import TraceError


class UsedGraph(Protocol):
    """A recorded graph, of which each rank has its stages."""

    @property
    def number(self) -> int:
        """Number of the graph, equal on every rank."""

    def input_numbers(self) -> list[int | float]:
        """Returns the numbers that it had as inputs when it last ran."""


class Decisions:
    """This rank's decisions. Made by every rank of a pipeline.

    Args:
        rank: This rank.
        ranks: All ranks of the pipeline.
        lifeline: Connects them; without one nothing is asked.
    """

    def __init__(self, rank: int, ranks: Collection[int], lifeline: Lifeline | None) -> None:
        self._rank = rank
        self._others = frozenset(ranks) - {rank}
        self._lifeline = lifeline if self._others else None
        self._batch = self._recorded = 0  # numbers of the current batch, and of the last that this rank has recorded
        self._is_deciding = False
        self._graphs: list[UsedGraph | None] = []
        # By rank and batch: a rank that has heard of all others' decisions may tell that about the next batch before they look.
        self._heard: dict[tuple[int, int], Decision] = {}
        self._news = threading.Condition()
        if self._lifeline is not None:
            self._lifeline.on_decision = self._hear

    @classmethod
    def among(cls, topology: Topology) -> Decisions:
        """Returns those of a pipeline's ranks."""
        if topology.control_group is None:
            return cls(0, (), None)
        watch = current_watch()
        ranks = dist.get_process_group_ranks(topology.control_group)
        return cls(dist.get_rank(), ranks, None if watch is None else watch.lifeline)

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Decides about one batch in the block. Entered by every rank for the same batches."""
        with self._news:
            self._batch += 1
            self._is_deciding = True
            self._heard = {key: each for key, each in self._heard.items() if each.batch >= self._batch}
        try:
            yield
        finally:
            with self._news:
                self._is_deciding = False
                is_asked = any(each.batch == self._batch and each.records for each in self._heard.values())
                has_passed = is_asked and self._recorded != self._batch
            if has_passed:
                self._tell(records=False)

    def agree_to_record(self, changed: Collection[str]) -> None:
        """Returns when every rank is about to record the batch. Called where this rank is.

        Args:
            changed: Names of what is not what it was when the graphs were recorded.

        Raises:
            TraceError: Another rank has a graph.
        """
        if self._lifeline is None or not self._is_deciding or self._recorded == self._batch:
            return
        self._recorded = self._batch
        self._tell(records=True)
        with self._news:
            self._news.wait_for(lambda: all(self._answer(rank) is not None for rank in self._others))
            passed = sorted(rank for rank in self._others if self._answer(rank) is False)
        if passed:
            because = f", since {', '.join(changed)} changed" if changed else ""
            raise TraceError(
                "The ranks of the pipeline disagree on whether to retrace the step.",
                observed=f"rank {self._rank} would retrace it{because}; rank {', '.join(map(str, passed))} has a matching "
                "trace",
                expected="the same values on every rank when the model is called",
                todo="Look for state that your code sets on one rank only: after the model's call in code that an exception "
                "cuts short, in a hook under `if trainer.is_global_zero`, or from unseeded random numbers.",
            )

    def note(self, graph: UsedGraph | None) -> None:
        """Notes the graph that the batch, or one of its calls, runs with; None where it skips the model."""
        self._graphs.append(graph)

    def graphs(self) -> int:
        """Returns a digest of the graphs noted since the last call, and of the numbers that they had as inputs."""
        used = [None if graph is None else (graph.number, graph.input_numbers()) for graph in self._graphs]
        self._graphs.clear()
        return zlib.crc32(repr(used).encode())

    def _answer(self, rank: int) -> bool | None:
        """Returns True if another rank records the batch; None until it has said so."""
        decision = self._heard.get((rank, self._batch))
        return None if decision is None else decision.records

    def _hear(self, decision: Decision) -> None:
        """Called in the lifeline's thread."""
        if decision.rank not in self._others:
            return
        with self._news:
            self._heard[decision.rank, decision.batch] = decision
            self._news.notify_all()
            is_over = decision.batch < self._batch or (decision.batch == self._batch and not self._is_deciding)
            has_passed = decision.records and is_over and self._recorded != decision.batch
        if has_passed:
            self._tell(records=False, batch=decision.batch)

    def _tell(self, *, records: bool, batch: int | None = None) -> None:
        assert self._lifeline is not None
        self._lifeline.tell(Decision(self._rank, self._batch if batch is None else batch, records))
