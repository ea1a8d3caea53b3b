"""Strategy that Lightning uses, which hands each hook over to the rooms above.

- ``strategy``: ``FxPipeStrategy``; with ``replica_strategy`` (processes) and ``configured_strategy`` (options).
- ``options``: types of its options on a command line.
- ``support``: what cannot be honoured is refused here.
- ``run_plan``: the plan of a run; ``search_space``: what it is chosen from, where the user wants that.
- ``plan_report``: logs a new plan.
- ``first_batch``: the batch from which it is made, which the run trains on.
- ``session``: a module in its pipeline, from setup to the end of its runs.
- ``run_optimizers``: a run's optimizers, also where hooks exchange them.
- ``first_values``: where the tensors of a module without data get it from.
- ``step_call``: Lightning's call of a step. ``run_recording``: which steps are recorded, and what reaches the loggers.
- ``batch_votes``: SIGTERM ends a run at the same batch on every rank; ranks that use different graphs end it with an error.
- ``checkpoint_hooks``: saving and restoring a run.
- ``example_run``: Lightning's own calls on ``self.example_input_array``.
"""
