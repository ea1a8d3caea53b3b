"""CUDA tensors without CUDA: fakes, with which everything can be traced and planned, and nothing computed."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

CUDA = torch.device("cuda", 1)  # a rank's own device is seldom the first


def _give_cuda_a_guard() -> None:
    """Autograd asks each device for its stream, which torch without CUDA answers by ending the process. The meta device's
    answer, that there is none, will do."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 15).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    cuda, meta = 1, 14  # c10::DeviceType
    if guards[cuda] is None:
        guards[cuda] = guards[meta]


@contextmanager
def simulated_cuda() -> Iterator[None]:
    """In the block, new tensors are fakes, which may lie on CUDA devices; autocast for CUDA can be switched on."""

    def cuda(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor.to(CUDA)

    _give_cuda_a_guard()
    with (
        mock.patch.object(torch.cuda.amp.common, "amp_definitely_not_available", return_value=False),
        mock.patch.object(torch.cuda, "is_bf16_supported", return_value=True),
        mock.patch.object(torch.cuda, "current_device", return_value=CUDA.index),
        mock.patch.object(Tensor, "cuda", cuda),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        yield
