"""Process groups end with what they were made for."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_fxpipe import FxPipeStrategy
from lightning_fxpipe.distributed.groups import closed_with
from tests.lit import LitModel, make_loader, make_trainer
from tests.ranks.pool import RankPool


class Owner:
    """Has groups."""


def ends() -> dict[str, Any]:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    owner, kept, taken = Owner(), dist.new_group(), dist.new_group()
    groups = [dist.new_group(), taken]
    ended = groups[0]
    closed_with(owner, groups)
    dist.destroy_process_group(groups.pop())
    before = dist.get_world_size(ended)
    del owner
    found = {"before": before, "after": is_there(ended), "kept": dist.get_world_size(kept)}
    dist.destroy_process_group(kept)
    return found


def is_there(group: Any) -> bool:
    try:
        return dist.get_backend(group) == "gloo"
    except ValueError:
        return False


def threads_and_sockets_after_runs(folder: str) -> list[tuple[int, int]]:
    """Of one process that makes one Trainer after the other, as a search for hyperparameters does."""
    found = []
    for number in range(5):
        trainer = make_trainer(
            strategy=FxPipeStrategy(async_save=True),
            devices=dist.get_world_size(),
            max_epochs=1,
            enable_checkpointing=True,
            default_root_dir=str(Path(folder) / str(number)),
        )
        trainer.fit(LitModel("rotary"), make_loader("rotary"))
        del trainer
        gc.collect()
        found.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
    return found


def test_groups_end_when_nobody_has_their_owner(ranks: Callable[[int], RankPool]) -> None:
    for found in ranks(2).run(ends):
        assert found == {"before": 2, "after": False, "kept": 2}


def test_a_run_that_is_over_leaves_no_threads_and_connections(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    """The Trainer was kept by the handler of SIGTERM, and with it all that it had run."""
    for _, second, *others in ranks(2).run(threads_and_sockets_after_runs, str(tmp_path)):
        # What the last run had may be there until the next one; a group has two threads, and a run had eight more of them.
        assert all(threads <= second[0] and sockets <= second[1] + 10 for threads, sockets in others), (second, others)
