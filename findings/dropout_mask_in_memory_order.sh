#!/usr/bin/env bash
# torch 2.13, CPU: with the same seed, dropout of equal tensors zeroes other elements if their memory is laid out otherwise.
#
# Expected: what torch.manual_seed fixes depends on shape and dtype, so that a copy made by contiguous() has the same mask.
# Observed: the mask is drawn in the order of the memory. A transposed tensor and its contiguous copy are equal and have different
# masks; the copy's mask, transposed, is that of the base. channels_last and contiguous images differ likewise.
# It reaches users where an activation goes through a buffer of its own, as between the stages of a pipeline, after a gather of
# sharded activations, or in a checkpointed block that gets a copy: dropout after it is no longer that of the plain run.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "torch==2.13.0" "numpy==2.2.6"
"$folder/venv/bin/python" - <<'PROGRAM'
import torch
from torch.nn.functional import dropout

print("torch", torch.__version__)


def mask(tensor: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    return dropout(tensor, 0.5) == 0


base = torch.ones(64, 32)
transposed, copy = base.t(), base.t().contiguous()
images = torch.ones(2, 8, 16, 16)
last = images.to(memory_format=torch.channels_last)
assert torch.equal(transposed, copy)
assert torch.equal(images, last)
print("transposed and its copy have the same mask:", torch.equal(mask(transposed), mask(copy)))
print("contiguous and channels_last images have the same mask:", torch.equal(mask(images), mask(last)))
print("the mask of the transposed tensor is that of its base:", torch.equal(mask(transposed), mask(base).t()))
assert not torch.equal(mask(transposed), mask(copy))
assert not torch.equal(mask(images), mask(last))
assert torch.equal(mask(transposed), mask(base).t())
PROGRAM
