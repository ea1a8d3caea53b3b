"""Which rank holds which stage."""

from __future__ import annotations

import copy

import torch

from lightning_fxpipe.distributed.topology import Topology


def place(stage: int) -> Topology:
    return Topology(group=None, control_group=None, stage_index=stage, num_stages=3, device=torch.device("cpu"))


def test_the_last_stage_is_on_rank_zero() -> None:
    """Where Lightning has its progress bar, loggers and the results of predict."""
    assert [place(0).rank_of(stage) for stage in range(3)] == [2, 1, 0]
    assert place(1).last_rank == 0
    assert [place(stage).is_last for stage in range(3)] == [False, False, True]


def test_a_copy_is_the_same_place() -> None:
    topology = place(1)
    assert copy.deepcopy(topology) is topology
