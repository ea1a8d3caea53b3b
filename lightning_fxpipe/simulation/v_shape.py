"""Orders for two stages a rank that lie in a V, which keep half or a third of the activations of 1F1B.

Pipeline Parallelism with Controllable Memory (arXiv 2405.15362; the authors' is ``zbv_greedy.py`` of
github.com/sail-sg/zero-bubble-pipeline-parallelism). Rank r of P has stages r and 2 P - 1 - r, so that a microbatch goes down
the ranks, up, down again with its gradients and up again. Every rank repeats one pattern of six slots for each microbatch: two
forwards, two backwards of inputs, two of weights. How far apart the four of the pattern lie is what decides the memory; the
paper's section 3 counts it. An order is made in these steps (section 4):

1. Repeat the pattern for each microbatch, the gradients of weights in slots that are free.
2. Move what comes before and after the steady part to earlier slots, as long as the rank keeps no more than before.
3. Close the gaps; give the gradients of weights the free slots once more, now each stage's by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_fxpipe.simulation.actions import FORWARD, INPUT_BACKWARD, WEIGHT_BACKWARD, Action, ActionTable

# What goes down and up the ranks, in this order: forwards of the first and second stage, backwards of the second and the first.
# Then come gradients of weights: all of a rank, or those of the second and those of the first stage.
_NUM_PASSES = 4
_DOWN = (0, 2)
_BACKWARD = (2, 3)
_PERIOD = 6

# The slots of each pass on a rank, by microbatch; gradients of weights after them.
Slots = list[list[int]]


def v_half(num_ranks: int, num_microbatches: int) -> ActionTable:
    """Keeps the activations of at most P // 2 + 1 microbatches."""
    gap = 3 if num_ranks % 2 == 0 else 0

    def pattern(rank: int) -> list[int]:
        return [
            2 * rank,
            3 * num_ranks - rank - 2,
            3 * num_ranks + gap + 2 * rank - 1,
            6 * num_ranks + gap - rank - 2,
        ]

    return _table(pattern, num_ranks, num_microbatches)


def v_min(num_ranks: int, num_microbatches: int) -> ActionTable:
    """Keeps the activations of at most (P + 4) // 3 microbatches."""
    gap = 2 if num_ranks % 3 == 0 else 0

    def pattern(rank: int) -> list[int]:
        return [rank, 2 * num_ranks - rank - 1, 2 * num_ranks + gap + rank, 4 * num_ranks + gap - rank - 1]

    return _table(pattern, num_ranks, num_microbatches)


def _table(pattern: Callable[[int], list[int]], num_ranks: int, num_microbatches: int) -> ActionTable:
    ranks = [
        [[first + _PERIOD * index for index in range(num_microbatches)] for first in pattern(rank)] for rank in range(num_ranks)
    ]
    ranks = _squeezed(_moved([_with_weights(slots) for slots in ranks]))
    ranks = _moved_at_the_end([slots[:_NUM_PASSES] for slots in ranks])
    ranks = _squeezed([_with_weights(slots) for slots in ranks])
    return _as_table([_with_weights(slots[:_NUM_PASSES], by_stage=True) for slots in ranks])


def _as_table(ranks: Sequence[Slots]) -> ActionTable:
    return ActionTable.of(_actions(rank, slots, len(ranks)) for rank, slots in enumerate(ranks))


def _actions(rank: int, slots: Slots, num_ranks: int) -> list[Action]:
    first, second = rank, 2 * num_ranks - 1 - rank
    passes = (
        *((first, FORWARD), (second, FORWARD), (second, INPUT_BACKWARD), (first, INPUT_BACKWARD)),
        *((second, WEIGHT_BACKWARD), (first, WEIGHT_BACKWARD)),
    )
    timed = [
        (slot, Action(stage, kind, index))
        for (stage, kind), of_pass in zip(passes, slots, strict=True)
        for index, slot in enumerate(of_pass)
    ]
    return [action for _, action in sorted(timed, key=lambda pair: pair[0])]


