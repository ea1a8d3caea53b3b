"""The pipelined call of a module as a graph: runs the recorder, opens only the modules it is told to, checks what it may be
used for.

A trace is valid for one train/eval mode, one structure of inputs, one pattern of ``requires_grad`` and all sizes of the batch
and of the dimensions that vary which satisfy the guards met while recording; :meth:`TracedRegion.computes` decides.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn

from lightning_fxpipe._compat.torch import FakeWorld, depends_on_data, has_hooks, symbolic_expression
from lightning_fxpipe.errors import FxPipeError, TraceError, UnsupportedError
from lightning_fxpipe.metrics.metric_calls import no_metrics_inside
from lightning_fxpipe.pytree.shapes import DimGroups
from lightning_fxpipe.pytree.sizes import SymbolicSize, as_size
from lightning_fxpipe.pytree.structure import NotFillable, Structure, Template
from lightning_fxpipe.reporting.own_faults import is_own_fault, own_fault_words
from lightning_fxpipe.reporting.wording import error_words, without_symbols
from lightning_fxpipe.rng import isolated_rng, python_rng
from lightning_fxpipe.tracing.code_guards import code_guards, functions_read
from lightning_fxpipe.tracing.confirmation import Recording, check_deterministic
from lightning_fxpipe.tracing.fake_run import fake_run
from lightning_fxpipe.tracing.first_call import FirstCalls, settle_changes, tensors_left
from lightning_fxpipe.tracing.graph_writer import erase_unused
from lightning_fxpipe.tracing.guards import GuardKey, failed_guards, name_of_guard
from lightning_fxpipe.tracing.held_numbers import CallArgument, HeldNumbers, NumberPlace
from lightning_fxpipe.tracing.held_tensors import HeldTensors
from lightning_fxpipe.tracing.number_arguments import without_numbers
from lightning_fxpipe.tracing.record import Recorder
from lightning_fxpipe.tracing.recordable import INPUT_PREFIX, Recordable, Signature, sign
from lightning_fxpipe.tracing.recorder_settings import is_torch_leaf
from lightning_fxpipe.tracing.signals import FirstCallSets, Learned, MustStayWhole, RecordAgain, RecordError, lessons_first
from lightning_fxpipe.tracing.state_reads import check_values_read
from lightning_fxpipe.tracing.step_record import StepRecord
from lightning_fxpipe.tracing.structure_guards import StructureKey
from lightning_fxpipe.tracing.torch_calls import check_parametrizations
from lightning_fxpipe.tracing.value_looks import Look, looks_hold
from lightning_fxpipe.user_code.frames import raising_source, user_source
from lightning_fxpipe.user_code.objects import Unsent, lasting_objects
from lightning_fxpipe.user_code.snapshot import Snapshot, state_of_opened, user_state
from lightning_fxpipe.user_code.step_code import attribute_uses, code_of

_LATE = "object has no attribute"  # in the words of an AttributeError


@dataclass(frozen=True, kw_only=True, eq=False)
class TracedRegion:
    """The recorded graph and what is needed to cut it and to use it.

    ``graph`` has placeholders for the tensors among the region's inputs, ``get_attr`` nodes for parameters, buffers and
    constants (one for each use), calls, and an output with the list of the tensors in the region's result. Each node's ``meta``
    has ``val`` (fake result), ``module_path``, ``source`` (``file:line`` in the user's code), ``mutated_storages`` and, where
    it differs from the region's own, ``context``.
    """

    graph: fx.Graph
    root: nn.Module = field(repr=False)
    signature: Signature = field(repr=False)
    batch_size: int
    batch_dim: int
    batch_symbols: frozenset[Any]  # that stand for the number of samples; usually one
    input_shapes: tuple[tuple[Any, ...], ...]  # of the tensors in the region's example: ints and sympy symbols
    varying: DimGroups  # dimensions besides the batch whose sizes are symbols
    output_structure: Structure = field(repr=False)
    output_sizes: tuple[Any, ...]  # sizes in the result that are no part of a tensor
    left: tuple[str, ...]  # attributes that the region's module sets, to values that are the last part of the result
    wanted: tuple[int, ...]  # which of the tensors in the result are outputs of the graph
    held: HeldTensors = field(repr=False)
    world: FakeWorld = field(repr=False)
    device: torch.device  # that the module runs on
    opened: tuple[str, ...]
    kept_whole: Mapping[str, str]
    record: StepRecord | None = field(default=None, repr=False)
    drawing: frozenset[str] = frozenset()
    guards: Mapping[GuardKey, Any] = field(default_factory=dict, repr=False)
    looks: tuple[Look, ...] = field(default=(), repr=False)
    numbers: HeldNumbers = field(repr=False)
    needs_dry_run: bool = False
    recording: Recording = field(repr=False)
    known: dict[Any, Any] = field(default_factory=dict, repr=False)  # what others have found out about the graph

    @cached_property
    def input_nodes(self) -> tuple[fx.Node, ...]:
        """Placeholders of the input tensors."""
        return tuple(node for node in self.graph.nodes if node.op == "placeholder" and "draw" not in node.meta)

    @cached_property
    def draw_nodes(self) -> tuple[fx.Node, ...]:
        """Placeholders of the random tensors that may be drawn before the region runs; None where they are not."""
        return tuple(node for node in self.graph.nodes if "draw" in node.meta)

    @cached_property
    def output_node(self) -> fx.Node:
        """The node with the list of the tensors in the result."""
        return self.graph.output_node()

    @property
    def refusal(self) -> FxPipeError | None:
        """The error where the graph cannot be cut, if no other way to run the step is right."""
        return self.recording.learned.refusal

    def with_tensors_of_today(self) -> TracedRegion:
        """The region with the buffers that its module has now, which has been moved or split since."""
        return replace(self, held=self.held.renewed())

    def bind_sizes(self, shapes: tuple[tuple[int, ...], ...]) -> dict[Any, int] | None:
        """Values of the symbols for inputs of these shapes, or None where the graph does not cover them."""
        sizes: dict[Any, int] = {}
        for symbolic, actual in zip(self.input_shapes, shapes, strict=True):
            if len(symbolic) != len(actual):
                return None
            for expression, size in zip(symbolic, actual, strict=True):
                if isinstance(expression, int):
                    if expression != size:
                        return None
                elif sizes.setdefault(expression, size) != size:
                    return None
        if not self.admits(sizes):
            return None
        if any(size < 2 for size in sizes.values()):
            return None  # torch decides broadcasting and contiguity differently for sizes 0 and 1
        return sizes

    def admits(self, sizes: Mapping[Any, int | float]) -> bool:
        """True if the conditions hold at these values of the symbols."""
        return all(_holds(condition, sizes) for condition in self._conditions())

    def _conditions(self) -> list[Any]:
        # A symbol that the trace found to be a constant, or equal to another, must be so again.
        return [*self.world.guards(), *(sympy.Eq(symbol, value) for symbol, value in self.world.replacements().items())]

    @cached_property
    def _conditions_of_numbers(self) -> list[Any]:
        return [each for each in self._conditions() if each.free_symbols & self.numbers.places.keys()]

    def values(self, sizes: Mapping[Any, int]) -> Mapping[Any, int | float]:
        """Returns the values of all symbols in the running batch, from those of its sizes."""
        return {**sizes, **self.numbers.now}

    def constant_numbers(self) -> list[NumberPlace | CallArgument]:
        """Returns the numbers that the graph holds for one value of only, or that decide about shapes."""
        shapes = (node.meta["val"].shape for node in self.graph.nodes if isinstance(node.meta.get("val"), Tensor))
        sizes = (symbolic_expression(size) for shape in shapes for size in shape)
        fixed = {symbol for size in sizes for symbol in getattr(size, "free_symbols", ())} | self.world.replacements().keys()
        for condition in self._conditions_of_numbers:
            if not condition.free_symbols <= self.numbers.places.keys():
                fixed |= condition.free_symbols
        return self.numbers.ways_to(fixed)

    def is_like(self, other: TracedRegion) -> bool:
        """True if the graph has the calls of another, for the values of numbers that it was recorded with."""
        return self.numbers.calls_of(self.graph) == other.numbers.calls_of(other.graph)

    @cached_property
    def _lasting(self) -> Mapping[int, Any]:
        return lasting_objects(self.root)

    def input_tensors(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, ...] | None:
        """The tensors in the arguments of a call, in the order of the graph's inputs; None where other things differ."""
        template = Template.of(without_numbers(args, kwargs), shared=self._lasting)
        return template.tensors if template.structure == self.signature.structure else None

    def result(self, outputs: Sequence[Any], sizes: Mapping[Any, int] | None = None) -> Any:
        """Returns the module's result, of its own type, from the graph's outputs and the values of the symbols. Sets what the
        module's forward leaves in its attributes.
        """
        made = dict(zip(self.wanted, outputs, strict=True))
        values = [
            made[index] if index in made else Unsent.with_name(f"Tensor {index} in the result of {self.signature.label}")
            for index in range(self.output_structure.num_tensors)
        ]
        known = self.values(sizes or {})
        numbers = [size.value(known) if isinstance(size, SymbolicSize) else size for size in self.output_sizes]
        filled = self.output_structure.fill(values, numbers)
        if not self.left:
            return filled
        result, values_left = filled
        for name, value in zip(self.left, values_left, strict=True):
            setattr(self.root.get_submodule(self.signature.path or ""), name, value)
        return result

    def is_current(self) -> bool:
        """True if recorded code would read the same as when it was recorded. Gives the stages the tensors of now."""
        return self.holds_now() and self.held.refresh()

    def holds_now(self) -> bool:
        """True if recorded code would read the same plain values, or such numbers as it holds for. Takes these."""
        return not self.failed_guards() and self.take_numbers()

    def failed_guards(self) -> list[GuardKey]:
        """Returns what recorded code reads, and what is not what it was."""
        return failed_guards(self.root, self.guards, self.numbers.varying)

    def take_numbers(self) -> bool:
        """Takes the numbers of now for inputs; False where the graph does not hold for them."""
        now = self.numbers.look()
        if now is None or not self.holds_for(now):
            return False
        self.numbers.now.update(now)
        return True

    def holds_for(self, numbers: Mapping[Any, int | float]) -> bool:
        """True if the graph holds for these values of its numbers."""
        return all(_holds(condition, numbers) for condition in self._conditions_of_numbers)

    def check_current(self, what: str) -> None:
        """Called at the model's call in a step that the trace was chosen for before.

        Raises:
            UnsupportedError: The step's code has set something else than in the dry run that chose the trace.
        """
        if self.is_current():
            return
        failed = [*map(name_of_guard, self.failed_guards()), *(str(place) for place in self.numbers.places.values())]
        raise UnsupportedError(
            f"The {what} sets an attribute that the model reads to an unexpected value for this batch.",
            where=self.signature.label,
            observed=f"another value of {', '.join(failed)}" if failed else "a tensor of another kind on a module",
            expected="values that depend on the batch, attributes of modules, global variables and the Trainer's counters",
            todo="Set it in a hook, such as on_train_batch_start, or pass it to the model as an argument.",
        )

    def sees_the_same(self, inputs: Sequence[Tensor]) -> bool:
        """Returns True if the code would see the same values where it has looked at them, for inputs that :meth:`computes`
        accepts.
        """
        if not self.looks:
            return True
        sizes = self.bind_sizes(tuple(tuple(tensor.shape) for tensor in inputs))
        named = {f"{INPUT_PREFIX}{index}": tensor for index, tensor in enumerate(inputs)}
        return sizes is not None and looks_hold(self.looks, named, self.values(sizes), self.held.constants)

    def computes(self, call: Recordable) -> bool:
        """Returns True if the graph computes this call, as long as the modules' plain attributes are those of the trace."""
        signature, shapes = sign(self.root, call)
        return signature == self.signature and self.bind_sizes(shapes) is not None


def trace_region(
    root: nn.Module,
    call: Recordable,
    *,
    opened: Collection[str] | None = (),
    device: torch.device | None = None,
    check: bool = True,
    earlier: TracedRegion | None = None,
    answers_looks: bool = True,
) -> TracedRegion:
    """Records the call of one module.

    The module's parameters are exchanged for fakes while it runs, and whatever its Python sets on itself is undone; but for
    what it sets on its first call once and for all (``tracing.first_call``): the module is given that, with values.

    Args:
        root: Module that paths and FQNs are relative to.
        call: The call, with real example tensors.
        opened: Paths of the modules inside which nodes are wanted; the called module itself always is. ``None`` opens
            everything down to torch.nn's own modules.
        device: Device that the module is taken to be on; by default that of the call's tensors.
        check: Whether to record twice and compare; without, the graph is good for planning only.
        earlier: An earlier trace, for the same device and with the same ``answers_looks``. If it has the call's signature, its
            knowledge is used, and a recording with the same calls needs no other to be compared with. Needs ``check``. An
            unconfirmed trace has to be of this very call.
        answers_looks: Whether modules that look at values of the inputs may be opened; otherwise they stay whole.

    Raises:
        TraceError: The Python of the called module itself cannot be recorded.
        UnsupportedError: Modules pass tensors on in an object that is theirs together.
    """
    first_calls = FirstCalls(root)
    record = partial(_trace_region, root, first_calls, opened, device, check, earlier, answers_looks)
    traced = call.in_its_state(root, record)
    first_calls.give_again()
    return traced


def _trace_region(
    root: nn.Module,
    first_calls: FirstCalls,
    opened: Collection[str] | None,
    device: torch.device | None,
    check: bool,
    earlier: TracedRegion | None,
    answers_looks: bool,
    call: Recordable,
) -> TracedRegion:
    check_parametrizations()
    signature, _ = sign(root, call)
    if earlier is not None and earlier.signature != signature:
        earlier = None
    with first_calls:
        given = first_calls.paths
        learned = Learned(given=given) if earlier is None else earlier.recording.known_again(given)
        record = partial(_record, root, call, signature, device=device, answers_looks=answers_looks, learned=learned)

        def keep_whole(stop: MustStayWhole) -> None:
            first_calls.take_back()
            if stop.path in ("", call.opened_path) or stop.path in learned.kept_whole:
                raise (stop.refusal or _untraceable(root, call, stop.reason, stop.source)) from stop
            learned.keep_whole(stop, root)

        while True:
            known, earlier = earlier, None  # it is of no use where more is learned now
            try:
                first = known or record(opened)
                traced = record(opened) if check else first
                if known is not None and not known.recording.confirms(traced.recording):
                    first, traced = traced, record(opened)
            except FirstCallSets as sets:
                if not first_calls.give(sets.values):
                    keep_whole(sets.otherwise)
            except RecordAgain as knowing_more:
                learned.take(knowing_more.lessons)
            except MustStayWhole as stop:
                keep_whole(stop)
            except RecordError as error:
                raise _untraceable(root, call, error.reason, error.source) from error
            else:
                check_deterministic(first.recording, traced.recording, _name(root, call), f"{call.label}, {call.source(root)}")
                drawing = traced.drawing - set(learned.kept_whole)
                if opened is None or not drawing:
                    return replace(traced, recording=replace(traced.recording, is_confirmed=check))
                opened = {*opened, *drawing}


def _record(
    root: nn.Module,
    call: Recordable,
    signature: Signature,
    opened: Collection[str] | None,
    *,
    device: torch.device | None,
    answers_looks: bool,
    learned: Learned,
) -> TracedRegion:
    actually_opened: dict[str, None] = {} if call.opened_path is None else {call.opened_path: None}

    def is_whole(path: str, module: nn.Module) -> bool:
        wanted_whole = is_torch_leaf(path, module) if opened is None else path not in opened and path not in learned.opened
        if not wanted_whole and path not in learned.kept_whole and has_hooks(module):
            learned.kept_whole[path] = "hooks run around its forward"
        whole = (wanted_whole or path in learned.kept_whole) and path != ""
        if not whole:
            actually_opened[path] = None
        return whole

    with isolated_rng(), no_metrics_inside(root), fake_run(root, call, is_whole, device, learned, answers_looks) as run:
        recorder = run.recorder
        with recorder.pause():
            # Modules that the region calls are looked after by the recorder; what a step sets, it sets in every run.
            own = Snapshot({}) if call.opened_path is None else state_of_opened(root.get_submodule(call.opened_path))
            everything = user_state(root) if learned.watches_state else None
        watches = [own] if everything is None else [own, everything]
        left: Mapping[str, Any] = {}

        def settle() -> None:
            """Decides about what the recorded code has set."""
            if recorder.shared_state.is_trying:  # modules found something else
                return
            with recorder.pause():
                path = call.opened_path or ""
                recorder.note_changes(path, own.changed_names({*recorder.sides_below(path), *left}))
                if everything is not None:
                    changed, sides = recorder.changed_by_opened, {*recorder.sides, *((path, name) for name in left)}
                    settle_changes(changed, everything, sides, learned.given, recorder.constant, partial(_line_of, root))

        def check_shared_state(result: Any = None) -> None:
            with recorder.pause():
                recorder.shared_state.note_given(result)
                recorder.shared_state.check(recorder.attributes_read, actually_opened, call.code(root), call.label)

        with lessons_first(recorder.lessons):
            try:
                with recorder.watching(*watches):
                    result = call.run(root, recorder, run.example)
                recorder.passing_hooks.check()
                drew = python_rng() != recorder.generators_before
            except (Exception, RecordError, MustStayWhole) as error:
                if recorder.shared_state.is_trying:  # it may be for want of what others leave
                    check_shared_state()
                if not isinstance(error, Exception):
                    raise
                settle()
                if is_own_fault(error):
                    what = f"Internal error of lightning_fxpipe while tracing {_name(root, call)}."
                    raise TraceError(what, **own_fault_words(error)) from error
                reason, source = without_symbols(error_words(error), run.sizes), raising_source(error) or user_source()
                raise _untraceable(root, call, reason, source) from error
            check_shared_state(result)
            if call.opened_path is not None:
                with recorder.pause():
                    read = {key[1] for key in recorder.attributes_read if isinstance(key, tuple) and key[0] == call.opened_path}
                    left = tensors_left(own, read, recorder.has)
            settle()
            if opened is not None:
                _open_branching(recorder, learned)
            if (refusal := recorder.in_place.refusal or recorder.state_reads.refusal) is not None:
                raise refusal
            check_values_read(root, recorder.attributes_read, recorder.left_values, call.label)
            output = _taken_apart((result, [*left.values()]) if left else result, run.lasting)
            # While what the step has set before is there.
            functions = (call.code(root), *functions_read(root, recorder.attributes_read))
            read_elsewhere: Mapping[GuardKey, Any] = code_guards(root, actually_opened, functions=functions)
            read_elsewhere = recorder.between.without_set(read_elsewhere)
            # The value of its class is no guard of an input.
            inputs = {each.guard for each in run.numbers.places.values() if isinstance(each, NumberPlace) and not each.steps}
            read_elsewhere = {key: value for key, value in read_elsewhere.items() if key not in inputs}
            chosen = call.choose_results(len(output.tensors))
            recorder.graph.output([recorder.argument(output.tensors[index]) for index in chosen])
            with recorder.pause():
                recorder.gradient_flow.write()
    erase_unused(recorder.graph)
    structure = StructureKey.of_graph(recorder.graph, actually_opened)
    return TracedRegion(
        graph=recorder.graph,
        root=root,
        signature=signature,
        batch_size=call.batch_size,
        batch_dim=call.batch_dim,
        batch_symbols=run.batch_symbols,
        input_shapes=run.input_shapes,
        varying=call.varying,
        output_structure=output.structure,
        output_sizes=tuple(as_size(size) for size in output.sizes),
        left=tuple(left),
        wanted=chosen,
        held=HeldTensors(root, recorder.graph, recorder.constants),
        world=run.world,
        device=run.device,
        opened=tuple(path for path in actually_opened if path != call.opened_path),
        kept_whole=dict(learned.kept_whole),
        record=call.record_of(recorder),
        guards={structure: structure.value(root), **read_elsewhere, **run.guards},
        numbers=run.numbers,
        needs_dry_run=run.numbers.has_arguments or bool(recorder.between.read_after_set),
        looks=tuple(recorder.looks.all),
        # What they draw is that of one device only if the recorder sees it.
        drawing=frozenset(path for path in recorder.drawing if not is_torch_leaf(path, root.get_submodule(path))),
        recording=Recording.of_graph(recorder.graph, drew, learned),
    )


def _open_branching(recorder: Recorder, learned: Learned) -> None:
    """Has whole modules opened that branch on values of the batch: a whole one would have to see the whole batch."""
    called = (str(node.target) for node in recorder.graph.nodes if node.meta.get("reads_batch") is Tensor.__bool__)
    if paths := set(called) - learned.opened - learned.kept_whole.keys():
        recorder.lessons.append(partial(learned.open, paths))


def _taken_apart(result: Any, lasting: Mapping[int, Any]) -> Template:
    try:
        output = Template.of(result, shared=lasting)
    except NotFillable as error:
        raise RecordError(str(error)) from error
    if any(depends_on_data(size) for size in output.sizes):
        raise RecordError("the result contains a number that depends on data")
    return output


def _line_of(root: nn.Module, path: str, name: str) -> str | None:
    kind = type(root.get_submodule(path))
    code = code_of(kind.forward)
    attribute = re.match(r"(?:self\.)?(\w+)", name)
    uses = attribute_uses(kind, attribute[1]) if attribute else None
    return uses or (f"{code.co_filename}:{code.co_firstlineno}" if code else None)


def _name(root: nn.Module, call: Recordable) -> str:
    return call.label if call.opened_path is None else type(root.get_submodule(call.opened_path)).__name__


def _holds(condition: sympy.Basic, sizes: Mapping[Any, int | float]) -> bool:
    value = condition.xreplace({symbol: sympy.sympify(size) for symbol, size in sizes.items()})
    # What is left of symbols depends on data: nothing that the inputs' shapes could contradict.
    return bool(value.free_symbols) or bool(value)


def _untraceable(root: nn.Module, call: Recordable, reason: str, source: str | None) -> TraceError:
    late = "If configure_optimizers or a later hook sets the attribute, set it in configure_model. " if _LATE in reason else ""
    return TraceError(
        f"The forward of {_name(root, call)} cannot be traced.",
        where=f"{call.label}, {source or 'source unknown'}",
        observed=reason,
        expected="code that runs on one device and does not read tensor values at this level",
        todo=f"{late}If the same error occurs on one device, fix that first. Otherwise move the code into a submodule, which "
        "stays whole if it cannot be traced. Store tensors that calls pass to each other in attributes, not in a list or dict.",
    )
