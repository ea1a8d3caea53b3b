"""Dataloaders in a pipeline.

- ``skip_loading``: ranks whose stages need no data do not load it.
- ``loading``: loaders that end on every rank together, or with an error on every rank.
"""
