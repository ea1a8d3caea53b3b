"""Ranks whose stages need no data: they do not load it, and rank 0 tells them the shapes of each batch.

Every rank runs the user's step up to the model's call, so every rank needs a batch; but a stage in the middle of a pipeline
takes nothing from it. What its step does before the model's call depends on the batch's shapes and constants, not on the values
of its tensors, which may as well be zero. That holds once a batch has shown that

- no part of the graph on that rank takes a tensor of the batch (``StageTrace``),
- the step does not look at values before the model's call (``tracing.prelude``),
- no hook of user code looks at the batch (``hooks.user_hooks``).

From then on the rank's loaders stand still, until the end of the strategy's life: their samplers are no longer where those of
the other ranks are. A batch for which one of the three does not hold is sent by rank 0 as it is.
"""

from __future__ import annotations

import io
import logging
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed.distributed_c10d as dist
from torch import Tensor

from lightning_fxpipe._compat.torch import tree_map
from lightning_fxpipe.distributed.agreement import gather_values, of_last_stage
from lightning_fxpipe.distributed.topology import Topology
from lightning_fxpipe.pytree.portable import packed
from lightning_fxpipe.rng import rng_state, same_rng, set_rng_state
from lightning_fxpipe.user_code.step import StepKind

_logger = logging.getLogger("lightning_fxpipe")


