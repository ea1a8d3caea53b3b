"""Writing checkpoints: whole or not at all, by all ranks together, and in the background on request.

A checkpoint gets its name when every rank has written its part and all of it is on the disk (``atomic``). An error of
one rank is raised on all. In the background, what is written is a copy, and the next save, a load and the end of the run wait
for it.
"""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.distributed_c10d as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import StorageWriter

from lightning_fxpipe._compat.lightning import metadata_filename
from lightning_fxpipe._compat.torch import patched_attributes, tree_map
from lightning_fxpipe.checkpoint.atomic import Replacement
from lightning_fxpipe.checkpoint.checksums import CHECKSUMS_FILE, Checksums, checksum
from lightning_fxpipe.checkpoint.folders import original_errors
from lightning_fxpipe.checkpoint.locations import Location
from lightning_fxpipe.distributed.agreement import gather_values
from lightning_fxpipe.distributed.groups import closed_with
from lightning_fxpipe.distributed.values import identity
from lightning_fxpipe.errors import add_note, text_of

Write = Callable[[Path, "dist.ProcessGroup | None"], None]
"""Writes this rank's part of a checkpoint to a path, with a group for CPU tensors of all ranks."""


class Saver:
    """Saves checkpoints, one after the other. Every rank calls its methods, in the same order.

    Args:
        make_group: Makes a group of all ranks, which the background then has for itself.
    """

    def __init__(self, make_group: Callable[[], dist.ProcessGroup | None]) -> None:
        self._make_group = make_group
        self._group: dist.ProcessGroup | None = None
        self._jobs: list[_Job] = []

    def save(self, path: Path, write: Write, group: dist.ProcessGroup | None) -> None:
        """Saves now, after what is still being written.

        Raises:
            Exception: What failed on any rank, now or in the background; what had the path's name still has it.
        """
        self.wait()
        save_together(path, write, group)

    def start(self, path: Path, write: Write, moment: int) -> None:
        """Saves in the background, after what is still being written.

        Args:
            path: The checkpoint.
            write: Writes this rank's part, from copies that nothing changes any more.
            moment: Of the run. What has been started at an earlier one must be written first: it holds memory.

        Raises:
            Exception: What has failed in the background since the last call.
        """
        self.wait(before=moment)
        if self._group is None:
            self._group = self._make_group()
            closed_with(self, [] if self._group is None else [self._group])
        self._begin(functools.partial(save_together, path, write, self._group), path, moment)

    def wait(self, *, before: int | None = None) -> None:
        """Waits for what has been started, at moments earlier than ``before`` or at all.

        Raises:
            Exception: What has failed.
        """
        waiting = [job for job in self._jobs if before is None or job.moment < before]
        self._jobs = [job for job in self._jobs if job not in waiting]
        for job in waiting:
            job.thread.join()
        for job in waiting:
            if job.error is not None:
                raise job.error

    def abandon(self, seconds: float) -> None:
        """Gives what is being written some time after a failure; it may fail or be left unfinished, without an error."""
        jobs, self._jobs = self._jobs, []
        if jobs:
            jobs[-1].thread.join(seconds)  # which is over after all the others

    def when_saved(self, action: Callable[[], None]) -> None:
        """Calls ``action`` when all that has been started is written; never, where some of it fails."""
        jobs = list(self._jobs)

        def unless_failed() -> None:
            if all(job.error is None for job in jobs):
                action()

        if jobs and jobs[-1].thread.is_alive():
            self._begin(unless_failed, jobs[-1].path, jobs[-1].moment)
        else:
            unless_failed()

    def is_started(self, path: Path) -> bool:
        """Returns True if a path may still be being written; the same on every rank."""
        return any(job.path == path for job in self._jobs)

    def _begin(self, work: Callable[[], None], path: Path, moment: int) -> None:
        self._jobs.append(_Job(work, path, moment, self._jobs[-1] if self._jobs else None))


