"""Of the room ``schedules``, and of the placement of stages."""

from tests.mutants.mutant import Mutant

_SPLIT, _BY_NAME, _PROGRAM, _EXECUTOR = (
    f"schedules/{name}.py" for name in ("split_backward", "by_name", "program", "executor")
)
_TOPOLOGY, _CHANGES = "distributed/topology.py", "runtime/stage_changes.py"
_LOOKS = "schedules/test_split_backward.py"
_GRADIENTS = f"{_LOOKS}::test_gradients_are_those_of_one_device"
_HALVES = f"{_LOOKS}::test_both_halves_together_are_the_backward_pass"
_HOOKS = f"{_LOOKS}::test_hooks_run_as_often_as_without_a_split"
_ORDERS = "schedules/test_by_name.py"
_TEST_PROGRAM = "schedules/test_program.py"

_OWN, _TEST_OWN = "schedules/own_table.py", "schedules/test_own_table.py"

MUTANTS = [
    Mutant(
        _PROGRAM,
        "            if user[0] != place[0]:\n",
        "            if True:\n",
        (f"{_TEST_PROGRAM}::test_stages_of_one_rank_send_nothing_to_each_other",),
        "a rank sends to itself",
    ),
    Mutant(
        _PROGRAM,
        "place = min(place, max(0, message.used_at - num_ahead))",
        "place = max(0, message.used_at - num_ahead)",
        (f"{_TEST_PROGRAM}::test_receives_start_in_the_order_of_the_sends",),
        "messages between two ranks are taken for each other",
    ),
    Mutant(
        _PROGRAM,
        "max(1, min(ahead_bytes // max(1, largest), most_open))",
        "1",
        (f"{_TEST_PROGRAM}::test_small_messages_are_received_long_before_their_turn",),
        "each small message waits for its receiver",
    ),
    Mutant(
        _PROGRAM,
        "min(ahead_bytes // max(1, largest), most_open)",
        "(ahead_bytes // max(1, largest))",
        (f"{_TEST_PROGRAM}::test_no_more_buffers_than_microbatches_in_flight",),
        "there are buffers for all microbatches",
    ),
    Mutant(
        _PROGRAM,
        "                    clock[other] = max(clock[other], at + 1)\n",
        "                    clock[other] = max(clock[other], at + 2)\n",
        (f"{_TEST_PROGRAM}::test_a_send_is_waited_for_once_the_receiver_has_answered",),
        "a rank waits for a send that the receiver has not come to",
    ),
    Mutant(
        _PROGRAM,
        "        raise deadlock_error(",
        "        return clocks or deadlock_error(",
        (f"{_TEST_PROGRAM}::test_a_table_whose_ranks_wait_for_each_other_is_refused",),
        "ranks that wait for each other for ever begin to run",
    ),
    Mutant(
        _PROGRAM,
        "        return tuple(sorted({(message.source, message.target) for message in messages}))\n",
        "        return tuple(dict.fromkeys((message.source, message.target) for message in messages))\n",
        (f"{_TEST_PROGRAM}::test_ranks_are_connected_in_an_order_that_all_have",),
        "ranks wait for each other when they connect",
    ),
    Mutant(
        _EXECUTOR,
        "        self._has_failed = True\n",
        "",
        ("ranks/test_executor.py::test_errors_come_out_as_they_were_raised_and_end_the_pipeline",),
        "a step after a failed one takes its messages",
    ),
    Mutant(
        _SPLIT,
        "    if any(isinstance(node, BackwardCFunction) for node in graph.users):\n        return None\n",
        "",
        (f"{_LOOKS}::test_backwards_of_python_run_once_for_each_microbatch", _GRADIENTS),
        "backwards of Python run twice",
    ),
    Mutant(
        _SPLIT,
        "    for part in [part for part in parts if part.weights.keys() & new.weights.keys()]:\n",
        "    for part in []:\n",
        (_HALVES,),
        "hooks of a weight that is used twice run twice",
    ),
    Mutant(
        _SPLIT,
        "                    hooks.callback(node.register_prehook(partial(_instead, gradients)).remove)\n",
        "                    pass\n",
        (_HALVES,),
        "what flows from one use of a weight to another counts twice",
    ),
    Mutant(
        _SPLIT,
        "        if end.node not in trunk:\n",
        "        if False:\n",
        (f"{_LOOKS}::test_a_tower_that_begins_in_a_stage_gets_its_gradients", _HALVES),
        "a tower that begins in a stage gets no gradients",
    ),
    Mutant(
        "runtime/one_f_one_b.py",
        "        splits = watch is not None and not watch.has_seen_any\n",
        "        splits = watch is not None\n",
        (_HOOKS,),
        "hooks on results run twice",
    ),
    Mutant(
        _OWN,
        "ActionTable.of(sorted(table.ranks, key=lambda actions: min((action.stage for action in actions), default=-1)))",
        "table",
        (f"{_TEST_OWN}::test_a_table_says_all_of_its_pipeline",),
        "a table whose lines are in another order is refused",
    ),
    Mutant(
        _OWN,
        "        if each == 2:\n",
        "        if each == 3:\n",
        (f"{_TEST_OWN}::test_a_table_says_all_of_its_pipeline",),
        "a table with stages in a V is refused",
    ),
    Mutant(
        _OWN,
        "        run_table(table, [some] * table.num_stages)\n",
        "        pass\n",
        (f"{_TEST_OWN}::test_ranks_that_would_wait_for_ever_are_refused",),
        "ranks that wait for each other begin to run",
    ),
    Mutant(
        _OWN,
        "num_microbatches not in (",
        "num_microbatches in (",
        (f"{_TEST_OWN}::test_another_number_of_microbatches_than_the_tables_is_refused",),
        "a table for another number of microbatches never runs",
    ),
    Mutant(
        _BY_NAME,
        "schedule.table if num_microbatches == schedule.num_microbatches else forward_order(placement, num_microbatches)",
        "schedule.table",
        (f"{_TEST_OWN}::test_a_table_says_all_of_its_pipeline",),
        "a batch with another number of microbatches than the table runs with the table",
    ),
    Mutant(
        _BY_NAME,
        "[tuple(each.costs for each in work)] if schedule.is_fitted and work else []",
        "[]",
        (f"{_ORDERS}::test_an_order_is_made_from_what_the_stages_take",),
        "an order is that for equal stages, whatever they take",
    ),
    Mutant(
        "simulation/fitted.py",
        "        known.append(same)\n",
        "        pass\n",
        ("simulation/test_fitted.py::test_the_order_for_equal_stages_is_taken_where_it_is_faster",),
        "an order that fits the stages is slower than one that does not",
    ),
    Mutant(
        "planner/cut_rule.py",
        "seconds=choice.unit_seconds, recomputed",
        "seconds=None, recomputed",
        ("planner/test_cut_rule.py::test_what_was_timed_counts",),
        "what layers take by the clock does not count for the order",
    ),
    Mutant(
        "planner/cut_rule.py",
        "        if not self.tells_work and not (",
        "        if False and not (",
        ("planner/test_cut_rule.py::test_a_plan_tells_what_its_stages_take_where_an_order_is_made_from_it",),
        "every setup runs all units on fakes",
    ),
    Mutant(
        _BY_NAME,
        "    except ScheduleError:\n        return None\n",
        "    except ZeroDivisionError:\n        return None\n",
        (f"{_ORDERS}::test_every_order_ends_for_few_and_odd_many_microbatches",),
        "the last batch of an epoch ends the run",
    ),
    Mutant(
        _TOPOLOGY,
        "min(stage, self.num_stages - 1 - stage) if self.is_v else stage % self.num_ranks",
        "stage % self.num_ranks",
        ("distributed/test_topology.py::test_stages_of_a_v_come_back",),
        "stages of a V go round",
    ),
    Mutant(
        _TOPOLOGY,
        "return tuple(dict.fromkeys(map(self.rank_of, stages)))",
        "return tuple(map(self.rank_of, stages))",
        ("distributed/test_topology.py::test_stages_of_one_rank_are_one_holder",),
        "a rank sums the gradients of a weight that two of its stages use with itself",
    ),
    Mutant(
        _CHANGES,
        "self._after_first = self._counts(later) | self._after_first",
        "self._after_first = self._counts()",
        ("runtime/test_stage_changes.py::test_what_counts_in_one_of_several_stages_is_seen",),
        "a stage that counts its calls is not seen beside others",
    ),
]
