"""Private names of torch around checkpoints' files do what the package takes them for."""

from __future__ import annotations

import os
from pathlib import Path

import fsspec
import pytest
import torch

from lightning_fxpipe._compat.checkpoints import NamesOnly, folder_reader, folder_writer, unpickled_metadata


@pytest.mark.filterwarnings("error:torch.distributed.checkpoint._fsspec_filesystem:DeprecationWarning")
def test_folders_are_written_and_read_behind_urls() -> None:
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    url = "memory://canary/folder"
    save({"a": torch.ones(3)}, storage_writer=folder_writer(None, url, {}), no_dist=True)
    metadata = unpickled_metadata(fsspec.open(f"{url}/.metadata").open().read())
    assert set(metadata.state_dict_metadata) == {"a"}
    target = {"a": torch.zeros(3)}
    load(target, storage_reader=folder_reader(None, url, {}, metadata), no_dist=True)
    assert torch.equal(target["a"], torch.ones(3))


def test_names_only_knows_what_is_harmless_and_nothing_else(tmp_path: Path) -> None:
    value = {"tensor": torch.ones(2), "dtype": torch.float16, "size": torch.Size([3]), "other": Path("a"), "code": os.getcwd}
    torch.save(value, tmp_path / "x.pt")
    found = torch.load(tmp_path / "x.pt", weights_only=False, pickle_module=NamesOnly)
    assert torch.equal(found["tensor"], torch.ones(2))
    assert (found["dtype"], found["size"]) == (torch.float16, torch.Size([3]))
    assert type(found["other"]) is not type(Path("a"))
    assert found["code"] is not os.getcwd
