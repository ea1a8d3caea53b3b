"""Runs a table of actions without computing anything: when each begins and ends, what is idle, what decides, what is kept.

A rank does its actions in the table's order, each as soon as the one before is over and what it needs has arrived. That is how
the executor runs a table (``schedules.executor``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from lightning_fxpipe.errors import ScheduleError
from lightning_fxpipe.simulation.actions import (
    BACKWARD,
    FORWARD,
    INPUT_BACKWARD,
    WEIGHT_BACKWARD,
    Action,
    ActionTable,
    deadlock_error,
)
from lightning_fxpipe.simulation.costs import Link, Overhead, StageCosts

_NO_OVERHEAD = Overhead()
_NO_LINK = Link()


@dataclass(frozen=True, slots=True)
class Event:
    """An action, and its time.

    Attributes:
        action: The action.
        rank: Where it runs.
        start_seconds, end_seconds: From when to when, since the step began.
        decided_by: The action that ended last of those that this one had to wait for; None for nothing.
    """

    action: Action
    rank: int
    start_seconds: float
    end_seconds: float
    decided_by: Action | None


@dataclass(frozen=True)
class Simulation:
    """Time and memory of a table of actions.

    Attributes:
        table: The table.
        costs: Of its stages.
        overhead: What is not computed, and takes time.
        ranks: The events of each rank, in their order.
    """

    table: ActionTable
    costs: tuple[StageCosts, ...]
    overhead: Overhead
    ranks: tuple[tuple[Event, ...], ...]

    @property
    def pipeline_seconds(self) -> float:
        """From the first action to the end of the last."""
        return max(events[-1].end_seconds for events in self.ranks)

    @property
    def seconds(self) -> float:
        """Seconds of a whole step."""
        return self.pipeline_seconds + self.overhead.step_seconds

    def seconds_of_replicas(self, num_replicas: int, link: Link, *, shares_out: bool = False) -> float:
        """Returns the seconds of a whole step of several such pipelines, in which each rank averages its gradients with those
        of the others as soon as its own stages are done.

        Args:
            num_replicas: Pipelines.
            link: What it takes to send something to a rank with the same stages.
            shares_out: Whether each steps its share of the parameters, and then gives them to the others: once more half of
                what the gradients travel.
        """
        spans = self.average_spans(num_replicas, link, shares_out=shares_out)
        return max(end for _, _, end in spans) + self.overhead.step_seconds

    def average_spans(
        self, num_replicas: int, link: Link, *, shares_out: bool = False
    ) -> tuple[tuple[float, float, float], ...]:
        """For each rank when its own stages are done, when it has the average of the gradients, and when what others step is
        there. Arguments as :meth:`seconds_of_replicas`.
        """
        found = []
        for events, num_bytes in zip(self.ranks, self.gradient_bytes, strict=True):
            seconds = link.reduce_seconds(num_bytes, num_replicas)
            averaged = events[-1].end_seconds + seconds
            found.append((events[-1].end_seconds, averaged, averaged + shares_out * 0.5 * seconds))
        return tuple(found)

    @property
    def gradient_bytes(self) -> tuple[float, ...]:
        """Bytes of the gradients of each rank's stages."""
        ranks = range(self.table.num_ranks)
        return tuple(sum(self.costs[stage].gradient_bytes for stage in self.table.stages_of(rank)) for rank in ranks)

    @property
    def busy_seconds(self) -> tuple[float, ...]:
        """How long each rank does something."""
        return tuple(sum(event.end_seconds - event.start_seconds for event in events) for events in self.ranks)

    @property
    def longest_rank_seconds(self) -> float:
        """From the first action of a rank to the end of its last, of the rank where that is longest."""
        return max(events[-1].end_seconds - events[0].start_seconds for events in self.ranks)

    @property
    def bubble_fraction(self) -> float:
        """Share of the pipeline's time that ranks are idle."""
        return 1 - sum(self.busy_seconds) / (self.table.num_ranks * self.pipeline_seconds)

    @cached_property
    def critical_path(self) -> tuple[Event, ...]:
        """The events that decide how long it takes, each of which waited for the one before."""
        by_action = {event.action: event for events in self.ranks for event in events}
        path = [max((events[-1] for events in self.ranks), key=lambda event: event.end_seconds)]
        while path[-1].decided_by is not None:
            path.append(by_action[path[-1].decided_by])
        return tuple(reversed(path))

    @cached_property
    def peak_activation_bytes(self) -> tuple[float, ...]:
        """The most that each rank keeps for its backward actions at a time."""
        return tuple(max(self._kept(events)) for events in self.ranks)

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """The most that each rank has in memory at a time: the states of its stages, and what it keeps for backward actions."""
        states = [sum(self.costs[stage].state_bytes for stage in self.table.stages_of(rank)) for rank in range(len(self.ranks))]
        return tuple(state + peak for state, peak in zip(states, self.peak_activation_bytes, strict=True))

    @cached_property
    def kept_bytes(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """For each rank what it has in memory from when on: pairs of seconds and bytes, one for the beginning and for the end
        of each action.
        """
        found = []
        for rank, events in enumerate(self.ranks):
            states = sum(self.costs[stage].state_bytes for stage in self.table.stages_of(rank))
            ends = zip(events, self._kept(events)[1:], strict=True)
            found.append(((0.0, states), *((event.end_seconds, states + kept) for event, kept in ends)))
        return tuple(found)

    @cached_property
    def peak_microbatches(self) -> tuple[int, ...]:
        """The most forwards of each rank that wait for their (whole) backward at a time."""
        return tuple(_most_open(events) for events in self.ranks)

    def _kept(self, events: Sequence[Event]) -> list[float]:
        kept, found = 0.0, [0.0]
        for event in events:
            kept += self.costs[event.action.stage].kept_bytes(event.action.kind)
            found.append(kept)
        return found


def run_table(
    table: ActionTable, costs: Sequence[StageCosts], *, link: Link = _NO_LINK, overhead: Overhead = _NO_OVERHEAD
) -> Simulation:
    """Simulates a table.

    Args:
        table: The actions of each rank.
        costs: Of each stage, for one microbatch.
        link: What it takes to send something to another rank.
        overhead: What is not computed, and takes time.

    Raises:
        ScheduleError: There are costs for more or fewer stages, or all ranks wait for each other.
    """
    if len(costs) != table.num_stages:
        raise ScheduleError(
            "The number of costs differs from the number of stages.",
            observed=str(len(costs)),
            expected=str(table.num_stages),
            todo="Pass the costs of each stage of the table.",
        )
    run = _Run(table, tuple(costs), link, overhead)
    run.go()
    return Simulation(table, run.costs, overhead, tuple(map(tuple, run.events)))


@dataclass
class _Run:
    table: ActionTable
    costs: tuple[StageCosts, ...]
    link: Link
    overhead: Overhead
    events: list[list[Event]] = field(default_factory=list)
    ready: dict[Action, float] = field(default_factory=dict)  # when what an action has made can be used on its rank
    arrivals: dict[tuple[Action, int], float] = field(default_factory=dict)  # when it can be used by a stage of another rank
    link_free: dict[tuple[int, int], float] = field(default_factory=dict)
    waiting: dict[Action, list[int]] = field(default_factory=dict)  # ranks, by what they wait for

    def __post_init__(self) -> None:
        # By stage, where what crosses its boundaries goes to and comes from, with its bytes.
        self.after: list[list[tuple[int, float]]] = [[] for _ in self.costs]
        self.before: list[list[tuple[int, float]]] = [[] for _ in self.costs]
        for stage, cost in enumerate(self.costs):
            following = [(stage + 1, cost.output_bytes)] if stage + 1 < len(self.costs) else []
            for to, num_bytes in (*following, *cost.skips):
                self.after[stage].append((to, num_bytes))
                self.before[to].append((stage, num_bytes))

    def go(self) -> None:
        """Runs all actions."""
        self.events = [[] for _ in self.table.ranks]
        runnable = deque(range(self.table.num_ranks))
        while runnable:
            rank = runnable.popleft()
            for action in self.table.ranks[rank][len(self.events[rank]) :]:
                needed = self._needed_by(action)
                missing = next((each for each, _ in needed if each not in self.ready), None)
                if missing is not None:
                    self.waiting.setdefault(missing, []).append(rank)
                    break
                self._do(action, rank, needed)
                runnable.extend(self.waiting.pop(action, ()))
        if self.waiting:
            raise deadlock_error((rank, action) for action, ranks in self.waiting.items() for rank in ranks)

    def _needed_by(self, action: Action) -> list[tuple[Action, float]]:
        """Lists the actions that an action waits for, besides the one before it on its rank, and the bytes that it gets from
        each.
        """
        if action.kind is WEIGHT_BACKWARD:
            return []  # its rank has done the other part before, see ActionTable
        if action.kind is FORWARD:
            return [(Action(stage, FORWARD, action.microbatch), num_bytes) for stage, num_bytes in self.before[action.stage]]
        return [(self._backward(stage, action.microbatch), num_bytes) for stage, num_bytes in self.after[action.stage]]

    def _backward(self, stage: int, microbatch: int) -> Action:
        whole = Action(stage, BACKWARD, microbatch)
        return whole if whole in self.table.actions else Action(stage, INPUT_BACKWARD, microbatch)

    def _do(self, action: Action, rank: int, needed: Sequence[tuple[Action, float]]) -> None:
        before = self.events[rank][-1] if self.events[rank] else None
        free = 0.0 if before is None else before.end_seconds
        start, decided_by = free, None if before is None else before.action
        for each, num_bytes in needed:
            arrival = self._arrival(each, action.stage, num_bytes, start)
            if before is None and decided_by is None or arrival > start:
                start, decided_by = max(start, arrival), each
        end = start + self.costs[action.stage].seconds(action.kind) + self.overhead.action_seconds
        self.events[rank].append(Event(action, rank, start, end, decided_by))
        self.ready[action] = end
        if action.kind is not WEIGHT_BACKWARD and self.link.overlaps:
            for to, num_bytes in self.after[action.stage] if action.kind is FORWARD else self.before[action.stage]:
                self._send(action, rank, to, num_bytes)

    def _send(self, action: Action, rank: int, to: int, num_bytes: float) -> None:
        receiver = self.table.rank_of_stage[to]
        if receiver == rank:
            return
        begin = max(self.ready[action], self.link_free.get((rank, receiver), 0.0))
        self.link_free[rank, receiver] = begin + num_bytes / self.link.bytes_per_second
        self.arrivals[action, to] = self.link_free[rank, receiver] + self.link.latency_seconds

    def _arrival(self, needed: Action, stage: int, num_bytes: float, free: float) -> float:
        """When a stage, whose rank can receive from ``free`` on, has what an action has made for it."""
        if self.table.rank_of_stage[needed.stage] == self.table.rank_of_stage[stage]:
            return self.ready[needed]
        if self.link.overlaps:
            return self.arrivals[needed, stage]
        return max(self.ready[needed], free) + num_bytes / self.link.bytes_per_second + self.link.latency_seconds


def _most_open(events: Sequence[Event]) -> int:
    num_open, most = 0, 0
    for event in events:
        num_open += {FORWARD: 1, BACKWARD: -1, WEIGHT_BACKWARD: -1}.get(event.action.kind, 0)
        most = max(most, num_open)
    return most
