"""Tables of actions that a user could write."""

from __future__ import annotations

import random
from collections.abc import Iterator

from lightning_fxpipe.simulation.actions import BACKWARD, FORWARD, INPUT_BACKWARD, WEIGHT_BACKWARD, Action, ActionTable

# 1F1B on two ranks, as torch's own class dumps it: empty cells are time that passes.
ONE_F_ONE_B = "0F0,0F1,,0B0,0F2,0B1,0F3,0B2,,0B3\r\n,1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3,\r\n"
# Microbatches in any order, another on each stage, one of them received while another waits; the last stage comes first.
ODD = "1F1,1B1,1F2,1F0,1B0,1B2,1F3,1B3\n0F1,0F2,0F0,0B1,0F3,0B0,0B2,0B3\n"
# Stages in a V, some backward passes in halves.
SPLIT_V = """\
0F0,0F3,3F0,3I0,0F1,3F3,3W0,3I3,0F2,3F1,3B1,0I0,0W0,3W3,0B3,3F2,3I2,0B1,3W2,0I2,0W2
1F0,2F0,1F3,2F3,1F1,2F1,2I0,1I0,2W0,2B3,1F2,2F2,1I3,1W0,2I1,1W3,1B1,2W1,2I2,1I2,1W2,2W2
"""
# All on one rank, the second half first.
ONE_RANK = "0F1,1F1,2F1,3F1,0F0,3B1,1F0,2F0,3F0,2B1,3I0,1B1,0B1,2I0,1B0,3W0,2W0,0B0\n"


def random_table(seed: int, num_microbatches: int = 4) -> ActionTable:
    """Any order that can be run: of four stages on two ranks, in a V or in rounds, with split backward passes or without."""
    choose = random.Random(seed)
    is_v, splits = choose.random() < 0.5, choose.random() < 0.5
    done: dict[Action, None] = {}

    def has_gone_back(stage: int, microbatch: int) -> bool:
        return any(Action(stage, kind, microbatch) in done for kind in (BACKWARD, INPUT_BACKWARD))

    def ready(stage: int, microbatch: int) -> Iterator[Action]:
        """What the stage could do for the microbatch now."""
        if Action(stage, FORWARD, microbatch) not in done:
            if stage == 0 or Action(stage - 1, FORWARD, microbatch) in done:
                yield Action(stage, FORWARD, microbatch)
        elif not has_gone_back(stage, microbatch):
            if stage == 3 or has_gone_back(stage + 1, microbatch):
                yield Action(stage, INPUT_BACKWARD if splits and choose.random() < 0.5 else BACKWARD, microbatch)
        elif Action(stage, INPUT_BACKWARD, microbatch) in done and Action(stage, WEIGHT_BACKWARD, microbatch) not in done:
            yield Action(stage, WEIGHT_BACKWARD, microbatch)

    while could := [each for stage in range(4) for index in range(num_microbatches) for each in ready(stage, index)]:
        done[choose.choice(could)] = None
    ranks = [[0, 3], [1, 2]] if is_v else [[0, 2], [1, 3]]
    return ActionTable.of([action for action in done if action.stage in stages] for stages in ranks)
