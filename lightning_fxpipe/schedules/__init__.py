"""The order in which microbatches go through the stages.

- ``pipelining``: schedule objects of ``torch.distributed.pipelining``.
"""
