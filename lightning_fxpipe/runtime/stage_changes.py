"""What a stage's forward changes by itself, seen while the first batch of a trace goes through it.

A forward that counts its calls, collects their results in a list, or moves frozen parameters (a momentum teacher) does so once
for a batch on one device; with several microbatches it would do so once for each, and compute something else. Such a batch
is not cut. Buffers are allowed that, and the user is told: most are statistics.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_fxpipe.microbatch.batch_norms import batch_norms
from lightning_fxpipe.user_code.snapshot import Snapshot


class StageChanges:
    """Made before the microbatches run.

    Args:
        root: The LightningModule, with this rank's stage.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._attributes = Snapshot({"self": root})
        self._buffers = {fqn: (buffer, buffer.clone()) for fqn, buffer in root.named_buffers() if not buffer.is_meta}
        frozen = ((fqn, p) for fqn, p in root.named_parameters() if not p.is_meta and not p.requires_grad)
        self._frozen = {fqn: (parameter, parameter.detach().clone()) for fqn, parameter in frozen}
        self._after_first: dict[str, Any] = {}

    def note_first(self) -> None:
        """Called when the first microbatch has gone through: what changes once, such as a flag, is no count."""
        self._after_first = self._counts()

    def reason(self) -> str | None:
        """Why batches must not be cut, after all microbatches; None if they may."""
        moved = [fqn for fqn, (parameter, before) in self._frozen.items() if not torch.equal(parameter, before)]
        if moved:
            return f"the model's forward changes {moved[0]}, which is frozen"
        now = self._counts()
        counted = [name for name, value in self._after_first.items() if now.get(name) != value]
        return f"the model's forward changes {counted[0]} with each call" if counted else None

    def buffers(self) -> list[str]:
        """Names of the buffers that have changed, but for those of BatchNorm, which are moved once for a batch."""
        norms = {f"{path}.{name}" for path, norm in batch_norms(self._root) for name, _ in norm.named_buffers()}
        return [fqn for fqn, (buffer, before) in self._buffers.items() if fqn not in norms and not torch.equal(buffer, before)]

    def restore(self) -> None:
        """Makes all of it what it was."""
        self._attributes.restore()
        with torch.no_grad():
            for tensor, before in (*self._buffers.values(), *self._frozen.values()):
                _put_back(tensor, before)

    def _counts(self) -> dict[str, Any]:
        """Numbers that modules hold, and the lengths of their lists and dicts."""
        found: dict[str, Any] = {}
        for path, module in self._root.named_modules():
            for name, value in vars(module).items():
                if name.startswith("_"):
                    continue
                if type(value) in (int, float):
                    found[f"{path}.{name}"] = value
                elif type(value) in (list, dict, set):
                    found[f"{path}.{name}"] = len(value)
        return found


def _put_back(tensor: Tensor, before: Tensor) -> None:
    tensor.data.copy_(before)
