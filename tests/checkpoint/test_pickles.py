"""No code of a checkpoint runs unless the user says so, whatever part of it names the code."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from lightning_fxpipe import FxPipeError
from lightning_fxpipe.__main__ import main
from lightning_fxpipe.checkpoint.converting import read_whole
from lightning_fxpipe.checkpoint.locations import Location
from lightning_fxpipe.checkpoint.pickles import Reading, unpickled

VERSION = {"pytorch-lightning_version": "2.6.0"}


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._mark),)


def _file(path: Path, payload: Payload) -> None:
    torch.save({"state_dict": {"a": torch.ones(2)}, "callbacks": payload, **VERSION}, path)


def _old_file(path: Path, payload: Payload) -> None:
    torch.save({"a": torch.ones(2), "b": payload}, path, _use_new_zipfile_serialization=False)


def _bare_pickle(path: Path, payload: Payload) -> None:
    path.write_bytes(pickle.dumps(payload, protocol=2))


def _archive_in_old_style(path: Path, payload: Payload) -> None:
    """Torch still reads tar files, whose first bytes are those of a name."""
    with tarfile.open(path, "w") as archive:
        for name in ("\x80", "storages", "tensors", "pickle"):
            content = pickle.dumps(payload, protocol=2)
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


class Script(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def _torchscript(path: Path, payload: Payload) -> None:
    torch.jit.save(torch.jit.script(Script()), path)


def _folder(path: Path, beside: Any = None, **values: Any) -> None:
    dcp_save({"model": {"a": torch.ones(2)}, **values}, storage_writer=FileSystemWriter(path), no_dist=True)
    torch.save(beside or VERSION, path / "meta.pt")


def _folder_metadata(path: Path, payload: Payload) -> None:
    _folder(path)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.planner_data = payload
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def _folder_value(path: Path, payload: Payload) -> None:
    _folder(path, optimizer_0={"state": {"a": {"step": torch.ones(1)}}, "param_groups": [{"params": ["a"], "x": payload}]})


def _folder_tensor(path: Path, payload: Payload) -> None:
    """In the place of a tensor."""

    class Planner(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            data = super().resolve_data(write_item)
            return payload_tensor if isinstance(data, torch.Tensor) else data

    payload_tensor = _Hooked(torch.ones(2), payload)
    values = {"model": {"a": torch.ones(2)}}
    dcp_save(values, storage_writer=FileSystemWriter(path), planner=Planner(), no_dist=True)
    torch.save(VERSION, path / "meta.pt")


class _Hooked(torch.Tensor):
    """A tensor that is pickled as a payload."""

    def __new__(cls, data: torch.Tensor, payload: Payload) -> Any:
        made = data.as_subclass(cls)
        made.payload = payload
        return made

    def detach(self) -> Any:
        return self

    def cpu(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.payload.__reduce__()


def _folder_rest(path: Path, payload: Payload) -> None:
    _folder(path, beside={"callbacks": payload, **VERSION})


def _shards(path: Path, payload: Payload) -> None:
    path.mkdir()
    torch.save({"a": torch.ones(2), "b": payload}, path / "pytorch_model-1.bin")
    (path / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "pytorch_model-1.bin"}}')


WRITERS = (
    *(_file, _old_file, _bare_pickle, _archive_in_old_style, _torchscript),
    *(_folder_metadata, _folder_value, _folder_tensor, _folder_rest, _shards),
)


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("command", ["inspect", "verify", "convert", "read"])
def test_no_code_of_a_checkpoint_runs(
    command: str, write: Callable[[Path, Payload], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, mark = tmp_path / "checkpoint", tmp_path / "mark"
    write(path, Payload(mark))
    assert not mark.exists()
    options = {
        "inspect": ["inspect", path],
        "verify": ["inspect", path, "--verify"],
        "convert": ["convert", path, tmp_path / "x"],
    }
    if command == "read":
        with pytest.raises((FxPipeError, pickle.UnpicklingError)):
            read_whole(Location.of(path), Reading(weights_only=True))
    else:
        status = main(list(map(str, options.get(command, ["convert", path, tmp_path / "target"]))))
        assert status == 1 or command != "convert"
        assert "Traceback" not in capsys.readouterr().err
    assert not mark.exists()


def test_the_payload_is_one(tmp_path: Path) -> None:
    """Or the test above could not fail."""
    _folder_value(tmp_path / "folder", Payload(tmp_path / "mark"))
    read_whole(Location.of(tmp_path / "folder"), Reading(weights_only=False))
    assert (tmp_path / "mark").exists()


def test_a_folder_reads_no_file_outside_of_it(tmp_path: Path) -> None:
    _folder(tmp_path / "folder")
    shutil.copy(tmp_path / "folder/__0_0.distcp", tmp_path / "outside")
    metadata = pickle.loads((tmp_path / "folder/.metadata").read_bytes())
    for item in metadata.storage_data.values():
        item.relative_path = "../outside"
    (tmp_path / "folder/.metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(FxPipeError, match=r"\.\./outside"):
        read_whole(Location.of(tmp_path / "folder"), Reading(weights_only=True))


def test_a_program_is_no_checkpoint(tmp_path: Path) -> None:
    _torchscript(tmp_path / "program.pt", Payload(tmp_path))
    with pytest.raises(FxPipeError, match="TorchScript") as raised:
        unpickled(tmp_path / "program.pt", "program.pt", Reading(weights_only=False))
    assert "torch.jit.load" in str(raised.value)
