"""How stages will run, as far as it decides what each may hold: the schedule, the microbatches, and what the devices are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

from lightning_fxpipe.errors import PartitionError, ScheduleError
from lightning_fxpipe.simulation.actions import BACKWARD, FORWARD, WEIGHT_BACKWARD, ActionTable
from lightning_fxpipe.simulation.by_name import SimulatedSchedule, is_v_shaped, table_of
from lightning_fxpipe.simulation.costs import StageCosts

_T = TypeVar("_T")
_EQUAL = StageCosts(forward_seconds=1.0, input_backward_seconds=1.0, weight_backward_seconds=1.0)
_GIB = 2**30
# What the optimizer keeps for each byte of a parameter that trains: two moments of Adam.
ADAM_BYTES_PER_BYTE = 2.0


@dataclass(frozen=True, kw_only=True)
class Load:
    """How the stages of a plan will run.

    Attributes:
        schedule: Order of forward and backward passes, by its name or as a table.
        num_ranks: Devices.
        stages_per_rank: Stages on each.
        num_microbatches: Microbatches of a batch.
        scale: How much larger a microbatch is than the one that is recorded.
        memory_bytes: What each device has for its stages, by global rank; empty if unknown.
        speeds: How fast each device is, in proportion to the others, by global rank; empty where all are equal.
        optimizer_bytes_per_byte: What the optimizer keeps on a device for each byte of its stages' parameters that train.
    """

    schedule: SimulatedSchedule | ActionTable
    num_ranks: int
    stages_per_rank: int = 1
    num_microbatches: int = 1
    scale: float = 1.0
    memory_bytes: tuple[int, ...] = ()
    speeds: tuple[float, ...] = ()
    optimizer_bytes_per_byte: float = ADAM_BYTES_PER_BYTE

    def check(self) -> None:
        """Raises :class:`PartitionError` where more or fewer devices are described than there are."""
        for name, described in (("device_speeds", self.speeds), ("device_memory_gib", self.memory_bytes)):
            if described and len(described) != self.num_ranks:
                raise PartitionError(
                    f"The number of entries in {name} differs from the number of devices.",
                    observed=f"{len(described)} entries for {self.num_ranks} devices",
                    expected="one number per device, by rank; rank 0 holds the last stage",
                    todo=f"Correct {name}, or omit it if all devices are equal.",
                )

    @property
    def words(self) -> str:
        """Name of the load in messages."""
        schedule = "a schedule table" if isinstance(self.schedule, ActionTable) else self.schedule
        return f"{schedule} with {self.num_microbatches} microbatches"

    @property
    def states_words(self) -> str:
        """Name of the optimizer's states in messages."""
        share = self.optimizer_bytes_per_byte / ADAM_BYTES_PER_BYTE
        return "Adam's states" if share == 1 else f"{share:.3g} of Adam's states"

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return self.num_ranks * self.stages_per_rank

    def rank_of(self, stage: int) -> int:
        """The pipeline rank that has a stage."""
        return min(stage, self.num_stages - 1 - stage) if self._is_v else stage % self.num_ranks

    def in_pipeline(self, by_rank: Sequence[_T]) -> Sequence[_T]:
        """By pipeline rank what is known by global rank: stages run against the ranks, unless they come back in a V."""
        return by_rank if self._is_v else by_rank[::-1]

    @property
    def _is_v(self) -> bool:
        if isinstance(self.schedule, ActionTable):
            return self.stages_per_rank == 2 and self.schedule.rank_of_stage[-1] == 0
        return is_v_shaped(self.schedule)

    @property
    def speed_shares(self) -> tuple[float, ...]:
        """For each stage the speed of its device, beside that of the fastest; empty where all are equal."""
        if len({*self.speeds}) < 2:
            return ()
        speeds = self.in_pipeline(self.speeds)
        return tuple(speeds[self.rank_of(stage)] / max(speeds) for stage in range(self.num_stages))

    def without_memory(self) -> Load:
        """Returns the load for devices of unknown memory."""
        return replace(self, memory_bytes=())

    @property
    def microbatches_kept(self) -> tuple[int, ...]:
        """Returns the largest number of microbatches whose activations each stage keeps at a time."""
        return _microbatches_kept(self.schedule, self.num_stages, self.stages_per_rank, self.num_microbatches)

    @property
    def memory_shares(self) -> tuple[float, ...]:
        """For each stage how much memory it has beside the one that has the most; empty where all have as much."""
        if len({*self.memory_bytes}) < 2:
            return ()
        memories = next(self.stage_memories())
        return tuple(memory / max(memories) for memory in memories)

    def stage_memories(self) -> Iterator[tuple[float, ...]]:
        """How the memory of each device may be shared out among its stages: bytes for each stage.

        With several stages on a device these are some ways of many: equally, or as many microbatches as each keeps.
        """
        memories = self.in_pipeline(self.memory_bytes)
        equally, by_kept = [1] * self.num_stages, self.microbatches_kept
        for parts in dict.fromkeys((tuple(equally), by_kept if self.stages_per_rank > 1 else tuple(equally))):
            of_rank = Counter[int]()
            for stage, part in enumerate(parts):
                of_rank[self.rank_of(stage)] += part
            yield tuple(memories[rank := self.rank_of(stage)] * part / of_rank[rank] for stage, part in enumerate(parts))


def memory_of_each(gib: float | Sequence[float], num_ranks: int) -> tuple[int, ...]:
    """Bytes of each device's memory, from one number for all or one for each; empty for none."""
    each = [gib] * num_ranks if isinstance(gib, (int, float)) else gib
    return tuple(int(one * _GIB) for one in each)


@lru_cache(maxsize=64)
def _microbatches_kept(
    schedule: SimulatedSchedule | ActionTable, num_stages: int, stages_per_rank: int, num_microbatches: int
) -> tuple[int, ...]:
    try:
        table = schedule
        if not isinstance(table, ActionTable):
            table = table_of(table, [_EQUAL] * num_stages, num_microbatches, stages_per_rank)
    except ScheduleError:  # then all go forward before the first one goes back
        return (num_microbatches,) * num_stages
    now, most = [0] * num_stages, [0] * num_stages
    change = {FORWARD: 1, BACKWARD: -1, WEIGHT_BACKWARD: -1}
    for action in (action for actions in table.ranks for action in actions):
        now[action.stage] += change.get(action.kind, 0)
        most[action.stage] = max(most[action.stage], now[action.stage])
    return tuple(most)
