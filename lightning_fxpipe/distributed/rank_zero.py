"""Rank 0's values in user code that not every rank runs: ``if trainer.is_global_zero: trainer.log_dir``.

A rank cannot know whether the others come to a call that needs them all. So each such call is a round of messages, and a hook
ends with rounds until no rank is at a call: ranks that have nothing to ask take part, too, and none waits for ever.
"""

from __future__ import annotations

from typing import Any

from lightning_fxpipe._compat.modes import without_modes
from lightning_fxpipe.distributed.agreement import gather_values
from lightning_fxpipe.distributed.topology import Topology
from lightning_fxpipe.user_code.frames import framework_calls

# Which functions user code has called, and the value.
Shared = tuple[tuple[str, ...], Any]


class RankZeroValues:
    """Answers calls for the ranks of one pipeline. Made, and its methods called, by each of them.

    Args:
        topology: This rank's place.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._is_asked = False

    def share(self, value: Any) -> Any:
        """Rank 0's value of the call of Lightning or torch that is running; this rank's where rank 0 does not make it."""
        mine = framework_calls(), value
        is_answered = False
        while not is_answered:
            is_answered, value = answer(mine, self._round(mine))
        return value

    def end(self) -> None:
        """Takes part in the other ranks' calls until all have come here."""
        self._round(None)
        while self._is_asked:
            self._round(None)

    def _round(self, mine: Shared | None) -> Shared | None:
        """One round; returns rank 0's call."""
        sent = mine if self._topology.is_last else (mine and (mine[0], None))
        with without_modes():  # where a model is made, new tensors have no data
            calls = gather_values(self._topology.control_group, sent)
        self._is_asked = any(call is not None for call in calls)
        return calls[0]


def answer(mine: Shared, zeros: Shared | None) -> tuple[bool, Any]:
    """True with the value of a call, or False if another round is needed: rank 0 makes other calls first.

    Args:
        mine: This rank's call.
        zeros: Rank 0's in the same round; None if it makes none.
    """
    if zeros is None:
        return True, mine[1]
    return zeros[0] == mine[0], zeros[1]
