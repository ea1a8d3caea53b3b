"""Validation, test and prediction that use the model's parts in another way than the plan allows: as on one device.

Decoding from token to token, sampling loops, a decoder without its encoder: such a step cannot go once through the stages. So
it runs as ordinary Python on the last stage's rank, on the whole batch, with the tensors of the other stages brought there.
They stay until the loop over the batches ends, and are brought anew where something has changed them before. Where that rank
has no room for them, every rank runs the step (``runtime.joint_step``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed.distributed_c10d as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_fxpipe._compat.torch import return_memory, version_of
from lightning_fxpipe.distributed.agreement import any_rank, of_last_stage
from lightning_fxpipe.distributed.topology import Topology
from lightning_fxpipe.errors import FxPipeError, UnsupportedError
from lightning_fxpipe.hooks.whole_model import Held, Used, WholeView
from lightning_fxpipe.metrics.metric_calls import METRICS
from lightning_fxpipe.metrics.step_log import StepLog
from lightning_fxpipe.microbatch.draws import BatchDraws
from lightning_fxpipe.microbatch.split import count_samples
from lightning_fxpipe.planner.cost import canonical_fqns
from lightning_fxpipe.planner.plan import PartitionPlan
from lightning_fxpipe.pytree.sizes import as_bytes
from lightning_fxpipe.rng import rng_state
from lightning_fxpipe.runtime.attributes import StepAttributes, SubmoduleAttributes
from lightning_fxpipe.runtime.batch_result import BatchResult, rng_since
from lightning_fxpipe.runtime.replay import watched_step
from lightning_fxpipe.stages.holders import first_held
from lightning_fxpipe.stages.memory import memory_for_rank
from lightning_fxpipe.user_code.exchange import named_tensors
from lightning_fxpipe.user_code.frames import user_source
from lightning_fxpipe.user_code.kinds import is_users
from lightning_fxpipe.user_code.step import Step, StepKind

# Of the memory that is left, what tensors of other stages may take.
_USABLE_SHARE = 0.9


class WholeSteps:
    """Which steps run whole, and the tensors that they need. All methods but :meth:`takes` are called by every rank.

    Args:
        module: The LightningModule, with placeholders.
        plan: Which stage holds what.
        topology: This rank's place.
        warn: Tells the user.
        submodules: What submodules hold: those of other stages on other ranks until a step runs whole.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: PartitionPlan,
        topology: Topology,
        warn: Callable[[str], None],
        submodules: SubmoduleAttributes,
    ) -> None:
        self._module = module
        self._submodules = submodules
        self._plan = plan
        self._topology = topology
        self._warn = warn
        self._kinds: set[StepKind] = set()
        self._values: dict[int, Tensor] = {}  # on the last stage, by the placeholder's identity
        self._versions: list[tuple[int, int]] | None = None  # of this rank's tensors, when they were brought

    def takes(self, kind: StepKind) -> bool:
        """Returns True if a step runs whole."""
        return kind in self._kinds

    def take(self, kind: StepKind, error: FxPipeError) -> bool:
        """A step runs whole from now on, because it cannot run in stages; unless there is no room.

        Args:
            kind: The step.
            error: Why it cannot.

        Returns:
            Whether there is room.
        """
        num_bytes = sum(tensor.numel() * tensor.element_size() for _, tensor in self._missing())
        facts = "; ".join(text for text in (error.where, error.observed) if text)
        why = f"Results are unchanged. Reason: {error.what} ({facts})"
        rest = f"the rest of the model, {num_bytes / 2**20:,.1f} MiB"
        free = memory_for_rank(self._topology.device, self._topology.num_ranks)
        if not of_last_stage(free is None or num_bytes <= _USABLE_SHARE * free, self._topology):
            self._warn(
                f"The {kind.value} cannot be pipelined as a whole, and the last stage's rank does not have enough memory for "
                f"{rest}. Every rank runs it instead, with a separate pipeline for each call of the model, so the stages do "
                f"not overlap. {why}"
            )
            return False
        self._kinds.add(kind)
        if self._topology.num_ranks == 1:
            self._warn(f"The {kind.value} cannot be pipelined, so it runs without stages. {why}")
            return True
        self._warn(
            f"The {kind.value} cannot be pipelined, so it runs on the last stage's rank only: {rest}, is copied there for "
            f"each loop over the batches while the other ranks wait. {why}"
        )
        return True

    def run(self, step: Step, batch: Any, metrics: Mapping[str, nn.Module], attributes: StepAttributes | None) -> BatchResult:
        """Runs the step on the last stage's rank, as on one device; what it gave is there only.

        Args:
            step: The step.
            batch: The batch.
            metrics: The module's metrics, by name.
            attributes: What the step can change, on the last stage's rank: now also what all modules hold.
        """
        self._bring()
        if attributes is None:
            return BatchResult()
        attributes.end_region(self._with_own_state())
        log, before = StepLog(metrics), rng_state()
        num_samples = count_samples(batch, 1, self._plan.batch_dim).num_samples  # it is not split
        draws = BatchDraws(num_samples, self._plan.batch_dim)
        with self._whole_model() as buffers, log.capture(self._module), step.context(), watched_step(self._module, draws):
            output = step.function(batch, *step.rest)
        return BatchResult(output=output, entries=log.entries, rng=rng_since(before), buffers=buffers)

    @contextmanager
    def _whole_model(self) -> Iterator[dict[str, Tensor]]:
        """In the block this rank has the whole model. Yields the buffers of other stages that the block changes.

        Raises:
            UnsupportedError: The block changes parameters.
        """
        places = [(m, name, fqn, t) for m, name, fqn, t in named_tensors(self._module) if id(t) in self._values]
        before = {key: version_of(value) for key, value in self._values.items()}
        changed: dict[str, Tensor] = {}
        for module, name, _, placeholder in places:
            setattr(module, name, self._values[id(placeholder)])
        try:
            yield changed
            for module, name, fqn, placeholder in places:
                now, key = getattr(module, name), id(placeholder)
                if now is self._values[key] and version_of(now) == before[key]:
                    continue
                if isinstance(placeholder, nn.Parameter):
                    raise _changes_parameter(fqn)
                with torch.inference_mode(False):
                    self._values[key] = now.detach().clone()
                changed[fqn] = self._values[key].cpu()
        finally:
            for module, name, _, placeholder in places:
                setattr(module, name, placeholder)

    def change_buffers(self, changed: Mapping[str, Tensor]) -> None:
        """Makes this rank's buffers what a step on the last stage's rank has made of them."""
        names = canonical_fqns(self._module)
        for module, name, fqn, tensor in list(named_tensors(self._module)):
            if fqn in changed and not tensor.is_meta and self._plan.stages_of(names[fqn]):
                setattr(module, name, changed[fqn].to(self._topology.device))
        if changed:
            self._versions = self._own_versions()

    def give_back(self) -> None:
        """The loop over the batches has ended: what was brought goes."""
        if self._versions is not None:
            self._submodules.begin()
        self._versions = None
        if self._values:
            self._values = {}
            return_memory()

    @contextmanager
    def no_placeholders(self) -> Iterator[TorchFunctionMode]:
        """In the block, a look at a tensor of another stage raises :class:`UnsupportedError`; yields what watches for it."""
        placeholders = {id(tensor): tensor for *_, tensor in named_tensors(self._module) if tensor.is_meta}
        used = Used(values=_refuse_look, gradients=_refuse_look, common=lambda: None)
        with WholeView(placeholders, Held, used, self._topology.device) as view:
            yield view

    def _missing(self) -> list[tuple[int, Tensor]]:
        """Lists the tensors that the last stage lacks, with the rank that has each, in the same order on every rank."""
        held, topology = first_held(self._module, self._plan), self._topology
        return [
            (topology.rank_of(stage), tensor)
            for stage, tensors in held.items()
            for fqn, tensor in tensors.items()
            if topology.last_rank not in topology.ranks_of(self._plan.stages_of(fqn))
        ]

    def _own_versions(self) -> list[tuple[int, int]]:
        return [(id(tensor), version_of(tensor)) for *_, tensor in named_tensors(self._module) if not tensor.is_meta]

    def _with_own_state(self) -> list[str]:
        """Paths of the modules that may hold other values after a call; metrics are brought together on their own."""
        metrics = {
            id(inside) for module in self._module.modules() if isinstance(module, METRICS) for inside in module.modules()
        }
        modules = self._module.named_modules()
        return [path for path, module in modules if path and is_users(type(module)) and id(module) not in metrics]

    def _bring(self) -> None:
        """Brings what the last stage lacks, unless it has it."""
        if self._versions is None and (unsent := self._submodules.share(self._topology.control_group)):
            self._warn(
                f"Modules of other stages hold values that cannot be sent to the last stage's rank, where this step runs: "
                f"{', '.join(unsent)}. It finds those of that rank there."
            )
        versions = self._own_versions()
        if not any_rank(versions != self._versions, self._topology):
            return
        self._versions, last = versions, self._topology.last_rank
        with torch.inference_mode(False), torch.no_grad():
            for owner, tensor in self._missing():
                if dist.get_rank() == owner:
                    dist.send(as_bytes(tensor.contiguous()), dst=last, group=self._topology.group)
                elif self._topology.is_last:
                    value = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._topology.device)
                    dist.recv(as_bytes(value), src=owner, group=self._topology.group)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    self._values[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if is_parameter else value


def _refuse_look() -> NoReturn:
    raise UnsupportedError(
        "The step uses parameters outside the pipelined calls.",
        where=user_source(),
        observed="a parameter or buffer of another stage",
        expected="parameters of the last stage only, except in the traced calls of the model",
        todo="Call the model in this step as training does.",
    )


def _changes_parameter(fqn: str) -> UnsupportedError:
    return UnsupportedError(
        "The step changes a parameter.",
        observed=fqn,
        expected="parameters that the optimizer, modules or hooks change",
        todo="Change it in a hook, which has access to the whole model.",
    )
