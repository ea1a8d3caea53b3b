"""Hooks of user code see the whole model, on every rank.

- ``hook_code``: which hooks run user code, and what that looks at.
- ``whole_model``: values and gradients of other stages.
- ``logged_numbers``: numbers that hooks log.
- ``user_hooks``: runs the hooks.
- ``old_gradients``: those that nobody looks at any more.
"""
