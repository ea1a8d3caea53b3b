"""The order in which microbatches go through the stages, forward and backward.

- ``pipelining``: the classes of ``torch.distributed.pipelining`` by name. A further schedule gets its name here, and is
  chosen in ``runtime.schedule_choice``.
"""
