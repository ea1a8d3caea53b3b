"""Commands of ``python -m lightning_fxpipe``.

- ``plan``: how a config's model is cut into stages.
- ``checkpoints``: ``inspect`` and ``convert``.
"""
