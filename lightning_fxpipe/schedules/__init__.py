"""The order in which microbatches go through the stages, forward and backward, and what runs it.

- ``by_name``: the schedules that a user can ask for. A further one gets its name here.
- ``own_table``: one that the user has written, as a table of actions.
- ``program``: what one rank does by a table: its actions, and the messages that follow from the table.
- ``executor``: runs a program.
- ``stage_graph``: the graph of a microbatch in a stage, from its forward to its backward.
- ``split_backward``: half a backward pass: gradients of inputs now, those of weights later.

One table type (``simulation.actions``) is planned, simulated and run.
"""