class _Job:
    """Work in the background for a path, after that of another job.

    Attributes:
        thread: What does it, and holds what it needs.
        error: What it failed with, once it is done.
    """

    def __init__(self, work: Callable[[], None], path: Path, moment: int, previous: _Job | None) -> None:
        self.path, self.moment = path, moment
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, args=(work, previous), name=f"fxpipe-save {path.name}", daemon=True)
        self.thread.start()

    def _run(self, work: Callable[[], None], previous: _Job | None) -> None:
        try:
            if previous is not None:
                previous.thread.join()
            work()
        except BaseException as error:
            self.error = error


# ---------------------------------------------------------------------------------------------------- together


def save_together(path: Path, write: Write, group: dist.ProcessGroup | None) -> None:
    """Has every rank write its part, and gives the checkpoint its name when all have. Called by every rank.

    Raises:
        Exception: What failed on any rank, on every rank; what had the name still has it.
    """
    replacement: Replacement | None = None  # of the rank that gives the name

    def begin() -> Path | None:
        nonlocal replacement
        if group is None or dist.get_rank() == 0:
            replacement = Replacement(path)
        return None if replacement is None else replacement.new

    try:
        new = on_every_rank(group, begin)
        on_every_rank(group, lambda: write(new, group))
        on_every_rank(group, lambda: None if replacement is None else replacement.finish())
    except BaseException:
        if replacement is not None:
            replacement.cancel()
        raise


def on_every_rank(group: dist.ProcessGroup | None, action: Callable[[], Any]) -> Any:
    """Calls ``action``; returns what it returned on rank 0. Called by every rank, where it may fail on one only.

    Raises:
        Exception: What it raised on any rank.
    """
    result, error = None, None
    try:
        result = action()
    except Exception as raised:
        error = raised
    if group is None or dist.get_world_size(group) == 1:
        if error is not None:
            raise error
        return result
    sent = None if error is None else (portable(error), "".join(traceback.format_tb(error.__traceback__)))
    told = gather_values(group, (dist.get_rank(), result if dist.get_rank() == 0 else None, sent))
    if error is not None:
        raise error
    for rank, _, other in told:
        if other is not None:
            original, stack = other
            add_note(original, f"while saving a checkpoint on rank {rank}:\n{stack}")
            raise original
    return next(result for rank, result, _ in told if rank == 0)


def portable(error: Exception) -> Exception:
    """The exception, if it can be sent and received; else one that says the same."""
    text = f"{type(error).__name__}: {text_of(error)}"
    try:
        received = pickle.loads(pickle.dumps(error))
        traceback.format_exception_only(received)  # as torch does on every rank
        if type(received) is type(error):
            return error
    except Exception as why:  # whatever the class does when it is taken apart or made
        text += f" (the error cannot be sent to other ranks: {text_of(why)})"
    return RuntimeError(text)


# ---------------------------------------------------------------------------------------------------- folders


def folder_writer(parts: Mapping[str, Any], rest: Mapping[str, Any], *, copied: bool) -> Write:
    """Returns a function that writes a checkpoint as a folder of ``torch.distributed.checkpoint`` with Lightning's file in
    it.

    Args:
        parts: What each rank has a part of.
        rest: Everything else; that of rank 0 is written.
        copied: Whether the values may change before they are written.
    """
    state = on_cpu(parts, copied=True) if copied else parts
    serialized = io.BytesIO()
    if dist.get_rank() == 0:
        torch.save(dict(rest), serialized)

    def write(path: Path, group: dist.ProcessGroup | None) -> None:
        checksums = write_parts(state, FileSystemWriter(path), group)
        if dist.get_rank() == 0:
            write_beside(Location.of(path), serialized.getbuffer(), checksums)

    return write


def write_parts(parts: Mapping[str, Any], writer: StorageWriter, group: dist.ProcessGroup | None) -> dict[str, int]:
    """Writes what each rank has a part of. Called by every rank of the group; of none, where this process has all.

    Returns:
        Checksums of all values, by their keys.
    """
    planner = _Planner()
    with original_errors(), _sendable_errors((writer, StorageWriter), (planner, SavePlanner)):
        dcp_save(dict(parts), storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)
    return {key: checksum for some in gather_values(group, planner.checksums) for key, checksum in some.items()}


