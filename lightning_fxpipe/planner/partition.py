"""The solver: where to cut a chain so that the heaviest stage is as light as possible, then as few bytes as possible cross.

Pure numbers, so that it can be checked against brute force. Unlike the greedy or approximate balancers of other pipeline
packages (torchgpipe's ``blockpartition``, fairscale's ``auto_shard``) it is exact, and it returns exactly the number of
stages asked for.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import accumulate

from lightning_fxpipe.errors import PartitionError


def solve(weights: Sequence[int], cut_costs: Sequence[int | None], num_stages: int) -> tuple[int, ...]:
    """Cuts a chain into contiguous, non-empty stages.

    Among all choices of ``num_stages - 1`` legal cuts, first the weight of the heaviest stage is minimised, then the sum of the
    cuts' costs; ties go to the leftmost cuts.

    Args:
        weights: Weight of each unit, not negative.
        cut_costs: Cost of the cut after each unit but the last; None where no cut is allowed.
        num_stages: Number of stages.

    Returns:
        Position of each cut, increasing: a cut at ``i`` lies after unit ``i``.

    Raises:
        PartitionError: There are fewer legal cuts than needed.
    """
    legal = [position for position, cost in enumerate(cut_costs) if cost is not None]
    if num_stages < 1 or num_stages - 1 > len(legal):
        raise PartitionError(
            f"Cannot form {num_stages} stages.",
            observed=f"{_places(len(legal))}, so at most {len(legal) + 1} stage{'s' if legal else ''}",
            expected=f"at least {_places(max(num_stages - 1, 0))}",
            todo=f"Use at most {len(legal) + 1} devices: each has a stage."
            if legal
            else "Train on one device, or let the model call its layers in modules whose code does not look at tensor values.",
        )
    if num_stages == 1:
        return ()
    prefix = [0, *accumulate(weights)]
    limit = lightest_maximum(weights, cut_costs, num_stages)
    return _cheapest_cuts(prefix, cut_costs, legal, num_stages, limit)


def lightest_maximum(weights: Sequence[int], cut_costs: Sequence[int | None], num_stages: int) -> int:
    """Weight of the heaviest stage in the best partition; there must be enough legal cuts.

    Bisection over the answer. More stages than needed never hurt: a stage can be split at any legal cut inside it.
    """
    return bisect_left(range(sum(weights)), True, key=lambda limit: _fits(weights, cut_costs, num_stages, limit))


def _fits(weights: Sequence[int], cut_costs: Sequence[int | None], num_stages: int, limit: int) -> bool:
    """Whether stages of at most ``limit`` suffice: fill each stage as far as a legal cut allows."""
    stages, since_cut, since_last_legal = 1, 0, 0
    for position, weight in enumerate(weights):
        since_cut += weight
        since_last_legal += weight
        if since_cut > limit:
            if since_last_legal > limit:
                return False
            stages += 1
            since_cut = since_last_legal
        if position < len(cut_costs) and cut_costs[position] is not None:
            since_last_legal = 0
    return stages <= num_stages


def _cheapest_cuts(
    prefix: Sequence[int], cut_costs: Sequence[int | None], legal: Sequence[int], num_stages: int, limit: int
) -> tuple[int, ...]:
    """Dynamic programme over (number of cuts, last cut); the inner minimum slides over a window, so it is linear.

    ``best[i]`` is the least total cost of k cuts of which the last is ``legal[i]``, with all k stages within ``limit``.
    """
    infinity = float("inf")
    best = [float(cut_costs[p] or 0) if prefix[p + 1] <= limit else infinity for p in legal]
    parents: list[list[int]] = []
    for _ in range(num_stages - 2):
        following = [infinity] * len(legal)
        parent = [-1] * len(legal)
        window: deque[int] = deque()  # indices of earlier cuts within reach, best first
        start = 0
        for i, position in enumerate(legal):
            if i > 0 and best[i - 1] < infinity:
                while window and best[window[-1]] > best[i - 1]:
                    window.pop()
                window.append(i - 1)
            while start < i and prefix[position + 1] - prefix[legal[start] + 1] > limit:
                start += 1
            while window and window[0] < start:
                window.popleft()
            if window:
                following[i] = best[window[0]] + (cut_costs[position] or 0)
                parent[i] = window[0]
        parents.append(parent)
        best = following
    reachable = [i for i, p in enumerate(legal) if best[i] < infinity and prefix[-1] - prefix[p + 1] <= limit]
    last = min(reachable, key=lambda i: best[i])
    cuts = [last]
    for parent in reversed(parents):
        cuts.append(parent[cuts[-1]])
    return tuple(legal[i] for i in reversed(cuts))


def _places(count: int) -> str:
    return f"{count} place{'' if count == 1 else 's'} for a cut"