class Sparing:
    """Knows which ranks do not load data, and gives them what they need instead.

    Args:
        topology: This rank's place.
        tell: Gets a line for the user, once for each step.

    Attributes:
        running_step: The step that batches are loaded for; None where user code goes through a loader by itself.
    """

    def __init__(self, topology: Topology, tell: Callable[[str], None]) -> None:
        self.running_step: Callable[[], StepKind | None] = lambda: None
        self._topology = topology
        self._tell = tell
        self._spared: dict[StepKind, frozenset[int]] = {}

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Group of all ranks for small messages."""
        return self._topology.control_group

    @property
    def everyone(self) -> dist.ProcessGroup | None:
        """Group of all ranks of all replicas, which load other batches, for small messages."""
        return self._topology.everyone

    def move_to(self, topology: Topology) -> None:
        """This rank has another place now; no batch has been spared yet."""
        self._topology = topology

    def watch(
        self,
        *,
        running_step: Callable[[], StepKind | None],
        free_ranks: Callable[[StepKind], frozenset[int]],
        is_seen_by_hooks: Callable[[StepKind], bool],
    ) -> None:
        """Called before each run, with what that tells of its batches; the same on every rank at the same place of the run.

        Args:
            running_step: The step that batches are loaded for; None where user code goes through a loader by itself.
            free_ranks: The pipeline ranks that have been seen to need no data in a step.
            is_seen_by_hooks: Whether a hook of user code looks at the batches of a step.
        """
        self.running_step, self._free_ranks, self._is_seen_by_hooks = running_step, free_ranks, is_seen_by_hooks

    @contextmanager
    def loading_for(self, kind: StepKind) -> Iterator[None]:
        """In the block batches are loaded for a step, before the run."""
        before = self.running_step
        self.running_step = lambda: kind
        try:
            yield
        finally:
            self.running_step = before

    def ranks(self, kind: StepKind | None) -> frozenset[int]:
        """The pipeline ranks that do not load data for a step; the same on every rank."""
        return frozenset() if kind is None else self._spared.get(kind, frozenset())

    def is_spared(self, kind: StepKind | None) -> bool:
        """Returns True if this rank is one of them."""
        return self._topology.rank in self.ranks(kind)

    def consider(self, kind: StepKind | None, batch: Any) -> None:
        """Agrees on the ranks to spare from now on. Called by every rank after it has loaded a batch."""
        if kind is None or self._topology.num_ranks < 3 or self.ranks(kind):
            return  # the first stage takes the inputs, the last one has the loss
        is_free = not self._is_seen_by_hooks(kind) and _can_be_sent(batch)
        mine = self._free_ranks(kind) if is_free else frozenset[int]()
        agreed = frozenset.intersection(*gather_values(self.group, mine))
        if agreed:
            self._spared[kind] = agreed
            spared = sorted(stage for rank in agreed for stage in self._topology.placement.stages_of(rank))
            stages = f"stage{'s' * (len(spared) > 1)} {', '.join(map(str, spared))}"
            self._tell(f"The ranks of {stages} stop loading data for {kind.value}: they need only its shapes.")

    def load(self, kind: StepKind | None, load: Callable[[], list[Any]]) -> list[Any]:
        """Loads on the ranks that are not spared. Called by every rank.

        Args:
            kind: The step that the data is for.
            load: Loads a batch; returns an empty list at the end of the data.

        Returns:
            The batch; on a rank that is spared one like that of rank 0, of zeros.
        """
        if kind is None or not self.ranks(kind):
            return load()
        before = rng_state()
        mine = [] if self.is_spared(kind) else load()
        pickled = packed if self._is_seen_by_hooks(kind) else describe_batch
        batches = self._tell_others(kind, tuple(map(pickled, mine)) if self._topology.is_last else (), before)
        return [pickle.loads(batch) for batch in batches] if self.is_spared(kind) else mine

    def begin(self, kind: StepKind | None, begin: Callable[[], Iterator[Any]]) -> Iterator[Any] | None:
        """Makes a loader's iterator on the ranks that are not spared; it may draw random numbers. Called by every rank."""
        if not self.ranks(kind):
            return begin()
        before = rng_state()
        try:
            return None if self.is_spared(kind) else begin()
        finally:
            self._tell_others(kind, (), before)

    def _tell_others(self, kind: StepKind | None, batches: tuple[bytes, ...], before: dict[str, Any]) -> tuple[bytes, ...]:
        """Sends the batches that rank 0 has loaded to all ranks; those that skip loading draw the numbers that it drew since
        ``before``.
        """
        news = None
        if self._topology.is_last:
            now = rng_state()
            drawn = None if same_rng(before, now) else {key: state for key, state in now.items() if key != "cuda"}
            news = (batches, drawn)
        told = of_last_stage(news, self._topology)
        assert told is not None
        batches, drawn = told
        if drawn is not None and self.is_spared(kind):
            set_rng_state(drawn)
        return batches

    def with_values(self, kind: StepKind, batch: Any) -> Any:
        """The batch with its values, as the step gets it. Called by every rank.

        Args:
            kind: The step.
            batch: The batch, on a rank that is spared perhaps without values.
        """
        values = of_last_stage(_moved(batch, "cpu") if self._topology.is_last else None, self._topology)
        return _moved(values, self._topology.device) if self.is_spared(kind) else batch


def without_values(batch: Any, device: torch.device) -> Any:
    """A batch like it, of zeros."""
    return _moved(pickle.loads(describe_batch(batch)), device)


def _moved(batch: Any, device: torch.device | str) -> Any:
    return tree_map(lambda leaf: leaf.detach().to(device) if isinstance(leaf, Tensor) else leaf, batch)


def describe_batch(batch: Any) -> bytes:
    """Pickles a batch without the values of its tensors."""
    buffer = io.BytesIO()
    _Describing(buffer).dump(batch)
    return buffer.getvalue()


class _Describing(pickle.Pickler):
    """Writes how to make tensors of zeros in place of plain tensors."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not Tensor or obj.layout is not torch.strided or obj.is_quantized:
            return NotImplemented
        return _zeros, (tuple(obj.shape), obj.stride(), obj.dtype)


def _zeros(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    num_elements = 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return torch.zeros(num_elements, dtype=dtype).as_strided(shape, stride)


def _can_be_sent(batch: Any) -> bool:
    try:
        pickle.loads(describe_batch(batch))
    except Exception:
        _logger.debug("Every rank loads the batches, because a %s cannot be sent", type(batch).__name__, exc_info=True)
        return False
    return True
