#!/usr/bin/env bash
# torch 2.13: tensors of uint16, uint32, uint64, float8 and complex32 can be pickled, and what was pickled cannot be read.
#
# Expected: pickle.loads(pickle.dumps(tensor)) is the tensor, or dumps raises.
# Observed: dumps succeeds for all; loads raises AttributeError ("type object 'torch.storage.UntypedStorage' has no attribute
# 'dtype'") for dtypes that have no typed storage class. int16 and bfloat16 can be read, and torch.save and torch.load handle all.
# It reaches users where objects are pickled rather than saved, as by torch.distributed's object collectives.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "torch==2.13.0" "numpy==2.2.6"
"$folder/venv/bin/python" - <<'PROGRAM'
import io
import pickle

import torch

print("torch", torch.__version__)
for name in ("uint16", "uint32", "uint64", "float8_e4m3fn", "complex32", "int16", "bfloat16"):
    tensor = torch.zeros(2, dtype=getattr(torch, name))
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    assert torch.load(file).dtype is tensor.dtype, name
    pickled = pickle.dumps(tensor)
    try:
        outcome = str(pickle.loads(pickled).dtype)
    except AttributeError as error:
        outcome = f"AttributeError: {error}"
    print(f"{name:14s} torch.save: read; pickle: {outcome}")
    is_read = outcome == str(tensor.dtype)
    assert is_read == (name in ("int16", "bfloat16")), f"{name} has changed: {outcome}"
PROGRAM
