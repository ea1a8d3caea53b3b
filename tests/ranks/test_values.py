"""Values with tensors inside arrive as they were: values, dtypes, layouts, and what shares memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_fxpipe.distributed.values import broadcast_value, receive_value, send_value
from tests.ranks.pool import RankPool

Ranks = Callable[[int], RankPool]


def value() -> dict[str, Any]:
    """Large tensors, which are sent by themselves, and small ones, of many kinds."""
    torch.manual_seed(1)
    large = torch.randn(300, 200)
    weight = nn.Parameter(large.clone())
    return {
        "plain": large,
        "permuted": torch.randn(20, 30, 10, 40).permute(2, 0, 3, 1),
        "channels last": torch.randn(4, 8, 40, 60).to(memory_format=torch.channels_last),
        "with gaps": large[:, ::2],
        "expanded": torch.randn(300, 1).expand(300, 200),
        "of a batch": [torch.randn(3), (large[:2, :2], None, "text")],
        "tied": {"in": weight, "out": weight},
        "bits": torch.rand(300, 300) > 0.5,
        "halves": torch.randn(300, 200).bfloat16(),
        "complex": torch.randn(200, 200, dtype=torch.complex64),
        "sparse": torch.eye(300).to_sparse(),
        "empty": torch.empty(0, 3),
        "number": torch.tensor(2.0),
    }


def exchange() -> dict[str, Any]:
    """Runs on each of two ranks; returns what rank 1 got in either way."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    group = dist.new_group(list(reversed(range(2))), sort_ranks=False)  # as stages run against ranks
    everywhere = broadcast_value(value() if dist.get_rank() == 0 else None, 0, group)
    if dist.get_rank() == 0:
        send_value(value(), 1, group)
        return {"broadcast": everywhere, "sent": value()}
    return {"broadcast": everywhere, "sent": receive_value(0, group)}


def describe(got: dict[str, Any]) -> dict[str, Any]:
    """What survives the way back to the test: whether it is equal, and how it lies in memory."""
    expected = value()
    return {
        "strides": {name: got[name].stride() for name in ("plain", "permuted", "channels last", "halves", "complex")},
        "equal": {
            name: torch.equal(got[name].to_dense(), tensor.to_dense()) and got[name].dtype == tensor.dtype
            for name, tensor in expected.items()
            if isinstance(tensor, torch.Tensor)
        },
        "tied": got["tied"]["in"] is got["tied"]["out"],
        "nested": torch.equal(got["of a batch"][1][0], expected["of a batch"][1][0]) and got["of a batch"][1][1:],
    }


def run() -> dict[str, Any]:
    return {way: describe(got) for way, got in exchange().items()}


def test_every_kind_of_tensor_arrives_as_it_was(ranks: Ranks) -> None:
    expected = describe(value())
    assert all(expected["equal"].values())
    for found in ranks(2).run(run):
        assert found == {"broadcast": expected, "sent": expected}
