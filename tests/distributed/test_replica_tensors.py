"""What does not need other processes; see ``tests/ranks/test_replica_tensors.py`` for what does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_fxpipe.distributed.replica_calls import ReplicaCalls
from lightning_fxpipe.distributed.replica_tensors import (
    TalksToReplicas,
    broadcast_among_replicas,
    gathered,
    reduced,
    voted,
)
from lightning_fxpipe.distributed.topology import Replicas
from lightning_fxpipe.user_code.for_microbatch import for_microbatch

TWO = Replicas(count=2)
TALKS: list[Callable[[], Any]] = [
    lambda: reduced(torch.ones(1), TWO, None, "mean"),
    lambda: gathered(torch.ones(1), TWO),
    lambda: broadcast_among_replicas("text", TWO, 0),
    lambda: voted(True, TWO, all=True),
    lambda: ReplicaCalls(TWO, lambda value: value).run(dist.barrier, {}),
]


@pytest.mark.parametrize("talk", TALKS)
def test_a_step_that_runs_for_a_microbatch_must_not_talk(talk: Callable[[], Any]) -> None:
    """Other replicas may have fewer microbatches, and would not come."""
    with (
        for_microbatch(),
        pytest.raises(
            TalksToReplicas, match="The step communicates with other replicas, but this schedule runs the step once per"
        ) as caught,
    ):
        talk()
    assert 'schedule="gpipe"' in str(caught.value)


def test_one_replica_has_nobody_to_talk_to() -> None:
    x = torch.tensor([3.0])
    with for_microbatch():
        assert reduced(x, Replicas(), None, "mean") is x
        assert gathered(x, Replicas()) is x
