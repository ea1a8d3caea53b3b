"""What a call has set on a module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_fxpipe.user_code.exchange import with_assigned_tensors


class Sets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.number, self.same, self.written, self.kept = 1, 2, torch.zeros(3), torch.zeros(3)
        with torch.inference_mode():
            self.inferred = torch.zeros(3)  # which counts no changes

    def forward(self, x: Tensor) -> Tensor:
        self.number += 1
        self.written.add_(1)
        self.made = x.sin()
        return x


def test_numbers_and_tensors_that_were_written_to_are_values_and_new_tensors_are_not() -> None:
    values: set[tuple[str, str]] = set()
    module, x = nn.Sequential(Sets()), torch.randn(3)
    result, made = with_assigned_tensors(values, nn.Module.__call__, module, x)
    assert result is x
    assert values == {("0", "number"), ("0", "written")}
    assert [*made] == [("0", "made")]
    torch.testing.assert_close(made["0", "made"], x.sin())
