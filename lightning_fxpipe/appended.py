"""What a step appends to lists of the LightningModule: one entry for the batch, where its microbatches have appended one each.

``self.outputs.append(loss)`` in a step and ``torch.stack(self.outputs).mean()`` in a hook at the end of the epoch is how
Lightning has its users keep results. With an entry for each microbatch, small ones would weigh as much as large ones, and
``len`` would be another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from lightning_fxpipe.joining import BatchLoss, joined

_MAX_DEPTH = 3
# A list of lists has one for each dataloader or so; a longer one has results.
_MAX_LISTS = 64


Path = tuple[Any, ...]


class AppendedEntries:
    """The lists of a module, and how they grow from microbatch to microbatch.

    Args:
        module: The LightningModule.
        known: Lists to which steps have been seen to append an entry for each microbatch, not for each sample; grows.
    """

    def __init__(self, module: nn.Module, known: set[Path]) -> None:
        self._lists = dict(_lists_in(vars(module), (), _MAX_DEPTH))
        self._lengths = {path: [len(found)] for path, found in self._lists.items()}
        self._known = known

    def end_microbatch(self) -> None:
        """Called after each microbatch."""
        for path, found in self._lists.items():
            self._lengths[path].append(len(found))

    def rewind(self) -> None:
        """Takes away what has been appended."""
        for path, found in self._lists.items():
            del self._lengths[path][1:]
            del found[self._lengths[path][0] :]

    def join(self, sizes: Sequence[int], loss: BatchLoss) -> None:
        """Joins the entries of the microbatches to those of the batch, where that is possible.

        Args:
            sizes: Samples in each microbatch.
            loss: The losses of the microbatches.
        """
        for path, found in self._lists.items():
            lengths = self._lengths[path]
            counts = [after - before for before, after in zip(lengths, lengths[1:], strict=False)]
            if len(counts) != len(sizes) or counts[0] < 1 or len(set(counts)) > 1:
                continue
            if counts != [*sizes]:
                self._known.add(path)
            elif path not in self._known:
                continue  # it has got an entry for each sample
            parts = [found[start : start + counts[0]] for start in lengths[:-1]]
            entries = [joined([((part[i],), {}) for part in parts], sizes, loss) for i in range(counts[0])]
            if len(sizes) > 1 and all(len(entry) == 1 for entry in entries):
                found[lengths[0] :] = [args[0] for ((args, _),) in entries]


def _lists_in(value: Any, path: Path, depth: int) -> Iterator[tuple[Path, list[Any]]]:
    if isinstance(value, list):
        yield path, value
    if depth and (isinstance(value, dict) or (isinstance(value, list) and len(value) <= _MAX_LISTS)):
        for key, entry in list(value.items() if isinstance(value, dict) else enumerate(value)):
            if isinstance(entry, (list, dict)):
                yield from _lists_in(entry, (*path, key), depth - 1)
