"""From a graph to a plan: which stage holds what.

- ``plan``: the plan, as frozen data that can be printed, saved and used again.
- ``alternatives``: what a plan was chosen from.
- ``cost``: a graph as a chain of units, and the tensors that cross a cut.
- ``unit_costs``: the one table of what units cost: parameters, bytes, flops, seconds.
- ``unit_operators``, ``measured_costs``: its columns that take a run: on tensors without data, or by a clock.
- ``partition``: the solver.
- ``load``: how stages will run, as far as that decides what each may hold.
- ``pinned``: modules whose stage the user chooses.
- ``split_points``: cuts before modules that the user names.
- ``cut_rule``: all of these together: the weight that is balanced, and the constraints on stages.
- ``granularity``: which modules are opened for a balanced partition.
- ``stage_costs``: from costs of units to costs of stages.
- ``fastest_cut``: the cut with which a simulated step is fastest.
- ``choice``: the schedule, the stages and the microbatches that are fastest.
- ``recompute``: which values each stage computes for itself.
- ``recompute_rule``: which modules' activations are computed again in the backward pass.
- ``skips``: tensors that go past stages which do not use them.
- ``assignment``: a chain cut into stages.
- ``reorder``: other orders of calls that compute the same.
- ``planning``: from a module and a batch to a plan.
- ``units``: the calls of a step that all ranks run, and a plan for them.
- ``recorded_step``: a step that is traced once, and simulated with any cuts and size of microbatches.
- ``simulated_plan``: a plan, and what a step would take with it.
- ``layouts``: how many stages and replicas of them are fastest on a number of devices.
- ``step_plan``: the entry: a step as one region (``planning``), or jointly (``units``).
- ``follow_plan``: from a plan to the cuts of any other graph of the same module.
"""
