"""Which calls treat the samples of a batch one by one, so that they may run on microbatches.

- ``batch_rows``: which dimension of each tensor in a trace is the batch, and which calls go by its length.
- ``value_use``: whether a call depends on a tensor's values, or on its shape only.
- ``division``: the verdict by shapes: which calls of a region may be cut, and which must see the whole batch.
- ``trials``: the verdict by trial on the first microbatch, for what shapes do not show.
"""
