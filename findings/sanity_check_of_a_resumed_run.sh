#!/usr/bin/env bash
# Lightning 2.6.6: a run that is resumed from a checkpoint of an epoch's end does a sanity check, in the epoch that has ended.
#
# Expected: no sanity check, as the Trainer means to skip it when it restarts ("it would mess up the loaded state"); or one with
# the `current_epoch` in which training goes on.
# Observed: the sanity check runs with `current_epoch` 0, and the next training batch has `current_epoch` 1. The evaluation loop
# of such a checkpoint does not count as restarting. A validation_step that depends on the epoch does something else there.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "torch==2.13.0" "numpy==2.2.6" "lightning==2.6.6"
cd "$folder"
"$folder/venv/bin/python" - <<'PROGRAM'
import logging
import warnings

import lightning as L
import torch
from torch.utils.data import DataLoader

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(("train", self.current_epoch))
        return self.layer(batch).mean()

    def validation_step(self, batch, batch_idx):
        self.seen.append(("sanity check" if self.trainer.sanity_checking else "validation", self.current_epoch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(max_epochs, ckpt_path):
    module, data = Module(), DataLoader(torch.ones(2, 2), batch_size=2)
    callback = L.pytorch.callbacks.ModelCheckpoint("checkpoints", save_last=True)
    options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    L.Trainer(max_epochs=max_epochs, callbacks=[callback], **options).fit(module, data, data, ckpt_path=ckpt_path)
    return module.seen


print("Lightning", L.__version__)
first = fit(1, None)
resumed = fit(2, "checkpoints/last.ckpt")
print("first run:  ", first)
print("resumed run:", resumed)
assert first == [("sanity check", 0), ("train", 0), ("validation", 0)], first
assert resumed == [("sanity check", 0), ("train", 1), ("validation", 1)], f"this has changed: {resumed}"
PROGRAM
