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
    - ``region_pass``: forward, then backward, as one operation of autograd.
    - ``interleaved``: forward and backward by turns; ``interleaving`` decides.

Steps that are no single region
    - ``joint_step``, ``joint_pass``: every rank runs the step, and each call is a pipeline.
    - ``whole_step``: evaluation as on one device.
"""
