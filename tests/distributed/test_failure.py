"""An error on one rank ends the run on all, soon, with the original error on the terminal and a failing exit status."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = '''
import sys
import lightning as L, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import lightning_fxpipe

class Fails(nn.Module):
    """Part of one stage, so that only that rank runs it."""
    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(8, 8), 0
    def forward(self, x):
        self.calls += x.is_cpu and type(x) is torch.Tensor
        if self.calls == 30:
            raise ValueError("the original error")
        return self.linear(x)

class Lit(L.LightningModule):
    def __init__(self, failing):
        super().__init__()
        self.model = nn.Sequential(*(Fails() if i == failing else nn.Linear(8, 8) for i in range(4)))
    def training_step(self, batch, batch_idx):
        return self.model(batch[0]).pow(2).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

torch.manual_seed(0)
data = DataLoader(TensorDataset(torch.randn(400, 8)), batch_size=8)
trainer = L.Trainer(accelerator="cpu", devices=2, strategy="fxpipe", max_epochs=1, logger=False,
                    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Lit(int(sys.argv[1])), data)
'''


@pytest.mark.parametrize(("failing_layer", "rank"), [(0, 1), (3, 0)])
def test_the_original_error_ends_the_run_on_all_ranks(tmp_path: Path, failing_layer: int, rank: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    started = time.monotonic()
    run = subprocess.run([sys.executable, str(script), str(failing_layer)], capture_output=True, text=True, timeout=90)
    assert run.returncode != 0
    assert "ValueError: the original error" in run.stderr
    assert f'File "{script}", line 16, in forward' in run.stderr
    # Once, and the other rank has nothing to say but that.
    assert run.stderr.count("Traceback (most recent call last)") == 1
    assert f"[rank {1 - rank}] stopped, because rank {rank} failed: ValueError: the original error" in run.stderr
    assert time.monotonic() - started < 60
