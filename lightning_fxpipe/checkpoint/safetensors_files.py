"""Weights in the safetensors format, read one tensor at a time. The package ``safetensors`` is an extra."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_fxpipe.checkpoint.checksums import Checksums, checksum
from lightning_fxpipe.checkpoint.damage import damage_told
from lightning_fxpipe.errors import FxPipeError

DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool},
    **{"U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "C64": torch.complex64},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
}
# In a file's metadata: the names that a tensor has beside the one under which it is stored, and checksums.
SHARED, CHECKSUMS = "lightning_fxpipe.shared", "lightning_fxpipe.checksums"


def read_safetensors(path: Path, is_wanted: Callable[[str], bool]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file, and its metadata; a tensor that is not wanted is on the meta device, and not read.

    Raises:
        FxPipeError: It is damaged: its tensors are compared with their checksums, if it has been written here.
    """
    tensors: dict[str, Tensor] = {}
    with damage_told(str(path)), _open(path) as file:
        metadata = dict(file.metadata() or {})
        shared: dict[str, str] = json.loads(metadata.get(SHARED, "{}"))
        checksums = Checksums(values=json.loads(metadata[CHECKSUMS])) if CHECKSUMS in metadata else None
        wanted = {shared.get(name, name) for name in (*file.keys(), *shared) if is_wanted(name)}
        for name in file.keys():  # noqa: SIM118  (no mapping)
            if name in wanted:
                tensors[name] = file.get_tensor(name)
                if checksums is not None:
                    checksums.check_value(str(path), name, tensors[name])
                continue
            part = file.get_slice(name)
            tensors[name] = torch.empty(part.get_shape(), dtype=DTYPES[part.get_dtype()], device="meta")
        return tensors | {name: tensors[stored] for name, stored in shared.items()}, metadata


def write_safetensors(path: Path, state: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, str]:
    """Writes tensors; of those that share memory the first name is kept.

    Returns:
        The names that are not in the file, with those that are; loading brings them back.
    """
    package = _package(path)
    kept: dict[Any, str] = {}
    shared: dict[str, str] = {}
    tensors: dict[str, Tensor] = {}
    for name, tensor in state.items():
        identity = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if tensor.numel() else name
        first = kept.setdefault(identity, name)
        if first != name:
            shared[name] = first
        else:
            # Views of the same memory that are no equals become tensors of their own: the format knows no views.
            is_all = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
            tensors[name] = tensor if is_all else tensor.clone(memory_format=torch.contiguous_format)
    checksums = {name: checksum(tensor) for name, tensor in tensors.items()}
    notes = {**metadata, CHECKSUMS: json.dumps(checksums), **({SHARED: json.dumps(shared)} if shared else {})}
    package.torch.save_file(tensors, path, metadata=notes)
    return shared


def write_pretrained(folder: Path, state: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, str]:
    """Writes a folder from which ``from_pretrained`` of Hugging Face loads weights, once a ``config.json`` lies beside them.

    Files have at most 5 GB. Of tensors that share memory one is written: models tie them again.

    Returns:
        Nothing that loading would have to know.
    """
    try:
        from huggingface_hub import save_torch_state_dict
    except ImportError as error:
        raise FxPipeError(
            "Writing a folder for from_pretrained requires the package huggingface_hub.",
            where=str(folder),
            observed=str(error),
            todo="Run `pip install huggingface_hub safetensors`.",
        ) from error
    folder.mkdir()
    save_torch_state_dict(dict(state), folder, metadata=dict(metadata))
    return {}


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    package = _package(path)
    try:
        with package.safe_open(path, framework="pt") as file:
            yield file
    except package.SafetensorError as error:
        raise FxPipeError("The safetensors file cannot be read.", where=str(path), observed=str(error)) from error


def _package(path: Path) -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise FxPipeError(
            "Reading and writing .safetensors files requires the package safetensors.",
            where=str(path),
            observed=str(error),
            todo="Run `pip install safetensors`.",
        ) from error
    return safetensors
