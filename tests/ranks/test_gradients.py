"""Gradients over the stages: summed where several hold a parameter, and clipped by the norm of all."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_fxpipe.distributed.topology import make_topology
from lightning_fxpipe.stages.gradients import SharedParameters, clip_by_global_norm
from tests.ranks.pool import RankPool

# ------------------------------------------------------------------ shared parameters, over three ranks


def start() -> int:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return dist.get_rank()


# For each shared parameter the ranks that hold it, first holder first: stages run against ranks, so the first is the highest.
HOLDERS = ((2, 0), (2, 1, 0), (1, 0), (2, 0))


def own_copy(index: int, rank: int) -> nn.Parameter:
    """A rank's copy before the copies are made equal: other numbers on every rank."""
    generator = torch.Generator().manual_seed(10 * index + rank)
    return nn.Parameter(torch.randn(2, 3, generator=generator))


def own_gradient(index: int, rank: int) -> Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(1000 + 10 * index + rank))


def share(absent: tuple[tuple[int, int], ...] = (), frozen: tuple[int, ...] = ()) -> dict[int, dict[str, Any]]:
    """Runs on every rank: what each of its copies is afterwards. ``absent``: (parameter, rank) without a gradient."""
    rank = start()
    mine = {index: own_copy(index, rank) for index, ranks in enumerate(HOLDERS) if rank in ranks}
    originals = dict(mine)
    for index in frozen:
        if index in mine:
            mine[index].requires_grad_(False)
    topology = make_topology(torch.device("cpu"))  # has the groups
    shared = SharedParameters([(ranks, mine.get(index)) for index, ranks in enumerate(HOLDERS)], topology)
    with shared.summed_gradients():
        for index, parameter in mine.items():
            if (index, rank) not in absent:
                parameter.grad = own_gradient(index, rank)
    return {
        index: {
            "value": parameter.detach().clone(),
            "gradient": None if parameter.grad is None else parameter.grad.clone(),
            "secondary": shared.is_secondary(parameter),
            "same object": parameter is originals[index],
        }
        for index, parameter in mine.items()
    }


def test_copies_start_with_the_first_holders_values(ranks: Callable[[int], RankPool]) -> None:
    results = ranks(3).run(share)
    for index, holders in enumerate(HOLDERS):
        for rank in holders:
            torch.testing.assert_close(results[rank][index]["value"], own_copy(index, holders[0]).detach(), rtol=0, atol=0)
            assert results[rank][index]["same object"]


def test_gradients_are_summed_over_the_copies(ranks: Callable[[int], RankPool]) -> None:
    results = ranks(3).run(share)
    for index, holders in enumerate(HOLDERS):
        expected = torch.stack([own_gradient(index, rank) for rank in holders]).sum(0)
        found = [results[rank][index]["gradient"] for rank in holders]
        torch.testing.assert_close(found[0], expected)
        # Copies stay equal only while their gradients are, to the last bit.
        for other in found[1:]:
            torch.testing.assert_close(other, found[0], rtol=0, atol=0)


def test_the_first_holder_counts_and_the_others_are_secondary(ranks: Callable[[int], RankPool]) -> None:
    results = ranks(3).run(share)
    for index, holders in enumerate(HOLDERS):
        assert [results[rank][index]["secondary"] for rank in holders] == [False] + [True] * (len(holders) - 1)


def test_a_copy_without_a_gradient_takes_the_others(ranks: Callable[[int], RankPool]) -> None:
    results = ranks(3).run(share, absent=((0, 2), (1, 0), (1, 1)))
    for rank in HOLDERS[0]:
        torch.testing.assert_close(results[rank][0]["gradient"], own_gradient(0, 0), rtol=0, atol=0)
    for rank in HOLDERS[1]:
        torch.testing.assert_close(results[rank][1]["gradient"], own_gradient(1, 2), rtol=0, atol=0)


def test_a_parameter_without_a_gradient_on_any_rank_gets_none(ranks: Callable[[int], RankPool]) -> None:
    """On one device an optimizer skips it; a gradient of zeros would have AdamW decay it all the same."""
    results = ranks(3).run(share, absent=tuple((0, rank) for rank in HOLDERS[0]))
    assert [results[rank][0]["gradient"] for rank in HOLDERS[0]] == [None, None]


def accumulate() -> list[float]:
    """Runs on every rank: the gradient of a parameter that both copies train in each of two batches."""
    parameter = nn.Parameter(torch.ones(1)) if start() < 2 else None
    topology = make_topology(torch.device("cpu"))
    shared = SharedParameters([((1, 0), parameter)], topology)
    for _ in range(2):
        with shared.summed_gradients():
            if parameter is not None:
                (parameter * 3).sum().backward()
    return [] if parameter is None or parameter.grad is None else parameter.grad.tolist()


