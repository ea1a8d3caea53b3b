"""Fine-tunes a causal language model of Hugging Face as a pipeline.

    python examples/hf_finetune.py                                    # a tiny Llama with random weights, two CPU processes
    python examples/hf_finetune.py --model Qwen/Qwen3-4B --accelerator gpu --devices 4 --precision bf16-true

The text is the source of Python's standard library, one byte per token for the tiny model.
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from lightning_fxpipe import FxPipeStrategy

Sample = dict[str, Tensor]


def num_tokens(batch: Sample) -> Tensor:
    """Number of tokens that the loss averages over: the labels are shifted by one, and -100 marks padding."""
    return (batch["labels"][:, 1:] != -100).sum()


class FineTune(L.LightningModule):
    """An ordinary LightningModule around a causal language model.

    Args:
        name: Model to download from the Hub; None makes a tiny Llama.
        learning_rate: Of AdamW.
    """

    def __init__(self, name: str | None, learning_rate: float = 3e-4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model: torch.nn.Module | None = None

    def configure_model(self) -> None:
        if self.model is None:  # Lightning may call this more than once
            tiny = LlamaConfig(
                vocab_size=256,
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=4,
                num_attention_heads=4,
                use_cache=False,
            )
            name = self.hparams["name"]
            self.model = AutoModelForCausalLM.from_pretrained(name) if name else AutoModelForCausalLM.from_config(tiny)

    def training_step(self, batch: Sample, batch_idx: int) -> Tensor:
        loss = self.model(**batch, use_cache=False).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["learning_rate"])


def samples(name: str | None, context: int, count: int) -> Iterator[Sample]:
    """Windows of text; the end of every second one is padding."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:20]
    text = "".join(file.read_text(encoding="utf-8", errors="ignore") for file in files)
    encode = AutoTokenizer.from_pretrained(name) if name else lambda text: {"input_ids": list(text.encode())}
    tokens = torch.tensor(encode(text)["input_ids"])
    for index in range(count):
        window = tokens[index * context % (len(tokens) - context) :][:context]
        mask = torch.arange(context) < (context if index % 2 else context - context // 4)
        yield {"input_ids": window, "attention_mask": mask.long(), "labels": window.where(mask, -100)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="name on the Hugging Face Hub; default: a tiny Llama, offline")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--context", type=int, default=64, help="tokens per sample")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", type=Path, default=Path("finetuned"), help="folder for save_pretrained")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the tiny model is too small for more
    L.seed_everything(1)
    data = DataLoader([*samples(options.model, options.context, 16 * options.steps)], batch_size=16)
    trainer = L.Trainer(
        accelerator=options.accelerator,
        devices=options.devices,
        precision=options.precision,
        strategy=FxPipeStrategy(schedule="1f1b", loss_weight=num_tokens),
        max_steps=options.steps,
        log_every_n_steps=1,
    )
    module = FineTune(options.model)
    trainer.fit(module, data)
    if trainer.is_global_zero:
        print(f"Loss after {trainer.global_step} steps: {trainer.callback_metrics['train_loss']:.3f}")
        module.model.save_pretrained(options.output)
        print(f"Saved to {options.output}")


if __name__ == "__main__":
    main()
