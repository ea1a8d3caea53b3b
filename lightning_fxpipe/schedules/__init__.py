"""The order in which microbatches go through the stages, forward and backward.

- ``pipelining``: schedule objects of ``torch.distributed.pipelining`` by name; ``runtime.schedule_choice`` takes one.
"""
