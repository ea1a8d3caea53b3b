"""Results of the last stage for the microbatches, put together as the results for the batch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_fxpipe.independence.division import cut
from lightning_fxpipe.stages.build import TensorSpec


class JoinedResults:
    """Takes the results of one microbatch after the other.

    Each is copied to its place at once: kept until all have come, the results of the batch would take twice their memory, which
    is much where they are the logits of a large vocabulary.

    Args:
        specs: Specs of the results for the batch.
        dims: Of each, the dimension along which microbatches are joined; None: all give the same.
        num_rows: Rows of the batch, in the dimension that is cut; results may have several entries for each.
    """

    def __init__(self, specs: Sequence[TensorSpec], dims: Sequence[int | None], num_rows: int) -> None:
        self._specs = specs
        self._dims = dims
        self._num_rows = num_rows
        self._tensors: list[Tensor] = []
        self.num_rows_there = 0

    @property
    def are_complete(self) -> bool:
        """True if all microbatches' are there."""
        return self.num_rows_there == self._num_rows

    def put(self, results: Sequence[Tensor], start: int, rows: int) -> None:
        """Takes those of a microbatch.

        Args:
            results: They.
            start: The microbatch's first row.
            rows: How many it has.
        """
        is_whole, is_first = rows == self._num_rows, not self._tensors
        self.num_rows_there += rows
        for number, (result, spec, dim) in enumerate(zip(results, self._specs, self._dims, strict=True)):
            if is_whole or dim is None:
                if is_first:
                    self._tensors.append(result)
                continue
            if is_first:
                self._tensors.append(spec.empty(result.device))
            cut(self._tensors[number], dim, start, rows, num_rows=self._num_rows).copy_(result)

    def take(self) -> tuple[Tensor, ...]:
        """The batch's results, once."""
        tensors, self._tensors = tuple(self._tensors), []
        return tensors


def with_gradients(gradients: Sequence[Tensor | None]) -> frozenset[int]:
    """Numbers of the results that have gradients."""
    return frozenset(number for number, gradient in enumerate(gradients) if gradient is not None)
