"""A term of the loss that is no mean, and too small to be seen in it, is seen in gradients by what the stages give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fxpipe import FxPipeStrategy
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.runtime.result_gradients import ResultGradients
from lightning_fxpipe.stages.build import TensorSpec
from tests.lit import make_trainer


def difference(term: Any, dtype: torch.dtype = torch.float32, changes: bool = False) -> str | None:
    """For a batch of eight samples in two microbatches, whose loss is a mean and this term of the second result."""
    torch.manual_seed(1)
    joined = [torch.randn(8, 5, dtype=dtype), torch.randn(8, 3, dtype=dtype)]
    specs = [TensorSpec(shape=tuple(tensor.shape), dtype=dtype, requires_grad=True) for tensor in joined]
    gradients = ResultGradients(joined, specs)
    assert gradients.are_looked_at
    one, other = gradients.given(joined)

    def loss(rows: slice) -> Tensor:
        scores, routed = one[rows].float(), other[rows]
        if changes:
            routed = routed.mul_(1.0)
        return scores.pow(2).mean() + 1e-5 * term(routed.float())

    return gradients.difference(loss(slice(None)), [loss(slice(0, 3)), loss(slice(3, 8))], (3 / 8, 5 / 8))


def balance(routed: Tensor) -> Tensor:
    return routed.softmax(-1).mean(0).pow(2).sum()


class Rounding(torch.autograd.Function):
    """Zero, with a gradient of other small numbers each time."""

    @staticmethod
    def forward(ctx: Any, routed: Tensor) -> Tensor:
        ctx.save_for_backward(routed)
        return routed.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 1e-4 * gradient * torch.randn_like(ctx.saved_tensors[0])


MEANS = {
    "a mean": lambda routed: routed.pow(2).mean(),
    "what rounding leaves of zero": lambda routed: Rounding.apply(routed),
    "nothing": lambda routed: torch.zeros(()),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("term", MEANS.values(), ids=MEANS)
def test_means_are_sums_over_microbatches(term: Any, dtype: torch.dtype) -> None:
    assert difference(term, dtype) is None


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 10), (torch.bfloat16, 1e6)])  # rounding hides more in bf16
def test_a_small_term_that_is_no_mean_is_seen(dtype: torch.dtype, factor: float) -> None:
    told = difference(lambda routed: factor * balance(routed), dtype)
    assert told is not None
    assert "of shape (8, 3)" in told
    assert "from its 2 microbatches" in told


def test_what_the_step_changes_in_place_is_its_own() -> None:
    assert difference(MEANS["a mean"], changes=True) is None


def test_one_result_is_not_looked_at_and_a_large_one_is_not_copied() -> None:
    small, large = torch.zeros(2, 3), torch.zeros(1).expand(2, 2**25)
    specs = {t: TensorSpec(shape=tuple(t.shape), dtype=t.dtype, requires_grad=True) for t in (small, large)}
    fixed = TensorSpec(shape=(2, 3), dtype=torch.float32, requires_grad=False)
    assert not ResultGradients([small], [specs[small]]).are_looked_at
    assert not ResultGradients([small, small], [specs[small], fixed]).are_looked_at
    gradients = ResultGradients([small, large], [specs[small], specs[large]])
    one, other = gradients.given([small, large])
    assert gradients.are_looked_at
    assert one.requires_grad
    assert other is large


class Routed(nn.Module):
    """Gives scores, and those by which a router would choose."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(4)))
        self.router, self.head = nn.Linear(12, 3), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = self.layers(x)
        return self.head(found), self.router(found)


class Lit(L.LightningModule):
    """A classifier whose loss has a small term of the router's."""

    def __init__(self, coefficient: float, is_balanced: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Routed()
        nn.init.normal_(self.model.router.weight, std=20.0)
        self.coefficient, self.is_balanced = coefficient, is_balanced

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores, routed = self.model(batch[0])
        share = routed.softmax(-1)
        chosen = F.one_hot(share.argmax(-1), 3).float().mean(0)
        term = 3 * (chosen * share.mean(0)).sum() if self.is_balanced else routed.pow(2).mean()
        return F.cross_entropy(scores, batch[1]) + self.coefficient * term

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(folder: Path, *, is_balanced: bool) -> None:
    strategy = FxPipeStrategy(num_stages=2, num_microbatches=4, schedule="1f1b")
    samples = torch.randn(32, 12, generator=torch.Generator().manual_seed(3))
    loader = DataLoader(TensorDataset(samples, torch.arange(32) % 5), batch_size=16)
    make_trainer(max_epochs=1, strategy=strategy, default_root_dir=folder).fit(Lit(1e-4, is_balanced), loader)


def test_1f1b_refuses_such_a_term_and_trains_a_mean(tmp_path: Path) -> None:
    fit(tmp_path, is_balanced=False)
    with pytest.raises(UnsupportedError, match=r"gradients with respect to a result of the model, of shape \(16, 3\)"):
        fit(tmp_path, is_balanced=True)
