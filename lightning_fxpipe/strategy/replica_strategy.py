"""Numbers of processes: to user code how many replicas they are, to the launcher how many there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed.distributed_c10d as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from lightning_fxpipe._compat.device_mesh import set_device_mesh
from lightning_fxpipe._compat.lightning import set_rank_zero_only
from lightning_fxpipe.distributed.agreement import of_last_stage
from lightning_fxpipe.distributed.failure import has_failed
from lightning_fxpipe.distributed.replica import Replica
from lightning_fxpipe.distributed.replica_tensors import broadcast_among_replicas, gathered, reduced, voted
from lightning_fxpipe.distributed.topology import Replicas, Topology
from lightning_fxpipe.distributed.values import broadcast_object

Broadcast = TypeVar("Broadcast")


if TYPE_CHECKING:
    from lightning.pytorch.strategies import ParallelStrategy as Base
else:
    Base = object  # that of the Lightning that the strategy is for follows in the order of bases


class ReplicaStrategy(Base):
    """The part of ``FxPipeStrategy`` about processes.

    The Trainer takes ``trainer.world_size``, ``num_devices``, ``num_nodes`` and ``global_rank`` from its strategy.
    """

    def __init__(self) -> None:
        self._num_machines = 1
        self._topology: Topology | None = None
        self._replica: Replica | None = None
        self._averages = True  # over the replicas, after a backward pass
        super().__init__()

    @property
    def topology(self) -> Topology:
        """This rank's place in its pipeline, once processes have started."""
        if self._topology is None:
            raise RuntimeError("The process groups are not available before the strategy's setup_environment.")
        return self._topology

    @property
    def device_mesh(self) -> DeviceMesh:
        """The ranks, by ``"data_parallel"`` (replicas) and ``"pipeline"`` (places, in the order of the stages)."""
        return self.topology.device_mesh

    def offer_mesh(self, module: Any) -> Callable[[], None]:
        """Makes the mesh a LightningModule's ``self.device_mesh``, as Lightning's ModelParallelStrategy does.

        Returns:
            What takes it away again.
        """
        set_device_mesh(module, self.device_mesh)
        return partial(set_device_mesh, module, None)

    @property
    def replica(self) -> Replica:
        """The ranks as user code sees them, once processes have started."""
        assert self._replica is not None
        return self._replica

    def name_profile(self, trainer: Any) -> None:
        """Tells the Trainer's profiler which process this is; the Trainer takes the only replica for the only process, whose
        profile needs no name of its own.
        """
        local_rank = self.local_rank if self.topology.num_ranks > 1 else None
        trainer.profiler.setup(stage=trainer.state.fn, local_rank=local_rank, log_dir=trainer.log_dir)

    @property
    @override
    def root_device(self) -> torch.device:
        assert self._parallel_devices is not None
        return self._parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this machine, one for each device."""
        return len(self._parallel_devices) if self._parallel_devices is not None else 0

    @property
    def replicas(self) -> Replicas:
        """The pipelines that train on different batches; one as long as no processes have started."""
        return Replicas() if self._topology is None else self._topology.replicas

    # ------------------------------------------------------------------ what the Trainer tells user code

    @property
    @override
    def world_size(self) -> int:
        return self.replicas.count  # the ranks of one pipeline are one replica

    @property
    @override
    def parallel_devices(self) -> list[torch.device] | None:
        return self._parallel_devices and [self.root_device] * self.replicas.count

    @parallel_devices.setter
    def parallel_devices(self, parallel_devices: list[torch.device] | None) -> None:
        self._parallel_devices = parallel_devices

    @property
    def num_nodes(self) -> int:
        """Machines that a replica's batch is multiplied by: those of all replicas are among ``parallel_devices``."""
        return 1

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_machines = num_nodes

    @property
    @override
    def global_rank(self) -> int:
        if self._replica is not None and (self._replica.is_computing or self._replica.is_preparing):
            return self.replicas.index
        return self._own_number

    @property
    def _own_number(self) -> int:
        # Those that end a step are numbered as replicas are, so that code for rank r < world_size runs once for each.
        return super().global_rank if self._topology is None else self._topology.rank_to_users

    @property
    @override
    def is_global_zero(self) -> bool:
        # Where data is made all ranks have the replica's number, and what is written is written once all the same.
        is_preparing = self._replica is not None and self._replica.is_preparing
        return (self._own_number if is_preparing else self.global_rank) == 0

    @property
    def is_distributed(self) -> bool:
        """True if data is distributed, for which Lightning asks this: all ranks of one pipeline get the same."""
        return self.replicas.are_several

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.replicas.count, "rank": self.replicas.index}

    # ------------------------------------------------------------------ ranks

    def set_world_ranks(self) -> None:
        """Tells the environment this process's rank; the Trainer calls it as soon as it is made, and every run again."""
        assert self.cluster_environment is not None
        rank = self.node_rank * self.num_processes + self.local_rank
        self.cluster_environment.set_global_rank(rank)
        self.cluster_environment.set_world_size(self._num_machines * self.num_processes)
        set_rank_zero_only(rank)

    @property
    def _others_answer(self) -> bool:
        """True if there are other ranks that come here, too, before any failure of the run."""
        is_computing = self._replica is not None and self._replica.is_computing  # a step comes to its end on one rank only
        return dist.is_initialized() and not is_computing and not has_failed()

    @property
    def _replicas_answer(self) -> bool:
        """True if user code runs to which the ranks with the same stages in other replicas come, too."""
        is_running = self._replica is not None and (self._replica.is_computing or self._replica.is_acting)
        return dist.is_initialized() and is_running and self.replicas.are_several and not has_failed()

    @property
    def _everyone(self) -> dist.ProcessGroup | None:
        """For messages between CPUs, for which the host need not wait for its device."""
        return None if self._topology is None else self._topology.everyone

    @property
    def _is_in_hook(self) -> bool:
        """True in user code that not every rank of the pipeline need run, such as a hook with ``if trainer.is_global_zero``."""
        return dist.is_initialized() and self._replica is not None and self._replica.is_acting and not has_failed()

    @override
    def barrier(self, name: str | None = None) -> None:
        if self._is_in_hook:
            self.reduce_boolean_decision(True)
        elif self._others_answer:
            dist.barrier(self._everyone)

    @override
    def broadcast(self, obj: Broadcast, src: int = 0) -> Broadcast:
        if self._is_in_hook:
            obj = self.replica.shared_value(obj)
        if self._is_in_hook or not self._others_answer:
            return broadcast_among_replicas(obj, self.replicas, src) if self._replicas_answer else obj
        if self.replicas.are_several:
            src *= self.topology.num_ranks  # to users the ranks are the replicas
        return cast(Broadcast, broadcast_object(obj, src, self._everyone))

    def broadcast_in_pipeline(self, obj: Broadcast) -> Broadcast:
        """The object of the rank with the last stage, on the ranks of its pipeline."""
        return of_last_stage(obj, self.topology) if self._others_answer else obj

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if self._is_in_hook:
            decision = self.replica.shared_value(decision)
        if self._is_in_hook or not self._others_answer:
            return voted(decision, self.replicas, all=all) if self._replicas_answer else decision
        votes = torch.tensor(int(decision), device="cpu")
        dist.all_reduce(votes, group=self._everyone)
        return int(votes) == dist.get_world_size() if all else int(votes) > 0

    @override
    def reduce(self, tensor: Tensor | Any, group: Any | None = None, reduce_op: Any = "mean") -> Tensor | Any:
        """Over the replicas: the ranks of one pipeline have the same. Called by the ranks of all replicas that have a stage."""
        return reduced(tensor, self.replicas, group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """The tensors of all replicas, along a new first dimension; with one replica the tensor itself, as on one device."""
        return gathered(tensor, self.replicas, group, sync_grads=sync_grads)

    # ------------------------------------------------------------------ gradients of replicas

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """In the block gradients are accumulated, and not averaged over the replicas."""
        before, self._averages = self._averages, False
        try:
            yield
        finally:
            self._averages = before
