"""What a stage's forward changes by itself, seen while the first batch of a trace goes through it.

A forward that counts its calls, collects their results in a list, or moves frozen parameters (a momentum teacher) does so once
for a batch on one device; with several microbatches it would do so once for each, and compute something else. Such a batch
is not cut. Buffers are allowed that, and the user is told: most are statistics.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.microbatch.batch_norms import batch_norms
from lightning_fxpipe.user_code.snapshot import Snapshot

# Of what trains, so much may be frozen for copies of it to be kept: a teacher is as large as its student, but what adapters are
# put around can be all memory there is.
_COPIED_SHARE = 1.5
_TORCHS_OWN = frozenset(vars(nn.Module()))


@dataclass(frozen=True)
class _Frozen:
    parameter: nn.Parameter
    total: float  # of its values: enough to notice a change
    copy: Tensor | None

    def has_changed(self) -> bool:
        now = _total(self.parameter)
        return now != self.total and not (math.isnan(now) and math.isnan(self.total))


class StageChanges:
    """Made before the microbatches run.

    Args:
        root: The LightningModule, with this rank's stage.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._attributes = Snapshot({"self": root})
        self._buffers = {fqn: (buffer, buffer.clone()) for fqn, buffer in root.named_buffers() if not buffer.is_meta}
        own = {fqn: p for fqn, p in root.named_parameters() if not p.is_meta and p.layout is torch.strided}
        num_trained = sum(p.numel() * p.element_size() for p in own.values() if p.requires_grad)
        # Types of one byte are those of weights that nobody moves, and torch cannot sum them all.
        frozen = {fqn: p for fqn, p in own.items() if not p.requires_grad and p.element_size() > 1}
        copies = sum(p.numel() * p.element_size() for p in frozen.values()) <= _COPIED_SHARE * num_trained
        self._frozen = {fqn: _Frozen(p, _total(p), p.detach().clone() if copies else None) for fqn, p in frozen.items()}
        self._after_first: dict[str, Any] = {}

    def note_first(self) -> None:
        """Called when the first microbatch has gone through: what changes once, such as a flag, is no count."""
        self._after_first = self._counts()

    def reason(self) -> str | None:
        """Why batches must not be cut, after all microbatches; None if they may.

        Raises:
            UnsupportedError: What has changed cannot be put back.
        """
        moved = [(fqn, frozen) for fqn, frozen in self._frozen.items() if frozen.has_changed()]
        if moved and moved[0][1].copy is None:
            raise UnsupportedError(
                "The model's forward changes parameters that are frozen.",
                where=moved[0][0],
                observed=f"{len(moved)} of them, changed once for each microbatch",
                expected="parameters that the step or the optimizer changes, once for a batch",
                todo="Set FxPipeStrategy(num_microbatches=1), or change them in the step or in a hook.",
            )
        if moved:
            return f"the model's forward changes {moved[0][0]}, which is frozen"
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
            for buffer, before in self._buffers.values():
                buffer.copy_(before)
            for frozen in self._frozen.values():
                if frozen.copy is not None:
                    frozen.parameter.copy_(frozen.copy)

    def _counts(self) -> dict[str, Any]:
        """Numbers that modules hold, and the lengths of their lists and dicts."""
        found: dict[str, Any] = {}
        for path, module in self._root.named_modules():
            for name, value in vars(module).items():
                if name in _TORCHS_OWN:
                    continue
                if type(value) in (int, float):
                    found[f"{path}.{name}"] = value
                elif type(value) in (list, dict, set):
                    found[f"{path}.{name}"] = len(value)
        return found


def _total(parameter: Tensor) -> float:
    dtype = torch.complex128 if parameter.is_complex() else torch.float64
    total = parameter.detach().sum(dtype=dtype)
    return float(total.real + total.imag if total.is_complex() else total)
