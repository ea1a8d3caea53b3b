"""The user's optimizers over stages.

- ``optimizers``: over this rank's parameters, with states by the names of the whole model's.
- ``coupling``, ``twins``: whether an optimizer can train a part of the parameters by itself, by trial on a copy.
- ``precision``: gradient scalers and other precision plugins.
"""
