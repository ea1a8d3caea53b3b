"""All mutants."""

from tests.mutants import microbatch, optim, others, planner, runtime, stages, tracing

_ROOMS = (planner, tracing, microbatch, stages, runtime, optim, others)
MUTANTS = [mutant for room in _ROOMS for mutant in room.MUTANTS]
