#!/usr/bin/env bash
# torch 2.13, one process: torch.distributed.checkpoint cannot save a model with tied weights through HuggingFaceStorageWriter.
#
# Expected: the state dict of a language model whose head is its embedding is saved, as save_pretrained of transformers does, which
# writes the tensor once, and as torch's own FileSystemWriter does, which writes it under both names.
# Observed: CheckpointException over the RuntimeError of safetensors, "Some tensors share memory": the writer hands on the tensors as
# they are.
# It reaches users of GPT-2, T5, Gemma and most small models, whose embeddings are tied by default. Cloned tensors are saved, at the
# price of the memory and of a file that has the weight twice.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "torch==2.13.0" "numpy==2.2.6" "safetensors==0.8.0" 2>/dev/null
cat > "$folder/program.py" <<'PROGRAM'
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint import FileSystemWriter, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(8, 4)
        self.head = torch.nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight


def outcome(writer, state):
    try:
        dcp.save(state, storage_writer=writer, no_dist=True)
    except (RuntimeError, CheckpointException) as error:
        words = " ".join(str(error).split())
        start = words.find("Some tensors share memory")
        return f"{type(error).__name__}: {words[start : start + 25]}"
    return "saved"


print("torch", torch.__version__)
folder, state = Path(sys.argv[1]), Tied().state_dict()
plain = outcome(FileSystemWriter(folder / "plain"), state)
tied = outcome(HuggingFaceStorageWriter(str(folder / "tied")), state)
apart = outcome(HuggingFaceStorageWriter(str(folder / "apart")), {name: tensor.clone() for name, tensor in state.items()})
print("FileSystemWriter:", plain)
print("HuggingFaceStorageWriter:", tied)
print("HuggingFaceStorageWriter, cloned:", apart)
(file,) = (folder / "apart").glob("*.safetensors")
print("in its file:", sorted(safe_open(file, "pt").keys()))
assert plain == apart == "saved"
assert tied == "CheckpointException: Some tensors share memory"
PROGRAM
"$folder/venv/bin/python" -W ignore "$folder/program.py" "$folder" 2>/dev/null
