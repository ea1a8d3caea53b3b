"""Commands of ``python -m lightning_fxpipe``.

- ``plan``: how a config's model is cut into stages.
- ``simulate``: what a step would take.
- ``layouts``: how many stages and replicas are fastest.
- ``devices``: what a simulated step runs on.
- ``saving``: files that are written besides.
- ``configs``: a config's model and a batch of its data, which these begin with.
- ``checkpoints``: ``inspect`` and ``convert``.
"""
