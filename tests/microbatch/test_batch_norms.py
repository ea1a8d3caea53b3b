"""BatchNorm over microbatches: its running statistics are those of the whole batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_fxpipe._compat.torch import has_hooks
from lightning_fxpipe.microbatch.batch_norms import DeferredNorms, batch_norms


def statistics(layer: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in layer.named_buffers()}


def in_microbatches(norms: DeferredNorms, module: Any, x: Tensor, sizes: list[int]) -> list[Tensor]:
    results = []
    with norms.deferring():
        for part in x.split(sizes):
            with norms.noting():
                results.append(module(part))
    return results


def deferred(module: nn.Module) -> DeferredNorms:
    return DeferredNorms(norm for _, norm in batch_norms(module))


@pytest.mark.parametrize("momentum", [0.1, 0.7, None])
@pytest.mark.parametrize(
    ("layer", "shape"), [(nn.BatchNorm1d, ()), (nn.BatchNorm1d, (5,)), (nn.BatchNorm2d, (3, 2)), (nn.BatchNorm3d, (2, 1, 3))]
)
def test_running_values_are_those_of_one_device(layer: Any, shape: tuple[int, ...], momentum: float | None) -> None:
    norm = layer(4, momentum=momentum)
    alone = copy.deepcopy(norm)
    for seed in range(3):
        x = 100 + torch.randn(7, 4, *shape, generator=torch.Generator().manual_seed(seed))
        alone(x)
        in_microbatches(deferred(norm), norm, x, [3, 2, 2])
    torch.testing.assert_close(statistics(norm), statistics(alone), rtol=1e-5, atol=1e-5)


@given(sizes=st.lists(st.integers(2, 5), min_size=1, max_size=6), offset=st.floats(-1e3, 1e3))
def test_any_cut_gives_the_same(sizes: list[int], offset: float) -> None:
    norm = nn.BatchNorm1d(2).double()
    alone = copy.deepcopy(norm)
    x = offset + torch.randn(sum(sizes), 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    alone(x)
    in_microbatches(deferred(norm), norm, x, sizes)
    torch.testing.assert_close(statistics(norm), statistics(alone), rtol=1e-9, atol=1e-9)


def test_each_microbatch_is_normalised_by_its_own_statistics() -> None:
    norm = nn.BatchNorm1d(4)
    x = torch.randn(6, 4)
    expected = [copy.deepcopy(norm)(part) for part in x.split(3)]
    for found, one in zip(in_microbatches(deferred(norm), norm, x, [3, 3]), expected, strict=True):
        torch.testing.assert_close(found, one, rtol=0, atol=0)


def test_a_layer_that_is_called_twice_moves_twice_in_the_order_of_the_calls() -> None:
    norm = nn.BatchNorm1d(4)
    alone = copy.deepcopy(norm)
    x = torch.randn(6, 4)
    alone(x)
    alone(2 * x + 1)
    in_microbatches(deferred(norm), lambda part: (norm(part), norm(2 * part + 1)), x, [2, 4])
    torch.testing.assert_close(statistics(norm), statistics(alone))


def test_a_frozen_layer_uses_its_running_values_and_keeps_them() -> None:
    norm = nn.BatchNorm1d(4)
    norm(torch.randn(8, 4))
    norm.eval()
    before, x = statistics(norm), torch.randn(6, 4)
    expected = norm(x)
    torch.testing.assert_close(torch.cat(in_microbatches(deferred(norm), norm, x, [2, 4])), expected, rtol=0, atol=0)
    torch.testing.assert_close(statistics(norm), before, rtol=0, atol=0)


def test_layers_without_running_values_and_of_other_ranks_are_left_alone() -> None:
    modules = nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False), nn.BatchNorm1d(4, device="meta"))
    with deferred(modules).deferring():
        assert [layer.track_running_stats for layer in modules] == [False, True]
    assert [layer.track_running_stats for layer in modules] == [False, True]


def test_what_runs_again_does_not_count() -> None:
    """A trial of a microbatch, and what activation checkpointing computes again in the backward pass."""
    module = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
    alone, norms = copy.deepcopy(module), deferred(module)
    x = torch.randn(6, 4)
    alone(x)
    with norms.deferring():
        for part in x.split(3):
            module(part)
            with norms.noting():
                y: Any = checkpoint(module, part, use_reentrant=False)
    with norms.without_tracking():
        y.sum().backward()
    torch.testing.assert_close(statistics(module), statistics(alone))


def test_an_error_leaves_no_hook_and_no_statistics() -> None:
    norm = nn.BatchNorm1d(4)
    norms = deferred(norm)
    before = statistics(norm)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        in_microbatches(norms, norm, torch.randn(4, 4), [3, 1])
    torch.testing.assert_close(statistics(norm), before, rtol=0, atol=0)
    assert norm.track_running_stats
    assert not has_hooks(norm)
    x, alone = torch.randn(4, 4), copy.deepcopy(norm)
    alone(x)
    in_microbatches(norms, norm, x, [2, 2])
    torch.testing.assert_close(statistics(norm), statistics(alone))


def test_half_precision_is_summed_in_single() -> None:
    norm = nn.BatchNorm1d(2)
    x = (torch.arange(4096.0).view(-1, 2) % 7).bfloat16()
    alone = copy.deepcopy(norm)
    alone(x.float())
    in_microbatches(deferred(norm), norm, x, [1024, 1024])
    torch.testing.assert_close(statistics(norm), statistics(alone))
