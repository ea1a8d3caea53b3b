"""All mutants."""

from tests.mutants import checkpoint, microbatch, optim, others, planner, runtime, schedules, simulation, stages, tracing

_ROOMS = (planner, simulation, schedules, tracing, microbatch, stages, runtime, optim, checkpoint, others)
MUTANTS = [mutant for room in _ROOMS for mutant in room.MUTANTS]