def _with_weights(slots: Slots, *, by_stage: bool = False) -> Slots:
    """With the gradients of weights in the first free slots after what they belong to."""
    taken = {slot: number for number, of_pass in enumerate(slots) for slot in of_pass}
    waiting, found = [0, 0], [list[int](), list[int]()]
    end = max(taken)
    slot = 0
    while slot <= end or any(waiting):
        number = taken.get(slot)
        if number in _BACKWARD:
            waiting[number - 2 if by_stage else 0] += 1
        elif number is None and any(waiting):
            stage = 0 if waiting[0] else 1
            waiting[stage] -= 1
            found[stage].append(slot)
        slot += 1
    return [*slots, *(found if by_stage else found[:1])]


def _most_kept(slots: Slots) -> int:
    """The most forwards at a time whose gradients of weights are not made; without such, they are made in free slots."""
    changes = {slot: (1, 1, 0, 0, -1)[number] for number, of_pass in enumerate(slots) for slot in of_pass}
    backwards = {slot for number in _BACKWARD for slot in slots[number]}
    kept = most = waiting = 0
    for slot in range(max(changes) + 1):
        if slot in changes:
            kept += changes[slot]
            waiting += slot in backwards
        elif len(slots) == _NUM_PASSES and waiting:
            kept, waiting = kept - 1, waiting - 1
        most = max(most, kept)
    return most


def _earliest(ranks: Sequence[Slots], rank: int, number: int, index: int) -> int:
    """The first slot that an entry may have by what it needs."""
    slots = ranks[rank]
    needed = [-1]
    if number < _NUM_PASSES:
        beside = rank - 1 if number in _DOWN else rank + 1
        if 0 <= beside < len(ranks):
            needed.append(ranks[beside][number][index])
        if number:
            needed.append(slots[number - 1][index])
    else:
        needed.append(sorted(slots[2] + slots[3])[index])
    if index:
        needed.append(slots[number][index - 1])
    return max(needed) + 1


def _in_order(ranks: Sequence[Slots]) -> list[tuple[int, int, int, int]]:
    """All entries by their slots: slot, rank, number of the pass, microbatch."""
    return sorted(
        (slot, rank, number, index)
        for rank, slots in enumerate(ranks)
        for number, of_pass in enumerate(slots)
        for index, slot in enumerate(of_pass)
    )


def _moved(ranks: list[Slots]) -> list[Slots]:
    """Moves the actions before and after the steady part to earlier slots, gradients of weights included."""
    return _moved_outside_of_steady_part(ranks, at_the_start=True)


def _moved_at_the_end(ranks: list[Slots]) -> list[Slots]:
    """Moves the actions after the steady part to earlier slots; gradients of weights come later."""
    return _moved_outside_of_steady_part(ranks, at_the_start=False)


def _moved_outside_of_steady_part(ranks: list[Slots], *, at_the_start: bool) -> list[Slots]:
    ranks = [[list(of_pass) for of_pass in slots] for slots in ranks]
    limit = max(map(_most_kept, ranks))
    occupied: list[set[int]] = [set() for _ in ranks]
    is_steady, is_after = False, False
    last = len(ranks[0][0]) - 1
    for slot, rank, number, index in _in_order(ranks):
        if not is_after and not is_steady and rank == 0 and number == _NUM_PASSES - 1:
            is_steady = True  # the first microbatch is through
        if is_steady and not is_after:
            is_after = number == 0 and index == last
        elif is_after or at_the_start:
            _move(ranks, rank, number, index, occupied[rank], limit)
            occupied[rank].add(ranks[rank][number][index])
            continue
        occupied[rank].add(slot)
    return ranks


def _move(ranks: Sequence[Slots], rank: int, number: int, index: int, occupied: set[int], limit: int) -> None:
    """Gives an entry the first free slot in which the rank keeps no more than the limit."""
    of_pass = ranks[rank][number]
    before = of_pass[index]
    for slot in range(_earliest(ranks, rank, number, index), before):
        if slot not in occupied:
            of_pass[index] = slot
            if _most_kept(ranks[rank]) <= limit:
                return
    of_pass[index] = before


def _squeezed(ranks: Sequence[Slots]) -> list[Slots]:
    """Without gaps: each entry follows what it needs, and the one before it on its rank."""
    found: list[Slots] = [[[0] * len(of_pass) for of_pass in slots] for slots in ranks]
    free = [0] * len(ranks)
    for _, rank, number, index in _in_order(ranks):
        earliest = _earliest(found, rank, number, index) if number < _NUM_PASSES else 0
        found[rank][number][index] = max(free[rank], earliest)
        free[rank] = found[rank][number][index] + 1
    return found
