"""An action, and the table that says which rank does which in what order.

Written as torch writes them (``torch.distributed.pipelining.schedules``): ``3F1`` is the forward of stage 3 for microbatch 1; a
table is a CSV file with a line for each rank. Sends and receives are no actions here: they follow from the others, and are
passed over where a table is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path

from lightning_fxpipe.errors import ScheduleError

_FORM = re.compile(r"(\d+)([FBIW])(\d+)")
# What torch writes besides: two actions at once, and what follows from the others.
_TOGETHER = re.compile(r"\((.*)\)OVERLAP_F_B")
_FOLLOWS = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d*")


class Kind(Enum):
    """Kinds of actions."""

    FORWARD = "F"
    BACKWARD = "B"  # the gradients of inputs and weights at once
    INPUT_BACKWARD = "I"
    WEIGHT_BACKWARD = "W"


FORWARD, BACKWARD, INPUT_BACKWARD, WEIGHT_BACKWARD = Kind


@dataclass(frozen=True, slots=True)
class Action:
    """One stage's work for one microbatch."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that is written so.

        Raises:
            ScheduleError: None is.
        """
        match = _FORM.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(
                "The schedule table contains an invalid action.",
                observed=repr(text),
                expected="a stage, one of F, B, I and W, and a microbatch, such as 3F1",
                todo="Use torch's format: one line per rank, with actions separated by commas.",
            )
        return cls(int(match[1]), Kind(match[2]), int(match[3]))


@dataclass(frozen=True)
class ActionTable:
    """Which rank does which actions, in this order.

    Attributes:
        ranks: The actions of each rank.

    Raises:
        ScheduleError: A stage is on two ranks, or one of its microbatches has not one forward and one backward action (or one
            for the inputs and one for the weights after it). Whether the ranks wait for each other for ever, the
            simulator finds out.
    """

    ranks: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        _check(self)

    @classmethod
    def of(cls, ranks: Iterable[Iterable[Action]]) -> ActionTable:
        """The table of these actions."""
        return cls(tuple(map(tuple, ranks)))

    @classmethod
    def from_csv(cls, text: str) -> ActionTable:
        """The table in a CSV text, as torch writes it; empty cells mean nothing, as there each rank does what it can."""
        lines = [line for line in text.splitlines() if line.strip()]
        return cls.of([action for cell in line.split(",") for action in _actions_in(cell)] for line in lines)

    @classmethod
    def load(cls, path: str | Path) -> ActionTable:
        """Reads a CSV file.

        Raises:
            ScheduleError: The file cannot be read, or is no table.
        """
        try:
            return cls.from_csv(Path(path).read_text(encoding="utf-8-sig"))
        except (OSError, ValueError) as error:
            raise ScheduleError(
                "Cannot read the schedule table.",
                where=str(path),
                observed=str(error),
                expected="a CSV file with one line per rank",
                todo="Pass the path of a table, such as the output of ActionTable.to_csv() or a dump of one of torch's "
                "schedules.",
            ) from error
        except ScheduleError as error:
            raise ScheduleError(
                error.what, where=str(path), observed=error.observed, expected=error.expected, todo=error.todo
            ) from None

    def to_csv(self) -> str:
        """The table as CSV, a line for each rank."""
        return "".join(",".join(map(str, actions)) + "\n" for actions in self.ranks)

    def __iter__(self) -> Iterator[Action]:
        return (action for actions in self.ranks for action in actions)

    @cached_property
    def rank_of_stage(self) -> tuple[int, ...]:
        """The rank of each stage."""
        found = {action.stage: rank for rank, actions in enumerate(self.ranks) for action in actions}
        return tuple(found[stage] for stage in range(len(found)))

    @cached_property
    def actions(self) -> frozenset[Action]:
        """All actions."""
        return frozenset(self)

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return len(self.ranks)

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.rank_of_stage)

    @cached_property
    def num_microbatches(self) -> int:
        """How many microbatches there are."""
        return 1 + max(action.microbatch for action in self)

    @cached_property
    def is_split(self) -> bool:
        """True if weights get their gradients in actions of their own."""
        return any(action.kind is WEIGHT_BACKWARD for action in self)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank has."""
        return tuple(stage for stage, owner in enumerate(self.rank_of_stage) if owner == rank)