def test_gradients_of_earlier_batches_are_summed_once(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(3).run(accumulate) == [[12.0], [12.0], []]


def test_a_frozen_parameter_is_shared_but_has_no_gradient_to_sum(ranks: Callable[[int], RankPool]) -> None:
    results = ranks(3).run(share, absent=tuple((3, rank) for rank in HOLDERS[3]), frozen=(3,))
    for rank in HOLDERS[3]:
        assert results[rank][3]["gradient"] is None
        torch.testing.assert_close(results[rank][3]["value"], own_copy(3, 2).detach(), rtol=0, atol=0)


# ------------------------------------------------------------------ clipping, over three ranks

# Parameters of a model, by the ranks that hold them; "tied" is on two.
PLACES = {"tied": (2, 0), "first": (2,), "middle": (1,), "also middle": (1,), "unused": (1,), "last": (0,)}


def gradient_of(name: str, changed: dict[str, Any]) -> Tensor | None:
    """A copy of its own: tensors that are sent to the ranks are in memory that all share, and clipping works in place."""
    if name in changed:
        return None if changed[name] is None else changed[name].clone()
    return None if name == "unused" else torch.randn(4, 2, generator=torch.Generator().manual_seed(sum(map(ord, name))))


def clipped_whole(max_norm: float, changed: dict[str, Any]) -> tuple[float, dict[str, Tensor | None]]:
    """What torch finds and leaves when it clips all parameters in one list."""
    whole = {name: nn.Parameter(torch.zeros(4, 2)) for name in PLACES}
    for name, parameter in whole.items():
        parameter.grad = gradient_of(name, changed)
    norm = torch.nn.utils.clip_grad_norm_(whole.values(), max_norm)
    return float(norm), {name: parameter.grad for name, parameter in whole.items()}


def assert_gradient(actual: Tensor | None, expected: Tensor | None, name: str) -> None:
    assert (actual is None) == (expected is None), name
    if actual is not None:
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0, equal_nan=True, msg=name)


def clip(max_norm: float, changed: dict[str, Any]) -> tuple[float, dict[str, Tensor | None]]:
    """Runs on every rank: the norm that it found, and its gradients after clipping."""
    rank = start()
    mine = {name: nn.Parameter(torch.zeros(4, 2)) for name, places in PLACES.items() if rank in places}
    topology = make_topology(torch.device("cpu"))
    shared = SharedParameters([(PLACES["tied"], mine.get("tied"))], topology)
    for name, parameter in mine.items():
        parameter.grad = gradient_of(name, changed)
    # Any iterable will do: Lightning's ``main_params`` is a generator.
    norm = clip_by_global_norm((parameter for parameter in mine.values()), max_norm, shared, topology)
    return float(norm), {name: parameter.grad for name, parameter in mine.items()}


@pytest.mark.parametrize(
    ("max_norm", "changed"),
    [
        (0.5, {}),
        (1e6, {}),
        (0.5, {"middle": None, "also middle": None}),
        (2.0, {"tied": torch.full((4, 2), 100.0)}),
        (0.5, dict.fromkeys(PLACES)),
        (0.5, {name: torch.zeros(4, 2) for name in PLACES}),
    ],
    ids=["clipped", "small enough", "a rank without gradients", "tied is largest", "no gradients", "all zero"],
)
def test_clipping_is_that_of_the_whole_list(ranks: Callable[[int], RankPool], max_norm: float, changed: dict[str, Any]) -> None:
    expected_norm, expected = clipped_whole(max_norm, changed)
    for norm, gradients in ranks(3).run(clip, max_norm, changed):
        assert norm == pytest.approx(expected_norm, rel=1e-6)
        for name, gradient in gradients.items():
            assert_gradient(gradient, expected[name], name)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_on_one_rank_shows_on_all(ranks: Callable[[int], RankPool], bad: float) -> None:
    """As with torch's own clipping: a diverged stage must not be hidden by clipping the others as if nothing were."""
    changed = {"middle": torch.full((4, 2), bad)}
    _, expected = clipped_whole(0.5, changed)
    for norm, gradients in ranks(3).run(clip, 0.5, changed):
        assert not math.isfinite(norm)
        for name, gradient in gradients.items():
            assert_gradient(gradient, expected[name], name)


def test_copies_stay_equal_to_the_last_bit_when_clipped(ranks: Callable[[int], RankPool]) -> None:
    results = ranks(3).run(clip, 0.5, {})
    torch.testing.assert_close(results[0][1]["tied"], results[2][1]["tied"], rtol=0, atol=0)
