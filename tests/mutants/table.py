"""All mutants."""

from tests.mutants import (
    checkpoint,
    microbatch,
    optim,
    others,
    pictures,
    planner,
    recording,
    runtime,
    schedules,
    simulation,
    stages,
    tracing,
)

_ROOMS = (planner, simulation, recording, schedules, tracing, microbatch, stages, runtime, optim, checkpoint, pictures, others)
MUTANTS = [mutant for room in _ROOMS for mutant in room.MUTANTS]
