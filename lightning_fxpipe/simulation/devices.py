"""Devices described by a few numbers, and the time of operators on them.

An operator takes as long as its arithmetic, its memory traffic or its start, whichever is longest (the roofline model, Williams
et al., 2009).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_fxpipe.simulation.costs import Link


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator that runs: its flops, and the bytes that it reads and writes."""

    flops: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Device:
    """What one rank computes with.

    Attributes:
        flops_per_second: Of products of matrices.
        bytes_per_second: Between it and its memory.
        operator_seconds: What passes at least from the start of an operator to that of the next.
        memory_bytes: Of its memory.
        link: To the next rank.
    """

    flops_per_second: float
    bytes_per_second: float
    operator_seconds: float = 0.0
    memory_bytes: float = float("inf")
    link: Link = Link()

    def seconds(self, operators: Sequence[Operator]) -> float:
        """How long operators take, one after the other."""
        return sum(
            max(each.flops / self.flops_per_second, each.num_bytes / self.bytes_per_second, self.operator_seconds)
            for each in operators
        )


def _gpu(tera_flops: float, tera_bytes: float, gib: float, link_giga_bytes: float) -> Device:
    return Device(
        flops_per_second=tera_flops * 1e12,
        bytes_per_second=tera_bytes * 1e12,
        operator_seconds=5e-6,
        memory_bytes=gib * 2**30,
        link=Link(latency_seconds=1e-5, bytes_per_second=link_giga_bytes * 1e9),
    )


# The makers' data sheets: dense products in 16 bits, memory, NVLink in one direction. What is reached is less.
DEVICES = {
    "v100": _gpu(125, 0.9, 32, 150),
    "a100": _gpu(312, 2.039, 80, 300),
    "h100": _gpu(989, 3.35, 80, 450),
    "h200": _gpu(989, 4.8, 141, 450),
}
