"""The program of one rank: its actions of a table, with the messages that the table implies.

A table says which rank does what, and nothing about messages. They follow from the *edges*: an edge is a tensor that one stage
computes and a later stage uses, the next one or one past others (``planner.skips``). The forward of the source sends it to the
forward of the target; the backward of the target sends its gradient to the backward of the source. Between two stages of one
rank nothing is sent. Every rank derives the same messages from the same table and edges.

The rules of the messages, for one ordered pair of ranks:

- They are received in the order in which they are sent. NCCL needs this, and it needs a communicator for each direction; then
  messages cannot wait for each other in a circle, so that ranks that can all go on by the table do go on.
- A receive starts a few actions before its tensors are used, so that they arrive during a computation.
- A sent tensor is kept until the receiver is known to have it, because something has come back that it has computed from it.
  Only then is the send waited for, which takes no time. A wait that takes time could stop two ranks for ever.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from lightning_fxpipe.simulation.actions import BACKWARD, FORWARD, INPUT_BACKWARD, Action, ActionTable, Kind, deadlock_error
from lightning_fxpipe.stages.build import TensorSpec

BOTH_WAYS = frozenset(Kind)
# What may be on the way to a rank before its turn, besides what it needs next. A sender holds a message back until told that
# another rank waits for it, which takes longer than a small microbatch on busy cores. More than that would only be memory.
AHEAD_BYTES = 1024 * 1024

_Place = tuple[int, int]  # a rank, and the position of one of its actions


class Value(NamedTuple):
    """The tensor of an edge for one microbatch, or its gradient.

    Attributes:
        edge: Index of the edge.
        microbatch: The microbatch.
        is_gradient: Whether it is the gradient.
    """

    edge: int
    microbatch: int
    is_gradient: bool


@dataclass(frozen=True, kw_only=True)
class Edge:
    """A tensor that one stage computes and a later stage uses.

    Attributes:
        source: The stage that computes it.
        target: The stage that uses it.
        spec: Of the tensor, for one microbatch; a gradient comes back where it says so.
    """

    source: int
    target: int
    spec: TensorSpec


@dataclass(frozen=True, eq=False)
class Message:
    """All that one action gives to one action of another rank.

    Attributes:
        values: What it carries.
        source: The rank that sends it.
        target: The rank that receives it.
        used_at: Position of the action that uses it, among those of the receiver.
    """

    values: tuple[Value, ...]
    source: int
    target: int
    used_at: int


@dataclass(frozen=True, kw_only=True)
class Step:
    """One action of a rank.

    Attributes:
        action: The action.
        starts: Messages whose receive starts before the action.
        receives: Messages that the action waits for.
        inputs: What it takes, those of its own rank included, in the order of the edges.
        outputs: What it gives, likewise.
        sends: Messages that are sent after it.
        completes: Messages sent before that the receiver has by now.
    """

    action: Action
    starts: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()
    inputs: tuple[Value, ...] = ()
    outputs: tuple[Value, ...] = ()
    sends: tuple[Message, ...] = ()
    completes: tuple[Message, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Program:
    """All that one rank does in a pass.

    Attributes:
        rank: The rank.
        edges: Those of all stages.
        steps: Its actions.
        leftover: Messages that are waited for when all actions are done, since nothing says before that they have arrived.
    """

    rank: int
    edges: tuple[Edge, ...]
    steps: tuple[Step, ...]
    leftover: tuple[Message, ...]

    @cached_property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Lists for each neighbour of this rank the sending and the receiving rank, in the order of these."""
        messages = (message for step in self.steps for message in (*step.sends, *step.receives))
        return tuple(sorted({(message.source, message.target) for message in messages}))


def program_of(
    table: ActionTable, edges: Sequence[Edge], rank: int, *, kinds: Collection[Kind] = BOTH_WAYS, ahead_bytes: int = AHEAD_BYTES
) -> Program:
    """Derives what a rank does.

    Args:
        table: The actions of all ranks.
        edges: The tensors that stages give each other, in the order in which a stage takes and gives them.
        rank: The rank.
        kinds: The kinds of actions that run; the others are left out, as backward actions in an evaluation.
        ahead_bytes: What may be received before its turn, besides what comes next.

    Raises:
        ScheduleError: The ranks would wait for each other for ever.
    """
    rows = [[action for action in actions if action.kind in kinds] for actions in table.ranks]
    links = _Links(rows, edges)
    steps = [
        Step(
            action=action,
            inputs=links.taken[action],
            outputs=links.given[action],
            receives=tuple(links.received[rank, at]),
            sends=tuple(links.sent[rank, at]),
        )
        for at, action in enumerate(rows[rank])
    ]
    starts = _starts(links, rank, len(steps), _num_ahead(steps, edges, ahead_bytes))
    completes, leftover = _completes(links, rank, len(steps))
    return Program(
        rank=rank,
        edges=tuple(edges),
        steps=tuple(replace(step, starts=tuple(starts[at]), completes=tuple(completes[at])) for at, step in enumerate(steps)),
        leftover=tuple(leftover),
    )


