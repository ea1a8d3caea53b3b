"""What a batch that goes forward and backward by turns leaves: its loss, compared, and its gradients."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch

from lightning_fxpipe import UnsupportedError
from lightning_fxpipe.runtime.batch_gradients import BatchGradients
from lightning_fxpipe.runtime.one_f_one_b import InterleavedPass
from lightning_fxpipe.user_code.step import Step, StepKind
from tests.runtime.test_region_pass import Gives, setup_of, spec

STEP = Step(kind=StepKind.TRAIN, function=lambda: None, rest=(), context=nullcontext, random_key=())


def one(*losses: float) -> InterleavedPass:
    """After a run of as many microbatches, in a mean."""
    return InterleavedPass(
        setup=setup_of(Gives(torch.sin), 4, 2, spec(4, 3)),
        values=[],
        random_key=(0,),
        gradients=BatchGradients([], may_stay=False),
        tail=None,
        weights=[1 / len(losses) for _ in losses],
        scale=1.0,
        results=frozenset(),
        keeps_results=False,
        undoes_together=False,
    )


@pytest.mark.parametrize(("losses", "whole"), [((1.0, 3.0), 2.0), ((1.0, 3.0), 2.0 + 1e-6), ((math.nan, 1.0), math.nan)])
def test_a_batch_with_the_loss_of_its_microbatches_passes(losses: tuple[float, ...], whole: float) -> None:
    one(*losses).check(whole, losses, torch.float32, STEP)


OTHER = [((1.0, 3.0), 3.0), ((1.0, 3.0), 4.0), ((1.0, 3.0), math.nan), ((math.nan, 1.0), 2.0)]


@pytest.mark.parametrize(("losses", "whole"), OTHER)
def test_a_batch_with_another_loss_than_that_of_its_microbatches_is_refused(losses: tuple[float, ...], whole: float) -> None:
    """Its gradients are those of another loss than the one that is logged."""
    with pytest.raises(UnsupportedError, match="The loss of this batch does not decompose into the losses of its microbatches"):
        one(*losses).check(whole, losses, torch.float32, STEP)
