"""Gradients, states and values over replicas, beside what torch and Lightning make of them where the replicas are the world."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _sync_ddp
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather as all_gather_with_gradients

from lightning_fxpipe._compat.torch import FakeWorld, patched_attributes
from lightning_fxpipe.distributed.replica_calls import ReplicaCalls
from lightning_fxpipe.distributed.replica_tensors import gathered, reduced
from lightning_fxpipe.distributed.topology import Placement, Replicas, make_topology
from lightning_fxpipe.stages import replicas as stage_replicas
from lightning_fxpipe.stages.replicas import average_gradients, share_tensors
from tests.ranks.pool import RankPool
from tests.ranks.runs import assert_same

Ranks = Callable[[int], RankPool]


def of_one_stage() -> Replicas:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    topology = make_topology(torch.device("cpu"), placement=Placement(num_ranks=1))
    _kept.append(topology)
    return topology.replicas


_kept: list[Any] = []  # groups end with their topology


def made(rank: int, count: int) -> list[nn.Parameter]:
    """Parameters of two kinds; some have a gradient in all, some in one, some in no replica; one is not trained."""
    parameters = []
    for index in range(count):
        dtype = {0: torch.float64, 2: torch.bfloat16, 3: torch.float16}.get(index % 5, torch.float32)
        parameter = nn.Parameter(torch.zeros(index % 4 + 1, 3, dtype=dtype), requires_grad=index != 7)
        if index % 3 == 0 or (index % 3 == 1 and rank == 1):
            parameter.grad = torch.full_like(parameter, 1.0 + index + 10 * rank)
        parameters.append(parameter)
    parameters[0].grad = parameters[0].grad.mT.contiguous().mT if parameters[0].grad is not None else None
    return parameters


def averaged_sparse() -> tuple[Tensor, Tensor]:
    """Runs on every rank: the gradients of a sparse embedding by replicas and by DDP."""
    replicas = of_one_stage()
    found = []
    for by_ddp in (False, True):
        torch.manual_seed(2)
        embedding: Any = nn.Embedding(6, 2, sparse=True)
        called = nn.parallel.DistributedDataParallel(embedding) if by_ddp else embedding
        called(torch.tensor([1, 1, 3 + replicas.index])).square().sum().backward()
        if not by_ddp:
            average_gradients(embedding.parameters(), replicas)
        assert embedding.weight.grad.is_sparse
        found.append(embedding.weight.grad.to_dense())
    return found[0], found[1]


def test_sparse_gradients_are_averaged_as_by_ddp(ranks: Ranks) -> None:
    for found, expected in ranks(2).run(averaged_sparse):
        assert_same(found, expected, "sparse")


def averaged(bucket_bytes: int) -> list[Any]:
    """Runs on every rank."""
    replicas = of_one_stage()
    parameters = made(replicas.index, 20)
    with patched_attributes((stage_replicas, "_BUCKET_BYTES", bucket_bytes)):
        average_gradients(parameters, replicas)
    return [parameter.grad for parameter in parameters]


@pytest.mark.parametrize("bucket_bytes", [1, 100, 10**6])
def test_gradients_are_the_mean_and_none_where_there_is_none(ranks: Ranks, bucket_bytes: int) -> None:
    each = [made(rank, 20) for rank in range(2)]
    expected = []
    for one, other in zip(*each, strict=True):
        if one.grad is None and other.grad is None:
            expected.append(None)
        else:
            expected.append(sum(p.grad if p.grad is not None else torch.zeros_like(p) for p in (one, other)) / 2)
    assert sum(gradient is None for gradient in expected) > 3
    for rank, found in enumerate(ranks(2).run(averaged, bucket_bytes)):
        expected[7] = each[rank][7].grad  # not trained
        assert_same(found, expected, "gradients")


def shared() -> list[Tensor]:
    """Runs on every rank."""
    replicas = of_one_stage()
    tensors = [torch.full((3,), 2 + replicas.index), torch.randn(4), torch.randn(2, 2).mT, torch.zeros(0), torch.randn(())]
    meta = torch.empty(3, device="meta")
    share_tensors([*tensors, meta], replicas)
    return tensors


def test_tensors_are_those_of_the_first_replica(ranks: Ranks) -> None:
    first, second = ranks(2).run(shared)
    assert_same(second, first, "shared")
    assert first[0].tolist() == [2, 2, 2]


def values() -> list[tuple[Any, Any]]:
    """Runs on every rank: pairs of what is found and what Lightning and torch have where the replicas are the world."""
    replicas = of_one_stage()
    pairs: list[tuple[Any, Any]] = []
    for operation in ("mean", "avg", "sum", "MAX", "min", "product", dist.ReduceOp.MAX):
        for value in (torch.tensor([2.0, 3.0 + replicas.index]), torch.tensor([2, 4 + replicas.index])):
            mine, theirs = value.clone(), value.clone()
            returned = reduced(mine, replicas, None, operation)
            pairs.append((returned, _sync_ddp(theirs, reduce_op=operation)))
            pairs.append((mine, theirs))  # in its place
    weights = torch.tensor([1.0, 10.0 + replicas.index])
    leaves = [torch.tensor([1.0 + replicas.index, 2.0], requires_grad=True) for _ in range(2)]
    mine, theirs = gathered(leaves[0], replicas, sync_grads=True), torch.stack(all_gather_with_gradients(leaves[1]))
    for result in (mine, theirs):
        (result.square().sum(0) * weights).sum().backward()
    pairs += [(mine.detach(), theirs.detach()), (leaves[0].grad, leaves[1].grad)]
    pairs.append((gathered(weights, replicas), theirs.new_tensor([[1.0, 10.0], [1.0, 11.0]])))
    pairs.append((reduced("text", replicas, None, "mean"), "text"))
    return pairs


def test_values_are_as_under_ddp(ranks: Ranks) -> None:
    for pairs in ranks(2).run(values):
        for found, expected in pairs:
            assert_same(found, expected, "value")


def recorded() -> list[Any]:
    """Runs on every rank: while a step is recorded nothing is sent, and shapes are right."""
    replicas = of_one_stage()
    calls = ReplicaCalls(replicas, lambda value: value)
    world = FakeWorld()
    fake = world.static(torch.ones(2, 3), torch.device("cpu"))
    shapes: list[Any] = []
    if replicas.index == 0:  # the other does not come
        shapes += [gathered(fake, replicas).shape, reduced(fake, replicas, None, "mean").shape]
        outputs = [world.static(torch.zeros(2, 3), torch.device("cpu")) for _ in range(2)]
        calls.run(dist.all_gather, {"tensor_list": outputs, "tensor": fake})
        flat = world.static(torch.zeros(4, 3), torch.device("cpu"))
        assert calls.run(dist.all_gather_into_tensor, {"output_tensor": flat, "input_tensor": fake, "async_op": True}).wait()
        shapes.append([each.shape for each in calls.run(all_gather_with_gradients, {"tensor": fake})])
    return shapes


def test_a_recorded_step_talks_to_nobody(ranks: Ranks) -> None:
    first, _ = ranks(2).run(recorded)
    assert first == [(2, 2, 3), (2, 3), [(2, 3), (2, 3)]]
