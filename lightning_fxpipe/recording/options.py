"""Options of a recording."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Recording:
    """Which training steps are recorded, and where it is written.

    A step is a batch here: with ``accumulate_grad_batches`` the optimizer steps in some of them only.

    Attributes:
        folder: Where the files are written; it is made.
        first_step: The first one, counted from 0 in each run of ``fit``. The first steps of a run look at batches and make
            schedules, and are like no others.
        num_steps: How many follow each other.
    """

    folder: str | Path
    first_step: int = 3
    num_steps: int = 5

    def __post_init__(self) -> None:
        if self.first_step < 0 or self.num_steps < 1:
            raise ValueError(f"{self}: expected a first step of 0 or more, and at least one step")

    @classmethod
    def of(cls, given: Recording | str | Path | None) -> Recording | None:
        """Returns the options that a user gives; a folder alone has the defaults."""
        return cls(given) if isinstance(given, (str, Path)) else given

    @property
    def steps(self) -> range:
        """The numbers of the steps."""
        return range(self.first_step, self.first_step + self.num_steps)
