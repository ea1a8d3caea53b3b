"""Imports that ranks need, made once in the process that they are forked from: they take seconds, Lightning's most of them."""

import gc

import lightning.pytorch  # noqa: F401
import torch

import lightning_fxpipe.strategy  # noqa: F401
import tests.ranks.pool  # noqa: F401

torch.set_num_threads(1)
gc.collect()
gc.freeze()  # the ranks look for garbage among other things only
