"""How long a run takes from the start of its processes to the end of its first batch: Lightning's DDP and fxpipe.

    python benchmarks/start_time.py                                  # a tiny GPT, two processes
    python benchmarks/start_time.py --model llama --layers 24 --rounds 5
    python benchmarks/start_time.py --model llama_without_cache --layers 24

Two candidates train the same module on the same batches, in alternation (A B A B ...):

  (a) ddp      Trainer(strategy="ddp")
  (b) fxpipe   Trainer(strategy="fxpipe")

Each runs in processes of its own, one for each rank, started in the same way, with one thread each. Seconds count from before
a rank's process is started, and are those of the slowest rank; the table gives the median and the range over the rounds. Its
parts follow each other: "imports" ends when all modules are imported, "model" when the LightningModule is made and fit is
called, "setup" when the Trainer begins to train (fxpipe has planned, and has its stages), "first batch" when the batch has been
through backward and the first optimizer step. CPU seconds are those of all that: on a busy machine compare these. Python keeps
the bytecode of what is imported, as it does on people's machines, and has it before the first round.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

CANDIDATES = ("ddp", "fxpipe")
PARTS = ("imports", "model", "setup", "first batch")
STARTED = "START_TIME_BENCHMARK"  # environment variable: when the rank's process was started
CPU = "cpu"


@dataclass(frozen=True)
class Work:
    """One size of the work, equal for both candidates."""

    model: str = "gpt"
    layers: int = 4
    dim: int = 32
    context: int = 32
    batch_size: int = 16
    ranks: int = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in asdict(Work()).items():
        choices = ("gpt", "llama", "llama_without_cache") if name == "model" else None
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, choices=choices)
    parser.add_argument("--rounds", type=int, default=5, help="how often each candidate runs")
    parser.add_argument("--profile", type=Path, help="a folder for a profile of each rank of fxpipe, which then takes longer")
    parser.add_argument("--worker", nargs=2, metavar=("CANDIDATE", "FILE"), help=argparse.SUPPRESS)
    options = vars(parser.parse_args())
    rounds, profiles, worker = options.pop("rounds"), options.pop("profile"), options.pop("worker")
    work = Work(**options)
    if worker:
        run_worker(worker[0], Path(worker[1]), work, profiles)
        return
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    subprocess.run([sys.executable, "-c", "import lightning, lightning_fxpipe"], check=True)
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in CANDIDATES}
    for index in range(rounds):
        for name in CANDIDATES:
            seconds[name].append(launch(name, work, profiles))
            total = sum(seconds[name][-1][part] for part in PARTS)
            print(f"round {index + 1}/{rounds}  {name:6s} {total:6.2f} s", file=sys.stderr, flush=True)
    report(work, seconds)


def report(work: Work, seconds: dict[str, list[dict[str, float]]]) -> None:
    """Prints the table."""
    from lightning_fxpipe.reporting.table import render_table

    totals = {name: [sum(run[part] for part in PARTS) for run in runs] for name, runs in seconds.items()}
    ratios = [b / a for a, b in zip(totals["ddp"], totals["fxpipe"], strict=True)]
    rows = [
        (
            name,
            spread(totals[name], "{:.1f}"),
            spread(ratios, "{:.2f}") if name == "fxpipe" else "-",
            *(f"{statistics.median(run[part] for run in runs):.1f}" for part in PARTS),
            spread([run[CPU] for run in runs], "{:.1f}"),
        )
        for name, runs in seconds.items()
    ]
    headers = ("Candidate", "To first step, s", "Ratio", "Imports", "Model", "Setup", "First batch", "CPU s")
    print(render_table(f"Time to the first step: {work}", headers, rows, right_aligned=headers[1:]))


def spread(values: list[float], form: str) -> str:
    middle, low, high = (form.format(v) for v in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({low}-{high})"


def launch(candidate: str, work: Work, profiles: Path | None) -> dict[str, float]:
    """Runs one candidate in fresh processes; returns the parts' seconds of the rank whose first step ended last."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = [part for key, value in asdict(work).items() for part in (f"--{key.replace('_', '-')}", str(value))]
    flags += ["--profile", str(profiles)] if profiles is not None else []
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(work.ranks):
            environment = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "NODE_RANK": "0",
                "WORLD_SIZE": str(work.ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                STARTED: repr(time.time()),
            }
            command = [sys.executable, __file__, *flags, "--worker", candidate, f"{folder}/{rank}.json"]
            with open(f"{folder}/{rank}.log", "w") as log:
                processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        codes = [process.wait(timeout=900) for process in processes]
        if any(codes):
            logs = "\n".join(Path(f"{folder}/{rank}.log").read_text()[-3000:] for rank in range(work.ranks))
            raise SystemExit(f"{candidate} failed:\n{logs}")
        reports = [json.loads(Path(f"{folder}/{rank}.json").read_text()) for rank in range(work.ranks)]
    slowest: dict[str, float] = max(reports, key=lambda report: sum(report[part] for part in PARTS))
    return slowest


