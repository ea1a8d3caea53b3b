"""Of the room ``stages``."""

from tests.mutants.mutant import Mutant

_BUILD, _SHARD, _GATHER = "stages/build.py", "stages/shard.py", "stages/gather.py"
_GRADIENTS, _MEMORY = "stages/gradients.py", "stages/memory.py"
_TEST_BUILD, _TEST_CALLS, _TEST_SHARD = "stages/test_build.py", "stages/test_build_calls.py", "stages/test_shard.py"
_TEST_GRADIENTS = "ranks/test_gradients.py"
_CASTS, _TEST_CASTS = "stages/shared_casts.py", "stages/test_shared_casts.py"
_REPLICAS, _TEST_TENSORS = "stages/replicas.py", "ranks/test_replica_tensors.py"

MUTANTS = [
    Mutant(
        _CASTS,
        "cache_enabled=True",
        "cache_enabled=torch.is_autocast_cache_enabled()",
        (f"{_TEST_CASTS}::test_a_batch_makes_as_many_copies_as_on_one_device",),
        "each microbatch casts the weights anew where Lightning has switched the cache off",
    ),
    Mutant(
        _CASTS,
        "            torch.clear_autocast_cache()\n",
        "            pass\n",
        (f"{_TEST_CASTS}::test_nothing_is_kept_behind_the_block",),
        "what autocast made of weights before they were trained is used after it",
    ),
    Mutant(
        _BUILD,
        '        if context is not None:\n            operation, target = "call_function", _under(target, context)\n',
        "",
        (
            f"{_TEST_CALLS}::test_no_grad_and_detached_values_cross_without_gradient",
            f"{_TEST_CALLS}::test_grad_enabled_inside_a_call_without_gradients",
        ),
        "calls under no_grad or autocast run without it in a stage",
    ),
    Mutant(
        _BUILD,
        'self._values[node] = self._graph.call_method("clone", (placeholder,))',
        "pass",
        ("stages/test_build_in_place.py::test_received_tensor_may_be_changed_in_place",),
        "a received tensor is changed in place where autograd needs it",
    ),
    Mutant(
        _BUILD,
        '            requires_grad=node.meta["val"].requires_grad,\n            gradient_of=',
        "            requires_grad=True,\n            gradient_of=",
        (f"{_TEST_BUILD}::test_what_crosses_is_described_as_it_is",),
        "a mask is sent as something that trains",
    ),
    Mutant(
        _BUILD,
        "    return None if found == tuple(range(len(strides))) else found\n",
        "    return None\n",
        (f"{_TEST_BUILD}::test_the_layout_of_a_boundary_is_that_of_the_traced_tensor",),
        "dropout after a boundary zeroes other entries than on one device",
    ),
    Mutant(
        _BUILD,
        "        return expression.xreplace(self._replacements)\n",
        "        return expression\n",
        (f"{_TEST_BUILD}::test_size_that_is_fixed_after_it_was_used_as_a_symbol",),
        "a size that the trace has fixed later is still a symbol",
    ),
    Mutant(
        _SHARD,
        "return not holders or any(stage in stages for stage in holders)",
        "return any(stage in stages for stage in holders)",
        (f"{_TEST_SHARD}::test_what_no_stage_claims_stays_on_every_rank_and_what_comes_after_with_the_last",),
        "what no stage claims is dropped by every rank",
    ),
    Mutant(
        _SHARD,
        "        holders = plan.stages_of(names[fqn])\n",
        "        holders = plan.stages_of(fqn)\n",
        (f"{_TEST_SHARD}::test_tied_weights_stay_tied_on_every_stage",),
        "the second name of a tied weight is nobody's",
    ),
    Mutant(
        _SHARD,
        "        if id(tensor) not in placeholders:\n",
        "        if True:\n",
        (f"{_TEST_SHARD}::test_tied_weights_stay_tied_on_every_stage",),
        "the two names of a tied weight have placeholders of their own",
    ),
    Mutant(
        _SHARD,
        "        check_is_whole(root.named_parameters())\n",
        "        pass\n",
        (f"{_TEST_SHARD}::test_a_module_that_has_lost_its_parameters_is_refused",),
        "a module in pieces is cut once more",
    ),
    Mutant(
        _GATHER,
        "    return parameter.requires_grad_(placeholder.requires_grad)  # callbacks",
        "    return parameter  # callbacks",
        ("stages/test_gather.py::test_a_parameter_comes_back_as_frozen_as_its_placeholder",),
        "what a callback has frozen is thawed after the run",
    ),
    Mutant(
        _GATHER,
        "has_room(num_bytes * num_copies)",
        "has_room(num_bytes)",
        ("stages/test_gather.py::test_copies_are_made_where_most_of_the_memory_does",),
        "the copies of the other ranks on the machine take no memory",
    ),
    Mutant(
        _GRADIENTS,
        "            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=control_group)\n",
        "",
        (f"{_TEST_GRADIENTS}::test_a_copy_without_a_gradient_takes_the_others",),
        "a copy without a gradient does not know that another has one",
    ),
    Mutant(
        _GRADIENTS,
        "                    dist.all_reduce(parameter.grad, group=group)\n",
        "                    pass\n",
        (f"{_TEST_GRADIENTS}::test_gradients_are_summed_over_the_copies",),
        "the copies of a shared parameter drift apart",
    ),
    Mutant(
        _GRADIENTS,
        "            broadcast_tensor(tensor, ranks[0], group)\n",
        "",
        (f"{_TEST_GRADIENTS}::test_copies_start_with_the_first_holders_values",),
        "the copies of a shared parameter start apart",
    ),
    Mutant(
        _GRADIENTS,
        "broadcast_tensor(tensor, ranks[0], group)",
        "broadcast_tensor(tensor, ranks[-1], group)",
        (f"{_TEST_GRADIENTS}::test_copies_start_with_the_first_holders_values",),
        "copies start with the values of another rank than the one that saves them",
    ),
    Mutant(
        _GRADIENTS,
        "for parameter in mine if not shared.is_secondary(parameter) and parameter.grad is not None]",
        "for parameter in mine if parameter.grad is not None]",
        (f"{_TEST_GRADIENTS}::test_clipping_is_that_of_the_whole_list",),
        "a shared parameter counts twice in the norm",
    ),
    Mutant(
        _GRADIENTS,
        "    dist.all_reduce(square, group=topology.group)\n",
        "",
        (f"{_TEST_GRADIENTS}::test_clipping_is_that_of_the_whole_list",),
        "each stage clips by its own norm",
    ),
    Mutant(
        _GRADIENTS,
        "            tensor.grad = None  # those of earlier",
        "            pass  # those of earlier",
        (f"{_TEST_GRADIENTS}::test_gradients_of_earlier_batches_are_summed_once",),
        "gradients of accumulated batches are summed over the copies again",
    ),
    Mutant(
        _MEMORY,
        "return None if available is None else available // num_ranks",
        "return available",
        ("stages/test_memory.py::test_the_smaller_limit_counts",),
        "each rank takes all of the machine's memory for its own",
    ),
    Mutant(
        _MEMORY,
        "    return min(found, default=None)\n",
        "    return max(found, default=None)\n",
        ("stages/test_memory.py::test_the_smaller_limit_counts",),
        "the container's limit does not count",
    ),
    Mutant(
        _MEMORY,
        "        if key not in self._seen:\n",
        "        if True:\n",
        ("stages/test_memory.py::test_each_memory_counts_once_and_not_what_is_there_anyway",),
        "parameters count as activations",
    ),
    # Replicas
    Mutant(
        _REPLICAS,
        "torch.cat([gradient.reshape(-1) for gradient in bucket]).div_(replicas.count)",
        "torch.cat([gradient.reshape(-1) for gradient in bucket])",
        (f"{_TEST_TENSORS}::test_gradients_are_the_mean_and_none_where_there_is_none",),
        "replicas sum their gradients",
    ),
    Mutant(
        _REPLICAS,
        "        if is_there and parameter.grad is None:\n            parameter.grad = torch.zeros_like(parameter)\n",
        "",
        (f"{_TEST_TENSORS}::test_gradients_are_the_mean_and_none_where_there_is_none",),
        "a replica that has not used a parameter leaves the others with a sum over fewer tensors",
    ),
    Mutant(
        _REPLICAS,
        "            if replicas.index != source:\n",
        "            if False:\n",
        (f"{_TEST_TENSORS}::test_tensors_are_those_of_the_first_replica",),
        "replicas begin with weights of their own",
    ),
    Mutant(
        _REPLICAS,
        "        self._buffers_differ = is_averaged and not is_manual\n",
        "        self._buffers_differ = False\n",
        ("ranks/test_replicas.py::test_equals_ddp",),
        "each replica has running statistics of its own",
    ),
    Mutant(
        _REPLICAS,
        "        self._buffers_differ = is_averaged and not is_manual\n",
        "        self._buffers_differ = is_averaged\n",
        ("ranks/test_replicas.py::test_equals_ddp",),
        "replicas that optimize by hand have one's running statistics",
    ),
]
