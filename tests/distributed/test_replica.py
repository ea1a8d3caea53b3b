"""Collectives of user code are those of one replica; a call with a group of ours is the real one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as with_gradients
from torch.distributed import distributed_c10d as real

from lightning_fxpipe.distributed.replica import Replica
from lightning_fxpipe.errors import UnsupportedError


@pytest.fixture
def replica() -> Iterator[Replica]:
    """Rank 0's values are sevens."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    replica = Replica(lambda value: torch.full_like(value, 7) if isinstance(value, torch.Tensor) else 7)
    with replica.answering():
        yield replica
    assert not replica.is_computing
    dist.destroy_process_group()


def of(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def test_there_is_one_replica(replica: Replica) -> None:
    for context in (replica.computing(), replica.acting()):
        with context:
            assert (dist.get_world_size(), dist.get_rank(), dist.get_world_size(dist.group.WORLD)) == (1, 0, 1)
            assert dist.get_world_size(dist.new_group()) == 1


def test_code_that_computes_goes_the_way_of_one_device_and_lightning_does_not(replica: Replica) -> None:
    assert dist.is_initialized()
    with replica.computing():
        assert not dist.is_initialized()
        with replica.acting():
            assert dist.is_initialized()


def all_gather(x: torch.Tensor) -> torch.Tensor:
    out = [torch.zeros_like(x)]
    dist.all_gather(out, x)
    return out[0]


def into(function: Callable[..., Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    def call(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        function(out, x)
        return out

    return call


def in_place(function: Callable[..., Any], *args: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def call(x: torch.Tensor) -> torch.Tensor:
        function(x, *args)
        return x

    return call


def waited(x: torch.Tensor) -> torch.Tensor:
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    work.wait()
    assert work.is_completed()
    return x


COLLECTIVES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all_reduce": in_place(lambda x: dist.all_reduce(x)),
    "all_reduce max": in_place(lambda x: dist.all_reduce(x, op=dist.ReduceOp.MAX)),
    "asynchronous": waited,
    "reduce": in_place(lambda x: dist.reduce(x, dst=0)),
    "broadcast": in_place(lambda x: dist.broadcast(x, src=0)),
    "all_gather": all_gather,
    "all_gather_into_tensor": into(lambda out, x: dist.all_gather_into_tensor(out, x)),
    "gather": into(lambda out, x: dist.gather(x, [out])),
    "scatter": into(lambda out, x: dist.scatter(out, [x])),
    "reduce_scatter": into(lambda out, x: dist.reduce_scatter(out, [x])),
    "reduce_scatter_tensor": into(lambda out, x: dist.reduce_scatter_tensor(out, x)),
    "all_to_all": into(lambda out, x: dist.all_to_all([out], [x])),
    "all_to_all_single": into(lambda out, x: dist.all_to_all_single(out, x)),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_gives_the_ranks_own_value_where_code_computes_and_rank_zeros_where_it_acts(
    replica: Replica, name: str
) -> None:
    with replica.computing():
        assert COLLECTIVES[name](of(1, 2)).tolist() == [1, 2]
    with replica.acting():
        assert COLLECTIVES[name](of(1, 2)).tolist() == [7, 7]
    with replica.acting(lambda value: value):
        assert COLLECTIVES[name](of(1, 2)).tolist() == [1, 2]


def test_what_is_gathered_is_rank_zeros_also_where_another_rank_gathers(replica: Replica) -> None:
    shared: list[torch.Tensor] = []
    with replica.acting(lambda value: shared.append(value) or value):  # type: ignore[func-returns-value]
        dist.gather(of(1, 2), dst=0)
        dist.gather(of(3, 4), [])
    assert [value.tolist() for value in shared] == [[1, 2], [3, 4]]


def test_objects_are_gathered_from_one_replica(replica: Replica) -> None:
    for context, expected in ((replica.computing(), "a"), (replica.acting(), 7)):
        with context:
            gathered: list[Any] = [None]
            dist.all_gather_object(gathered, "a")
            assert gathered == [expected]


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce", "broadcast", "gather"])
def test_functions_with_gradients_pass_them_on(replica: Replica, name: str) -> None:
    x = of(1, 2).requires_grad_()
    arguments = (0,) if name in ("broadcast", "reduce") else ()
    result = getattr(with_gradients, name)(x, *arguments)
    (result[0] if isinstance(result, tuple) else result).mul(3).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3, 3]


def test_names_that_modules_have_imported_before_answer_too(monkeypatch: pytest.MonkeyPatch) -> None:
    users: Any = ModuleType("users")
    users.get_world_size = real.get_world_size
    monkeypatch.setitem(sys.modules, "users", users)
    with Replica(lambda value: value).answering():
        assert users.get_world_size() == 1  # without any process group
    assert users.get_world_size is dist.get_world_size is real.get_world_size


def test_another_group_is_the_real_one(replica: Replica) -> None:
    group = real.new_group([0])
    with replica.acting():
        x = of(1, 2)
        dist.all_reduce(x, group=group)
        assert x.tolist() == [1, 2]  # not rank 0's
        assert dist.get_world_size(group) == 1


def test_lightning_makes_groups_and_destroys_them_and_user_code_does_not(replica: Replica) -> None:
    group = dist.new_group([0])
    assert group is not dist.group.WORLD
    dist.destroy_process_group(group)
    with replica.acting():
        dist.destroy_process_group()
    assert dist.is_initialized()


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: dist.all_gather([of(0), of(0)], of(1)), "a list of 2"),
        (lambda: dist.new_group([0, 1]), r"new_group\(\[0, 1\]\)"),
        (lambda: dist.send(of(1), 1), "distributed.send"),
        (lambda: dist.recv(of(1)), "distributed.recv"),
    ],
)
def test_what_a_single_replica_cannot_do_is_refused(replica: Replica, call: Callable[[], Any], reason: str) -> None:
    with replica.computing(), pytest.raises(UnsupportedError, match=rf"(?s)other replicas.*test_replica\.py:\d+.*{reason}"):
        call()


def test_all_is_torchs_own_afterwards() -> None:
    before = {name: getattr(dist, name) for name in ("all_reduce", "get_rank", "is_initialized", "send", "new_group")}
    with Replica(lambda value: value).answering():
        assert all(getattr(dist, name) is not value for name, value in before.items())
        assert all(getattr(real, name) is value for name, value in before.items())
    assert all(getattr(dist, name) is value for name, value in before.items())


def test_what_the_pipeline_runs_with_sees_the_ranks_also_while_a_step_runs(replica: Replica) -> None:
    """torch.distributed.pipelining took itself for a single process, and had no group."""
    torchs = {"__name__": "torch.distributed.pipelining.schedules", "dist": dist}
    exec("def asks(): return dist.is_initialized()", torchs)
    with replica.computing():
        assert torchs["asks"]()  # type: ignore[operator]
        assert not dist.is_initialized()


def test_what_is_shared_in_a_block_is_not_shared_after_it() -> None:
    calls: list[str] = []

    def named(name: str) -> Callable[[Any], Any]:
        return lambda value: (calls.append(name), value)[1]

    replica = Replica(named("together"))
    with replica.acting():
        replica.shared_value(1)
        with replica.acting(named("own")):
            replica.shared_value(2)
        replica.shared_value(3)
    assert calls == ["together", "own", "together"]


def test_a_rank_has_a_number_of_its_own_where_it_acts_only(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real, "get_rank", lambda: 3)
    with replica.acting():
        assert dist.get_rank() == 3
        with replica.computing():
            assert dist.get_rank() == 0
        assert dist.get_rank() == 3
        assert not replica.is_computing
    assert dist.is_initialized()
