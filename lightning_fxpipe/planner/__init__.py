"""From a graph to a plan: which stage holds what.

- ``plan``: the plan, as frozen data that can be printed, saved and used again.
- ``alternatives``: what a plan was chosen from.
- ``cost``: what nodes weigh, and what a cut would send.
- ``granularity``: which modules are opened for a balanced partition.
- ``partition``: the solver.
- ``load``: how stages will run, as far as that decides what each may hold.
- ``weighing``: what units weigh in parameters and in memory.
- ``pinned``: modules whose stage the user chooses.
- ``split_points``: cuts before modules that the user names.
- ``cut_rule``: all of these together: what is balanced, and what is asked of stages besides.
- ``fastest_cut``: the cut that a simulated step is fastest with, for a chain whose costs are known.
- ``timed_cut``: the same for units that have been timed.
- ``unit_costs``, ``stage_costs``: what units compute and keep, and how long that takes on a device.
- ``measured_costs``: how long units take on the device at hand.
- ``stage_work``: what stages take beside each other, for an order of actions that is made from it.
- ``choice``: the schedule, the stages and the microbatches that are fastest.
- ``recompute``: which values each stage computes for itself.
- ``recompute_rule``: which modules' activations are computed again in the backward pass.
- ``skips``: tensors that go past stages which do not use them.
- ``assignment``: a chain cut into stages.
- ``reorder``: other orders of calls that compute the same.
- ``planning``: from a module and a batch to a plan.
- ``units``: the calls of a step that all ranks run, and a plan for them.
- ``simulated_plan``: a plan, and what a step would take with it.
- ``layouts``: how many stages and replicas of them are fastest on a number of devices.
- ``step_plan``: the entry: a step as one region (``planning``), or jointly (``units``).
- ``follow_plan``: from a plan to the cuts of any other graph of the same module.
"""