def write_beside(folder: Location, rest: bytes | memoryview, checksums: Mapping[str, int]) -> None:
    """Writes what a folder has beside its values; last the file by which Lightning knows it, without which it is not complete.

    Args:
        folder: The folder, with the values and their metadata.
        rest: What is in Lightning's file.
        checksums: Of the values.
    """
    with folder.inside(".metadata").opened() as file:
        files = {".metadata": checksum(file.read()), metadata_filename(): checksum(rest)}
    for name, content in ((CHECKSUMS_FILE, Checksums(checksums, files).to_json()), (metadata_filename(), rest)):
        with folder.inside(name).writing() as file:
            file.write(content)


@contextmanager
def _sendable_errors(*objects: tuple[Any, type]) -> Iterator[None]:
    """Has methods raise only what the ranks can send each other, as torch does with errors in the middle of its collectives.

    Args:
        objects: Objects, and the classes whose public methods are meant.

    Raises:
        Exception: The first error of this rank, itself.
    """
    own: list[Exception] = []

    def guarded(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            except Exception as error:
                own.append(error)
                raise portable(error) from None

        return call

    methods = [(one, name) for one, kind in objects for name, value in vars(kind).items() if inspect.isfunction(value)]
    patches = [(one, name, guarded(getattr(one, name))) for one, name in methods if not name.startswith("_")]
    try:
        with patched_attributes(*patches):
            yield
    except Exception:
        if own:
            raise own[0] from None
        raise


def on_cpu(state: Any, *, copied: bool) -> Any:
    """The state with tensors on the CPU; what shared memory still does. With ``copied`` none with the original."""
    moved: dict[Any, Tensor] = {}

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return copy.deepcopy(leaf) if copied else leaf
        if leaf.device.type == "cpu" and not copied:
            return leaf
        key = identity(leaf)
        if key not in moved:
            moved[key] = leaf.detach().to("cpu", copy=copied)
        return moved[key]

    return tree_map(move, state)


class _Planner(DefaultSavePlanner):
    """Torch's, but that containers which it would not give back as they were are kept in one piece.

    Attributes:
        checksums: Of the values that this rank has written, by their keys.
    """

    def __init__(self) -> None:
        super().__init__()
        self.checksums: dict[str, int] = {}

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """Returns the next value to write."""
        data = super().resolve_data(write_item)
        if isinstance(data, Tensor):
            data = data.detach().cpu()  # as torch would
        self.checksums[write_item.index.fqn] = checksum(data if isinstance(data, Tensor) else data.getbuffer())
        return data

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner({}, storage_meta, is_coordinator)
        flat: dict[str, Any] = {}
        for path, value in _leaves((), dict(state_dict)):
            key = ".".join(map(str, path))
            if key in flat:
                raise ValueError(f"two values in a checkpoint share the name {key}")
            flat[key] = value
            self.mappings[key] = path
        self.state_dict = flat


def _leaves(path: tuple[str | int, ...], value: Any) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    is_entry = len(path) == 2 and isinstance(value, Mapping)  # such as a module's extra state
    if not (_is_structure(path, value) or (_is_opened(value) and not is_entry)):
        yield path, value
        return
    for key, entry in value.items() if isinstance(value, Mapping) else enumerate(value):
        yield from _leaves((*path, key), entry)


def _is_structure(path: tuple[str | int, ...], value: Any) -> bool:
    """Returns True if it is a part of the checkpoint, or an optimizer's states, of which a rank may have none."""
    return isinstance(value, Mapping) and (len(path) < 2 or path[1:] == ("state",))


def _is_opened(value: Any) -> bool:
    """Returns True if a container's entries are stored one by one: torch makes names strings, and forgets what is empty."""
    if isinstance(value, Mapping):
        return bool(value) and all(isinstance(key, str) for key in value)
    return isinstance(value, list) and any(isinstance(entry, Tensor) or _is_opened(entry) for entry in value)
