"""Private names of torch around checkpoints' files do what the package takes them for."""

from __future__ import annotations

import enum
import io
import os
import pickle
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from lightning_fxpipe._compat.checkpoints import (
    _METADATA_CLASSES,
    NamesOnly,
    StoredItem,
    folder_reader,
    folder_writer,
    stored_items,
    unpickled_metadata,
)


@pytest.mark.filterwarnings("error:torch.distributed.checkpoint._fsspec_filesystem:DeprecationWarning")
def test_folders_are_written_and_read_behind_urls() -> None:
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    url = "memory://canary/folder"
    save({"a": torch.ones(3)}, storage_writer=folder_writer(None, url, {}), no_dist=True)
    metadata = unpickled_metadata(fsspec.open(f"{url}/.metadata").open().read())
    assert set(metadata.state_dict_metadata) == {"a"}
    (item,) = stored_items(metadata)
    assert (item.key, item.file, item.offset) == ("a", "__0_0.distcp", 0)
    assert item == StoredItem("a", "__0_0.distcp", 0, fsspec.open(f"{url}/{item.file}").open().size)
    target = {"a": torch.zeros(3)}
    load(target, storage_reader=folder_reader(None, url, {}, metadata), no_dist=True)
    assert torch.equal(target["a"], torch.ones(3))


def test_metadata_name_what_torch_writes_and_nothing_else(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    values = {"a": torch.zeros(2, dtype=torch.bfloat16), "b": torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)}
    save({**values, "c": {"d": [1, "x"]}}, checkpoint_id=tmp_path / "folder", no_dist=True)
    content = (tmp_path / "folder" / ".metadata").read_bytes()
    assert unpickled_metadata(content).state_dict_metadata["a"].properties.dtype is torch.bfloat16
    for other in (os.getcwd, {"a": 1}):
        with pytest.raises(pickle.UnpicklingError):
            unpickled_metadata(pickle.dumps(other))


class AsEarlyPython(pickle.Pickler):
    """Writes members of enumerations as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


def test_metadata_of_an_early_python_are_read_and_its_getattr_takes_nothing_else(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    save({"a": torch.zeros(2)}, checkpoint_id=tmp_path / "folder", no_dist=True)
    metadata = unpickled_metadata((tmp_path / "folder" / ".metadata").read_bytes())
    file = io.BytesIO()
    AsEarlyPython(file).dump(metadata)
    assert b"getattr" in file.getvalue()
    assert unpickled_metadata(file.getvalue()) == metadata
    kind = _METADATA_CLASSES["_MEM_FORMAT_ENCODING"]

    class Asks:
        def __init__(self, *of: Any) -> None:
            self.of = of

        def __reduce__(self) -> Any:
            return getattr, self.of

    for of in ((kind, "mro"), (torch.Size, "numel"), (torch.float32, "to_complex")):
        with pytest.raises(pickle.UnpicklingError, match="it asks"):
            unpickled_metadata(pickle.dumps(Asks(*of)))


def test_names_only_knows_what_is_harmless_and_nothing_else(tmp_path: Path) -> None:
    value = {"tensor": torch.ones(2), "dtype": torch.float16, "size": torch.Size([3]), "other": Path("a"), "code": os.getcwd}
    torch.save(value, tmp_path / "x.pt")
    found = torch.load(tmp_path / "x.pt", weights_only=False, pickle_module=NamesOnly)
    assert torch.equal(found["tensor"], torch.ones(2))
    assert (found["dtype"], found["size"]) == (torch.float16, torch.Size([3]))
    assert type(found["other"]) is not type(Path("a"))
    assert found["code"] is not os.getcwd
