"""Of the room ``schedules``, of where stages are, and of torch's stages as they are used."""

from tests.mutants.mutant import Mutant

_SPLIT, _BY_NAME, _PIPELINING = (f"schedules/{name}.py" for name in ("split_backward", "by_name", "pipelining"))
_STAGE, _TOPOLOGY, _CHANGES = "_compat/pipelining.py", "distributed/topology.py", "runtime/stage_changes.py"
_GRADIENTS = "schedules/test_split_backward.py::test_gradients_are_those_of_one_device"
_LOOKS = "schedules/test_split_backward.py"
_HOOKS = f"{_LOOKS}::test_hooks_run_as_often_as_without_a_split"
_ORDERS = "schedules/test_by_name.py"

_OWN, _TEST_OWN = "schedules/own_table.py", "schedules/test_own_table.py"

_SKIPS, _TEST_SKIPS = "schedules/skips.py", "schedules/test_skips.py"
_ONE_PROCESS = "ranks/test_skips.py::test_stages_of_one_process_equal_one_device"

MUTANTS = [
    Mutant(
        _SKIPS,
        "_FIRST_TAG = 1 << 16",
        "_FIRST_TAG = 1",
        (
            f"{_TEST_SKIPS}::test_no_other_message_has_such_a_tag",
            f"{_TEST_SKIPS}::test_each_message_has_a_tag_of_its_own_and_the_next_is_asked_for_ahead",
        ),
        "a rank that waits for a command gets a tensor that goes past stages",
    ),
    Mutant(
        _SKIPS,
        "_FIRST_TAG + number * self._num_microbatches + index",
        "_FIRST_TAG + number + index",
        (f"{_TEST_SKIPS}::test_each_message_has_a_tag_of_its_own_and_the_next_is_asked_for_ahead",),
        "two tensors that go past stages share a tag",
    ),
    Mutant(
        _SKIPS,
        "key not in self._asked:",
        "key not in self._coming:",
        (f"{_TEST_SKIPS}::test_nothing_is_asked_for_twice_in_whatever_order_microbatches_come",),
        "a pass takes a message of the next one",
    ),
    Mutant(
        _SKIPS,
        "torch.zeros_like(leaf) if gradient is None else",
        "torch.ones_like(leaf) if gradient is None else",
        (f"{_TEST_SKIPS}::test_gradient_that_nobody_has_computed_is_sent_as_zeros",),
        "a tensor that came past stages and gets no gradient sends back another",
    ),
    Mutant(
        _SKIPS,
        'found["input_values"] = [*found["input_values"], *self._leaves[index]]',
        'found["input_values"] = [*self._leaves[index], *found["input_values"]]',
        (_ONE_PROCESS,),
        "gradients of what came past stages go to the stage before",
    ),
    Mutant(
        _SPLIT,
        "    if any(output.grad_fn not in on_way for output in outputs if output.grad_fn is not None):\n",
        "    if False:\n",
        (
            f"{_LOOKS}::test_a_tower_that_begins_in_a_stage_gets_its_gradients",
            f"{_LOOKS}::test_whatever_may_be_split_has_the_same_gradients_as_in_one_piece",
        ),
        "a tower that begins in a stage gets no gradients",
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
        "    return schedule.table if num_microbatches == schedule.num_microbatches else None\n",
        "    return schedule.table\n",
        (f"{_TEST_OWN}::test_a_table_says_all_of_its_pipeline",),
        "torch fails at a batch with another number of microbatches than the table",
    ),
    Mutant(
        _BY_NAME,
        "    if schedule.is_fitted and work:\n",
        "    if schedule.is_fitted and not work:\n",
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
        _STAGE,
        "        return self._losses.pop(mb_index, None) if stage.is_last else None\n",
        "        return super()._maybe_get_loss(stage, mb_index)\n",
        ("_compat/test_pipelining.py::test_a_table_may_take_microbatches_in_any_order",),
        "microbatches of a table in another order than theirs get the gradients of each other's losses, or none",
    ),
    Mutant(
        _SPLIT,
        "    if not inputs or any(has_gradient_hooks(parameter) for parameter in parameters):\n",
        "    if any(has_gradient_hooks(parameter) for parameter in parameters):\n",
        (f"{_LOOKS}::test_without_an_input_that_trains_the_weights_would_be_lost",),
        "weights after frozen stages get no gradient",
    ),
    Mutant(
        _SPLIT,
        "    if not inputs or any(has_gradient_hooks(parameter) for parameter in parameters):\n",
        "    if not inputs:\n",
        (_HOOKS,),
        "hooks of parameters do not run",
    ),
    Mutant(
        _SPLIT,
        "or not known.issuperset(leaves.values())",
        "",
        (f"{_LOOKS}::test_a_weight_that_is_none_of_the_stages_own_would_be_lost",),
        "a weight that torch is not told of gets no gradient",
    ),
    Mutant(
        _SPLIT,
        "any(isinstance(node, BackwardCFunction) for node in users) or ",
        "",
        (f"{_LOOKS}::test_backwards_of_python_run_once_for_each_microbatch", _GRADIENTS),
        "backwards of Python run twice",
    ),
    Mutant(
        _SPLIT,
        "            if node in left_at and left_at[node] is not place:\n                return False\n",
        "",
        (f"{_LOOKS}::test_weights_that_leave_the_way_at_two_places_would_run_what_lies_between_twice",),
        "a layer used twice ends in an error of autograd",
    ),
    Mutant(
        _PIPELINING,
        "not self._watch.has_seen_any and may_split",
        "may_split",
        (_HOOKS,),
        "hooks on results run twice",
    ),
    Mutant(
        _PIPELINING,
        "with_own_node(output) if output.requires_grad else output",
        "output",
        (f"{_LOOKS}::test_what_is_sent_may_be_needed_for_weights",),
        "a stage that sends what it has saved ends in an error of autograd",
    ),
    Mutant(
        _STAGE,
        "        if not full_backward and self.has_backward and not self.splits(bwd_chunk_id):\n",
        "        if False:\n",
        (_GRADIENTS,),
        "every backward pass is split",
    ),
    Mutant(
        _STAGE,
        "                self._make_buffers(self.grad_recv_info, mb_index)\n",
        "                pass\n",
        (f"{_LOOKS}::test_what_is_sent_may_get_no_gradient",),
        "a gradient that another stage of the rank does not have has no memory",
    ),
    Mutant(
        _BY_NAME,
        "    except ScheduleError:\n        return None\n",
        "    except ZeroDivisionError:\n        return None\n",
        (f"{_ORDERS}::test_every_order_ends_for_few_and_odd_many_microbatches",),
        "the last batch of an epoch ends the run",
    ),
    Mutant(
        _BY_NAME,
        "return kind if num_microbatches % num_rounds == 0 else None",
        "return kind",
        (f"{_ORDERS}::test_where_there_is_no_such_order_all_go_forward_first",),
        "torch refuses a number of microbatches",
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
    Mutant(
        "schedules/one_way.py",
        "max(1, AHEAD_BYTES // max(1, num_bytes))",
        "1",
        ("schedules/test_one_way.py::test_between_cpus_small_messages_are_asked_for_long_before",),
        "each small message waits for its receiver",
    ),
]
