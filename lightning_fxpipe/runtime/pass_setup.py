"""Stages, microbatches and pipelines for the calls of a region, kept for all batches of the same shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import fx, nn

from lightning_fxpipe._compat.autograd import has_gradient_hooks
from lightning_fxpipe.distributed.agreement import gather_values
from lightning_fxpipe.distributed.topology import Topology
from lightning_fxpipe.errors import PartitionError
from lightning_fxpipe.independence.division import (
    Division,
    NotDivisible,
    calls_of_unknown_size,
    divide,
    fixed_nodes,
    has_several_entries,
    joined_dim,
    sample_dims,
)
from lightning_fxpipe.microbatch.batch_norms import DeferredNorms, batch_norms
from lightning_fxpipe.microbatch.draws import generator_state
from lightning_fxpipe.microbatch.split import Pass, plan_passes, without_single_samples
from lightning_fxpipe.planner.assignment import Assignment
from lightning_fxpipe.planner.cost import node_fqns
from lightning_fxpipe.planner.follow_plan import follow_plan_with_tail
from lightning_fxpipe.planner.plan import PartitionPlan
from lightning_fxpipe.recording.recorder import Recorder
from lightning_fxpipe.reporting.wording import node_words
from lightning_fxpipe.runtime.late_exchanges import ChangedPlaces, LateExchanges
from lightning_fxpipe.runtime.left_state import LeftState, read_by_all
from lightning_fxpipe.runtime.lru import LruCache
from lightning_fxpipe.runtime.region_pass import Crossing, Leg, PassSetup
from lightning_fxpipe.runtime.same_cuts import check_same_cuts
from lightning_fxpipe.runtime.stage_edges import StageGradients, stage_edges
from lightning_fxpipe.runtime.stage_trace import StageTrace
from lightning_fxpipe.runtime.stage_traces import MAX_TRACES
from lightning_fxpipe.runtime.submodule_values import path_of
from lightning_fxpipe.schedules.by_name import SCHEDULES, Schedule, forward_order, training_order
from lightning_fxpipe.schedules.executor import Channels, Executor, PassRecording
from lightning_fxpipe.schedules.program import BOTH_WAYS, Edge, program_of
from lightning_fxpipe.simulation.actions import BACKWARD, FORWARD, ActionTable, Kind
from lightning_fxpipe.stages.build import Stage, TensorSpec, boundary_specs, build_stage
from lightning_fxpipe.tracing.trace import TracedRegion
from lightning_fxpipe.tracing.trace_log import TraceLog
from lightning_fxpipe.user_code.paths import Path
from lightning_fxpipe.user_code.step import StepKind

_T = TypeVar("_T")

# Each is made in about 15 ms, and holds no memory between batches. A step that every rank runs makes several calls, each with
# and without gradients.
_MAX_SETUPS = 8
_MAX_SETUPS_OF_CALLS = 40
_HOOKS = "hooks on gradients"  # of which has been told


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Stages:
    """This rank's part of a trace.

    Attributes:
        assignment: All stages.
        stages: The rank's stages, by their index.
        results: What the last stage gives.
        tail: Where the results are, what runs once for the batch.
        division: How the batch is cut; None where it is not.
        gradients: Which gradients the stages send each other.
        late_exchanges: What the rank's stages may leave for others.
    """

    assignment: Assignment
    stages: Mapping[int, Stage]
    results: tuple[fx.Node, ...]
    tail: Stage | None
    division: Division | None
    gradients: StageGradients
    late_exchanges: LateExchanges


class PassSetups:
    """Makes and keeps them. Made by every rank.

    Args:
        root: The LightningModule, with this rank's stage on its device.
        plan: Where each parameter lives.
        topology: This rank's place.
        log: Is told of batches that cannot be cut.
        schedule: How training batches go through the stages.
        everywhere: Whether every rank gets the results, and not only the last stage's.
        recorder: Notes what runs.
        compiles: Whether modules inside of stages are compiled.
    """

    def __init__(
        self,
        root: nn.Module,
        plan: PartitionPlan,
        topology: Topology,
        log: TraceLog,
        *,
        schedule: Schedule = SCHEDULES["gpipe"],
        everywhere: bool = False,
        recorder: Recorder | None = None,
        compiles: bool = False,
    ) -> None:
        self._compiles = compiles
        self._recorder = recorder or Recorder()
        self._schedule = schedule
        self._everywhere = everywhere
        self._root = root
        self._plan = plan
        self._topology = topology
        self._log = log
        global_ranks = tuple(map(topology.global_rank, range(topology.num_ranks)))
        self._channels = Channels(onward=topology.group, back=topology.backward_group, global_ranks=global_ranks)
        self._whole: LruCache[StageTrace, _Stages] = LruCache(MAX_TRACES)
        self._divided: LruCache[StageTrace, _Stages | str] = LruCache(MAX_TRACES)
        self._batch_norms = [norm for _, norm in batch_norms(root)]
        self._norms = DeferredNorms(self._batch_norms)
        self._setups = self._no_setups()
        self._proven: WeakSet[TracedRegion] = WeakSet()  # whose stages have been seen to treat samples one by one
        self._told_of: set[str] = set()
        self._changed = ChangedPlaces()
        self._left: LeftState | None = None

    @property
    def left(self) -> LeftState:
        """Sends what the stages leave for code that every rank runs; made when it is first needed."""
        if self._left is None:
            self._left = LeftState(self._root, self._topology, read_by_all(self._root, self._everywhere), self._log.warn)
        return self._left

    def forget(self) -> None:
        """Gives back what is kept."""
        self._setups = self._no_setups()

    def _no_setups(self) -> LruCache[Hashable, PassSetup]:
        return LruCache(_MAX_SETUPS_OF_CALLS if self._everywhere else _MAX_SETUPS)

    def get(
        self,
        trace: StageTrace,
        sizes: Mapping[Any, int],
        num_samples: int,
        count: int,
        *,
        training: bool,
        before: Callable[[], None],
    ) -> PassSetup:
        """The setup for a batch. Called by every rank.

        Args:
            trace: The trace that covers the batch.
            sizes: Values of its symbols for the batch.
            num_samples: Samples in the batch.
            count: Microbatches that are asked for.
            training: Whether a backward pass follows.
            before: Called before a new one is made.
        """

        def make() -> PassSetup:
            before()
            return self._make(trace, sizes, num_samples, count, training)

        if any(norm.training for norm in self._batch_norms):
            count = without_single_samples(num_samples, count)
        key = (trace, tuple(sorted((str(symbol), size) for symbol, size in sizes.items())), count, training)
        return self._setups.get(key, make)

    def is_proven(self, trace: StageTrace, setup: PassSetup) -> bool:
        """Returns True if the stages of a trace have been seen to treat samples one by one, or need not."""
        return setup.num_microbatches == 1 or trace.traced in self._proven

    def prove(self, trace: StageTrace, reason: str | None, changed: Sequence[str]) -> bool:
        """Takes in what a try of this rank's stage has shown. Called by every rank.

        Args:
            trace: The trace.
            reason: Why its batches must not be cut.
            changed: Buffers that the stage has changed, and numbers that it sets by the number of samples.

        Returns:
            Whether they may be cut on all ranks; if not, the trace's batches are not cut any more.
        """
        hooked = [fqn for fqn, each in self._root.named_parameters() if not each.is_meta and has_gradient_hooks(each)]
        shown = gather_values(self._topology.control_group, (reason, [*changed], hooked))
        reasons = [each for each, *_ in shown if each is not None]
        self._proven.add(trace.traced)
        if reasons:
            self._divided.put(trace, reasons[0])
            self._setups = self._no_setups()
        elif names := sorted({name for _, each, _ in shown for name in each} - self._told_of):
            self._told_of.update(names)
            self._log.warn(
                "The model updates buffers or numbers in its forward, which happens once per microbatch, as with gradient "
                f"accumulation: {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}. To get the values of one device, "
                "set FxPipeStrategy(num_microbatches=1)."
            )
        if not reasons and trace.kind is StepKind.TRAIN:
            self._tell_of_gradient_hooks(sorted({name for *_, hooked in shown for name in hooked}))
        return not reasons

    def _tell_of_gradient_hooks(self, names: Sequence[str]) -> None:
        if names and _HOOKS not in self._told_of:
            self._told_of.add(_HOOKS)
            self._log.warn(
                "Gradient hooks of parameters run once per microbatch, on its part of the gradient: "
                f"{', '.join(names[:4])}{', ...' if len(names) > 4 else ''}. Nonlinear operations such as clipping give "
                "different results: move them to on_after_backward, or set FxPipeStrategy(num_microbatches=1)."
            )

    def _make(self, trace: StageTrace, sizes: Mapping[Any, int], num_samples: int, count: int, training: bool) -> PassSetup:
        passes = plan_passes(num_samples, count)
        if passes[0].count > 1 or len(passes) > 1:
            divided = self._divided.get(trace, lambda: self._divide(trace))
            if isinstance(divided, _Stages):
                found = self._agreed(partial(self._setup, trace.traced, divided, passes, sizes, training))
                if isinstance(found, PassSetup):
                    self._tell_of_other_number(passes, training)
                    return found
                divided = found
            self._tell(trace, divided)
        whole = self._whole.get(trace, lambda: self._stages(trace.kind, self._undivided(trace.traced), None))
        return self._setup(trace.traced, whole, plan_passes(num_samples, 1), sizes, training)

    def _tell(self, trace: StageTrace, reason: str) -> None:
        if reason not in self._told_of:
            self._told_of.add(reason)
            self._log.warn(
                f"The {trace.kind.value} runs each batch as a single microbatch, so the stages do not overlap: {reason}. "
                "Microbatches require a model that treats each sample independently."
            )

    def _tell_of_other_number(self, passes: Sequence[Pass], training: bool) -> None:
        """Tells where a table of the user's does not run, since it is for another number of microbatches than the batch has."""
        wanted, found = self._schedule.num_microbatches, " and ".join(f"{part.count} of {part.size} samples" for part in passes)
        if training and wanted is not None and passes[0].count != wanted and found not in self._told_of:
            self._told_of.add(found)
            self._log.inform(
                f"The schedule table {self._schedule.name} is for {wanted} microbatches. A batch split into {found} runs in "
                "GPipe order instead."
            )

    def _undivided(self, traced: TracedRegion) -> Assignment:
        """The stages for the whole batch. What has sizes that depend on values crosses no cut: it runs after the last stage."""
        if not self._everywhere:
            with suppress(PartitionError):
                return follow_plan_with_tail(self._plan, traced, calls_of_unknown_size(traced))
        return follow_plan_with_tail(self._plan, traced, ())

    def _divide(self, trace: StageTrace) -> _Stages | str:
        """The stages for microbatches, or why there are none."""
        found = self._agreed(partial(self._assigned, trace.traced))
        return found if isinstance(found, str) else self._stages(trace.kind, *found)

    def _assigned(self, traced: TracedRegion) -> tuple[Assignment, Division]:
        """Returns the assignment and division for microbatches. Raises :class:`NotDivisible`."""
        division = divide(traced)
        held = sorted({fqn for node in division.tail for fqn in node_fqns(node, self._root) if self._plan.stages_of(fqn)})
        if held and self._everywhere:
            raise NotDivisible(f"{_mixing(division)} needs the whole batch, but uses {held[0]}, which only one stage holds")
        try:
            return follow_plan_with_tail(self._plan, traced, division.tail), division
        except PartitionError as error:
            needed = f"needs the whole batch, but earlier stages depend on it ({error.observed})"
            raise NotDivisible(f"{_mixing(division)} {needed}") from None

    def _agreed(self, make: Callable[[], _T]) -> _T | str:
        """Returns the made object, or the reason of a rank that cannot make it: only its stage's rank knows what a module has
        kept.
        """
        made: _T | None = None
        reason = None
        try:
            made = make()
        except NotDivisible as error:
            reason = str(error)
        reasons = [each for each in gather_values(self._topology.control_group, reason) if each is not None]
        if reasons:
            return reasons[0]
        assert made is not None
        return made

    def _stages(self, kind: StepKind, assignment: Assignment, division: Division | None) -> _Stages:
        topology = self._topology
        if topology.can_skip:
            assignment = assignment.with_skips(topology.last_stage)
        check_same_cuts(assignment, topology, may_run_whole=kind is not StepKind.TRAIN and not self._everywhere)
        return _Stages(
            assignment=assignment,
            stages={
                stage: build_stage(assignment, stage, self._plan.checkpointed_modules, compiles=self._compiles)
                for stage in topology.stages
            },
            results=assignment.boundary(topology.last_stage),
            gradients=StageGradients(assignment, topology.last_stage),
            tail=build_stage(assignment, topology.num_stages) if topology.is_last or self._everywhere else None,
            division=division,
            late_exchanges=self._late_exchanges(assignment),
        )

    def _late_exchanges(self, assignment: Assignment) -> LateExchanges:
        is_alone = self._topology.num_ranks == 1  # and all stages have the same objects
        nodes = (node for stage in self._topology.stages if not is_alone for node in assignment.nodes(stage))
        own = {str(node.target) for node in nodes if node.op == "call_module"}
        self._changed.add(assignment.chain.traced)
        return LateExchanges(self._root, own, self._changed)

    def _setup(
        self, traced: TracedRegion, stages: _Stages, passes: tuple[Pass, ...], sizes: Mapping[Any, int], training: bool
    ) -> PassSetup:
        division, topology = stages.division, self._topology
        num_values = len(traced.input_nodes) + len(traced.draw_nodes)
        joined: tuple[int | None, ...] = (None,) * len(stages.results)
        dims: dict[str, int] = {}
        in_batch = sum(part.count * part.size for part in passes)
        if division is not None:
            in_call = sizes[division.symbol]
            if in_call != in_batch:
                raise NotDivisible(f"the model receives {in_call} of the batch's {in_batch} samples")
            joined = tuple(joined_dim(node, division) for node in stages.results)
            if passes[0].size < 2 and any(has_several_entries(node, division) for node in stages.results):
                raise NotDivisible(
                    "with one sample per microbatch, it is unknown which entries of a result belong to which sample"
                )
            dims = sample_dims(traced, division)
            dims |= {node.name: dim for node, dim in zip(stages.results, joined, strict=True) if dim is not None}
        # With one microbatch the random numbers run through the stages as on one device.
        carried = _random_state_specs(topology.device) if division is None else ()
        legs = []
        for part in passes:
            sizes_of_part = dict(sizes) if division is None else {**sizes, division.symbol: part.size}
            if not traced.admits(sizes_of_part):
                raise NotDivisible(f"the model's code takes a different path for {part.size} samples than for {in_batch}")
            longer = None if division is None else {**sizes, division.symbol: part.size + 1}
            admits_one_more = longer is not None and traced.admits(longer)
            legs.append(self._leg(stages, part, passes[0].size, sizes_of_part, carried, training, admits_one_more))
        return PassSetup(
            stages=stages.stages,
            tail=stages.tail,
            last_stage=topology.last_stage,
            legs=tuple(legs),
            input_dims=(None,) * num_values if division is None else division.input_dims,
            joined_dims=joined,
            joined_specs=boundary_specs(stages.results, sizes),
            input_shapes=tuple(spec.shape for spec in boundary_specs(traced.input_nodes, sizes)),
            input_sources=tuple(map(stages.gradients.into(0), traced.input_nodes)),
            sample_dims=dims,
            fixed=frozenset() if division is None else fixed_nodes(traced, division),
            carries_random_state=bool(carried),
            device=topology.device,
            norms=DeferredNorms(()) if division is None else self._norms,
            late_exchanges=stages.late_exchanges,
            left=self.left,
            carried=_sides_of(traced),
        )

    def _leg(
        self,
        stages: _Stages,
        part: Pass,
        full_size: int,
        sizes: Mapping[Any, int],
        carried: tuple[TensorSpec, ...],
        training: bool,
        admits_one_more: bool,
    ) -> Leg:
        division, topology, last = stages.division, self._topology, self._topology.last_stage
        into = stages.gradients.into
        crossings = {
            index: Crossing(
                received=boundary_specs(stage.boundary_in, sizes, into(index)),
                sent=boundary_specs(stage.boundary_out, sizes, into(index + 1)),
            )
            for index, stage in stages.stages.items()
        }
        edges = stage_edges(stages.assignment, last, sizes, carried, stages.gradients)
        executor = partial(self._executor, edges, part.first)
        one_way = forward_order(topology.placement, part.count)
        interleaved = None
        if training and division is not None and self._schedule.alternates:
            # Made when it is needed.
            order = partial(training_order, self._schedule, topology.placement, part.count, self._plan.stage_work)
            interleaved = cache(lambda results: executor(order(), BOTH_WAYS, results))
        return Leg(
            part=part,
            start=0 if division is None else division.rows(part.first * full_size),
            rows=0 if division is None else division.rows(part.size),
            crossings=crossings,
            sizes=sizes,
            admits_one_more=admits_one_more,
            forward=executor(one_way, {FORWARD}),
            backward=cache(lambda results: executor(one_way, {BACKWARD}, results)) if training else None,
            interleaved=interleaved,
        )

    def _executor(
        self,
        edges: Sequence[Edge],
        first: int,
        table: ActionTable,
        kinds: Collection[Kind],
        results: Collection[int] = (),
    ) -> Executor:
        """Makes the executor of a table's actions of some kinds.

        Args:
            edges: The tensors that stages give each other.
            first: Number in the batch of the first microbatch.
            table: All actions.
            kinds: Those that run.
            results: Numbers of the results that have gradients.
        """
        topology, replace = self._topology, dataclasses.replace
        edges = [replace(e, spec=replace(e.spec, requires_grad=e.spec.has_gradient(results))) for e in edges]
        return Executor(
            program_of(table, edges, topology.rank, kinds=kinds),
            device=topology.device,
            channels=self._channels,
            recording=PassRecording(recorder=self._recorder, first=first),
        )


def _random_state_specs(device: torch.device) -> tuple[TensorSpec, ...]:
    """Returns the specs of the tensors that carry the state of a device's random numbers over a boundary."""
    state = generator_state(device)
    return (TensorSpec(shape=tuple(state.shape), dtype=state.dtype, requires_grad=False),)


def _mixing(division: Division) -> str:
    node = next(iter(sorted(division.tail, key=str)), None)
    return "a call" if node is None else node_words(node)


def _sides_of(traced: TracedRegion) -> frozenset[Path]:
    """Places of the tensors that modules leave as attributes, which are results of the region."""
    calls = () if traced.record is None else traced.record.calls
    places = {(path, name) for call in calls for path, name, _ in call.sides}
    places |= {(traced.signature.path or "", name) for name in traced.left}
    return frozenset((*path_of(path), ("attribute", name)) for path, name in places)
