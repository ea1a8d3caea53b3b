"""The command ``doctor``: what a bug report needs, and a test of communication between two processes."""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed.distributed_c10d as dist
from torch.multiprocessing.spawn import start_processes

from lightning_fxpipe.reporting.own_faults import versions
from lightning_fxpipe.reporting.table import human_bytes

_TIMEOUT = timedelta(seconds=60)


def doctor(arguments: Sequence[str], purpose: str) -> int:
    """Runs ``fxpipe doctor``."""
    argparse.ArgumentParser(prog="fxpipe doctor", description=purpose).parse_args(arguments)
    backend = "nccl" if torch.cuda.device_count() > 1 and dist.is_nccl_available() else "gloo"
    print(f"Versions    {versions()}")
    print(f"Platform    {platform.platform()}")
    print(f"Devices     {_devices()}")
    print(f"Backend     {backend}", flush=True)
    begin = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as folder:
            arguments = (backend, f"{folder}/store")
            start_processes(round_trip, arguments, nprocs=2, start_method="spawn")  # type: ignore[no-untyped-call]
    except Exception as error:  # of either process, as text
        print(f"Round trip  failed: {str(error).strip().splitlines()[-1]}")
        return 1
    print(f"Round trip  2 processes, {time.perf_counter() - begin:.1f} s")
    return 0


def round_trip(rank: int, backend: str, store: str) -> None:
    """Sends a tensor to the other process and back; raises RuntimeError if another one comes back."""
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=2, timeout=_TIMEOUT)
    try:
        sent = torch.arange(4.0, device=device)
        tensor = sent.clone() if rank == 0 else torch.zeros_like(sent)
        dist.broadcast(tensor, src=0)
        dist.all_reduce(tensor)
        if not torch.equal(tensor, 2 * sent):
            raise RuntimeError(f"expected {(2 * sent).tolist()} from the all-reduce, received {tensor.tolist()}")
    finally:
        dist.destroy_process_group()


def _devices() -> str:
    cores = f"{os.cpu_count()} CPU cores"
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return ", ".join([*(f"{gpu.name} ({human_bytes(gpu.total_memory)})" for gpu in gpus), cores])
