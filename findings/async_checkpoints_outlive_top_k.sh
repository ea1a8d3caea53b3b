#!/usr/bin/env bash
# Lightning 2.6, one process: checkpoints that are written in the background outlive their removal, so that more than save_top_k stay.
#
# Expected: ModelCheckpoint(save_top_k=1) leaves one file, with AsyncCheckpointIO as without: a removal follows the save before it.
# Observed: AsyncCheckpointIO hands a save to a thread, but removes at once. Where writing takes longer than the time to the next
# better checkpoint, the removal finds no file yet, does nothing, and the file appears afterwards for good. A slow disk is played
# here by a plugin that waits before it writes; steps of a fast model, and a checkpoint every few of them, do the same.
# It reaches users as a disk that fills up: each such file has the size of the model and its optimizer's states.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "torch==2.13.0" "lightning==2.6.6" "numpy==2.2.6"
cat > "$folder/program.py" <<'PROGRAM'
import sys
import time
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO


class SlowDisk(TorchCheckpointIO):
    def save_checkpoint(self, *args, **kwargs):
        time.sleep(0.3)
        super().save_checkpoint(*args, **kwargs)


class Falling(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        self.log("score", float(-self.global_step))  # each checkpoint is better than the one before
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def files_left(folder, plugin):
    keep = ModelCheckpoint(folder, filename="{step}", monitor="score", save_top_k=1, every_n_train_steps=1)
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_steps=4, callbacks=[keep], plugins=[plugin],
        logger=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Falling(), torch.utils.data.DataLoader(torch.ones(8, 2)))
    return sorted(path.name for path in Path(folder).iterdir())


print("lightning", L.__version__, "torch", torch.__version__)
plain = files_left(Path(sys.argv[1]) / "plain", SlowDisk())
background = files_left(Path(sys.argv[1]) / "background", AsyncCheckpointIO(SlowDisk()))
print("written at once:", plain)
print("written in the background:", background)
assert len(plain) == 1
assert len(background) > 1
PROGRAM
"$folder/venv/bin/python" -W ignore "$folder/program.py" "$folder" 2>/dev/null
