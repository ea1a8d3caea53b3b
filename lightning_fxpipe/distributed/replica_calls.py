"""Collectives of user code among several replicas: torch's own, with the group of the replicas in place of the default one.

Each rank of a pipeline talks to those that have the same stages in the other replicas. Where code acts on all ranks of a
pipeline, as hooks do, each gives what the one with the last stage would give, so all get the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed.distributed_c10d as dist
from torch import Tensor

from lightning_fxpipe._compat.modes import makes_fakes, unwatched_torch
from lightning_fxpipe._compat.torch import FakeTensor
from lightning_fxpipe.distributed.replica_tensors import (
    all_reduce,
    broadcast,
    check_may_talk,
    exchanged,
    gathered_with_gradients,
    reduced_with_gradients,
)
from lightning_fxpipe.distributed.topology import Replicas
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.user_code.frames import user_source

# Arguments with what a rank gives, by their names in torch's functions; what is a list is given as a whole.
_GIVEN = ("tensor", "tensors", "input", "input_tensor", "input_list", "input_tensor_list", "scatter_list", "obj")
_GIVEN_LISTS = ("scatter_object_input_list",)
# With what it gets, an entry for each replica.
_LISTS = ("tensor_list", "gather_list", "object_gather_list")
# Where torch takes global rank 0 when nothing is said.
_FROM_OR_TO_FIRST = ("broadcast_object_list", "gather", "scatter", "gather_object", "scatter_object_list")
_WITH_GRADIENTS = "torch.distributed.nn.functional"
# The others take ranks of a group for global ones, there or in their backward pass (torch 2.13, on CPUs).
_SUITED = ("all_gather", "all_reduce")
# Those that a step may have between calls of its model.
_IN_CALLS = ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "_all_gather_base")
_REFUSED = ("new_subgroups", "new_subgroups_by_enumeration")


class ReplicaCalls:
    """Runs functions of ``torch.distributed`` among the replicas.

    Args:
        replicas: The replicas.
        share: Gives the ranks of a pipeline what the one with the last stage gives, where code acts; elsewhere its argument.
    """

    def __init__(self, replicas: Replicas, share: Callable[[Any], Any]) -> None:
        self._replicas = replicas
        self._share = share

    def run(self, original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Calls the function. Called by the ranks with the same stages, in all replicas.

        Args:
            original: The function of torch.
            arguments: Those that user code has given, by name.

        Raises:
            UnsupportedError: It cannot be done in a group of the replicas.
        """
        name, has_gradients = original.__name__, original.__module__ == _WITH_GRADIENTS
        if name in _REFUSED or (has_gradients and name not in _SUITED):
            raise UnsupportedError(
                "User code calls a collective that replicas of a pipeline do not support.",
                where=user_source(),
                observed=f"{original.__module__}.{name}",
                expected="collectives over all replicas; if differentiable, all_gather or all_reduce",
                todo="Use one of these collectives.",
            )
        check_may_talk()
        if has_gradients and name == "all_gather":
            return tuple(gathered_with_gradients(arguments["tensor"], self._replicas))
        if has_gradients:
            return reduced_with_gradients(arguments["tensor"], self._replicas, arguments.get("op", dist.ReduceOp.SUM))
        if name in _IN_CALLS:
            return self._in_calls(name, self._shared(arguments))
        # One replica may record a step alone, as for a batch of another shape.
        if makes_fakes() or any(isinstance(tensor, FakeTensor) for tensor in _tensors(arguments.values())):
            return self._recorded(name, arguments)
        return original(**self._of_group(original, self._shared(arguments)))

    def _in_calls(self, name: str, arguments: dict[str, Any]) -> Any:
        """A collective of tensors of which those that watch a step see the same calls when it is recorded and when it runs:
        it may be between calls of the model, and then belongs to a stage.
        """
        given: Tensor = arguments["input_tensor" if "input_tensor" in arguments else "tensor"]
        if name == "all_reduce":
            found = exchanged(all_reduce, given, self._replicas, arguments.get("op", dist.ReduceOp.SUM))
            given.detach().copy_(found)
        elif name == "broadcast":
            source = arguments.get("group_src")
            found = exchanged(broadcast, given, self._replicas, arguments["src"] if source is None else source)
            given.detach().copy_(found)
        else:
            found = gathered_with_gradients(given.detach(), self._replicas)
            if name == "all_gather":
                for taken, part in zip(arguments["tensor_list"], found.unbind(), strict=True):
                    taken.detach().copy_(part)
            else:
                taken = arguments["output_tensor"]
                taken.detach().copy_(found.reshape(taken.shape))
        return Done() if arguments.get("async_op") else None

    def _of_group(self, original: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments, where ranks are those of replicas."""
        found = {**arguments, "group": self._replicas.group}
        for end in ("src", "dst"):
            if f"group_{end}" in inspect.signature(original).parameters:
                rank = found.pop(end, None)
                default = 0 if original.__name__ in _FROM_OR_TO_FIRST else None
                if found.get(f"group_{end}") is None:
                    found[f"group_{end}"] = default if rank is None else rank
        return found

    def _shared(self, arguments: dict[str, Any]) -> dict[str, Any]:
        found = dict(arguments)
        for name, value in arguments.items():
            if name == "obj" or name in _GIVEN_LISTS:
                found[name] = self._share(value)
            elif name == "object_list" and "obj" not in arguments:  # sent and received
                value[:] = self._share([*value])
            elif name in _GIVEN:
                for tensor in _tensors([value]):
                    with unwatched_torch(), torch.no_grad():
                        shared = self._share(tensor.detach())
                        if shared is not tensor and not _is_same(shared, tensor):
                            tensor.copy_(shared)
        return found

    def _recorded(self, name: str, arguments: dict[str, Any]) -> Any:
        """Returns tensors like a collective's results while a step is recorded: with the right shapes and kinds, from this
        replica's.
        """
        given: Any = next((arguments[key] for key in _GIVEN if arguments.get(key) is not None), None)
        for key in (*_LISTS, *(["object_list"] if "obj" in arguments else [])):
            for index, taken in enumerate(arguments.get(key) or ()):
                if isinstance(taken, Tensor):
                    taken.copy_(given)
                else:
                    arguments[key][index] = given
        if name == "scatter_object_list":
            arguments["scatter_object_output_list"][0] = (arguments.get("scatter_object_input_list") or [None])[0]
        return Done() if arguments.get("async_op") or name in ("isend", "irecv") else None


class Done:
    """Handle of a collective with ``async_op=True``, which has finished already."""

    def wait(self, timeout: Any = None) -> bool:
        """Does not wait."""
        return True

    def is_completed(self) -> bool:
        """Yes."""
        return True

    is_success = is_completed

    def get_future(self) -> torch.futures.Future[None]:
        """One that is over, too."""
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    found = []
    for value in values:
        entries = value if isinstance(value, (list, tuple)) else [value]
        found += [entry for entry in entries if isinstance(entry, Tensor)]
    return found


def _is_same(one: Any, other: Tensor) -> bool:
    return isinstance(one, Tensor) and one.data_ptr() == other.data_ptr()
