"""Commands of ``fxpipe``: a function with a command's name takes its arguments and returns the exit status.

- ``plan``: ``plan``, ``simulate`` and ``layouts``, for the model and the data of a LightningCLI config.
- ``configs``: reads such a config, with overrides on the command line.
- ``checkpoints``: ``inspect`` and ``convert``.
- ``doctor``: ``doctor``.
"""
