"""What batches of another length in every step cost, against batches of one length.

    python benchmarks/shapes_time.py                    # a compute-bound size, two processes
    python benchmarks/shapes_time.py --rounds 40 --dim 192

One run of ``Trainer(strategy="fxpipe")`` trains the example's GPT. Each round has three steps: one on a batch of the fixed
length, one on a batch of a length that was never seen before, and one of that length again. The new lengths come in pairs with
the fixed one as their mean, so both kinds have the same number of tokens; ratios are medians (and ranges) over the pairs. The
first steps, in which the model is traced, are counted apart.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "examples")]
from step_time import Work, loss_of, make_model, make_optimizer, make_trainer, spread  # noqa: E402

from lightning_fxpipe.reporting.table import render_table  # noqa: E402

SHORTEST, LONGEST = 32, 128
FIXED = (SHORTEST + LONGEST) // 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = Work()
    for name in ("dim", "num_layers", "batch_size", "microbatches", "stages"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(defaults, name))
    parser.add_argument("--rounds", type=int, default=24, help="an even number")
    options = vars(parser.parse_args())
    rounds = options.pop("rounds")
    torch.set_num_threads(1)
    work = Work(**options, context=LONGEST)
    lengths = [FIXED, FIXED, FIXED + 1, FIXED + 1, *(length for new in new_lengths(rounds) for length in (FIXED, new, new))]
    clock = Clock()
    trainer = make_trainer(work, clock)
    trainer.fit(LitGPT(work), DataLoader(batches_of(lengths, work), batch_size=None))  # type: ignore[arg-type]
    if trainer.global_rank == 0:
        report(clock.seconds, [traced.seconds for traced in trainer.strategy.session.trace_log.traces])


def new_lengths(count: int) -> list[int]:
    """Distinct, in pairs of mean ``FIXED``."""
    offsets = random.Random(1).sample(range(2, FIXED - SHORTEST + 1), count // 2)
    return [FIXED + sign * offset for offset in offsets for sign in (1, -1)]


def batches_of(lengths: list[int], work: Work) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 256, (work.batch_size, length + 1), generator=generator) for length in lengths]


class LitGPT(L.LightningModule):
    def __init__(self, work: Work) -> None:
        super().__init__()
        self.model = make_model(work)

    def training_step(self, ids: Any, batch_idx: int) -> Any:
        return loss_of(self.model(ids[:, :-1]), ids[:, 1:])

    def configure_optimizers(self) -> Any:
        return make_optimizer(self.parameters())


class Clock(L.Callback):
    """Notes how long each step takes."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last = 0.0

    def on_train_batch_start(self, *args: Any) -> None:
        self._last = time.perf_counter()

    def on_train_batch_end(self, *args: Any) -> None:
        self.seconds.append(time.perf_counter() - self._last)


def report(seconds: list[float], traces: list[float]) -> None:
    """Prints the table."""
    measured = seconds[4:]
    fixed, new, again = measured[0::3], measured[1::3], measured[2::3]
    first_seen = [a - b for a, b in zip(new, again, strict=True)]
    rows = [
        ("Step, one length", f"{1000 * statistics.median(fixed):.0f} ms"),
        ("Step, a new length each time", f"{1000 * statistics.median(new):.0f} ms"),
        ("Ratio", spread(ratios(new, fixed), "{:.3f}")),
        ("Ratio, lengths seen in the step before", spread(ratios(again, fixed), "{:.3f}")),
        ("First step of a length, more than its second", f"{1000 * statistics.median(first_seen):.0f} ms"),
        ("Lengths", str(len(new) + 2)),
        ("Traces", f"{len(traces)}: {', '.join(f'{s:.2f} s' for s in traces)}"),
        ("First step of all", f"{seconds[0]:.2f} s"),
        ("First step of the second length", f"{seconds[2]:.2f} s"),
    ]
    print(render_table("Batches of changing length", ("", "Measured"), rows, right_aligned=("Measured",)))


def ratios(varying: list[float], fixed: list[float]) -> list[float]:
    """Of two steps each, whose lengths have the fixed one as their mean."""
    pairs = range(0, len(fixed), 2)
    return [sum(varying[i : i + 2]) / sum(fixed[i : i + 2]) for i in pairs]


if __name__ == "__main__":
    main()
