"""One GPT trained by two processes, by Lightning's DDP and FSDP2, DeepSpeed's and torch's pipelines, and fxpipe.

    python benchmarks/peers.py                                 # README's table
    python benchmarks/peers.py --peers ddp fxpipe-1f1b --rounds 1
    pip install --target peers_deps --no-deps deepspeed hjson py-cpuinfo einops msgpack ninja psutil pydantic pydantic-core \\
        annotated-types typing-inspection                      # for the peer deepspeed, kept apart

All peers train the same model on the same batches with AdamW, in alternating rounds (A B C A B C ...), with one thread in each
process. The table has the median step over the rounds, its ratio to torch's 1F1B in the same round, the peak memory of the
process that takes most, over what the imports take, and the largest difference of a loss from one process. DeepSpeed's
initialization consumes memory that is part of its peak.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from step_time import (
    Clock,
    Work,
    loss_of,
    make_batches,
    make_callback,
    make_model,
    make_optimizer,
    run_fxpipe,
    run_ranks,
    run_single,
    run_torch,
    spread,
    trainer_with,
)

WORKS = {
    "small": Work(),
    "wide": Work(dim=768, num_heads=12, context=64, batch_size=8),  # many parameters for each token
}
DEPENDENCIES = Path(__file__).with_name("peers_deps")
REFERENCE = "torch-1f1b"


def run_lightning(work: Work, clock: Clock, strategy: Any, *, shards: bool = False) -> None:
    """Trains with a strategy that splits the batch over the ranks."""
    import lightning as L
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    class LitGPT(L.LightningModule):
        def configure_model(self) -> None:
            self.model = make_model(work)
            if shards:
                from torch.distributed.fsdp import fully_shard

                mesh = self.device_mesh["data_parallel"]
                for block in (*self.model.blocks, self.model):
                    fully_shard(block, mesh=mesh)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            (ids,) = batch
            return loss_of(self.model(ids[:, :-1]), ids[:, 1:])

        def configure_optimizers(self) -> Any:
            return make_optimizer(self.parameters())

    data = TensorDataset(make_batches(work).flatten(0, 1))
    # Every other sample: the ranks together have the samples of a batch.
    sampler = DistributedSampler(data, num_replicas=2, rank=int(os.environ["RANK"]), shuffle=False)
    trainer = trainer_with(strategy, 2, make_callback(clock))
    trainer.fit(LitGPT(), DataLoader(data, batch_size=work.batch_size // 2, sampler=sampler))


def run_fsdp2(work: Work, clock: Clock) -> None:
    from lightning.pytorch.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
    run_lightning(work, clock, strategy, shards=True)


def run_deepspeed(work: Work, clock: Clock) -> None:
    """DeepSpeed's PipelineEngine, with its own 1F1B, which takes the model as a list of layers."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    sys.path.append(str(DEPENDENCIES))
    import deepspeed
    import torch
    from deepspeed.pipe import PipelineModule

    model = make_model(work)

    class Embedding(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.position = model.token, model.position

        def forward(self, ids: Any) -> Any:
            return self.token(ids) + self.position.weight[: ids.shape[1]]

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    layers = [Embedding(), *model.blocks, torch.nn.Sequential(model.norm, model.head)]
    pipeline = PipelineModule(layers, num_stages=work.stages, loss_fn=loss_of, partition_method="uniform")
    engine, *_ = deepspeed.initialize(
        model=pipeline,
        optimizer=make_optimizer(pipeline.parameters()),
        config={
            "train_batch_size": work.batch_size,
            "train_micro_batch_size_per_gpu": work.batch_size // work.microbatches,
            "gradient_accumulation_steps": work.microbatches,
            "gradient_clipping": 0.0,
            "steps_per_print": 10**9,
        },
    )
    parts = ((part[:, :-1], part[:, 1:]) for batch in make_batches(work) for part in batch.chunk(work.microbatches))
    for _ in range(work.warmup_steps + work.steps):
        loss = engine.train_batch(parts)
        clock.step_done(loss if torch.is_tensor(loss) else None)


PEERS: dict[str, Callable[[Work, Clock], Any]] = {
    "single": run_single,
    "ddp": lambda work, clock: run_lightning(work, clock, "ddp"),
    "fsdp2": run_fsdp2,
    "deepspeed": run_deepspeed,
    "torch-gpipe": lambda work, clock: run_torch(replace(work, schedule="gpipe"), clock),
    REFERENCE: run_torch,
    "fxpipe": lambda work, clock: run_fxpipe(work, clock, schedule="auto"),
    "fxpipe-1f1b": run_fxpipe,
}


def launch(peer: str, work: str) -> dict[str, Any]:
    """Runs one peer in fresh processes; returns its step in milliseconds, its peak in MiB, and the mean loss of each step."""
    num_ranks = 1 if peer == "single" else 2
    with tempfile.TemporaryDirectory() as folder:
        run_ranks([__file__, "--work", work, "--worker", peer], folder, num_ranks)
        reports = [json.loads(Path(f"{folder}/{rank}.json").read_text()) for rank in range(num_ranks)]
    losses = [statistics.fmean(found) for found in zip(*(r["losses"] for r in reports if r["losses"]), strict=True)]
    return {**{key: max(report[key] for report in reports) for key in ("step_ms", "peak_mib")}, "losses": losses}


def run_worker(peer: str, work: Work, output: Path) -> None:
    import lightning  # noqa: F401  here for all: what imports take is no peer's
    import torch

    import lightning_fxpipe.strategy.strategy  # noqa: F401

    torch.set_num_threads(1)
    clock = Clock(work)
    PEERS[peer](work, clock)
    output.write_text(json.dumps(clock.report()))


def report(work: str, runs: dict[str, list[dict[str, Any]]]) -> None:
    from lightning_fxpipe.reporting.table import render_table

    rows = []
    for peer, found in runs.items():
        steps = [run["step_ms"] for run in found]
        ratios = [step / other["step_ms"] for step, other in zip(steps, runs.get(REFERENCE, []), strict=False)]
        pairs = zip(found[-1]["losses"], runs["single"][-1]["losses"], strict=True) if "single" in runs else ()
        rows.append(
            (
                peer,
                spread(steps, "{:.0f}"),
                spread(ratios, "{:.2f}") if ratios else "-",
                f"{max(run['peak_mib'] for run in found):.0f}",
                f"{max((abs(one - other) for one, other in pairs), default=float('nan')):.1e}",
            )
        )
    headers = ("Peer", "Step ms", f"Ratio to {REFERENCE}", "Peak MiB", "Loss difference")
    print(render_table(f"{work}: {asdict(WORKS[work])}", headers, rows, right_aligned=headers[1:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", choices=WORKS, default="wide", help="size of the model")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=[*PEERS], metavar="PEER", help=", ".join(PEERS))
    parser.add_argument("--rounds", type=int, default=3, help="number of runs of each peer")
    parser.add_argument("--output", type=Path, help="write all runs to this file (JSON)")
    parser.add_argument("--worker", nargs=2, metavar=("PEER", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        run_worker(options.worker[0], WORKS[options.work], Path(options.worker[1]))
        return
    runs: dict[str, list[dict[str, Any]]] = {peer: [] for peer in options.peers}
    for index in range(options.rounds):
        for peer in options.peers:
            runs[peer].append(launch(peer, options.work))
            print(
                f"round {index + 1}/{options.rounds}  {peer:12s} {runs[peer][-1]['step_ms']:8.1f} ms",
                file=sys.stderr,
                flush=True,
            )
    report(options.work, runs)
    if options.output:
        options.output.write_text(json.dumps(runs, indent=1))


if __name__ == "__main__":
    main()
