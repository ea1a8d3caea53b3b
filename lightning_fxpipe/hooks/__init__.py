"""Hooks of user code see the whole model, on every rank.

- ``hook_code``: which hooks run user code, and what that looks at.
- ``hook_readers``: which of them read batches and results of steps.
- ``whole_model``: values and gradients of other stages.
- ``whole_optimizers``: parameter groups and states of other stages.
- ``rank_zero_changes``: what rank 0 alone changes.
- ``frame``: a hook that is running.
- ``logged_numbers``: numbers that hooks log.
- ``user_hooks``: runs the hooks.
- ``old_gradients``: those that are not read any more.
"""
