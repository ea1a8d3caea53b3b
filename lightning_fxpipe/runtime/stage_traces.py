"""This rank's stage of each trace, and which trace a step runs with: a known one that covers its shapes, or a new one."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from lightning_fxpipe._compat.torch import hooks_of
from lightning_fxpipe.distributed.agreement import gather_values
from lightning_fxpipe.distributed.decisions import Decisions
from lightning_fxpipe.distributed.topology import Topology
from lightning_fxpipe.errors import FxPipeError, PartitionError, TraceError
from lightning_fxpipe.planner.assignment import Assignment
from lightning_fxpipe.planner.follow_plan import follow_plan, trace_for_plan
from lightning_fxpipe.planner.plan import PartitionPlan
from lightning_fxpipe.planner.planning import Planned
from lightning_fxpipe.pytree.shapes import DimGroups, ShapeHistory, Shapes
from lightning_fxpipe.pytree.structure import Template
from lightning_fxpipe.runtime.lru import LruCache
from lightning_fxpipe.runtime.number_inputs import NumberInputs
from lightning_fxpipe.runtime.same_cuts import check_same_cuts
from lightning_fxpipe.runtime.span_match import SpanMatch, match_span
from lightning_fxpipe.runtime.stage_trace import StageTrace
from lightning_fxpipe.stages.build import build_stage, stages_with_inputs
from lightning_fxpipe.tracing.comparable import Steps
from lightning_fxpipe.tracing.discovery import regions
from lightning_fxpipe.tracing.guards import GuardKey, Varying, name_of_guard
from lightning_fxpipe.tracing.held_numbers import NumberPlace
from lightning_fxpipe.tracing.prelude import PreludeFacts
from lightning_fxpipe.tracing.recheck import is_recheck_due, recheck
from lightning_fxpipe.tracing.recordable import Recordable, RegionCall, Signature, sign
from lightning_fxpipe.tracing.region import NoModelCall, StepCall, find_region, trains
from lightning_fxpipe.tracing.signals import CannotFollow
from lightning_fxpipe.tracing.span import StepRegion
from lightning_fxpipe.tracing.step_record import Span
from lightning_fxpipe.tracing.trace import TracedRegion
from lightning_fxpipe.tracing.trace_log import Traced, TraceLog, input_constants, input_names
from lightning_fxpipe.user_code.iterators import StepIterators
from lightning_fxpipe.user_code.objects import lasting_objects
from lightning_fxpipe.user_code.step import StepKind
from lightning_fxpipe.user_code.step_code import may_differ_between_batches

_logger = logging.getLogger("lightning_fxpipe")

# A trace costs a fraction of a second to make, and little memory: its graph has tens of nodes.
MAX_TRACES = 32


_Cut = tuple[Recordable, Shapes, Assignment, DimGroups]


class _Outdated(Exception):
    """All traces of the step's calls are out of date."""


class ValuesNeeded(Exception):
    """A batch without values does not do."""


