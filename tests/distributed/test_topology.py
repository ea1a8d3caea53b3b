"""Which rank holds which stage."""

from __future__ import annotations

import copy

import pytest
import torch

from lightning_fxpipe.distributed.topology import Placement, Replicas, Topology


def place(stage: int) -> Topology:
    return Topology(group=None, control_group=None, rank=stage, placement=Placement(num_ranks=3), device=torch.device("cpu"))


def test_the_last_stage_is_on_rank_zero() -> None:
    """Where Lightning has its progress bar, loggers and the results of predict."""
    assert [place(0).rank_of(stage) for stage in range(3)] == [2, 1, 0]
    assert place(1).last_rank == 0
    assert [place(stage).is_last for stage in range(3)] == [False, False, True]


def stages_of(num_ranks: int, **options: int) -> list[tuple[int, ...]]:
    placement = Placement(num_ranks=num_ranks, **options)  # type: ignore[arg-type]
    found = [placement.stages_of(rank) for rank in range(num_ranks)]
    assert all(placement.rank_of(stage) == rank for rank, stages in enumerate(found) for stage in stages)
    assert sorted(stage for stages in found for stage in stages) == [*range(placement.num_stages)]
    return found


def test_several_stages_go_round() -> None:
    assert stages_of(3, stages_per_rank=2) == [(0, 3), (1, 4), (2, 5)]
    assert stages_of(1, stages_per_rank=4) == [(0, 1, 2, 3)]


def test_stages_of_a_v_come_back() -> None:
    assert stages_of(3, stages_per_rank=2, is_v=True) == [(0, 5), (1, 4), (2, 3)]
    assert stages_of(1, stages_per_rank=2, is_v=True) == [(0, 1)]


def test_the_last_stage_of_a_v_is_on_rank_zero() -> None:
    placement = Placement(num_ranks=3, stages_per_rank=2, is_v=True)
    ranks = [
        Topology(group=None, control_group=None, rank=r, placement=placement, device=torch.device("cpu")) for r in range(3)
    ]
    assert [rank.is_last for rank in ranks] == [True, False, False]
    assert [ranks[0].rank_of(stage) for stage in range(6)] == [0, 1, 2, 2, 1, 0]
    assert ranks[1].last_rank == 0


def test_stages_of_one_rank_are_one_holder() -> None:
    placement = Placement(num_ranks=2, stages_per_rank=2)
    topology = Topology(group=None, control_group=None, rank=0, placement=placement, device=torch.device("cpu"))
    assert topology.ranks_of([0, 1, 2]) == (1, 0)
    assert topology.holds_any([1, 2])
    assert not topology.holds_any([1, 3])


def test_a_copy_is_the_same_place() -> None:
    topology = place(1)
    assert copy.deepcopy(topology) is topology


@pytest.mark.parametrize("is_v", [False, True])
def test_replicas_are_neighbours_in_turn(is_v: bool) -> None:
    """Ranks of a pipeline follow each other, and the first of each ends its steps; to users those have the first numbers."""
    placement = Placement(num_ranks=3, stages_per_rank=1 + is_v, is_v=is_v)
    seen = []
    for index in range(2):
        replicas = Replicas(count=2, index=index)
        for rank in range(3):
            topology = Topology(
                group=None, control_group=None, rank=rank, placement=placement, device=torch.device("cpu"), replicas=replicas
            )
            assert topology.last_rank == 3 * index
            assert {topology.global_rank(other) for other in range(3)} == {3 * index, 3 * index + 1, 3 * index + 2}
            assert (topology.rank_to_users == index) == topology.is_last
            seen.append(topology.rank_to_users)
    assert sorted(seen) == [*range(6)]
