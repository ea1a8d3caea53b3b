"""Which calls treat the samples of a batch one by one, so that they may run on microbatches.

- ``rows``: where a trace's tensors have the batch, and which calls go by the numbers of its rows.
- ``value_use``: whether a call depends on a tensor's values, or on its shape only.
- ``division``: what of a region may be cut, and what must see the whole batch.
- ``trials``: by trial, what shapes do not show.
"""