def _actions_in(cell: str) -> Iterator[Action]:
    """The actions in a cell of a CSV file, one after the other."""
    cell = cell.strip()
    together = _TOGETHER.fullmatch(cell)
    for part in together[1].split(";") if together else [cell]:
        if part and _FOLLOWS.fullmatch(part) is None:
            yield Action.parse(part)


def _check(table: ActionTable) -> None:
    owners: dict[int, set[int]] = {}
    position: dict[Action, int] = {}
    for rank, actions in enumerate(table.ranks):
        for index, action in enumerate(actions):
            owners.setdefault(action.stage, set()).add(rank)
            if action in position:
                raise _wrong(f"{action} occurs twice", "each action once")
            position[action] = index
    if not position:
        raise _wrong("no action", "at least one")
    if sorted(owners) != [*range(len(owners))]:
        raise _wrong(f"stages {sorted(owners)}", "consecutive stages from 0, each with actions")
    shared = [stage for stage, ranks in owners.items() if len(ranks) > 1]
    if shared:
        raise _wrong(f"stage {shared[0]} on lines {[rank + 1 for rank in sorted(owners[shared[0]])]}", "each stage on one line")
    for stage in owners:
        for microbatch in range(table.num_microbatches):
            _check_microbatch(position, stage, microbatch)


def _check_microbatch(position: dict[Action, int], stage: int, microbatch: int) -> None:
    forward, whole, inputs, weights = (position.get(Action(stage, kind, microbatch)) for kind in Kind)
    is_whole = whole is not None and inputs is None and weights is None
    is_split = whole is None and inputs is not None and weights is not None
    if forward is None or not (is_whole or is_split):
        names = [str(Action(stage, kind, microbatch)) for kind in Kind if Action(stage, kind, microbatch) in position]
        raise _wrong(
            f"{', '.join(names) or 'nothing'} for microbatch {microbatch} of stage {stage}", "either F and B, or F, I and W"
        )
    order = [place for place in (forward, whole, inputs, weights) if place is not None]
    if order != sorted(order):
        raise _wrong(
            f"microbatch {microbatch} of stage {stage} in another order", "forward (F) first and weight backward (W) last"
        )


def _wrong(observed: str, expected: str) -> ScheduleError:
    return ScheduleError(
        "The schedule table cannot be executed.",
        observed=observed,
        expected=expected,
        todo="Correct the table, or start from one that simulate(...) returns for a named schedule.",
    )


def deadlock_error(waits: Iterable[tuple[int, Action]]) -> ScheduleError:
    """Returns the error of a table whose ranks wait for each other for ever.

    Args:
        waits: The ranks that cannot continue, each with an action that it waits for or cannot begin.
    """
    return ScheduleError(
        "The schedule deadlocks: its ranks wait for each other.",
        observed=", ".join(f"line {rank + 1} for {action}" for rank, action in sorted(waits, key=lambda wait: wait[0])),
        expected="an order in which at least one rank can continue",
        todo="Move the awaited actions to earlier places in their lines.",
    )


def running_ranks(num_ranks: int, place_of_last_stage: int) -> tuple[int, ...]:
    """Returns the number that the rank at each place of a pipeline has in a running one, in which rank 0 holds the last stage.

    Args:
        num_ranks: Number of places; stage 0 is at the first.
        place_of_last_stage: The last place, or the first if the stages come back in a V.
    """
    numbers = range(num_ranks)
    return tuple(numbers if place_of_last_stage == 0 else reversed(numbers))


def is_table_file(path: str | Path) -> bool:
    """True if a path is that of a table (CSV), which may be missing, rather than the name of a schedule."""
    return Path(path).suffix.lower() == ".csv" or Path(path).is_file()
