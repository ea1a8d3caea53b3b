"""From a step to a graph: which of its calls are pipelined, and what they compute.

Finding the region
    - ``prelude``: what the step does before it calls the model, in a dry run.
    - ``region``, ``span``: what a region of one call is, and one of several.
    - ``calls_aside``: what stands between those, and is no part of it.
    - ``discovery``: decides where it begins and ends, by one run of the step on fake tensors.
    - ``input_gradient``, ``parameter_use``: steps that do more with the model than to call it.
    - ``recordable``: what can be traced, and when two of them are alike.

Recording it
    - ``trace``: the entry: a call as a graph, checked; ``confirmation``: by another recording.
    - ``record``, ``recording``, ``graph_writer``, ``recorder_settings``: runs the model's own Python, and writes the graph.
    - ``fake_run``, ``examples``, ``probe``, ``value_looks``: fake tensors, what they stand for, and code that looks at values.
    - ``known_calls``: calls of modules like one that has been run, which need not be.
    - ``first_call``: what a model sets on its first call.
    - ``gradient_flow``: which tensors get gradients from which results.
    - ``torch_calls``, ``activation_checkpointing``, ``distributions``, ``recurrent``: calls that need care.
    - ``inner_results``: what leaves a module by another way than its result.
    - ``state_reads``, ``made_tensors``: what comes into one by another way than its arguments, and from whom.
    - ``tensors_in_place``: tensors that several have and that one changes.
    - ``shared_state``, ``exchanges``, ``views``, ``reachable``: plain values that come so.
    - ``passing_hooks``: hooks that code registers while it runs.
    - ``set_between``: what the step sets between its calls for a later one.
    - ``tensor_classes``: inputs of classes of their own.
    - ``kept_state``: what a module keeps from one of its calls for the next one.
    - ``step_record``: the calls that the step makes itself.
    - ``signals``: what ends a recording before its time.

What a trace depends on
    - ``guards``, ``comparable``: what it has read, compared before each batch (``runtime.batch_traces`` asks).
    - ``code_guards``, ``structure_guards``: global variables and classes; the modules that it calls, and their hooks.
    - ``held_tensors``, ``held_numbers``, ``number_arguments``: tensors that it has from elsewhere, and numbers that change.
    - ``recheck``: the net below these: a trace in use is recorded again now and then, and compared.
    - ``trace_log``: tells when a step is traced again, and why.
    - ``repeat``: single calls of a graph once more, to see what is inside.
"""
