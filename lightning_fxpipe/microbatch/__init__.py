"""A batch and its microbatches: how it is cut, and what of a batch is not simply cut.

- ``split``: how a batch is cut: its samples, and how many microbatches where the user does not say.
- ``loss_weights``: how the losses of microbatches make the batch's, for 1F1B.
- ``draws``: random numbers of the batch and of its microbatches.
- ``batch_norms``: running statistics are of the whole batch.
"""
