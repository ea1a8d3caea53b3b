"""Devices described by a few numbers, and the time of operators on them.

An operator takes as long as its arithmetic, its memory traffic or its start, whichever is longest (the roofline model, Williams
et al., 2009).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from lightning_fxpipe.errors import FxPipeError
from lightning_fxpipe.simulation.costs import Link


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator that runs: its flops, and the bytes that it reads and writes."""

    flops: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Device:
    """The processor and memory of one rank.

    Attributes:
        flops_per_second: Of products of matrices.
        bytes_per_second: Between it and its memory.
        operator_seconds: What passes at least from the start of an operator to that of the next.
        memory_bytes: Of its memory.
        link: To the next rank.
        name: What tables call it.
    """

    flops_per_second: float
    bytes_per_second: float
    operator_seconds: float = 0.0
    memory_bytes: float = float("inf")
    link: Link = Link()
    name: str = "device"

    def seconds(self, operators: Sequence[Operator]) -> float:
        """How long operators take, one after the other."""
        return sum(
            max(each.flops / self.flops_per_second, each.num_bytes / self.bytes_per_second, self.operator_seconds)
            for each in operators
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, in which a number without a limit is None."""
        values = asdict(self)
        for numbers in (values, values["link"]):
            numbers.update({name: None for name, value in numbers.items() if value == math.inf})
        return values

    @classmethod
    def load(cls, path: str | Path) -> Device:
        """Reads a device from a YAML file with ``flops_per_second`` and ``bytes_per_second`` and, if they are known,
        ``operator_seconds``, ``memory_bytes``, ``link_latency_seconds`` and ``link_bytes_per_second``.

        Raises:
            FxPipeError: The file does not describe a device.
        """
        try:
            values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
            numbers = {str(key): float(value) for key, value in values.items()}
            latency = numbers.pop("link_latency_seconds", 0.0)
            link = Link(latency_seconds=latency, bytes_per_second=numbers.pop("link_bytes_per_second", math.inf))
            return cls(**numbers, link=link, name=Path(path).stem)
        except (OSError, yaml.YAMLError, AttributeError, TypeError, ValueError) as error:
            raise FxPipeError(
                "Cannot read the device description.",
                where=str(path),
                observed="no such file" if isinstance(error, FileNotFoundError) else str(error),
                expected=f"{', '.join(DEVICES)}, or a YAML file with flops_per_second and bytes_per_second",
                todo="Use one of these names, or the path of such a file.",
            ) from error


def _gpu(name: str, tera_flops: float, tera_bytes: float, gib: float, link_giga_bytes: float) -> Device:
    return Device(
        flops_per_second=tera_flops * 1e12,
        bytes_per_second=tera_bytes * 1e12,
        operator_seconds=5e-6,
        memory_bytes=gib * 2**30,
        link=Link(latency_seconds=1e-5, bytes_per_second=link_giga_bytes * 1e9),
        name=name,
    )


# The makers' data sheets: dense products in 16 bits, memory, NVLink in one direction. What is reached is less.
DEVICES = {
    gpu.name: gpu
    for gpu in (
        _gpu("v100", 125, 0.9, 32, 150),
        _gpu("a100", 312, 2.039, 80, 300),
        _gpu("h100", 989, 3.35, 80, 450),
        _gpu("h200", 989, 4.8, 141, 450),
    )
}