# --------------------------------------------------------------------------- in the ranks


class Clock:
    """The seconds that each part has taken, from the start of the process."""

    def __init__(self) -> None:
        self._last = float(os.environ[STARTED])
        self.seconds: dict[str, float] = {}

    def ended(self, part: str) -> None:
        """Notes that a part is over."""
        now = time.time()
        self.seconds[part] = now - self._last
        self.seconds[CPU] = time.process_time()
        self._last = now


def run_worker(candidate: str, output: Path, work: Work, profiles: Path | None) -> None:
    import lightning as L
    from torch.utils.data import DataLoader

    if candidate == "fxpipe":
        import lightning_fxpipe  # noqa: F401

    if work.model != "gpt":
        from transformers import LlamaForCausalLM  # noqa: F401
    clock = Clock()
    clock.ended("imports")

    class Timed(L.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            clock.ended("setup")

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            clock.ended("first batch")

    L.seed_everything(0)
    module = make_module(work)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=work.ranks,
        strategy=candidate,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[Timed()],
    )
    data = DataLoader(make_samples(work), batch_size=work.batch_size)
    clock.ended("model")
    if profiles is not None and candidate == "fxpipe":
        import cProfile

        profiles.mkdir(parents=True, exist_ok=True)
        with cProfile.Profile() as profile:
            trainer.fit(module, data)
        profile.dump_stats(profiles / f"{work.model}_{work.layers}_rank{os.environ['RANK']}.prof")
    else:
        trainer.fit(module, data)
    output.write_text(json.dumps(clock.seconds))


def make_module(work: Work) -> Any:
    """A LightningModule as most people write it around a model."""
    import lightning as L
    import torch

    class Wrapper(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_gpt(work) if work.model == "gpt" else make_llama(work)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if work.model != "gpt":
                return self.model(**batch).loss
            ids = batch["input_ids"]
            logits = self.model(ids[:, :-1])
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=3e-4)

    return Wrapper()


def make_gpt(work: Work) -> Any:
    """The example's."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    from byte_lm import GPT

    return GPT(work.dim, work.layers, 4, work.context)


def make_llama(work: Work) -> Any:
    """That of transformers, small."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=work.dim,
        intermediate_size=2 * work.dim,
        num_hidden_layers=work.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=work.context,
        use_cache=work.model == "llama",  # which is the default
    )
    return LlamaForCausalLM(config)


def make_samples(work: Work) -> list[dict[str, Any]]:
    """Random bytes, as a tokenizer's output."""
    import torch

    ids = torch.randint(0, 256, (work.batch_size, work.context))
    if work.model == "gpt":
        return [{"input_ids": row} for row in ids]
    return [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in ids]


if __name__ == "__main__":
    main()
