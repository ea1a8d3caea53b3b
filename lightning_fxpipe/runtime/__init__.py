"""A batch through the pipeline.

The step around the region
    - ``batch_run``: the entry: runs the step once, around the region. ``batch_result``: what it gave.
    - ``region_run``: the region in place of the step's calls of the model (``region_in_place``).
    - ``replay``: walks through the step's own Python.
    - ``attributes``: what the step leaves behind, on every rank; ``submodule_values``: on submodules.

Through the stages
    - ``batch_traces``, ``stage_traces``: the trace that a batch runs with; ``stage_trace``: this rank's stage of one.
    - ``span_match``: whether a step makes the calls of a trace of several, by a dry run.
    - ``number_inputs``: numbers that change while a step trains, as inputs of its traces.
    - ``same_cuts``: that every rank has recorded the same graph.
    - ``stage_edges``: what the stages give each other.
    - ``pass_setup``: what a batch goes through the stages with (stage, number of microbatches, schedule objects), kept for
      batches of the same shapes (``lru``).
    - ``batch_passes``: the passes of the running batch.
    - ``stage_changes``: what a stage's forward changes by itself.
    - ``late_exchanges``: what a stage begins to leave for others.
    - ``left_state``: what stages' modules leave on themselves for hooks, which run on every rank.
    - ``joined_results``: what the last stage gives for the microbatches, put together as it comes.
    - ``region_pass``: forward, then backward, as one operation of autograd (GPipe). Both schedules check
      here what a stage is about to send: the next one receives into buffers of fixed shapes.
    - ``one_f_one_b``: forward and backward by turns (1F1B), and that the losses of microbatches make the batch's.
    - ``step_tail``: the step's code after the region, for a microbatch.
    - ``batch_reads``: the batch's values in the step's run for a microbatch.
    - ``result_gradients``: that its gradients are made so, too.
    - ``batch_gradients``: the gradients that it has found, until the loss goes backward.
    - ``known_numbers``: the factor of its gradients, without a look at the device.
    - ``schedule_choice``: which of these two ways training takes. A further schedule begins here.

Steps that are no single region
    - ``joint_step``: manual optimization, calls that build on each other (GANs, rollouts): every rank runs the step.
    - ``joint_pass``: one call in it.
    - ``whole_step``: evaluation that cannot go through the stages once, on one rank.
"""
