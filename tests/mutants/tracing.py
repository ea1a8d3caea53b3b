"""Of the rooms ``tracing`` and ``independence``."""

from tests.mutants.mutant import Mutant

_TRACE, _GUARDS, _HELD, _USE = "tracing/trace.py", "tracing/guards.py", "tracing/held_tensors.py", "tracing/parameter_use.py"
_ROWS, _DIVISION, _TRIALS = "independence/batch_rows.py", "independence/division.py", "independence/trials.py"
_TEST_REFUSES, _TEST_GUARDS, _TEST_USE = (
    "tracing/test_trace_refuses.py",
    "tracing/test_guards.py",
    "tracing/test_parameter_use.py",
)
_TEST_ROWS, _TEST_DIVISION = "independence/test_batch_rows.py", "independence/test_division.py"
_TEST_TRIALS, _TEST_LABELS = "independence/test_trials.py", "strategy/test_label_reads.py"

_RECHECK, _TEST_RECHECK = "tracing/recheck.py", "strategy/test_recheck.py"
_ALIKE = "test_blocks_are_answered_where_all_that_they_read_is_alike"

MUTANTS = [
    Mutant(
        "tracing/tensors_in_place.py",
        "                changed |= elsewhere\n",
        "",
        ("strategy/test_writes_elsewhere.py::test_it_shares_a_stage_with_the_module_that_it_changes",),
        "what a module's forward does to another one's parameters is lost on the other rank",
    ),
    Mutant(
        "tracing/tensors_in_place.py",
        "                self._note_write()\n",
        "",
        ("strategy/test_writes_elsewhere.py::test_each_of_several_modules_alike_changes_it",),
        "a block like one that changes another module is taken to change nothing",
    ),
    Mutant(
        _RECHECK,
        "        if before != now\n",
        "        if False\n",
        (f"{_TEST_RECHECK}::test_a_value_that_no_guard_sees_ends_the_run",),
        "what a metaclass computes keeps the value of the first batch",
    ),
    Mutant(
        _RECHECK,
        "and not _is_same(constants.get(str(node.target), now), now)",
        "and False",
        (f"{_TEST_RECHECK}::test_a_value_that_no_guard_sees_ends_the_run",),
        "a tensor that is found where no guard looks stays that of the first batch",
    ),
    Mutant(
        _RECHECK,
        "varying=traced.varying, ",
        "",
        (f"{_TEST_RECHECK}::test_batches_of_any_length_are_compared_with_the_lengths_as_symbols",),
        "a trace for batches of any length is never compared",
    ),
    Mutant(
        _RECHECK,
        "        return\n    differing",
        "        pass\n    differing",
        (f"{_TEST_RECHECK}::test_sizes_that_are_symbols_in_other_places_are_not_compared",),
        "a batch of as many samples as another input has rows ends the run",
    ),
    Mutant(
        "pytree/structure.py",
        "            if isinstance(slot, _Plain):  # arrays are bytes\n",
        "            if False:\n",
        (f"{_TEST_RECHECK}::test_a_value_that_no_guard_sees_ends_the_run",),
        "an array that is loaded from a file stays that of the first batch",
    ),
    Mutant(
        "runtime/stage_traces.py",
        "                if self.count_use(found[0]):\n",
        "                if False:\n",
        ("ranks/test_recheck.py::test_a_value_that_no_guard_sees_ends_the_run_on_every_rank",),
        "calls of a step with manual optimization keep a value that no guard sees",
    ),
    Mutant(
        _TRACE,
        "    first_calls.give_again()\n",
        "",
        ("tracing/test_first_call.py::test_what_is_set_on_the_first_call_stays_when_the_step_before_it_is_undone",),
        "a flag that a model sets on its first call is lost, and each run refused",
    ),
    Mutant(
        _GUARDS,
        "            found[key] = _NOT_PLAIN\n",
        "            found[key] = None\n",
        (f"{_TEST_GUARDS}::test_a_tensor_where_code_has_found_none_is_another_value",),
        "a state that is None at first is never used",
    ),
    Mutant(
        "tracing/comparable.py",
        "        is_same = self.kind.can_change and self.kind.is_same(self.contents, other.contents)\n",
        "        is_same = self.kind.is_same(self.contents, other.contents)\n",
        ("tracing/test_comparable.py::test_another_value_is_noticed_and_an_equal_one_is_the_same",),
        "a long tuple of settings keeps its first values",
    ),
    Mutant(
        _TRACE,
        "traced = record(opened) if check else first",
        "traced = first",
        (f"{_TEST_REFUSES}::test_numbers_from_out_of_sight_are_refused",),
        "code that does something else each time is recorded once, and frozen",
    ),
    Mutant(
        "tracing/confirmation.py",
        "    if not differing and not (first.drew or second.drew):\n",
        "    if not differing:\n",
        (f"{_TEST_REFUSES}::test_random_path_is_refused_whatever_comes_out_of_the_generator",),
        "one outcome of layer drop is frozen into the graph",
    ),
    Mutant(
        "tracing/confirmation.py",
        "return not self.is_confirmed or self.calls == other.calls",
        "return True",
        ("tracing/test_confirmation.py::test_a_graph_that_is_not_the_earlier_one_is_recorded_twice",),
        "a step whose state has changed is refused as one that depends on chance",
    ),
    Mutant(
        "tracing/signals.py",
        "harmless=self.harmless if has_same_state else frozenset(),",
        "harmless=self.harmless,",
        ("tracing/test_confirmation.py::test_what_made_no_difference_in_another_state_may_make_one_now",),
        "an exchange between modules that was harmless with other values is not looked for again",
    ),
    Mutant(
        _TRACE,
        "with isolated_rng(), no_metrics_inside(root), fake_run(",
        "with no_metrics_inside(root), fake_run(",
        (f"{_TEST_REFUSES}::test_recording_leaves_the_generators",),
        "recording moves the run's random numbers",
    ),
    Mutant(
        _TRACE,
        "return signature == self.signature and self.bind_sizes(shapes) is not None",
        "return self.bind_sizes(shapes) is not None",
        ("tracing/test_trace.py::test_dtype_structure_constants_and_grad_mode_are_part_of_what_a_trace_covers",),
        "a graph of another dtype or mode is used",
    ),
    Mutant(
        _TRACE,
        "return signature == self.signature and self.bind_sizes(shapes) is not None",
        "return signature == self.signature",
        ("tracing/test_trace.py::test_one_trace_covers_every_batch_size_but_no_other_sequence_length",),
        "a graph of other sizes is used",
    ),
    Mutant(
        _TRACE,
        "return self.holds_now() and self.held.refresh()",
        "return self.take_numbers() and self.held.refresh()",
        (f"{_TEST_GUARDS}::test_a_trace_is_not_used_once_something_that_it_has_read_changes",),
        "a temperature that a callback anneals is that of the first batch",
    ),
    Mutant(
        _TRACE,
        "return self.holds_now() and self.held.refresh()",
        "return self.holds_now()",
        ("tracing/test_held_tensors.py::test_stages_have_the_tensors_of_today",),
        "a tensor that user code replaces is that of the first batch",
    ),
    Mutant(
        "tracing/discovery.py",
        "    if discovery.has_branches and not discovery.uses_all_parameters():\n",
        "    if False:\n",
        (f"{_TEST_LABELS}::test_calls_after_a_branch_on_labels_are_pipelined",),
        "layers of a branch that the first batch does not take are missing in another order of stages",
    ),
    Mutant(
        "runtime/batch_reads.py",
        "        if func in LOOKS and id(args[0]) in self._known:\n",
        "        if False:\n",
        (f"{_TEST_LABELS}::test_what_is_read_is_that_of_the_batch[CountsPositives]",),
        "1F1B refuses a loss that counts positives, some of them after the first step",
    ),
    Mutant(
        "tracing/torch_calls.py",
        "            leaf.constant = None\n",
        "            pass\n",
        ("tracing/test_held_numbers.py::test_a_number_is_no_input_if_its_value_is_read_from_a_tensor_made_of_it",),
        "an annealed number that goes through a tensor is that of the second batch for good",
    ),
    Mutant(
        "tracing/discovery.py",
        "up_to=() if is_by_inputs else ends",
        "up_to=()",
        ("tracing/test_discovery.py::test_a_gradient_up_to_the_last_results_is_the_steps_own_affair",),
        "a step that differentiates by the model's results only is no region",
    ),
    Mutant(
        "tracing/discovery.py",
        "            raise input_gradient() if is_by_inputs else own_gradient()\n",
        "            if is_by_inputs:\n                raise input_gradient()\n",
        ("tracing/test_discovery.py::test_a_gradient_through_calls_with_parameters_is_refused",),
        "a step that differentiates through the stages ends in an error of torch's",
    ),
    Mutant(
        "runtime/replay.py",
        "        if func in DIFFERENTIATING:\n            check_may_differentiate()\n",
        "",
        ("ranks/test_own_gradients.py::test_a_step_that_runs_for_each_microbatch_is_refused",),
        "a step that computes gradients by itself fails in the look at its batch",
    ),
    Mutant(
        "runtime/joint_step.py",
        "ends = [*others, *here, *backwards.anchors]",
        "ends = [*others, *backwards.anchors]",
        ("ranks/test_own_gradients.py::test_they_are_those_of_one_device[few]",),
        "a step cannot differentiate by a parameter that it uses by itself",
    ),
    Mutant(
        _GUARDS,
        "        if key not in guards and key not in read_after_set:  # what it was when it was read first\n",
        "        if key not in read_after_set:\n",
        (f"{_TEST_GUARDS}::test_what_is_compared_is_the_value_that_was_read_first",),
        "what the code has read before it changed it is not compared",
    ),
    Mutant(
        "tracing/set_between.py",
        "        is_compared = is_compared or self._is_written or bool(self._set)\n",
        "",
        ("strategy/test_set_before_call.py::test_what_a_forward_sets_for_its_submodules_counts",),
        "a stage has what was there before a forward has set it",
    ),
    *(
        Mutant("tracing/comparable.py", before, after, (f"tracing/test_comparable.py::{test}",), harm)
        for before, after, test, harm in (
            (
                'return value if value == value else "nan"',
                "return value",
                "test_another_value_is_noticed_and_an_equal_one_is_the_same",
                "a nan among the settings makes a new trace for each batch",
            ),
            (
                "    return value.dtype.str, value.shape, value.tobytes()\n",
                "    return value.dtype.str, value.shape\n",
                "test_another_value_is_noticed_and_an_equal_one_is_the_same",
                "another array of the same shape is not noticed",
            ),
            (
                'frozenset({"attribute", "slot"})',
                'frozenset({"attribute"})',
                "test_another_value_is_noticed_and_an_equal_one_is_the_same",
                "settings in an object with slots keep their first values",
            ),
            (
                "            return _Large(kind, contents)\n",
                "            return _Large(kind, ())\n",
                "test_another_value_is_noticed_and_an_equal_one_is_the_same",
                "a long list of settings keeps its first values",
            ),
            (
                "            return _Itself(value) if _stands_for_itself(cls) else _OTHER\n",
                "            return _OTHER\n",
                "test_another_value_is_noticed_and_an_equal_one_is_the_same",
                "a path, a decimal or a dtype keeps its first value",
            ),
        )
    ),
    *(
        Mutant(f"tracing/{file}.py", before, after, (f"strategy/test_values_read.py::{test}",), harm)
        for file, before, after, test, harm in (
            (
                "guards",
                "        note((None, name), trainer_value(name, value))\n",
                "",
                "test_what_the_run_holds_counts_as_it_is_in_each_step",
                "a data module's setting keeps its first value",
            ),
            (
                "guards",
                "                note((path, name), _of_all(path, vars(module)))\n",
                "                pass\n",
                "test_what_the_run_holds_counts_as_it_is_in_each_step",
                "a setting that code finds in vars(self) keeps its first value",
            ),
            (
                "trace",
                "functions = (call.code(root), *functions_read(root, recorder.attributes_read))",
                "functions = (call.code(root),)",
                "test_a_value_that_changes_between_steps_counts_whatever_holds_it",
                "a global variable that a function in an attribute reads keeps its first value",
            ),
            (
                "comparable",
                "            return _SYMBOL if depth else _OTHER\n",
                "            return _OTHER\n",
                "test_a_value_that_changes_between_steps_counts_whatever_holds_it",
                "a step is refused where a number that changes is reached by two names",
            ),
        )
    ),
    Mutant(
        "tracing/held_numbers.py",
        "kind_of_step(owner, self.steps[-1][0]).can_change else None",
        "True else None",
        ("strategy/test_values_read.py::test_a_value_that_changes_between_steps_counts_whatever_holds_it",),
        "a number in what cannot change is taken for an input, and keeps its first value",
    ),
    Mutant(
        "tracing/structure_guards.py",
        "found += [_number_of(_forward_of(module)), module is not None and has_hooks(module)]",
        "found += [_number_of(_forward_of(module))]",
        ("tracing/test_structure_guards.py::test_a_trace_is_not_used_once_its_modules_change",),
        "a hook that is put on an opened module never runs",
    ),
    Mutant(
        "tracing/structure_guards.py",
        "    if known is None or known[0]() is not thing:\n",
        "    if known is None:\n",
        ("tracing/test_structure_guards.py::test_a_module_in_the_memory_of_another_is_not_taken_for_it",),
        "a new module in the memory of an old one is taken for it",
    ),
    Mutant(
        "tracing/code_guards.py",
        "                waiting.append(in_classes[name])\n",
        "                pass\n",
        ("tracing/test_code_guards.py::test_what_forward_names_and_its_methods_and_functions_is_read",),
        "a global variable that a method of the model reads is not compared",
    ),
    Mutant(
        "tracing/code_guards.py",
        "                yield _BY_NAME[name], _BY_NAME[name].value(root)\n",
        "                pass\n",
        ("tracing/test_code_guards.py::test_rates_and_callbacks_are_read_where_code_names_them",),
        "a learning rate that the model reads is that of the first batch",
    ),
    Mutant(
        _HELD,
        "    return tensor.is_meta or other.is_meta or tensor.device == other.device\n",
        "    return tensor.device == other.device\n",
        ("tracing/test_held_tensors.py::test_a_placeholder_is_no_reason_to_record_anew",),
        "a buffer of another stage makes one rank record anew",
    ),
    Mutant(
        _HELD,
        "    return type(tensor), tensor.shape, tensor.dtype, tensor.layout, tensor.requires_grad\n",
        "    return type(tensor), tensor.shape, tensor.layout, tensor.requires_grad\n",
        ("tracing/test_held_tensors.py::test_a_buffer_of_another_dtype_does_not_fit",),
        "a buffer of another dtype is put into a graph of the old one",
    ),
    Mutant(
        _USE,
        "    if func == _SET_DATA:\n",
        "    if False:\n",
        (f"{_TEST_USE}::test_a_step_that_changes_parameters_is_refused",),
        "a step sets parameters on one stage",
    ),
    Mutant(
        _USE,
        "    return bool(wanted) != args[0].requires_grad\n",
        "    return False\n",
        (f"{_TEST_USE}::test_a_step_that_freezes_parameters_is_refused",),
        "a step freezes parameters on one stage",
    ),
    Mutant(
        _USE,
        "        if was != is_now:\n",
        "        if was is None:\n",
        (
            f"{_TEST_USE}::test_a_step_that_replaces_parameters_is_refused",
            f"{_TEST_USE}::test_other_memory_under_a_parameter_is_found_after_the_step",
        ),
        "a step replaces a parameter, and the optimizer trains the old one",
    ),
    Mutant(
        _USE,
        'written: list[Any] = [kwargs["out"]] if "out" in kwargs else []',
        "written: list[Any] = []",
        ("tracing/test_parameter_use.py::test_a_step_that_writes_into_a_parameter_by_out_is_refused",),
        "a step writes into a parameter by out=",
    ),
    Mutant(
        _USE,
        "_WRITING = _GIVING_MEMORY | NORMALISATIONS.keys()",
        "_WRITING = _GIVING_MEMORY",
        ("tracing/test_parameter_use.py::test_running_statistics_are_written_to",),
        "running statistics outside of the pipeline stay on the last stage",
    ),
    Mutant(
        "tracing/torch_calls.py",
        "            torch.set_grad_enabled(self.grad_enabled),\n",
        "",
        (
            "tracing/test_repeat.py::test_modes_are_those_of_the_call",
            "stages/test_build_calls.py::test_no_grad_and_detached_values_cross_without_gradient",
        ),
        "a function that the model calls under no_grad trains in a stage",
    ),
    Mutant(
        "tracing/torch_calls.py",
        "            torch.autocast(self.device_type, enabled=self.autocast_enabled, dtype=self.autocast_dtype),\n",
        "",
        ("tracing/test_repeat.py::test_autocast_that_a_call_was_made_without_is_off",),
        "a call for which the model has switched autocast off runs under it",
    ),
    Mutant(
        "tracing/repeat.py",
        "with self._world.active(), torch.no_grad(), self.autocast():",
        "with self._world.active(), torch.no_grad():",
        ("tracing/test_repeat.py::test_autocast_is_that_of_the_trace",),
        "what is repeated to look inside gives tensors of another dtype",
    ),
    # independence
    Mutant(
        _ROWS,
        "return length if type(start) is int and type(step) is int and (start, step) == (0, 1) else None",
        "return length",
        (f"{_TEST_ROWS}::test_other_numbers_are_not",),
        "numbers that begin with one are those of rows",
    ),
    Mutant(
        _ROWS,
        "            return node not in self.own_numbers\n",
        "            return False\n",
        (f"{_TEST_DIVISION}::test_what_depends_on_the_place_in_the_batch_sees_all_of_it",),
        "an embedding of a row's number begins anew with each microbatch",
    ),
    Mutant(
        _ROWS,
        "        return all(size.subs({self.symbol: samples}) == samples * one for samples in _TRIED_NUMBERS)\n",
        "        return True\n",
        (f"{_TEST_ROWS}::test_some_of_the_samples_are_no_number_for_each",),
        "half of the samples are so many for each",
    ),
    Mutant(
        _ROWS,
        "return any(self.symbol in size.free_symbols for size in sizes)",
        "return False",
        (f"{_TEST_ROWS}::test_calculating_with_the_number_of_samples",),
        "a loss that the model divides by the number of samples is divided by those of a microbatch",
    ),
    Mutant(
        _DIVISION,
        "            return bool(dims) or follows\n",
        "            return bool(dims)\n",
        (_TEST_DIVISION,),
        "a mean over the batch is taken over each microbatch",
    ),
    Mutant(
        _DIVISION,
        "            if storage_key(value) in changed:\n",
        "            if False:\n",
        (f"{_TEST_DIVISION}::test_memory_that_the_tail_changes_and_stages_have_is_refused",),
        "the stages read memory that is changed later for the whole batch",
    ),
    Mutant(
        _DIVISION,
        '    if found or not getattr(symbol, "is_Symbol", False):\n',
        "    if False:\n",
        (f"{_TEST_DIVISION}::test_code_for_one_batch_size_is_not_divided",),
        "code that holds for one batch size runs on microbatches of another",
    ),
    Mutant(
        _TRIALS,
        "        if not _alike(before.movedim(dim, 0)[entries:], after.movedim(dim, 0)[entries:]):\n",
        "        if False:\n",
        (f"{_TEST_TRIALS}::test_calls_that_mix_samples_are_named",),
        "samples that notice each other are never seen",
    ),
    Mutant(
        _TRIALS,
        "before.movedim(dim, 0)[entries:], after.movedim(dim, 0)[entries:]",
        "before.movedim(dim, 0), after.movedim(dim, 0)",
        (f"{_TEST_TRIALS}::test_calls_within_samples_are_not",),
        "each sample that depends on itself is said to notice others",
    ),
    Mutant(
        _TRIALS,
        "        kept.attributes.restore()\n",
        "        pass\n",
        ("independence/test_trials.py::test_trying_leaves_the_attributes_as_they_are",),
        "a try leaves its traces in the modules",
    ),
    Mutant(
        _TRIALS,
        "    with isolated_rng():\n",
        "    if True:\n",
        (f"{_TEST_TRIALS}::test_calls_within_samples_are_not",),
        "dropout makes two runs of a try differ",
    ),
    Mutant(
        "independence/value_use.py",
        "not isinstance(result, FakeTensor) or storage_key(result) in self._reached",
        "storage_key(result) in self._reached",
        ("independence/test_value_use.py::test_a_result_that_is_no_fake_comes_from_out_of_sight",),
        "a result that comes from out of sight uses no values",
    ),
    *(
        Mutant("tracing/known_calls.py", old, new, (f"tracing/test_known_calls.py::{_ALIKE}",), meaning)
        for old, new, meaning in (
            (
                "known for known in self._known.get(key, ()) if known.is_of(modules)",
                "known for known in self._known.get(key, ())",
                "blocks with other settings are taken to be alike",
            ),
            (
                "if watch.writes or not before.is_current(question) or any(",
                "if any(",
                "a block that counts its calls is taken to do nothing more",
            ),
            (
                "            self.names_read |= known.names\n",
                "",
                "what a module inside reads is forgotten where its call was known",
            ),
            (
                "isinstance(child, _UNSEEN) or has_hooks(child)",
                "isinstance(child, _UNSEEN)",
                "a hook does not run",
            ),
            (
                "            parts += _sharing((*tensors, *own))\n",
                "",
                "a block with tied weights is taken to be like one without",
            ),
            (
                "return is_same and self.generators == python_rng() and self.versions == versions",
                "return is_same and self.versions == versions",
                "a block that draws random numbers is taken to draw none",
            ),
            (
                "or made.base is not None or",
                "or",
                "a view is taken to have memory of its own",
            ),
        )
    ),
    *(
        Mutant("tracing/state_reads.py", before, after, (f"tracing/test_state_reads.py::{test}",), harm)
        for before, after, test, harm in (
            (
                "                self._note_read(tensor, inside.path)\n",
                "                pass\n",
                "test_a_module_that_leaves_a_tensor_and_cannot_be_opened_is_refused",
                "a block in another stage finds what was left for it before",
            ),
            (
                "follows |= maker is not None or isinstance(tensor, nn.Parameter)",
                "follows |= maker is not None",
                "test_what_a_module_would_have_to_be_opened_for_while_it_changes_others_is_refused",
                "what follows from weights is lost between stages",
            ),
            (
                "for tensor in tensors_among((result,)) if follows else ():",
                "for tensor in tensors_among((result,)):",
                "test_what_each_stage_has_by_itself_opens_nothing",
                "tables that blocks share are refused",
            ),
        )
    ),
    *(
        Mutant("tracing/kept_state.py", before, after, (f"stages/test_kept_state.py::{test}",), harm)
        for before, after, test, harm in (
            (
                "            elif self._is_operand(call, key):\n",
                "            elif not self._is_operand(call, key):\n",
                "test_whatever_else_is_kept_holds_the_calls_in_one_stage",
                "a flag is what the constructor set in the stage of the second call",
            ),
            (
                "return {call.name(key): value for key, value in call.reads.items() if self._is_operand(call, key)}",
                "return {}",
                "test_a_tensor_goes_to_the_stage_of_the_next_call",
                "statistics are those of the constructor in the stage of the second call",
            ),
            (
                "if reader is not call:",
                "if False:",
                "test_whatever_else_is_kept_holds_the_calls_in_one_stage",
                "what the last call keeps for the next step's first one stays in its stage",
            ),
            (
                "len(writers) == 1\n",
                "False\n",
                "test_a_cache_that_each_stage_fills_by_itself_forbids_no_cut_and_is_not_sent",
                "a table of positions that all blocks use forbids all cuts",
            ),
        )
    ),
    *(
        Mutant(f"tracing/{file}.py", before, after, (f"tracing/test_shared_state.py::{test}",), harm)
        for file, before, after, test, harm in (
            (
                "shared_state",
                "if calls.get(path) != trial.together.get(path)",
                "if False",
                "test_a_value_that_a_module_leaves_for_another_is_refused",
                "layers in different stages count for themselves",
            ),
            (
                "shared_state",
                "constants = {place_of(each): each for each in shared if self._is_made_of_constants(each.value)}",
                "constants: dict[Path, Difference] = {}",
                "test_a_value_that_a_module_leaves_for_another_is_refused",
                "a mask that one layer leaves for the others is the constructor's in their stages",
            ),
            (
                "shared_state",
                'str(self._fqns.get(id(tensor)) or self._before.place_of(tensor) or "_")',
                '"_"',
                "test_a_value_that_a_module_leaves_for_another_is_refused",
                "a layer uses its own buffer in place of the one that another has left",
            ),
            (
                "shared_state",
                "            for found in self._set_for_hooks():\n",
                "            for found in ():\n",
                "test_a_module_that_counts_on_one_that_it_is_no_part_of_is_refused",
                "the step uses what the last stage's layers have left on the model",
            ),
            (
                "shared_state",
                '        self._by_path.setdefault(AROUND, []).append(f"gives {_plain_leaves(value)}")\n',
                "        pass\n",
                "test_a_number_that_modules_leave_for_the_code_around_them_is_refused",
                "the step logs what the last stage's layers have left",
            ),
            (
                "shared_state",
                "        with self._calls.on_made_up_data():\n",
                "        if True:\n",
                "test_a_number_that_changes_the_result_of_a_module_on_made_up_data_is_refused",
                "layers that look at values count for themselves",
            ),
            (
                "shared_state",
                "        if not inside:\n",
                "        if True:\n",
                "test_modules_that_exchange_a_value_share_a_stage_with_the_module_around_them",
                "an encoder whose layers set a flag for each other is refused",
            ),
            (
                "shared_state",
                "        if trial.round is Round.ALONE and dependent and self._views is not None:\n",
                "        if False:\n",
                "test_values_that_no_other_module_uses_are_left_alone",
                "a cache that each stage would fill by itself is refused",
            ),
            (
                "views",
                "        self._put(self._left.get(path, self._start))\n",
                "",
                "test_code_that_tells_its_modules_where_they_are_is_refused",
                "a layer is never tried without what others leave for it",
            ),
            (
                "views",
                "            self._left[path] = [slot.with_other_values(contents, values) for slot, contents in before]\n",
                "            pass\n",
                "test_a_value_that_a_module_leaves_for_another_is_refused",
                "a layer that warms up after some steps does so in one stage only",
            ),
            (
                "reachable",
                "return Snapshot({**inside, **others}, enters_modules=False) if others else found",
                "return found",
                "test_a_hook_knows_what_its_module_does_not",
                "hooks of a layer change what the model reads",
            ),
        )
    ),
    *(
        Mutant("runtime/late_exchanges.py", before, after, (f"runtime/test_late_exchanges.py::{test}",), harm)
        for before, after, test, harm in (
            (
                "                if self._is_late(change, each, is_first=is_first):\n",
                "                if False:\n",
                "test_what_a_stage_begins_to_leave_for_another_rank_is_refused",
                "a flag that a layer sets after some steps is set in one stage only",
            ),
            (
                "        if change.place in self.live or container is None:\n            return change.place in self.live\n",
                "        if container is None:\n            return False\n",
                "test_what_has_changed_while_it_was_recorded_is_known",
                "a model that counts its calls ends in an error",
            ),
        )
    ),
    Mutant(
        _TRIALS,
        "        kept.put_buffers_back()\n        try:\n",
        "        try:\n",
        (f"{_TEST_TRIALS}::test_what_is_kept_and_not_used_or_always_the_same_is_left_alone",),
        "statistics that move with each microbatch are taken for a state",
    ),
    Mutant(
        "tracing/discovery.py",
        "            self._check_not_hidden(leaf)\n",
        "            pass\n",
        ("tracing/test_discovery.py::test_what_comes_from_inside_of_a_call_is_no_constant",),
        "a validation step logs the features of the beginning",
    ),
    Mutant(
        "tracing/discovery.py",
        "        check_values_read(root, discovery.attributes_read, discovery.left_values, step_name(step))\n",
        "",
        ("tracing/test_discovery.py::test_a_number_that_a_submodule_leaves_on_itself_is_refused_where_the_step_reads_it",),
        "the loss is made of a number of the beginning",
    ),
    Mutant(
        "tracing/state_reads.py",
        "self.refusal = self.refusal or _in_a_container(reader, self._maker(tensor))",
        "pass",
        ("tracing/test_state_reads.py::test_tensors_in_a_list_are_refused",),
        "a list of skips only grows in one stage, and is empty in another",
    ),
]
