"""A batch through the pipeline.

The step around the region
    - ``batch_run``: the entry: runs the step once, around the region. ``batch_result``: what it gave.
    - ``region_run``: the region in place of the step's calls of the model (``region_in_place``).
    - ``replay``: walks through the step's own Python.
    - ``attributes``: what the step leaves behind, on every rank.

Through the stages
    - ``batch_traces``, ``stage_traces``: the trace that a batch runs with, and this rank's stage of it.
    - ``pass_setup``: stages, microbatches and schedules, kept for batches of the same shapes (``lru``).
    - ``batch_passes``: the passes of the running batch.
    - ``stage_changes``: what a stage's forward changes by itself.
    - ``joined_results``: what the last stage gives for the microbatches, put together as it comes.
    - ``region_pass``: forward, then backward, as one operation of autograd; checks what a stage sends.
    - ``one_f_one_b``: forward and backward by turns (1F1B), and that the losses of microbatches make the batch's.
    - ``schedule_choice``: which of the two.

Steps that are no single region
    - ``joint_step``: manual optimization, calls that build on each other (GANs, rollouts): every rank runs the step.
    - ``joint_pass``: one call in it.
    - ``whole_step``: evaluation that cannot go through the stages once, on one rank.
"""
