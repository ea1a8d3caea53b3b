"""The order in which microbatches go through the stages, forward and backward.

- ``by_name``: the schedules that a user can ask for. A further one gets its name here.
- ``own_table``: one that the user has written, as a table of actions.
- ``places``: where a rank's stages are in a pass through all ranks.
- ``one_way``: runs a pass that goes forward, or back, through one stage on each rank.
- ``skips``: what goes past stages.
- ``pipelining``: runs all others, as classes of ``torch.distributed.pipelining`` or as tables that torch runs.
- ``split_backward``: where gradients of weights may come later than those of inputs.
"""
