"""The gradient of a loss is known without a look at the device, as long as nothing but numbers has gone into it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fxpipe.runtime.batch_gradients import ParkedLoss
from lightning_fxpipe.runtime.known_numbers import KnownNumbers
from tests.ranks.synchronisations import DEVICE, renamed_device


def hooked(hook: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    """A step that registers a hook for the loss's gradient."""

    def scaled(loss: Tensor) -> Tensor:
        loss.register_hook(hook)
        return loss / 2

    return scaled


def written(gradient: Tensor) -> None:
    gradient.view(1).mul_(3)


def on_device(number: float) -> Tensor:
    return torch.full((), number, device=DEVICE)


# What is differentiated, made of the loss; its derivative by the loss; how often the device is asked.
CASES: dict[str, tuple[Callable[[Tensor], Tensor], float, int]] = {
    "the loss": (lambda loss: loss, 1.0, 0),
    "over one batch": (lambda loss: loss / 1, 1.0, 0),
    "over three batches": (lambda loss: loss / 3, float(torch.tensor(1.0) / 3), 0),
    "scaled by a number": (lambda loss: 128 * loss / 4, 32.0, 0),
    "a hook that multiplies": (hooked(lambda gradient: gradient * 3), 1.5, 0),
    "scaled by the device's number": (lambda loss: loss * on_device(8.0), 8.0, 1),
    "a hook that writes to the gradient": (hooked(written), 1.5, 1),
    "another function": (lambda loss: loss.square(), 4.0, 1),
}


@pytest.mark.parametrize(("make", "derivative", "num_looks"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gradient_is_that_of_the_device(
    make: Callable[[Tensor], Tensor], derivative: float, num_looks: int, dtype: torch.dtype
) -> None:
    numbers, found = KnownNumbers(), []
    with renamed_device() as device:
        loss = torch.full((), 2.0, dtype=dtype, device=DEVICE)
        parked: Tensor = ParkedLoss.apply(torch.zeros((), requires_grad=True), loss, lambda g: found.append(numbers.read(g)))
        with numbers:
            make(parked).backward()
    assert found == [pytest.approx(derivative, rel=1e-7 if dtype == torch.float64 else 0)]
    assert len(device.batches[0]) == num_looks
