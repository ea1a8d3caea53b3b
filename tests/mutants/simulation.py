"""Of the room ``simulation``, and of what the planner does with it."""

from tests.mutants.mutant import Mutant

_RUN, _TABLES, _WALK, _ZERO = (f"simulation/{name}.py" for name in ("simulator", "actions", "walk", "zero_bubble"))
_CUT, _UNITS = "planner/fastest_cut.py", "planner/unit_operators.py"
_BY_DEFINITION = "simulation/test_simulator.py::test_times_are_those_that_follow_from_the_definition"
_BRUTE_FORCE = "planner/test_fastest_cut.py::test_random_chains_are_cut_as_by_brute_force"
_KEPT = "planner/test_unit_operators.py"

MUTANTS = [
    Mutant(
        "simulation/simulator.py",
        "averaged = events[-1].end_seconds + seconds",
        "averaged = self.pipeline_seconds + seconds",
        ("planner/test_layouts.py::test_a_rank_averages_as_soon_as_its_own_stages_are_done",),
        "replicas average when all stages are done",
    ),
    Mutant(
        "simulation/timeline.py",
        "Span(OTHERS_STEP, middle, end)",
        "Span(OTHERS_STEP, middle, middle)",
        ("pictures/test_replicas.py::test_a_step_ends_with_the_average_that_layouts_count",),
        "a step of replicas that share out the optimizer ends on pictures before they have the others' parameters",
    ),
    Mutant(
        "strategy/run_plan.py",
        "ADAM_BYTES_PER_BYTE / (num_replicas if self.shard_optimizer_state else 1)",
        "ADAM_BYTES_PER_BYTE",
        ("ranks/test_shards.py::test_a_memory_limit_counts_a_replicas_share_of_the_states",),
        "a memory limit counts all states of an optimizer that is shared out",
    ),
    Mutant(
        _RUN,
        "start, decided_by = max(start, arrival), each",
        "start, decided_by = free, each",
        (_BY_DEFINITION,),
        "an action begins before what it needs is there",
    ),
    Mutant(
        _RUN,
        "        self.arrivals[action, to] = self.link_free[rank, receiver] + self.link.latency_seconds\n",
        "        self.arrivals[action, to] = self.link_free[rank, receiver]\n",
        (_BY_DEFINITION,),
        "a message takes no time",
    ),
    Mutant(
        _RUN,
        "begin = max(self.ready[action], self.link_free.get((rank, receiver), 0.0))",
        "begin = self.ready[action]",
        ("simulation/test_simulator.py::test_transfers_in_one_direction_follow_each_other",),
        "messages share a link without taking longer",
    ),
    Mutant(
        _RUN,
        "            for to, num_bytes in (*following, *cost.skips):\n",
        "            for to, num_bytes in following:\n",
        ("simulation/test_simulator.py::test_skip_is_sent_once_past_the_stages_between",),
        "what goes past stages arrives at once",
    ),
    Mutant(
        _TABLES,
        "    if order != sorted(order):\n",
        "    if False:\n",
        ("simulation/test_actions.py::test_what_nobody_could_run_is_refused",),
        "a backward may come before its forward",
    ),
    Mutant(
        _WALK,
        "        while not self.fits(action, limit_bytes):\n",
        "        while False:\n",
        ("simulation/test_zero_bubble.py::test_any_costs_give_an_order_that_can_be_run_in_the_memory",),
        "an order takes more memory than there is",
    ),
    Mutant(
        _ZERO,
        "if not is_harmless or self._choices.fills_always:",
        "if self._choices.fills_always:",
        ("simulation/test_zero_bubble.py::test_it_has_the_published_bubble_rate",),
        "an order waits where gradients of weights could be made",
    ),
    Mutant(
        _CUT,
        "return least + self._chain.overhead.step_seconds <",
        "return 1.1 * least + self._chain.overhead.step_seconds <",
        (_BRUTE_FORCE,),
        "the fastest cut is left out",
    ),
    Mutant(
        _CUT,
        "        if self._excess(found.peak_bytes) > 0:\n",
        "        if False:\n",
        (_BRUTE_FORCE,),
        "a cut is chosen that does not fit into the memory",
    ),
    Mutant(
        _UNITS,
        "self._values[node] = self.repeat.blank(node)\n            self._kept.add(storage_key(self._values[node]))\n",
        "self._values[node] = self.repeat.blank(node)\n",
        (f"{_KEPT}::test_what_units_keep_together_is_what_autograd_keeps",),
        "the batch counts as kept for backward",
    ),
    Mutant(
        _UNITS,
        "        return self._originals.get(key) or (key, int(tensor.untyped_storage().nbytes()))\n",
        "        return (key, int(tensor.untyped_storage().nbytes()))\n",
        (f"{_KEPT}::test_what_units_keep_together_is_what_autograd_keeps",),
        "what two units keep counts twice",
    ),
]
