"""Changes that a stage's forward makes by itself, seen while the first batch of a trace passes through it.

A forward that counts its calls, collects their results in a list, or moves parameters (a momentum teacher, noise on its own
weights) does so once for a batch on one device; with several microbatches it would do so once for each, and compute something
else. Such a batch is not cut. What gives the same when it is done again, such as a bound on the norm of the weights, may be.
Buffers are allowed to change, and the user is told: most are statistics.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.microbatch.batch_norms import batch_norms
from lightning_fxpipe.pytree.sizes import as_bytes, plain_numbers, same_bytes
from lightning_fxpipe.user_code.snapshot import Snapshot

# Of what trains, so much may be frozen for copies of it to be kept: a teacher is as large as its student, but what adapters are
# put around can be all memory there is.
_COPIED_SHARE = 1.5
_TORCHS_OWN = frozenset(vars(nn.Module()))
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


@dataclass(frozen=True)
class _Totals:
    """Sums of a parameter's values and of their sizes: enough to notice a change."""

    values: float
    sizes: float

    @classmethod
    def of(cls, parameters: Mapping[str, Tensor]) -> dict[str, _Totals]:
        """Returns the totals of each parameter, by its name; the device is asked once."""
        detached = {fqn: p.detach() for fqn, p in parameters.items()}
        real = {fqn: _countable(p) for fqn, p in detached.items()}
        sums = [[p.sum(dtype=torch.float64), p.abs().sum(dtype=torch.float64)] for p in real.values()]
        return {fqn: cls(*found) for fqn, found in zip(real, plain_numbers(*sums), strict=True)}

    def differ(self, others: _Totals, tolerance: float = 0.0) -> bool:
        """Returns True if the totals differ by more than a share of the sizes."""
        return (
            abs(self.values - others.values) > tolerance * self.sizes or abs(self.sizes - others.sizes) > tolerance * self.sizes
        )


def _countable(values: Tensor) -> Tensor:
    """The values in a dtype that has sums and absolute values: their bytes, unless they are floats of two bytes or more."""
    if values.is_complex():
        return torch.view_as_real(values)
    return values if values.is_floating_point() and values.element_size() > 1 else as_bytes(values.contiguous())


@dataclass(frozen=True)
class _Frozen:
    parameter: nn.Parameter
    totals: _Totals
    copy: Tensor | None


class StageChanges:
    """Made before the microbatches run.

    Args:
        root: The LightningModule, with this rank's stages.

    Attributes:
        numbers: Names of numbers that modules set by the number of samples, as far as that is known.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self.numbers: list[str] = []
        self._attributes = Snapshot({"self": root})
        self._buffers = {fqn: (buffer, buffer.clone()) for fqn, buffer in root.named_buffers() if not buffer.is_meta}
        own = {fqn: p for fqn, p in root.named_parameters() if not p.is_meta and p.layout is torch.strided}
        num_trained = sum(p.numel() * p.element_size() for p in own.values() if p.requires_grad)
        frozen = {fqn: p for fqn, p in own.items() if not p.requires_grad}
        # An embedding's are those of the rows that are looked up, whatever the microbatch.
        embeddings = [module for module in root.modules() if isinstance(module, _EMBEDDINGS)]
        bounded = {id(module.weight) for module in embeddings if module.max_norm is not None}
        self._trained = {fqn: p for fqn, p in own.items() if p.requires_grad and id(p) not in bounded}
        self._totals_after_first: dict[str, _Totals] = {}
        copies = sum(p.numel() * p.element_size() for p in frozen.values()) <= _COPIED_SHARE * num_trained
        totals = _Totals.of(frozen)
        self._frozen = {fqn: _Frozen(p, totals[fqn], p.detach().clone() if copies else None) for fqn, p in frozen.items()}
        self._after_first: dict[str, Any] = {}

    def note_first(self, stage: nn.Module, others: Sequence[nn.Module] = ()) -> None:
        """Called when the first microbatch has gone through a stage: what changes once, such as a flag, is no count.

        Args:
            stage: The stage.
            others: The rank's other stages, which it may not have been through.
        """
        # What several stages have counts from the first of them on.
        own = {id(held) for held in (*stage.modules(), *stage.parameters())}
        later = {id(held) for other in others for held in (*other.modules(), *other.parameters())} - own
        self._after_first = self._counts(later) | self._after_first
        new = {fqn: p for fqn, p in self._trained.items() if id(p) not in later and fqn not in self._totals_after_first}
        self._totals_after_first |= _Totals.of(new)

    def reason(self) -> str | None:
        """Why batches must not be cut, after all microbatches; None if they may.

        Raises:
            UnsupportedError: What has changed cannot be put back.
        """
        now = _Totals.of({fqn: self._trained[fqn] for fqn in self._totals_after_first})
        trained = [fqn for fqn, totals in now.items() if self._is_moved_again(fqn, totals)]
        now = _Totals.of({fqn: each.parameter for fqn, each in self._frozen.items()})
        frozen = [fqn for fqn, each in self._frozen.items() if each.totals.differ(now[fqn])]
        lost = [*trained, *(fqn for fqn in frozen if self._frozen[fqn].copy is None)]
        if lost:
            raise UnsupportedError(
                "The model's forward changes parameters.",
                where=lost[0],
                observed=f"{len(lost)} parameters, changed once per microbatch",
                expected="parameters that the optimizer or a hook changes once per batch",
                todo="Set FxPipeStrategy(num_microbatches=1), or change the parameters in a hook.",
            )
        if frozen:
            return f"the model's forward changes {frozen[0]}, which is frozen"
        counts = self._counts()
        counted = [name for name, value in self._after_first.items() if counts.get(name) != value]
        return f"the model's forward changes {counted[0]} with each call" if counted else None

    def _is_moved_again(self, fqn: str, now: _Totals) -> bool:
        return self._totals_after_first[fqn].differ(now, 2 * torch.finfo(self._trained[fqn].dtype).eps)

    def changed(self) -> list[str]:
        """Names of :attr:`numbers`, and of the buffers that have changed, but for BatchNorm's: these move once for a batch."""
        norms = {f"{path}.{name}" for path, norm in batch_norms(self._root) for name, _ in norm.named_buffers()}
        buffers = [name for name, (now, before) in self._buffers.items() if name not in norms and not same_bytes(now, before)]
        return [*buffers, *self.numbers]

    def restore(self) -> None:
        """Makes all of it what it was."""
        self._attributes.restore()
        with torch.no_grad():
            for buffer, before in self._buffers.values():
                buffer.copy_(before)
            for frozen in self._frozen.values():
                if frozen.copy is not None:
                    frozen.parameter.copy_(frozen.copy)

    def _counts(self, later: Collection[int] = ()) -> dict[str, Any]:
        """Numbers that modules hold, and the lengths of their lists and dicts, but for some modules, by identity."""
        found: dict[str, Any] = {}
        for path, module in self._root.named_modules():
            if id(module) in later:
                continue
            for name, value in vars(module).items():
                if name in _TORCHS_OWN:
                    continue
                if type(value) in (int, float):
                    found[f"{path}.{name}"] = value
                elif type(value) in (list, dict, set):
                    found[f"{path}.{name}"] = len(value)
        return found
