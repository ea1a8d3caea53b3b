"""This rank's stage: its graph module, and its share of the user's module.

- ``build``: the stage modules of a cut graph.
- ``shard``: leaves a rank with its own share.
- ``holders``: which stage has which tensor.
- ``gather``: makes the module whole again after its runs.
- ``gradients``: of parameters that several stages hold; clipping over all stages.
- ``replicas``: gradients that replicas average, and the state that they begin with.
- ``shared_casts``: what autocast makes of weights, once for all microbatches.
- ``memory``: how much there is, and what autograd takes of it.
"""
