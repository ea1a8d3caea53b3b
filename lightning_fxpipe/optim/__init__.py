"""The user's optimizers over stages.

- ``optimizers``: over this rank's parameters; its state under the names of the whole model's, to save and to resume.
- ``shards``: replicas that share out an optimizer's states.
- ``coupling``: whether an optimizer can train a part of the parameters by itself, by trial on a copy, which ``twins`` makes.
- ``precision``: gradient scalers and other precision plugins.
"""
