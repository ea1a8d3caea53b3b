"""Alternatives to a plan: combinations of a schedule, stages on each device and microbatches, with the cost of each."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_fxpipe.reporting.table import human_bytes, human_seconds, render_table
from lightning_fxpipe.simulation.simulator import Simulation

_NUM_SHOWN = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """One combination.

    Attributes:
        schedule: Order of forward and backward passes.
        stages_per_rank: Stages on each device.
        num_microbatches: Microbatches of a batch.
        step_seconds: What the model's calls of a step take, as simulated.
        idle_share: Of that time, for how much devices wait; from 0 to 1.
        peak_bytes: Most memory that a device needs for it.
        fits: Whether it has that.
    """

    schedule: str
    stages_per_rank: int
    num_microbatches: int
    step_seconds: float
    idle_share: float
    peak_bytes: int
    fits: bool

    @classmethod
    def of(cls, schedule: str, simulation: Simulation, *, fits: bool, step_seconds: float | None = None) -> Alternative:
        """The combination of a simulated step.

        Args:
            schedule: Name of its schedule.
            simulation: The step.
            fits: True if each device has the memory.
            step_seconds: Seconds of the step with what is not simulated; None: the simulation's.
        """
        return cls(
            schedule=schedule,
            stages_per_rank=len(simulation.table.stages_of(0)),
            num_microbatches=simulation.table.num_microbatches,
            step_seconds=simulation.seconds if step_seconds is None else step_seconds,
            idle_share=simulation.bubble_fraction,
            peak_bytes=round(max(simulation.peak_bytes)),
            fits=fits,
        )


def alternatives_table(alternatives: tuple[Alternative, ...]) -> str:
    """The first of them, the one that was chosen, beside the best of the others."""
    chosen = alternatives[0]
    rows = [
        (
            each.schedule,
            str(each.stages_per_rank),
            str(each.num_microbatches),
            human_seconds(each.step_seconds),
            f"{each.step_seconds / chosen.step_seconds:.2f}",
            f"{100 * each.idle_share:.0f} %",
            human_bytes(each.peak_bytes) + ("" if each.fits else ": does not fit"),
        )
        for each in alternatives[:_NUM_SHOWN]
    ]
    headers = ("Schedule", "Stages", "Microbatches", "Step", "Ratio", "Idle", "Memory")
    left_out = len(alternatives) - len(rows)
    return render_table(
        "Candidates, fastest first; the first one is used",
        headers,
        rows,
        right_aligned=headers[1:],
        caption=(
            "Stages and memory are per device; a step covers the model's calls only, simulated from the measured time of each "
            "layer"
        )
        + (f"; {left_out} slower candidates are not shown" if left_out else ""),
    )
