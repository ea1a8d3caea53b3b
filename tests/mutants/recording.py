"""Of the room ``recording``, and of what the strategy does with it."""

from tests.mutants.mutant import Mutant

_RECORDER, _STEPS, _RUN = "recording/recorder.py", "recording/steps.py", "strategy/run_recording.py"
_RANKS = "ranks/test_recording.py"
_UNDIVIDED = "recording/test_recorder.py::test_of_an_action_no_parts_are_noted"

MUTANTS = [
    Mutant(
        _RECORDER,
        "            self._is_undivided = True\n",
        "            self._is_undivided = False\n",
        (_UNDIVIDED,),
        "parts of an action are noted as its neighbours",
    ),
    Mutant(
        _RECORDER,
        "        return self.is_on and bool(self._open) and not self._is_undivided\n",
        "        return self.is_on and not self._is_undivided\n",
        ("recording/test_recorder.py::test_what_is_part_of_nothing_is_not_noted",),
        "evaluation is recorded",
    ),
    Mutant(
        _STEPS,
        "less = offset.seconds + begin",
        "less = begin - offset.seconds",
        ("recording/test_steps.py::test_the_ranks_spans_are_put_on_one_clock_and_count_from_the_first",),
        "clocks are put apart instead of together",
    ),
    Mutant(
        "recording/alignment.py",
        "key=lambda trip: trip[2] - trip[0]",
        "key=lambda trip: trip[0]",
        ("recording/test_steps.py::test_the_shortest_trip_tells_the_offset_and_its_error",),
        "any round trip tells a clock's offset",
    ),
    Mutant(
        "recording/expected.py",
        "if its == table]",
        "if its]",
        ("recording/test_expected.py::test_only_steps_of_the_same_table_count",),
        "steps with other microbatches count for the simulation",
    ),
    Mutant(
        "schedules/executor.py",
        "microbatch=self.first + action.microbatch",
        "microbatch=action.microbatch",
        (f"{_RANKS}::test_each_rank_does_each_action_of_the_table_once_in_its_order",),
        "microbatches of a rest have the numbers of others",
    ),
    Mutant(
        "runtime/batch_passes.py",
        '        with self._recorder.undivided("check a batch"), undo_after',
        "        with undo_after",
        (f"{_RANKS}::test_a_look_at_a_batch_is_no_part_of_the_schedule",),
        "a look at a batch counts as its forward",
    ),
    Mutant(
        _RUN,
        "        if not self._is_chosen and not has_stepped:\n",
        "        if not self._is_chosen:\n",
        (f"{_RANKS}::test_the_bubble_and_the_peak_are_logged_by_rank_0_where_the_optimizer_steps",),
        "nothing is logged of steps that are not recorded",
    ),
    Mutant(
        _RUN,
        "        self.recorder.is_on = False\n        self._write()\n",
        "        self.recorder.is_on = False\n",
        (f"{_RANKS}::test_a_run_that_fails_leaves_the_steps_before",),
        "a run that fails leaves nothing of what it has recorded",
    ),
]
