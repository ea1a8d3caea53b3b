"""Check that a loss that is a sum over microbatches has gradients that are such sums, too.

A term that is none, as the balance of a mixture of experts over the batch, may be too small beside the loss to be seen in it,
and yet be all that trains some weights. It shows in how the loss depends on what the stages gave: by each such result, of which
one has the tokens' logits and another the router's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_fxpipe.pytree.sizes import plain_number
from lightning_fxpipe.stages.build import TensorSpec
from lightning_fxpipe.tracing.gradient_flow import reached_by_gradients

# A larger result and its gradient should not be there once more, as logits of a large vocabulary.
_MOST_BYTES = 2**26
# Of a gradient's norm. What rounding does is far less; a term that is no mean differs by a tenth or more.
_TOLERANCE, _TOLERANCE_16_BIT = 1e-3, 5e-2


class ResultGradients:
    """Gradients of the results of one batch. If only one result trains, no check is needed: terms show by their share in the
    loss.

    Args:
        joined: What the stages gave for the batch.
        specs: What they are.
    """

    def __init__(self, joined: Sequence[Tensor], specs: Sequence[TensorSpec]) -> None:
        trained = [i for i, spec in enumerate(specs) if spec.requires_grad]
        small = [i for i in trained if joined[i].numel() * joined[i].element_size() <= _MOST_BYTES]
        self._leaves = {i: joined[i].detach().requires_grad_() for i in small if len(trained) > 1}

    @property
    def are_looked_at(self) -> bool:
        """True if there are gradients to compare."""
        return bool(self._leaves)

    def given(self, joined: Sequence[Tensor]) -> list[Tensor]:
        """The results for the step, which may change them."""
        return [self._leaves[i].clone() if i in self._leaves else tensor for i, tensor in enumerate(joined)]

    def difference(self, whole: Tensor, losses: Sequence[Tensor | None], weights: Sequence[float]) -> str | None:
        """Describes the difference; None if there is none, or none can be told.

        Args:
            whole: The loss of the batch, a scalar.
            losses: Those of the microbatches.
            weights: Factor of each in the batch's.
        """
        parts = [loss * weight for loss, weight in zip(losses, weights, strict=True) if loss is not None and weight]
        try:
            found = [self._by_results(loss) for loss in (whole, torch.stack(parts).sum())]
        except RuntimeError:  # the step's code cannot be differentiated twice, or has changed what it needs
            return None
        most = max(float(one.norm()) for one in found[0])
        for leaf, one, other in zip(self._leaves.values(), *found, strict=True):
            norm, parts_norm, distance = (float(value) for value in (one.norm(), other.norm(), (one - other).norm()))
            tolerance = _TOLERANCE if leaf.dtype.itemsize > 2 else _TOLERANCE_16_BIT
            if distance > tolerance * max(norm, parts_norm) and distance > self._rounding(leaf, most, whole):
                return (
                    f"gradients with respect to a result of the model, of shape {tuple(leaf.shape)}, with norm {norm:.4g} for "
                    f"the whole batch and {parts_norm:.4g} from its {len(losses)} microbatches, which differ by {distance:.2g}"
                )
        return None

    def unused(self, loss: Tensor) -> frozenset[int]:
        """Numbers of the results that a loss does not depend on."""
        if not loss.requires_grad:
            return frozenset()
        leaves = [*self._leaves.values()]
        return frozenset(
            [*self._leaves][index] for index in set(range(len(leaves))).difference(reached_by_gradients([loss], leaves))
        )

    def _rounding(self, leaf: Tensor, most: float, loss: Tensor) -> float:
        """Returns the rounding error of a gradient that should be zero, as of a shift that softmax ignores.

        Args:
            leaf: The result.
            most: Norm of the largest gradient by a result.
            loss: Of the batch; a gradient by which moving the whole result would not change it does not matter.
        """
        eps = torch.finfo(leaf.dtype).eps
        return max(8 * eps * most, eps * abs(plain_number(loss)) / max(1.0, float(leaf.detach().norm())))

    def _by_results(self, loss: Tensor) -> list[Tensor]:
        leaves = [*self._leaves.values()]
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True) if loss.requires_grad else [None] * len(leaves)
        zipped = zip(gradients, leaves, strict=True)
        return [torch.zeros_like(leaf, dtype=torch.float64) if each is None else each.double() for each, leaf in zipped]
