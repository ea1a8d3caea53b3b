"""Dataloaders in a pipeline.

- ``begun``: iterators in place of dataloaders, whose first batch is looked at before the run.
- ``skip_loading``: ranks whose stages need no data do not load it.
- ``loading``: loaders that end on every rank together, or with an error on every rank.
"""
