"""Trains a byte-level GPT over two CPU processes.

python examples/train_lm.py fit --config examples/configs/lm_fxpipe.yaml
"""

from __future__ import annotations

import time

import torch
from byte_lm import ByteGPT, TextData
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities import rank_zero_info

import lightning_fxpipe  # noqa: F401  (lets a config say `strategy: fxpipe`)


class BaselineCLI(LightningCLI):
    """Also prints what a bigram model reaches on the same bytes."""

    def before_fit(self) -> None:
        self.datamodule.setup("fit")
        self.start = time.monotonic()
        self.bigram_loss = self.datamodule.bigram_loss()
        rank_zero_info(f"Bigram baseline on the validation bytes: {self.bigram_loss:.3f} nats per byte")

    def after_fit(self) -> None:
        if "val_loss" not in self.trainer.callback_metrics:  # max_steps ended the run before, or limit_val_batches is 0
            rank_zero_info("No validation has run to its end, so there is no loss to compare with the bigram baseline.")
            return
        devices = self.config[self.subcommand].trainer.devices
        rank_zero_info(
            f"Trained {self.trainer.global_step} steps with {type(self.trainer.strategy).__name__} on {devices} devices "
            f"in {time.monotonic() - self.start:.0f} s, planning included."
        )
        val_loss = float(self.trainer.callback_metrics["val_loss"])
        rank_zero_info(
            f"Validation loss {val_loss:.3f} nats per byte, bigram baseline {self.bigram_loss:.3f}: "
            f"{'below' if val_loss < self.bigram_loss else 'NOT below'} it by {abs(self.bigram_loss - val_loss):.3f}"
        )


def main() -> None:
    torch.set_num_threads(1)  # one process for each core
    # Subclass mode: the config names the classes, so that `python -m lightning_fxpipe plan` finds them there too.
    BaselineCLI(
        ByteGPT,
        TextData,
        subclass_mode_model=True,
        subclass_mode_data=True,
        save_config_kwargs={"overwrite": True},
    )


if __name__ == "__main__":
    main()
