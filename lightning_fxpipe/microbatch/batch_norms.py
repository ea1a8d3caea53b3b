"""BatchNorm's running statistics are of the whole batch, though it normalises over microbatches.

On one device a layer moves its running values once for each batch. Were they moved once for each microbatch, they would forget
earlier batches as much faster as there are microbatches. So while microbatches run, layers track nothing; mean and variance of
what they get are put together, and the running values are moved when all have come forward. As ``DeferredBatchNorm`` of
torchgpipe (``torchgpipe/batchnorm.py``), but with the variances combined without cancellation (Chan, Golub and LeVeque 1979).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fxpipe._compat.torch import patched_attributes

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def batch_norms(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The BatchNorm layers of a module, with their paths."""
    return [(path, child) for path, child in module.named_modules() if isinstance(child, _BATCH_NORMS)]


@dataclass
class _Statistics:
    """Input of one call of a layer in the microbatches so far: mean and variance for each channel."""

    count: int
    mean: Tensor
    squares: Tensor  # sum of the squared differences from the mean

    def add(self, other: _Statistics) -> None:
        count = self.count + other.count
        difference = other.mean - self.mean
        self.squares = self.squares + other.squares + difference.square() * (self.count * other.count / count)
        self.mean = self.mean + difference * (other.count / count)
        self.count = count


class DeferredNorms:
    """The running statistics of some layers.

    Args:
        layers: BatchNorm layers; those that track nothing, or whose data another rank has, are left alone.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._layers: list[Any] = [*layers]
        self._found: dict[nn.Module, list[_Statistics]] = {}  # of each call in a microbatch
        self._num_calls: dict[nn.Module, int] | None = None  # in the one that runs forward

    @contextmanager
    def without_tracking(self) -> Iterator[None]:
        """In the block, a backward pass of microbatches, running values stay what they are."""
        # Those in evaluation use the running values all the same.
        with patched_attributes(*((layer, "track_running_stats", False) for layer in self._layers if _tracks(layer))):
            yield

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """In the block microbatches run forward; after it the running values move, once for each call in a microbatch."""
        hooks = [layer.register_forward_pre_hook(self._note, with_kwargs=True) for layer in self._layers if _tracks(layer)]
        try:
            with self.without_tracking():
                yield
            with torch.no_grad():
                for layer, calls in self._found.items():
                    for call in calls:
                        _move(layer, call)
        finally:
            self._found = {}
            for hook in hooks:
                hook.remove()

    @contextmanager
    def noting(self) -> Iterator[None]:
        """In the block one of them runs, and counts; what runs elsewhere is a trial, or computed again."""
        self._num_calls = {}
        try:
            yield
        finally:
            self._num_calls = None

    def _note(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._num_calls is None or not layer.training:
            return
        x = (args[0] if args else kwargs["input"]).detach()
        variance, mean = torch.var_mean(x.float() if x.dtype.itemsize < 4 else x, [0, *range(2, x.dim())], correction=0)
        count = x.numel() // x.shape[1]
        calls = self._found.setdefault(layer, [])
        number = self._num_calls.get(layer, 0)
        self._num_calls[layer] = number + 1
        new = _Statistics(count, mean, variance * count)
        if number == len(calls):
            calls.append(new)
        else:
            calls[number].add(new)


def _tracks(layer: Any) -> bool:
    return bool(layer.track_running_stats) and layer.running_mean is not None and not layer.running_mean.is_meta


def _move(layer: Any, found: _Statistics) -> None:
    layer.num_batches_tracked.add_(1)
    factor = layer.momentum if layer.momentum is not None else 1 / float(layer.num_batches_tracked)
    variance = found.squares / max(found.count - 1, 1)
    for running, new in ((layer.running_mean, found.mean), (layer.running_var, variance)):
        running.mul_(1 - factor).add_(new.to(running.dtype), alpha=factor)
