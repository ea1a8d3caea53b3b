"""Of the room ``optim``."""

from tests.mutants.mutant import Mutant

_OPTIMIZERS, _PRECISION, _COUPLING = "optim/optimizers.py", "optim/precision.py", "optim/coupling.py"
_TEST_COUPLING, _TEST_STATES = "optim/test_coupling.py", "ranks/test_optimizer_states.py"
_TEST_OPTIMIZERS = "optim/test_optimizers.py"

_SHARDS, _TEST_SHARDS = "optim/shards.py", "ranks/test_shards.py"

MUTANTS = [
    Mutant(
        _SHARDS,
        "        self._share_values()\n",
        "        pass\n",
        (f"{_TEST_SHARDS}::test_equals_replicas_that_share_nothing_out",),
        "what a replica has stepped stays its own",
    ),
    Mutant(
        _SHARDS,
        "            for parameter in sorted(new, key=lambda p: (p.requires_grad, p.nbytes), reverse=True):\n",
        "            for parameter in new:\n",
        (f"{_TEST_SHARDS}::test_the_largest_are_shared_out_first",),
        "one replica gets all that is large",
    ),
    Mutant(
        _OPTIMIZERS,
        "            if wanted.get(key) in stated:\n",
        "            if key in wanted:\n",
        (f"{_TEST_SHARDS}::test_a_replica_reads_the_states_of_its_share",),
        "each replica has all states after it has read a checkpoint",
    ),
    Mutant(
        _OPTIMIZERS,
        "        if len(groups) != len(self.group_fqns):\n",
        "        if False:\n",
        (f"{_TEST_OPTIMIZERS}::test_a_state_of_other_groups_is_refused",),
        "a checkpoint with another number of parameter groups is loaded",
    ),
    Mutant(
        _OPTIMIZERS,
        'if any(len(saved["params"]) != len(fqns) for',
        'if any(len(saved["params"]) < 0 for',
        (f"{_TEST_OPTIMIZERS}::test_a_state_of_other_groups_is_refused",),
        "a checkpoint with groups of other sizes is loaded",
    ),
    Mutant(
        _OPTIMIZERS,
        "    return value.clone() if copies else value\n",
        "    return value\n",
        (f"{_TEST_OPTIMIZERS}::test_a_loaded_state_is_a_copy_where_the_file_is_mapped",),
        "the optimizer's state is the memory of a mapped file",
    ),
    Mutant(
        _OPTIMIZERS,
        "if value.shape == parameter.shape and value.stride() != parameter.stride():",
        "if False:",
        (f"{_TEST_OPTIMIZERS}::test_a_loaded_state_lies_in_memory_as_its_parameter",),
        "a loaded moment lies in memory in another order than its parameter",
    ),
    Mutant(
        _OPTIMIZERS,
        "        if unknown:\n            raise UnsupportedError(",
        "        if False:\n            raise UnsupportedError(",
        (f"{_TEST_OPTIMIZERS}::test_a_parameter_of_no_module_is_refused",),
        "an optimizer of parameters that the module has not ends in a KeyError",
    ),
    Mutant(
        _OPTIMIZERS,
        'for key, entry in state.items() if key != "step"})',
        "for key, entry in state.items()})",
        (f"{_TEST_OPTIMIZERS}::test_a_counter_of_steps_stays_where_torch_has_it",),
        "counters of steps move to the GPU, where each step waits for them",
    ),
    Mutant(
        _PRECISION,
        "dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)",
        "pass",
        ("ranks/test_precision.py::test_every_precision_is_that_of_one_device",),
        "one stage skips a step that the others make",
    ),
    Mutant(
        _PRECISION,
        '(plugin, "clip_grad_by_norm", clip_by_norm),',
        "",
        ("ranks/test_training.py::test_trainer_options_give_the_same_run",),
        "each stage clips by its own norm",
    ),
    Mutant(
        _PRECISION,
        "        return 1.0 if scaler is None else float(scaler.get_scale())\n",
        "        return 1.0\n",
        ("ranks/test_precision.py::test_scaled_microbatches_are_those_of_one_device",),
        "1F1B does not know by what the loss is scaled",
    ),
    Mutant(
        _PRECISION,
        "        StepKind.VALIDATE: plugin.val_step_context,\n",
        "        StepKind.VALIDATE: plugin.train_step_context,\n",
        ("optim/test_precision.py::test_each_step_has_its_context",),
        "validation runs in the plugin's context for training",
    ),
    Mutant(
        _COUPLING,
        "parts = [part for part in (range(count // 2), range(1, count, 2)) if 0 < len(part) < count]",
        "parts: list[range] = []",
        (f"{_TEST_COUPLING}::test_a_step_of_all_parameters_together_is_found_with_several_stages",),
        "an optimizer that needs all parameters trains each stage by itself",
    ),
    Mutant(
        _COUPLING,
        "with torch.random.fork_rng(devices=[]), torch.enable_grad()",
        "with torch.enable_grad()",
        (f"{_TEST_COUPLING}::test_a_trial_leaves_the_optimizer_and_the_random_numbers_as_they_are",),
        "the trial of an optimizer seeds the run's random numbers",
    ),
    Mutant(
        _COUPLING,
        ", replaced_everywhere(_COLLECTIVES, _refused):",
        ":",
        (f"{_TEST_COUPLING}::test_communication_is_found_while_torch_distributed_answers_for_one_replica",),
        "an optimizer that talks to other replicas is tried as if it did not",
    ),
]