class _Links:
    """Values that the actions of all ranks pass to each other.

    Attributes:
        rows: The actions of each rank.
        taken, given: Of each action the values that it takes and gives.
        sent, received: The messages of each action, by rank and position.
        causes: Of each place the places that it waits for, besides the one before it.
    """

    def __init__(self, rows: Sequence[Sequence[Action]], edges: Sequence[Edge]) -> None:
        self.rows = rows
        self.taken: dict[Action, tuple[Value, ...]] = {}
        self.given: dict[Action, tuple[Value, ...]] = {}
        self.sent: dict[_Place, list[Message]] = defaultdict(list)
        self.received: dict[_Place, list[Message]] = defaultdict(list)
        self.causes: dict[_Place, list[_Place]] = defaultdict(list)
        self._places = {action: (rank, at) for rank, row in enumerate(rows) for at, action in enumerate(row)}
        into, out_of = _by_stage(edges, lambda edge: edge.target), _by_stage(edges, lambda edge: edge.source)
        trains = [edge.spec.requires_grad for edge in edges]
        for action in self._places:
            before, after = into[action.stage], out_of[action.stage]
            if action.kind is FORWARD:
                self._add(action, before, after, is_gradient=False)
                self._link(action, [(number, edges[number].target) for number in after], is_gradient=False)
            elif action.kind in (BACKWARD, INPUT_BACKWARD):
                before, after = ([number for number in numbers if trains[number]] for numbers in (before, after))
                self._add(action, after, before, is_gradient=True)
                self._link(action, [(number, edges[number].source) for number in before], is_gradient=True)
            else:
                self._add(action, (), (), is_gradient=False)

    def _add(self, action: Action, taken: Iterable[int], given: Iterable[int], *, is_gradient: bool) -> None:
        self.taken[action] = tuple(Value(number, action.microbatch, is_gradient) for number in taken)
        self.given[action] = tuple(Value(number, action.microbatch, is_gradient) for number in given)

    def _link(self, action: Action, ends: Iterable[tuple[int, int]], *, is_gradient: bool) -> None:
        """Links an action to those that take what it gives.

        Args:
            action: The action.
            ends: Of each tensor that it gives the edge, and the stage that takes it.
            is_gradient: Whether these are gradients.
        """
        place = self._places[action]
        by_stage: dict[int, list[int]] = defaultdict(list)
        for number, stage in ends:
            by_stage[stage].append(number)
        for stage, numbers in by_stage.items():
            kinds = (BACKWARD, INPUT_BACKWARD) if is_gradient else (FORWARD,)
            user = next(p for kind in kinds if (p := self._places.get(Action(stage, kind, action.microbatch))) is not None)
            self.causes[user].append(place)
            if user[0] != place[0]:
                values = tuple(Value(number, action.microbatch, is_gradient) for number in numbers)
                message = Message(values, source=place[0], target=user[0], used_at=user[1])
                self.sent[place].append(message)
                self.received[user].append(message)


def _by_stage(edges: Sequence[Edge], stage_of: Callable[[Edge], int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for number, edge in enumerate(edges):
        found[stage_of(edge)].append(number)
    return found


def _num_ahead(steps: Sequence[Step], edges: Sequence[Edge], ahead_bytes: int) -> int:
    """How many actions before its tensors are used a receive starts: one, or as many as fit ``ahead_bytes``; no more than the
    rank has microbatches in flight.
    """
    sizes = (sum(edges[value.edge].spec.num_bytes for value in m.values) for step in steps for m in step.receives)
    largest = max(sizes, default=0)
    num_open = most_open = 0
    for step in steps:
        num_open += {FORWARD: 1, BACKWARD: -1, INPUT_BACKWARD: -1}.get(step.action.kind, 0)
        most_open = max(most_open, abs(num_open))
    return max(1, min(ahead_bytes // max(1, largest), most_open))


def _starts(links: _Links, rank: int, num_steps: int, num_ahead: int) -> list[list[Message]]:
    """For each action of a rank, the receives that start before it."""
    found: list[list[Message]] = [[] for _ in range(num_steps)]
    for source, row in enumerate(links.rows):
        coming = [message for at in range(len(row)) for message in links.sent[source, at] if message.target == rank]
        place = num_steps
        for message in reversed(coming):  # none starts after one that is sent later
            place = min(place, max(0, message.used_at - num_ahead))
            found[place].insert(0, message)
    return found


def _completes(links: _Links, rank: int, num_steps: int) -> tuple[list[list[Message]], list[Message]]:
    """For each action of a rank, the sends that the receiver is known to have when it has its inputs; and those of which this
    is not known in the pass.
    """
    found: list[list[Message]] = [[] for _ in range(num_steps)]
    leftover: list[Message] = []
    known = _known_done(links)
    for at in range(num_steps):
        for message in links.sent[rank, at]:
            # What is known grows with the position, so that the first place is found by bisection.
            place = bisect_right(range(num_steps), message.used_at, key=lambda here: known[rank, here][message.target])
            (found[place] if place < num_steps else leftover).append(message)
    return found, leftover


def _known_done(links: _Links) -> Mapping[_Place, list[int]]:
    """For each action, how many actions of each rank are done for certain when its inputs are there (a vector clock).

    Raises:
        ScheduleError: The ranks would wait for each other for ever.
    """
    rows, done = links.rows, [0] * len(links.rows)
    clocks: dict[_Place, list[int]] = {}
    has_moved = True
    while has_moved:
        has_moved = False
        for rank, row in enumerate(rows):
            clock = clocks.get((rank, done[rank] - 1), [0] * len(rows))
            while done[rank] < len(row) and all(done[other] > at for other, at in links.causes[rank, done[rank]]):
                clock = [*clock]
                for other, at in links.causes[rank, done[rank]]:
                    clock = [*map(max, clock, clocks[other, at])]
                    clock[other] = max(clock[other], at + 1)
                clock[rank] = done[rank]
                clocks[rank, done[rank]] = clock
                done[rank] += 1
                has_moved = True
    waiting = [(rank, done[rank]) for rank, row in enumerate(rows) if done[rank] < len(row)]
    if waiting:
        missing = (next(cause for cause in links.causes[place] if done[cause[0]] <= cause[1]) for place in waiting)
        raise deadlock_error((rank, rows[other][at]) for (rank, _), (other, at) in zip(waiting, missing, strict=True))
    return clocks
