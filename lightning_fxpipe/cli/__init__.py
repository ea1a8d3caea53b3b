"""Commands of ``python -m lightning_fxpipe``.

- ``plan``: how a config's model is cut into stages.
- ``simulate``: what a step would take.
- ``configs``: a config's model and a batch of its data, which these begin with.
- ``checkpoints``: ``inspect`` and ``convert``.
"""