class StageTraces:
    """The traces of a module's steps.

    Args:
        root: The LightningModule, with this rank's stage on its device.
        plan: Where each parameter lives.
        topology: This rank's place.
        log: Gets each trace that is made.
        decisions: Has the ranks agree on making one.

    Attributes:
        iterators: Those that the running batch's step makes.
    """

    def __init__(
        self, root: nn.Module, plan: PartitionPlan, topology: Topology, log: TraceLog, decisions: Decisions | None = None
    ) -> None:
        self._decisions = decisions or Decisions(0, (), None)
        self._root = root
        self._batch_dim = plan.batch_dim
        self._plan = plan
        self._topology = topology
        self._log = log
        self._num_made = 0
        self._num_uses: Counter[int] = Counter()  # of each trace, by its number
        self._known: list[StageTrace] = []  # the one used last comes last
        self._of_plan: StageTrace | None = None  # until a batch has run
        self._moment_of_plan: tuple[list[object], object] = [], None
        self.iterators = StepIterators()
        self._changed: dict[str, None] = {}  # names of what is not what it was for traces that would do else
        self._numbers = NumberInputs()
        self._read_before: set[GuardKey] = set()  # by code before the model's call
        self.guard_keys: dict[GuardKey, None] = {}  # what the recorded code, and what comes before it, reads from modules
        self._unfixed: set[StepKind] = set()
        self._needing_values: set[StepKind] = set()
        self._histories: LruCache[Signature, ShapeHistory] = LruCache(MAX_TRACES)
        self._staged = {id(p) for fqn, p in root.named_parameters(remove_duplicate=False) if plan.stages_of(fqn)}

    def __len__(self) -> int:
        return len(self._known)

    def begin_with(self, kind: StepKind, planned: Planned) -> None:
        """Begins with the graph that the plan was made of, if every rank has one. Called by every rank.

        Args:
            kind: Which step it is of.
            planned: What this rank has planned.
        """
        is_there = planned.traced is not None and (self._topology.device.type == "cpu" or not planned.traced.held.constants)
        if all(gather_values(self._topology.control_group, is_there)):
            self._of_plan, _ = self._make(kind, partial(self._cut_planned, planned))
            self._moment_of_plan = self._moment()

    def find(self, kind: StepKind, call: StepCall, size: int, *, has_values: bool = True) -> tuple[StageTrace, Shapes]:
        """A trace that covers the step's calls of the model, and the shapes that they get.

        Args:
            kind: Which step.
            call: It, with a microbatch.
            size: Samples in that.
            has_values: Whether the microbatch has its values on every rank.

        Raises:
            NoModelCall: The step returns without calling the model.
            ValuesNeeded: The values decide, or may decide; on every rank, as what comes before does not depend on them.
            CannotFollow: The step cannot be cut as the plan says; or one that trains nothing cannot be recorded.
        """
        if self._of_plan is not None and self._is_plan_outdated(call):
            self._known.remove(self._of_plan)
            self._of_plan = None
        with suppress(_Outdated):
            if (found := self._known_span(kind, call, size) or self._known_call(kind, call, size)) is not None:
                known, shapes = found
                if known is self._of_plan:
                    self._of_plan = None
                self._note_looks(kind, known.traced)
                if not has_values and self.needs_values(kind):
                    raise ValuesNeeded
                return self._used(known), shapes
        if not has_values:
            raise ValuesNeeded
        of_plan = self._of_plan
        with self._log.told(f"Tracing the {kind.words}"):
            made, shapes = self._make(kind, partial(self._cut, kind, call, size))
        if of_plan is not None and of_plan.kind is kind:  # something has come to be since
            self._known = [known for known in self._known if known is not of_plan]
            self._of_plan = None
        if made.span is not None:
            self._takes(made, kind, call, shapes)
        return made, shapes

    def _moment(self) -> tuple[list[object], object]:
        """Returns the forward hooks and the Trainer's counters."""
        trainer = vars(self._root).get("_trainer")
        counters = None if trainer is None else (trainer.current_epoch, trainer.global_step)
        return [hook for module in self._root.modules() for hook in hooks_of(module)], counters

    def _is_plan_outdated(self, call: StepCall) -> bool:
        """True if hooks have come since the plan was made, which may leave values, or if a resumed step may go another way."""
        (hooks, counters), (hooks_of_plan, counters_of_plan) = self._moment(), self._moment_of_plan
        is_resumed = counters != counters_of_plan and may_differ_between_batches(self._root, call.function)
        return hooks != hooks_of_plan or is_resumed

    def find_call(self, kind: StepKind, region: RegionCall) -> tuple[StageTrace, Shapes]:
        """A trace that covers a call, and the shapes that it gets. Called by every rank.

        Args:
            kind: Which step makes it.
            region: The call.

        Raises:
            FxPipeError: It cannot be recorded, or not be cut as the plan says. Each call is a pipeline already.
        """
        with self._decisions.batch(), region.numbers_on(self._root):
            if (found := self._known_now(kind, region)) is not None:
                self._used(found[0])
                if self.count_use(found[0]):
                    self._recheck(found[0], region)
            else:
                with self._log.told(f"Tracing {region.label}"):
                    try:
                        found = self._make(kind, partial(self._cut_region, kind, region, region.batch_size))
                    except CannotFollow as signal:
                        raise signal.reason from None
        self._decisions.note(found[0])
        return found

    def count_use(self, used: StageTrace) -> bool:
        """Counts a use of a trace; returns True if the trace is to be recorded again, and compared, in this use."""
        self._num_uses[used.number] += 1
        return is_recheck_due(self._num_uses[used.number])

    def recheck(self, known: StageTrace, call: StepCall, size: int) -> None:
        """Records a step again that a trace computes, and compares both.

        Args:
            known: The trace.
            call: The step, with a microbatch that has its values.
            size: Samples in that.

        Raises:
            UnsupportedError: The step's code does something else now.
            TraceError: It cannot be recorded any more.
        """
        if known.span is None:
            self._recheck(known, self._find_staged(call, size))
            return
        region = StepRegion(step=call, span=known.span, batch_size=size, batch_dim=self._batch_dim)
        if not self._takes(known, known.kind, call, sign(self._root, region)[1]).is_skipped:
            self._recheck(known, region)

    def _recheck(self, known: StageTrace, region: Recordable) -> None:
        with self._log.told(f"Checking the trace of the {known.kind.words}"):
            recheck(known.traced, region)

    def _used(self, known: StageTrace) -> StageTrace:
        self._known.remove(known)
        self._known.append(known)
        return known

    def is_fixed(self, kind: StepKind) -> bool:
        """Returns True if a step's calls of the model follow from the batch's shapes, its constants and :attr:`guard_keys`."""
        return kind not in self._unfixed

    def needs_values(self, kind: StepKind) -> bool:
        """True if a step has read values of its batch before its model call, or has set tensors that the model reads."""
        return kind in self._needing_values

    def _takes(self, known: StageTrace, kind: StepKind, call: StepCall, shapes: Shapes) -> SpanMatch:
        """Compares the step with a trace of several calls: the calls, its constants and the shapes of tensors."""
        traced = known.traced
        match = match_span(
            self._root,
            traced,
            call,
            shapes,
            device_type=self._topology.device.type,
            batch_dim=self._batch_dim,
            iterators=self.iterators,
            is_current=partial(self._is_current, traced),
        )
        self._note_prelude(kind, match.facts)
        self._numbers.note(match.other_numbers)
        self._changed |= dict.fromkeys(map(str, match.other_numbers))
        # A step that skips the model has none.
        if traced.held.are_unseen(match.exchanged) or traced.needs_dry_run:
            self._unfixed.add(kind)
        if match.is_same and not traced.held.take_where_other(match.exchanged):
            return replace(match, is_same=False)
        return match

    def have_held_tensors_changed(self) -> bool:
        """Returns True if code has put another tensor where the stages have one from."""
        return any(known.traced.held.have_changed() for known in self._known)

    def _note_looks(self, kind: StepKind, traced: TracedRegion) -> None:
        """Notes that every microbatch is read before it runs, if the region itself reads values."""
        if traced.looks:
            self._unfixed.add(kind)
            self._needing_values.add(kind)

    def _note_prelude(self, kind: StepKind, facts: PreludeFacts | None) -> None:
        if facts is not None:
            self.guard_keys |= dict.fromkeys(facts.guards)
            self._read_before.update(facts.guards)
            if not facts.is_fixed:
                self._unfixed.add(kind)
            if facts.needs_values:
                self._needing_values.add(kind)

    def _known_span(self, kind: StepKind, call: StepCall, size: int) -> tuple[StageTrace, Shapes] | None:
        """Returns a known trace of several calls that covers those of a step.

        Raises:
            _Outdated: The step makes all of a trace's calls, but reads something else. A trace of fewer calls does not fit it.
        """
        spans = [known for known in reversed(self._known) if known.span is not None and known.kind is kind]
        if not spans:
            return None
        assert spans[0].span is not None
        # The span has no part in what it is signed by.
        region = StepRegion(step=call, span=spans[0].span, batch_size=size, batch_dim=self._batch_dim)
        signature, shapes = sign(self._root, region)
        inputs = Template.of(region.example(), shared=lasting_objects(self._root)).tensors
        is_outdated = False
        for known in spans:
            is_alike = known.traced.signature == signature and known.traced.bind_sizes(shapes) is not None
            if is_alike and known.traced.sees_the_same(inputs):
                match = self._takes(known, kind, call, shapes)
                if match.is_same:
                    return known, shapes
                is_outdated |= match.is_outdated
        if is_outdated:
            raise _Outdated
        return None

    def _known_call(self, kind: StepKind, call: StepCall, size: int) -> tuple[StageTrace, Shapes] | None:
        """Returns a known trace of one call that covers that of a step, compared when the step has come to it."""
        if all(known.span is not None for known in self._known):
            return None
        found: list[tuple[StageTrace, Shapes] | None] = []
        try:
            region = self._find_staged(call, size, lambda region: found.append(self._known_now(kind, region)))
        except FxPipeError:
            _logger.debug("The %s is retraced, because it contains no known call", kind.words, exc_info=True)
            return None
        self._note_prelude(kind, region.prelude)
        return found[0]

    def _find_staged(self, call: StepCall, size: int, at_call: Callable[[RegionCall], Any] | None = None) -> RegionCall:
        return find_region(
            self._root,
            call,
            batch_size=size,
            batch_dim=self._batch_dim,
            device=self._topology.device,
            is_region=self._is_staged,
            at_call=at_call,
        )

    def _known_now(self, kind: StepKind, region: RegionCall) -> tuple[StageTrace, Shapes] | None:
        """Returns a known trace that covers a call that is made now."""
        signature, shapes = sign(self._root, region)
        for known in reversed(self._known):
            is_alike = known.span is None and (known.kind is kind or not known.is_for_one_step)
            if is_alike and known.traced.signature == signature and known.traced.bind_sizes(shapes) is not None:
                inputs = Template.of(region.example(), shared=lasting_objects(self._root)).tensors
                if self._is_current(known.traced) and known.traced.sees_the_same(inputs):
                    return known, shapes
        return None

    def _is_current(self, traced: TracedRegion) -> bool:
        """True if recorded code would read the same now; notes what it would read instead."""
        if traced.is_current():
            return True
        failed = traced.failed_guards()
        self._changed |= dict.fromkeys(map(name_of_guard, failed))
        self._numbers.note_changed(self._root, traced.guards, failed)
        return False

    def _is_staged(self, module: nn.Module) -> bool:
        return any(id(parameter) in self._staged for parameter in module.parameters())

    # ------------------------------------------------------------------ new ones

    def _make(self, kind: StepKind, cut: Callable[[], _Cut]) -> tuple[StageTrace, Shapes]:
        self._decisions.agree_to_record([*self._changed])
        begin = time.perf_counter()
        region, shapes, assignment, symbolic = self._agree(kind, cut)
        check_same_cuts(assignment, self._topology, symbolic, region.ends_because, may_run_whole=kind is not StepKind.TRAIN)
        self._num_made += 1
        made = StageTrace(
            number=self._num_made,
            kind=kind,
            span=region.span if isinstance(region, StepRegion) else None,
            traced=assignment.chain.traced,
            stages=tuple(build_stage(assignment, stage, self._plan.checkpointed_modules) for stage in self._topology.stages),
            stages_with_inputs=stages_with_inputs(assignment),
        )
        self._note_looks(kind, made.traced)
        self._known = [*self._known[-(MAX_TRACES - 1) :], made]
        self.guard_keys |= dict.fromkeys(made.traced.guards)
        open_dims = {place for group in symbolic for place in group if not _is_specialised(made.traced, *place)}
        seconds = time.perf_counter() - begin
        record = Traced(
            step=kind.value,
            seconds=seconds,
            signature=assignment.chain.traced.signature,
            shapes=shapes,
            names=input_names(region),
            constants=input_constants(region),
            changed=tuple(self._changed),
        )
        self._changed.clear()
        self._log.add(record, frozenset(open_dims))
        return made, shapes

    def _agree(self, kind: StepKind, cut: Callable[[], _Cut]) -> _Cut:
        """Runs ``cut`` on every rank, and returns its result.

        Raises:
            CannotFollow: It failed on one of them: in training, as the step cannot be cut as the plan says.
        """
        made: _Cut | None = None
        failure: FxPipeError | None = None
        try:
            made = cut()
        except NoModelCall:
            raise
        except FxPipeError as error:
            if kind is StepKind.TRAIN and not isinstance(error, PartitionError):
                raise
            failure = error
        failures = [found for found in gather_values(self._topology.control_group, failure) if found is not None]
        if failures:
            raise CannotFollow(failures[-1])
        assert made is not None
        return made

    def _cut(self, kind: StepKind, call: StepCall, size: int) -> _Cut:
        """The region of a step, the shapes that it gets, its stages, and the dimensions whose sizes are symbols."""
        fallback = trains if kind is StepKind.TRAIN else self._is_staged
        found = regions(
            self._root,
            call,
            batch_size=size,
            batch_dim=self._batch_dim,
            device=self._topology.device,
            fallback=fallback,
            needs_model=False,
        )
        first: FxPipeError | None = None
        for region in found:
            try:
                return self._cut_region(kind, region, size)
            except (TraceError, PartitionError) as error:
                first = first or error
        assert first is not None
        raise first

    def _cut_planned(self, planned: Planned) -> _Cut:
        region, traced = planned.region, planned.traced
        assert region is not None
        assert traced is not None
        signature, shapes = sign(self._root, region)
        self._histories.get(signature, ShapeHistory).observe(shapes, region.batch_size, self._batch_dim)
        return region, shapes, follow_plan(self._plan, traced.with_tensors_of_today()), ()

    def _cut_region(self, kind: StepKind, region: Recordable, size: int) -> _Cut:
        if isinstance(region, RegionCall):
            self._note_prelude(kind, region.prelude)
        signature, shapes = sign(self._root, region)
        history = self._histories.get(signature, ShapeHistory)
        history.observe(shapes, size, self._batch_dim)
        groups = history.groups(shapes)
        assignment, symbolic = self._assignment(region, groups, history)
        for group in symbolic:
            tensor, dim = group[0]
            if _is_specialised(assignment.chain.traced, tensor, dim):
                history.note_specialised(group, shapes[tensor][dim])
        return region, shapes, assignment, symbolic

    def _assignment(self, region: Recordable, groups: DimGroups, history: ShapeHistory) -> tuple[Assignment, DimGroups]:
        """The stages of a trace whose sizes are symbols in as many groups of dimensions as can be, and those groups."""
        leaving_one_out = [tuple(g for g in groups if g is not left) for left in groups] if len(groups) > 1 else []
        for attempt in (groups, *leaving_one_out):
            if attempt:
                try:
                    assignment = self._follow_plan(replace(region, varying=attempt))
                except FxPipeError:  # some code cannot do without knowing a size
                    _logger.debug("Could not trace %s for all sizes", attempt, exc_info=True)
                    continue
                break
        else:
            attempt, assignment = (), self._follow_plan(region)
        for group in groups:
            if group not in attempt:
                history.keep_static(group)
        return assignment, attempt

    def _follow_plan(self, region: Recordable) -> Assignment:
        trace = partial(trace_for_plan, self._root, plan=self._plan, device=self._topology.device)
        return follow_plan(self._plan, self._numbers.record(trace, region, self._latest(region)))

    def _latest(self, region: Recordable) -> TracedRegion | None:
        """Returns the trace used last that has the region's calls and signature."""
        signature, _ = sign(self._root, region)
        span = region.span if isinstance(region, StepRegion) else None
        for known in reversed(self._known):
            if known.traced.signature == signature and _calls_of(known.span) == _calls_of(span):
                return known.traced
        return None

    def varying(self) -> Varying:
        """Returns what guards need not compare before a step: numbers that are inputs, and that only the model reads."""
        places = [place for known in self._known for place in known.traced.numbers.places.values()]
        found: dict[GuardKey, set[Steps]] = {}
        for place in places:
            if isinstance(place, NumberPlace) and place.guard not in self._read_before:
                found.setdefault(place.guard, set()).add(place.steps)
        return found


def _calls_of(span: Span | None) -> tuple[int, int] | None:
    return None if span is None else (span.first, span.last)


def _is_specialised(traced: TracedRegion, tensor: int, dim: int) -> bool:
    """Returns True if the trace found a symbol to be a number after all."""
    size = traced.input_shapes[tensor][dim]
    return isinstance(size, int) or bool(getattr(traced.world.replacements().get(size), "is_number", False))
