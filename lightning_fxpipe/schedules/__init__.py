"""The order in which microbatches go through the stages, forward and backward.

- ``by_name``: the schedules that a user can ask for. A further one gets its name here.
- ``own_table``: one that the user has written, as a table of actions.
- ``pipelining``: runs them, as classes of ``torch.distributed.pipelining`` or as tables that torch runs.
- ``split_backward``: where gradients of weights may come later than those of inputs.
"""
