"""A batch and its microbatches: how it is cut, and what of a batch is not simply cut.

- ``split``: splitting a batch, and its number of samples.
- ``loss_weights``: how the losses of microbatches make the batch's, for 1F1B.
- ``draws``: random numbers of the batch and of its microbatches.
- ``rewind``: random generators at one state again and again.
- ``batch_norms``: running statistics are of the whole batch.
"""
