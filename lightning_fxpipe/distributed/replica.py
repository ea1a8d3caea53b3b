"""View of user code on a pipeline's processes: one replica, as on one device, or one of several, as under DDP.

A step that scales its loss by ``dist.get_world_size()``, or gathers the embeddings of all replicas, runs on all ranks of a
pipeline, of which only the last comes to its end: what it gathers would be wrong, or the call would wait for ever. So while a
run is on, the functions of ``torch.distributed`` answer for the default process group as those of a group of one. A call with
another group is the real one: torch.distributed.pipelining always names ours. This package itself calls
``torch.distributed.distributed_c10d``, which is the same without the answers.

What computes must do the same on every rank, so it is rank 0 everywhere: the steps, and what makes data. What acts, as a hook
that writes a file, must do so once: there a rank has its own number, and a collective gives every rank rank 0's values.

Where there are several replicas, those are the world: a step is rank r in replica r, and a collective goes from each rank to
those with the same stages in the other replicas (``distributed.replica_calls``).
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed as seen
import torch.distributed.distributed_c10d as real
import torch.distributed.nn.functional as seen_with_gradients
from torch import Tensor

from lightning_fxpipe._compat.torch import patched_attributes
from lightning_fxpipe.distributed.rank_zero import RankZeroValues
from lightning_fxpipe.distributed.replica_calls import Done, ReplicaCalls
from lightning_fxpipe.distributed.topology import Replicas, Topology
from lightning_fxpipe.errors import UnsupportedError, no_end_of_epoch
from lightning_fxpipe.user_code.frames import user_source

# What brings rank 0's value to every rank that comes, and gives the others theirs.
Share = Callable[[Any], Any]

# Modules whose names for the functions are left alone: torch calls itself with groups of ours.
_NOT_USERS = ("torch", "lightning_fxpipe")
# What of torch this package runs its ranks with.
_MACHINERY = ("torch.distributed.pipelining.", "torch.distributed.checkpoint.")
_NO_PARTNER = ("send", "recv", "send_object_list", "recv_object_list", "new_subgroups", "new_subgroups_by_enumeration")
# Those that Lightning needs for itself: it makes a group for its own barriers, and destroys it.
_ONLY_IN_USER_CODE = ("new_group", "destroy_process_group")
# What has an answer without any message.
_QUESTIONS = (*_ONLY_IN_USER_CODE, "get_rank", "get_world_size", "is_initialized", "get_process_group_ranks")
# Collectives of tensors: the arguments with what a rank gives and gets, either of them a tensor or a list with one.
_COLLECTIVES: dict[str, tuple[str, str]] = {
    "all_reduce": ("tensor", "tensor"),
    "reduce": ("tensor", "tensor"),
    "broadcast": ("tensor", "tensor"),
    "all_gather": ("tensor", "tensor_list"),
    "all_gather_into_tensor": ("input_tensor", "output_tensor"),
    "_all_gather_base": ("input_tensor", "output_tensor"),
    "gather": ("tensor", "gather_list"),
    "scatter": ("scatter_list", "tensor"),
    "reduce_scatter": ("input_list", "output"),
    "reduce_scatter_tensor": ("input", "output"),
    "_reduce_scatter_base": ("input", "output"),
    "all_to_all": ("input_tensor_list", "output_tensor_list"),
    "all_to_all_single": ("input", "output"),
}


class _Now(threading.local):
    """State of a thread: user code that computes, user code that acts, or neither, as in one that writes a checkpoint."""

    is_computing = False
    is_acting = False
    is_preparing = False  # which is a way to act


class Replica:
    """Answers for the default process group. Made by every rank of the pipeline.

    Args:
        share: Gives every rank of the pipeline the argument of the one with the last stage. Called by every rank of it.
        topology: This rank's place; None: in the only replica.
    """

    def __init__(self, share: Share, topology: Topology | None = None) -> None:
        self._topology = topology
        self._replicas = Replicas() if topology is None else topology.replicas
        self._now = _Now()
        self._share_together = share
        self._share: Share = _own
        self._zeros = None if topology is None or topology.num_ranks == 1 else RankZeroValues(topology)

    @property
    def is_computing(self) -> bool:
        """True if user code runs in this thread that must do the same on every rank."""
        return self._now.is_computing

    @property
    def is_acting(self) -> bool:
        """True if user code runs in this thread that may do something else on each rank, such as a hook."""
        return self._now.is_acting and not self.is_computing

    @property
    def is_preparing(self) -> bool:
        """True if user code runs that makes data or models, the same on every rank, and may write, which is done once."""
        return self._now.is_preparing and not self.is_computing

    @contextmanager
    def _being(self, *, computing: bool, acting: bool, preparing: bool = False) -> Iterator[None]:
        now = self._now
        before = now.is_computing, now.is_acting, now.is_preparing
        now.is_computing, now.is_acting, now.is_preparing = computing, acting, preparing
        try:
            yield
        finally:
            now.is_computing, now.is_acting, now.is_preparing = before

    def computing(self) -> AbstractContextManager[None]:
        """The block is user code that computes: a step, or what makes its data."""
        return self._being(computing=True, acting=self._now.is_acting)

    def aside(self) -> AbstractContextManager[None]:
        """The block is no user code, in a block that is."""
        return self._being(computing=False, acting=False)

    @contextmanager
    def acting(self, share: Share | None = None, *, preparing: bool = False) -> Iterator[None]:
        """The block is user code that acts, such as a hook; with a ``share`` in place of the one that every rank must call.

        With ``preparing`` it makes data or models as well: all ranks have the replica's number.
        """
        before, self._share = self._share, share or self._share_together
        try:
            with self._being(computing=False, acting=True, preparing=preparing):
                yield
        finally:
            self._share = before

    def computes(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, run by :meth:`computing`."""
        return _run_in(self.computing, function)

    def prepares(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, run by :meth:`acting` with ``preparing``."""
        return _run_in(self._preparing, function)

    @contextmanager
    def _preparing(self) -> Iterator[None]:
        if self._zeros is None or self._now.is_preparing:
            with self.acting(preparing=True):
                yield
            return
        with self.acting(self._zeros.share, preparing=True):
            yield
        self._zeros.end()

    def acts(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, run by :meth:`acting`."""
        return _run_in(self.acting, function)

    def answering(self) -> AbstractContextManager[None]:
        """During the block torch.distributed is what user code sees, also under names that modules have imported before."""
        answers = {name: functools.partial(self._exchange, name) for name in _COLLECTIVES}
        own = (name for name in vars(Replica) if name.startswith("_") and not name.startswith("__"))
        answers |= {name.removeprefix("_"): getattr(self, name) for name in own}
        with_gradients = {name: functools.partial(_with_gradients, name) for name in _COLLECTIVES}
        answers |= {name: functools.partial(_refuse, name) for name in _NO_PARTNER}
        replacements = [
            (owner, name, functools.partial(self._for_default_group, answer))
            for owner, found in ((seen, answers), (seen_with_gradients, with_gradients), (seen.nn, with_gradients))
            for name, answer in found.items()
        ]
        if self._replicas.are_several:
            calls = ReplicaCalls(self._replicas, self.shared_value)
            replacements = [
                (owner, name, replacement if name in _QUESTIONS else functools.partial(self._among_replicas, calls))
                for owner, name, replacement in replacements
            ]
        return replaced_functions(replacements)

    def _for_default_group(self, answer: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        """The function of torch; ``answer`` is called where its group is the default one, with all arguments by name."""

        def call(arguments: dict[str, Any]) -> Any:
            result = answer(**arguments)
            return Done() if arguments.get("async_op") else result

        return self._where_asked(original, call)

    def _among_replicas(self, calls: ReplicaCalls, original: Callable[..., Any]) -> Callable[..., Any]:
        """The function of torch, with the group of the replicas in place of the default one."""
        return self._where_asked(original, functools.partial(calls.run, original))

    def _where_asked(self, original: Callable[..., Any], call: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
        """The function, but ``call`` with all arguments by name where user code calls it with the default group."""
        signature = inspect.signature(original)
        is_everybodys = original.__name__ not in _ONLY_IN_USER_CODE

        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind(*args, **kwargs).arguments
            is_own = arguments.get("group") in (None, seen.group.WORLD)
            asks_for_us = str(sys._getframe(1).f_globals.get("__name__")).startswith(_MACHINERY)
            if not is_own or asks_for_us or not (is_everybodys or self._now.is_acting or self.is_computing):
                return original(*args, **kwargs)
            return call(arguments)

        return run

    # ------------------------------------------------------------------ who and how many

    def _get_rank(self, **_: Any) -> int:
        if not self.is_acting or self.is_preparing:
            return self._replicas.index
        return real.get_rank() if self._topology is None else self._topology.rank_to_users

    def _get_world_size(self, **_: Any) -> int:
        return self._replicas.count

    def _is_initialized(self) -> bool:
        # Code that asks goes its way of one device; Lightning itself must know.
        return (self._replicas.are_several or not self.is_computing) and real.is_initialized()

    def _new_group(self, ranks: Any = None, **_: Any) -> Any:
        """The group of the replicas, which is what the default group stands for."""
        if ranks is not None and [*ranks] != [*range(self._replicas.count)]:
            raise _refusal(f"new_group({[*ranks]})", f"a group of all replicas: new_group(), {self._replicas.count} ranks")
        return seen.group.WORLD

    def _destroy_process_group(self, **_: Any) -> None:
        """Nothing: it is needed until the run has ended."""

    def _get_process_group_ranks(self, **_: Any) -> list[int]:
        return [*range(self._replicas.count)]

    # ------------------------------------------------------------------ collectives

    def _exchange(self, name: str, /, **arguments: Any) -> None:
        """A collective of tensors: what a rank gets is what it gives, and rank 0's where code acts."""
        given, got = (_tensor(arguments.get(argument), name) for argument in _COLLECTIVES[name])
        if got is None:  # as for gather, elsewhere than where things are gathered
            got = given.detach().clone()
        elif given is not None and given is not got:  # for scatter, only where things come from
            got.copy_(given.detach().reshape(got.shape))
        if self.is_acting:
            with torch.no_grad():
                got.copy_(self._share(got.detach().cpu()))

    def shared_value(self, value: Any) -> Any:
        """Rank 0's value where user code acts that all ranks run, or this rank's own."""
        return self._share(value) if self.is_acting else value

    def _barrier(self, **_: Any) -> None:
        self.shared_value(None)

    _monitored_barrier = _barrier

    def _broadcast_object_list(self, object_list: list[Any], **_: Any) -> None:
        object_list[:] = self.shared_value(list(object_list))

    def _all_gather_object(self, object_list: list[Any], obj: Any, **_: Any) -> None:
        _only(object_list, "all_gather_object")
        object_list[0] = self.shared_value(obj)

    def _gather_object(self, obj: Any, object_gather_list: list[Any] | None = None, **_: Any) -> None:
        shared = self.shared_value(obj)
        if object_gather_list:
            _only(object_gather_list, "gather_object")
            object_gather_list[0] = shared

    def _scatter_object_list(
        self, scatter_object_output_list: list[Any], scatter_object_input_list: list[Any] | None = None, **_: Any
    ) -> None:
        mine = _only(scatter_object_input_list, "scatter_object_list") if scatter_object_input_list else None
        scatter_object_output_list[0] = self.shared_value(mine)


def _own(value: Any) -> Any:
    return value


def _run_in(block: Callable[[], AbstractContextManager[None]], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with no_end_of_epoch(getattr(function, "__name__", "a hook")), block():
            return function(*args, **kwargs)

    return run


def replaced_everywhere(
    names: Iterable[str], replacement: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> AbstractContextManager[None]:
    """During the block functions of torch.distributed are what is made of them, under all names that user code may call."""
    owners = (seen, real, seen_with_gradients, seen.nn)
    return replaced_functions((owner, name, replacement) for owner in owners for name in names)


@contextmanager
def replaced_functions(functions: Iterable[tuple[ModuleType, str, Callable[[Any], Any]]]) -> Iterator[None]:
    """Replaces functions of modules, if these have them, by what is made of each, also where users have imported them."""
    replaced: dict[int, tuple[Any, Any]] = {}
    patches: list[tuple[Any, str, Any]] = []
    for owner, name, replacement in functions:
        original = getattr(owner, name, None)
        if original is not None:
            if id(original) not in replaced:
                replaced[id(original)] = original, replacement(original)
            patches.append((owner, name, replaced[id(original)][1]))
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and name.split(".")[0] not in _NOT_USERS:
            for attribute, value in list(vars(module).items()):
                original, new = replaced.get(id(value), (None, None))
                if original is value and original is not None:
                    patches.append((module, attribute, new))
    with patched_attributes(*patches):
        yield


def _with_gradients(name: str, /, **arguments: Any) -> Any:
    """A function of torch.distributed.nn, which returns its result, and passes gradients on."""
    given = arguments["tensors" if name == "scatter" else _COLLECTIVES[name][0]]
    result = (given if isinstance(given, Tensor) else _only(given, name)).clone()
    if name == "_all_gather_base":
        return result.reshape(arguments["output_tensor"].shape)
    return (result,) if name in ("gather", "all_gather", "all_to_all") else result


def _tensor(given: Any, function: str) -> Any:
    """The tensor of a list with one, or the argument itself; None for a list that this rank has not."""
    if given is None or isinstance(given, Tensor):
        return given
    return _only(given, function) if given or function not in ("gather", "scatter") else None


def _only(entries: Any, function: str) -> Any:
    """The only entry of a list that has one for each replica."""
    if len(entries) != 1:
        raise _refusal(f"{function} with a list of {len(entries)}", "a list of one entry, as dist.get_world_size() returns 1")
    return entries[0]


def _refuse(name: str, /, **_: Any) -> None:
    raise _refusal(name, "an operation that a single replica can perform")


def _refusal(observed: str, expected: str) -> UnsupportedError:
    return UnsupportedError(
        "User code communicates with other replicas, but there is only one: the ranks of a pipeline form a single replica.",
        where=user_source(),
        observed=f"torch.distributed.{observed}",
        expected=expected,
        todo="Use torch.distributed.get_world_size() instead of the environment or the number of devices.",
    )
