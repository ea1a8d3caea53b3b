"""Checks that the microbatches' losses make the loss of the whole batch, which nothing but the user's code can tell.

After the schedule of a training batch the last stage runs the step once more, on the whole batch: in it the pipelined call
returns the outputs of all microbatches together, so that the loss is the one device's. Nothing is logged, and all that the step
changes is undone. If that loss is the mean or the sum of the microbatches' losses, it is known how to weigh them. If it is
neither, a warning says so.

The first training batch with several microbatches is checked; the tenth, the hundredth and so on, because padding may come
late; and the first of each further trace, which may be another loss. The gradients of a checked batch were computed with the
weights in use until then; they are linear in them and are corrected when the check finds others, so no batch runs twice.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_fxpipe._compat import FakeTensor
from lightning_fxpipe._compat_lightning import silenced_loggers
from lightning_fxpipe.containers import leaves_with_path
from lightning_fxpipe.exchange import remembered_generators
from lightning_fxpipe.frames import raising_source
from lightning_fxpipe.metrics import StepLog
from lightning_fxpipe.microbatch import Pass
from lightning_fxpipe.plan import PartitionPlan
from lightning_fxpipe.step import BatchRun, loss_of
from lightning_fxpipe.topology import Topology
from lightning_fxpipe.trace import TracedRegion
from lightning_fxpipe.undo import TooMuchToUndo, undone
from lightning_fxpipe.weighting import Finding, LossOptions, LossReduction, Verdict, compare, loss_weights
from lightning_fxpipe.wholebatch import NotJoinable, WholeBatch

# Traces whose loss is known; as many as the runtime keeps.
_MAX_TRACES = 32
# Losses that are exactly zero tell nothing; after so many batches of them the check ends.
_MAX_UNCLEAR = 10

_SILENT = Finding(verdict=Verdict.IMPOSSIBLE)


class LossCheck:
    """Decides how the losses of microbatches are weighted. The same on every rank of the pipeline.

    Args:
        root: The LightningModule.
        plan: Which stage holds what.
        options: What the user says about the loss.
        topology: This rank's place.
    """

    def __init__(self, root: nn.Module, plan: PartitionPlan, options: LossOptions, topology: Topology) -> None:
        self.root = root
        self.plan = plan
        self.options = options
        self.topology = topology
        self._known: list[TracedRegion] = []
        self._num_unclear = 0
        self._num_batches = 0
        self._ended = False
        self._said_impossible = False

    @property
    def reduction(self) -> LossReduction:
        """What the loss is taken to be."""
        return self.options.reduction or LossReduction.MEAN

    def weights(self, microbatches: Sequence[Any], sizes: Sequence[int]) -> tuple[float, ...]:
        """Factor of each microbatch's loss in the batch's loss."""
        return self.options.weights(self.reduction, microbatches, sizes)

    def begin(self, run: BatchRun, batch: Any, traced: TracedRegion) -> BatchCheck | None:
        """Called before a batch runs through the graph; None where there is nothing to check."""
        if not run.step.is_training or len(run.sizes) < 2 or self._ended:
            return None
        self._num_batches += 1
        is_new = not any(known is traced for known in self._known)
        return BatchCheck(self, run, batch, traced) if is_new or _is_power_of_ten(self._num_batches) else None

    def learn(self, finding: Finding, traced: TracedRegion) -> Finding:
        """Takes over what the last stage has found; returns what the user is to be told."""
        if finding.verdict is Verdict.UNCLEAR:
            self._num_unclear += 1
            if self._num_unclear < _MAX_UNCLEAR:
                return finding
            self._ended = True
            return impossible(f"in {_MAX_UNCLEAR} batches it was zero or not finite, or there was none")
        self._known = [*[known for known in self._known if known is not traced][-(_MAX_TRACES - 1) :], traced]
        if finding.verdict is Verdict.DIFFERS or finding.is_warning:
            self._ended = True  # once is enough
        if finding.verdict is Verdict.FITS:
            self.options = dataclasses.replace(self.options, reduction=finding.reduction)
        if finding.verdict is Verdict.IMPOSSIBLE:
            if self.options.reduction is None:  # the user has not said what the loss is, either
                finding = dataclasses.replace(finding, is_warning=True)
            finding, self._said_impossible = finding if not self._said_impossible else _SILENT, True
        return finding


class BatchCheck:
    """The check of one batch, while it runs; made by :meth:`LossCheck.begin` on every rank."""

    def __init__(self, check: LossCheck, run: BatchRun, batch: Any, traced: TracedRegion) -> None:
        self._check = check
        self._run = run
        self._traced = traced
        self._parked: list[tuple[Pass, list[tuple[nn.Parameter, Tensor]]]] = []
        self._mine = [parameter for parameter in check.root.parameters() if not parameter.is_meta]
        self._batch: Any = None
        self._fingerprints: list[tuple[float, float]] = []
        self._failure: Finding | None = None
        if not check.topology.is_last:
            return
        self._rewind_generators = remembered_generators(check.root)
        try:
            self._fingerprints = [_fingerprint(parameter) for parameter in self._mine]
            # The step may change its batch in place.
            self._batch = copy.deepcopy(batch, _cloned_tensors(batch))
            run.kept = {}
        except Exception as error:
            self._failure = impossible(f"the batch cannot be copied ({type(error).__name__}: {error})")

    def end_pass(self, part: Pass) -> None:
        """Called after a pass has run backward: keeps its gradients apart from those of passes with other weights."""
        self._parked.append((part, [(p, p.grad) for p in self._mine if p.grad is not None]))
        for parameter in self._mine:
            parameter.grad = None

    def finish(self) -> Finding:
        """Called after all passes by every rank: checks the loss on the last stage, and sums the gradients with the weights
        that are right."""
        topology, before = self._check.topology, self._check.reduction
        finding = self._find() if topology.is_last else None
        group = topology.control_group
        if group is not None:
            shared = [finding]
            dist.broadcast_object_list(shared, src=topology.rank_of(topology.num_stages - 1), group=group)
            (finding,) = shared
        assert finding is not None
        finding = dataclasses.replace(self._check.learn(finding, self._traced), attributes=finding.attributes)
        sizes = self._run.sizes
        now = loss_weights(self._check.reduction, sizes)
        factors = [a / b for a, b in zip(now, loss_weights(before, sizes), strict=True)]
        if self._check.reduction is not before:
            self._run.weights = now
        for part, gradients in self._parked:
            for parameter, gradient in gradients:
                if factors[part.first] != 1:
                    gradient.mul_(factors[part.first])
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        return finding

    # ------------------------------------------------------------------ on the last stage

    def _find(self) -> Finding:
        run = self._run
        if self._failure is not None:
            return self._failure
        if len(run.losses) != len(run.sizes):
            return Finding(verdict=Verdict.UNCLEAR)  # a step that skipped a microbatch
        before = zip(self._mine, self._fingerprints, strict=True)
        changed = [parameter for parameter, fingerprint in before if _fingerprint(parameter) != fingerprint]
        outputs = WholeBatch(run, self._batch, self._check.plan)
        try:
            with undone(self._check.root, parameters=changed):
                run.assigned.rewind()
                loss = self._loss_of_whole_batch(outputs)
                differing = [] if isinstance(loss, FakeTensor) else run.assigned.learn()
            if isinstance(loss, FakeTensor):  # made of a stand-in for an output
                return impossible(outputs.reason)
        except (TooMuchToUndo, NotJoinable) as error:
            return impossible(str(error))
        except Exception as error:
            if not outputs.is_complete:
                return impossible(outputs.reason)
            where = raising_source(error) or "source unknown"
            return impossible(f"the step fails on it ({type(error).__name__}: {error}; {where})", is_warning=True)
        if loss is None:
            return Finding(verdict=Verdict.UNCLEAR)
        losses = torch.stack(run.losses).to("cpu", torch.float64).tolist()
        finding = compare(float(loss), losses, run.sizes, self._check.options, run.weights, run.losses[0].dtype)
        return dataclasses.replace(finding, attributes=tuple(differing))

    def _loss_of_whole_batch(self, outputs: WholeBatch) -> Tensor | None:
        run, root = self._run, self._check.root
        self._rewind_generators()
        muted = StepLog(run.log.calls.metrics)
        # With gradients enabled, as the step expects it: the outputs need none, so there is no graph.
        with (
            silenced_loggers(root),
            muted.capture(root),
            run.step.context(),
            run.randomness.whole_batch(),
            outputs.in_place_of_region(),
        ):
            muted.begin_microbatch(sum(run.sizes))
            return loss_of(run.step.function(self._batch, *run.step.rest))


def _is_power_of_ten(number: int) -> bool:
    return set(str(number)[1:]) <= {"0"} and str(number)[0] == "1"


def _fingerprint(parameter: nn.Parameter) -> tuple[float, float]:
    """Differs where the step changes a parameter, as a teacher's. A tensor's version does not count changes of its data."""
    values = torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter.detach()
    norm = torch.linalg.vector_norm(values, dtype=torch.float64) if values.is_floating_point() else values.abs().sum()
    return float(values.sum(dtype=torch.float64)), float(norm)


def _cloned_tensors(batch: Any) -> dict[int, Tensor]:
    """Copies of a batch's tensors by id: deepcopy would copy all of the memory that a tensor is a view of."""
    return {id(leaf): leaf.detach().clone() for _, leaf in leaves_with_path(batch) if isinstance(leaf, Tensor)}


def impossible(reason: str, *, is_warning: bool = False) -> Finding:
    """The finding that there is no loss to compare with."""
    message = (
        f"Whether the losses of microbatches make the loss of the batch could not be checked: {reason}. The loss is taken "
        "to be what FxPipeStrategy(loss_reduction=..., loss_weight=...) say, by default a mean over samples. If it is one, say "
        "loss_reduction='mean'; else set num_microbatches=1."
    )
    return Finding(verdict=Verdict.IMPOSSIBLE, message=message, is_warning=is_warning)
