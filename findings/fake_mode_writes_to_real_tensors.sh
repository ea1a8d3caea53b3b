#!/usr/bin/env bash
# torch 2.13, CPU: under a FakeTensorMode that allows real inputs, an in-place operator whose tensors are all real changes the data.
#
# Expected: nothing under the mode touches data; only shapes and types are computed, as out-of-place operators do.
# Observed: `t.mul_(2.0)` doubles the values of a real tensor, of any size, while `t * 2.0` gives a fake one and `t.add_(fake)`
# leaves the values as they are. The version counter grows in both cases. So a counter, a scale or a memory bank that code keeps
# outside of its module's buffers is another one after a run that was to show shapes only.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "torch==2.13.0" "numpy==2.2.6"
"$folder/venv/bin/python" - <<'PROGRAM'
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

print("torch", torch.__version__)
for size in (1, 1000):
    alone, beside = torch.ones(size), torch.ones(size)
    with FakeTensorMode(allow_non_fake_inputs=True):
        alone.mul_(2.0)
        beside.add_(torch.ones(size))
        product = alone * 2.0
    print(f"{size} elements: mul_ with a number gives {alone[0].item()}, add_ of a fake {beside[0].item()}")
    assert isinstance(product, FakeTensor)
    assert torch.equal(alone, torch.full((size,), 2.0))
    assert torch.equal(beside, torch.ones(size))
    assert alone._version == beside._version == 1
PROGRAM
