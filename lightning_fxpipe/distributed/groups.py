"""Process groups that end with what they were made for.

Each gloo group has threads, which look for work some hundred times a second, and connections. A process with many runs, as a
search for hyperparameters has, would keep those of all.
"""

from __future__ import annotations

import weakref
from contextlib import suppress

import torch.distributed.distributed_c10d as dist


def closed_with(owner: object, groups: list[dist.ProcessGroup]) -> None:
    """Ends the groups in a list when their owner is garbage-collected.

    But not those of NCCL, whose end would wait for the other ranks.
    """
    # At the end of the process torch ends what is left.
    weakref.finalize(owner, _close, groups).atexit = False


def _close(groups: list[dist.ProcessGroup]) -> None:
    for group in groups:
        with suppress(ValueError):  # it has ended before
            if dist.is_initialized() and dist.get_backend(group) == "gloo":
                dist.destroy_process_group(group)
