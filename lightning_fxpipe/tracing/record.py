"""Records a module call as a ``torch.fx.Graph`` by running the module's own Python on fake tensors.

Ordinary code breaks on the proxies of ``torch.fx.Tracer``; ``torch.export`` bakes in the mode and loses module paths. Here the
model sees tensors without data, and each torch call it makes passes through a ``TorchFunctionMode`` that appends a node.

A module that the caller wants whole becomes one ``call_module`` node: its Python still runs (on fakes, to learn the shapes of
its outputs), but nothing inside is recorded, so its hooks, dropout and control flow stay its own. Sizes stay symbolic.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from lightning_fxpipe._compat.torch import (
    NEEDS_VALUES,
    PACK_PADDED,
    SYMBOLIC_TYPES,
    FakeTensor,
    depends_on_data,
    has_hooks,
    modules_inside,
    storage_key,
    tree_leaves,
    tree_map,
)
from lightning_fxpipe.microbatch.draws import Draw, can_be_drawn_ahead, drawn_now_or_ahead, shape_drawn_ahead
from lightning_fxpipe.pytree.structure import graft
from lightning_fxpipe.reporting.messages import went_on
from lightning_fxpipe.reporting.wording import error_words
from lightning_fxpipe.rng import isolated_rng, python_rng
from lightning_fxpipe.tracing.examples import Examples, NoExample, cone
from lightning_fxpipe.tracing.graph_writer import GraphWriter
from lightning_fxpipe.tracing.guards import GuardKey
from lightning_fxpipe.tracing.inner_results import InnerCalls
from lightning_fxpipe.tracing.kept_state import KeptState
from lightning_fxpipe.tracing.known_calls import Known, KnownCalls, Question
from lightning_fxpipe.tracing.made_tensors import MadeTensors
from lightning_fxpipe.tracing.passing_hooks import PassingHooks
from lightning_fxpipe.tracing.probe import Probe, ProbeFailed, result_of_function
from lightning_fxpipe.tracing.recorder_settings import RecorderSettings, is_torch_leaf
from lightning_fxpipe.tracing.recurrent import PackedSequences, shape_only
from lightning_fxpipe.tracing.set_between import SetBetween
from lightning_fxpipe.tracing.shared_state import SharedState
from lightning_fxpipe.tracing.signals import Lesson, MustStayWhole, RecordError
from lightning_fxpipe.tracing.state_reads import StateReads
from lightning_fxpipe.tracing.tensors_in_place import TensorsInPlace
from lightning_fxpipe.tracing.torch_calls import (
    LOOKS,
    call_on_fakes,
    changed_statistics,
    is_query,
    running_statistics,
    target_of,
    tensors_among,
    watch_mutation,
)
from lightning_fxpipe.tracing.value_looks import Looks
from lightning_fxpipe.user_code.calls import classes_with_own_call, is_scripted
from lightning_fxpipe.user_code.exchange import OwnAttributes, with_assigned_tensors
from lightning_fxpipe.user_code.frames import raising_source, user_source
from lightning_fxpipe.user_code.kinds import is_users
from lightning_fxpipe.user_code.objects import PLAIN_TYPES, is_plain, is_value, same_answer
from lightning_fxpipe.user_code.snapshot import Snapshot, passing_over, state_of_opened

DRAW_PREFIX = "region_draw_"
_UNREACHED = "region_unreached"  # in the place of what cannot be reached yet
_FACTORIES = frozenset({torch.arange, torch.zeros, torch.ones, torch.empty, torch.rand, torch.randn})  # tensors are numbers


class Recorder(GraphWriter, TorchFunctionMode):
    """The mode that writes the graph; ``region_path`` is that of the module whose forward is recorded."""

    begins_with_first_call = False  # True where every rank runs what comes before

    def __init__(self, settings: RecorderSettings, region_path: str = "") -> None:
        TorchFunctionMode.__init__(self)
        GraphWriter.__init__(self, settings.tensor_fqns, settings.lasting, region_path, settings.device_type)
        self.attributes_read: set[GuardKey] = set()  # by code that is recorded: path and name
        root, before = settings.modules.get("", nn.Module()), settings.before or Snapshot({})
        self.between = SetBetween(root, before, is_step=self._runs_step, running=self._running_path, pause=self.pause)
        self.left_values: set[GuardKey] = set()  # plain attributes that whole modules have set: by path and name
        self.lessons: list[Lesson] = []  # what has to be known to record it, and was not
        self.changed_by_opened: dict[str, str] = {}  # by the paths of opened modules something that each has changed
        self.drawing: set[str] = set()  # whole modules in which a tensor is drawn that could be drawn ahead
        self.looks, self.known_calls = Looks(), KnownCalls(settings.device_type)
        self.generators_before = python_rng()  # of Python and numpy, when what is recorded begins
        self._settings = settings
        self._module_paths = {id(module): path for path, module in settings.modules.items()}
        self._whole_path: str | None = None
        self._inner_calls, self._packed_sequences = InnerCalls(), PackedSequences()
        self.kept_state = KeptState(self, made := MadeTensors(), self.known_calls.note_write)
        self.state_reads = StateReads(settings, self.lessons, self, made, self.kept_state)
        self.shared_state = SharedState(settings, self.lessons, self.state_reads.follows, self.begins_with_first_call)
        self._seen: set[int] | None = None  # ids of the tensors that a module looks at, while that is asked
        self._examples = Examples(settings.inputs, settings.sizes, self.constants)  # for questions about values
        self._module_call = nn.Module.__call__
        self._in_own_call: list[nn.Module | None] = []  # modules whose class has a __call__ of its own
        self.passing_hooks = PassingHooks(settings.modules.values())
        self.in_place = TensorsInPlace(before, settings.modules, self.known_calls.note_write)
        self._watches: list[Snapshot] = []  # of what opened code may change, which is running

    def begin(self) -> None:
        """Called before user code runs: that of the region, here."""
        if self._settings.begin_region():
            self.shared_state.note_inputs()

    # ------------------------------------------------------------------ torch calls

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_paused and self._seen is not None:
            self._seen.update(map(id, tensors_among((args, kwargs))))
        if self.is_paused or is_query(func):
            if self._whole_path is not None and can_be_drawn_ahead(func):
                self.drawing.add(self._whole_path)
                self.known_calls.note_draw()
            self._inner_calls.note_call(func, args)
            self.in_place.note_call(func, args, kwargs)
            function = partial(self._scripted, func) if is_scripted(func) else shape_only(func, args)
            result = function(*args, **kwargs)
            self.state_reads.note((args, kwargs), result)
        else:
            result = self._record_function(func, args, kwargs)
        self.shared_state.note(func, (args, kwargs), result)
        return result

    def _record_function(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in LOOKS and self._follows_from_inputs(args[0]):
            return self._look(func, args[0])
        if func is Tensor.__bool__ and isinstance(args[0], FakeTensor):
            return self._decide(args[0])
        if func is Tensor.__getitem__:
            args = (args[0], self._with_numbers(args[1]))
        elif func in _FACTORIES:
            args = tuple(tree_map(self._bind, args))
        if func is torch.autograd.grad:
            raise RecordError("torch.autograd.grad differentiates through several stages")
        longest = self._bind(self._record_function(torch.max, args[1:2], {})) if func is PACK_PADDED else None
        operation, target, extra = target_of(func)
        touched = list(tensors_among((args, kwargs)))
        with self.pause(), watch_mutation(touched) as mutated:
            result = self._packed_sequences.result(func, args, longest)
            if result is None:
                result = self._result_of_function(func, args, kwargs)
        mutated.update(storage_key(tensor) for tensor in changed_statistics(func, args, kwargs))
        leaves = tree_leaves(result)
        if not mutated and not any(isinstance(leaf, Tensor) for leaf in leaves):
            if any(isinstance(leaf, SYMBOLIC_TYPES) and depends_on_data(leaf) for leaf in leaves):
                raise RecordError(f"{target} reads a number from a tensor")
            if touched and (not leaves or not all(isinstance(leaf, (*PLAIN_TYPES, *SYMBOLIC_TYPES)) for leaf in leaves)):
                raise RecordError(f"{target} has a side effect that a graph cannot represent")
            return result
        ahead: tuple[fx.Node, ...] = ()
        if can_be_drawn_ahead(func) and isinstance(result, Tensor) and "out" not in kwargs:
            operation, target = "call_function", drawn_now_or_ahead(func)
            ahead = (self._add_draw(func, args, kwargs, result),)
        node_args = (*ahead, *(self.argument(arg) for arg in args), *extra)
        node_kwargs = {key: self.argument(value) for key, value in kwargs.items()}
        self._append(operation, target, node_args, node_kwargs, self._running_path(), mutated, result)
        return result

    def _add_draw(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> fx.Node:
        """An input for a tensor that may be drawn before the region runs, see ``microbatch.draws``."""
        with self.pause():
            numbers = torch.empty(shape_drawn_ahead(func, args, kwargs), dtype=result.dtype, device=result.device)
            node = self.add_input(f"{DRAW_PREFIX}{len(self._alive)}", numbers)
        node.meta["draw"] = Draw.of(func, args, kwargs)
        return node

    def _result_of_function(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a function on fakes or, where its kernel needs values, on made-up data."""
        if is_scripted(func):
            return self._scripted(func, *args, **kwargs)
        try:
            return call_on_fakes(shape_only(func, args), args, kwargs)
        except NEEDS_VALUES as error:
            return result_of_function(func, self._template_of((args, kwargs)), self._example, error)

    def _scripted(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # On fakes it would fix their sizes for good.
        return result_of_function(func, self._template_of((args, kwargs)), self._example)

    # ------------------------------------------------------------------ module calls

    def classes_with_own_call(self) -> set[type[nn.Module]]:
        """Classes of the modules, and their bases, that override ``nn.Module.__call__``."""
        return classes_with_own_call(self._settings.modules.values())

    def call_module(self, original_call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Calls a module: recorded as one node, or inside a node for each of its calls."""
        went_on()
        path = self._module_paths.get(id(module))
        if self.is_paused or path is None or self._in_own_call[-1:] == [module]:
            return self._call_inside(original_call, path, module, args, kwargs)
        if self._settings.is_whole(path, module):
            return self._record_whole_module(original_call, path, module, args, kwargs)
        self._module_stack.append(path)
        self._in_own_call.append(module if original_call is not self._module_call else None)
        before, attributes, state = python_rng(), OwnAttributes(module), state_of_opened(module)
        try:
            with self.watching(state):
                result = original_call(module, *args, **kwargs)
            self.passing_hooks.check()
            if before != python_rng():
                raise RecordError("its Python draws random numbers")
            left = attributes.assigned_tensors() if self._may_leave_tensors() else {}
            self.sides.update({(path, name): tensor for name, tensor in left.items()})
            self.note_changes(path, state.changed_names(self.sides_below(path)))
            return result
        except RecordError as error:
            raise MustStayWhole(path, error.reason, error.source) from error
        except Exception as error:
            raise MustStayWhole(path, error_words(error), raising_source(error)) from error
        finally:
            self._module_stack.pop()
            self._in_own_call.pop()

    def _call_inside(
        self, original_call: Callable[..., Any], path: str | None, module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        """A call that leaves no node; of a module inside a whole one, usually."""
        self.kept_state.note_arguments(module, args, kwargs)
        if path is not None:
            self.known_calls.note_call(module)
        if path is None or self._inner_calls.whole_path not in self._settings.learned.probed_inside:
            asked = self._ask(path, module, args, kwargs) if self.is_paused else None
            if asked is not None and asked.answer is not None:
                result = self._answer(path, asked, asked.answer)
            else:
                result = self.known_calls.made(asked, original_call, module, *args, **kwargs)
        else:
            before = self._template_of((args, kwargs))
            call = partial(self.shared_state.noting, original_call)
            probe = Probe(call=call, module=module, template=before, example=self._example)
            result = self._inner_calls.try_call(partial(original_call, module, *args, **kwargs), probe)
        if path is not None:
            self._inner_calls.note(path, result)
        return result

    def _ask(self, path: str | None, module: nn.Module, args: Any, kwargs: Any) -> Question | None:
        """Returns the observations of a call of a module at ``path`` that leaves no nodes; None if it has to be made."""
        learned, whole = self._settings.learned, self._whole_path or path
        must_run = whole in learned.inner_results or whole in learned.probed_inside or self.in_place.reached_by(module)
        asked = None if path is None or must_run or self.shared_state.is_trying else self.known_calls.ask(module, args, kwargs)
        if asked is None or asked.answer is None or self.kept_state.permits_answer(asked.modules, asked.answer.values):
            return asked
        return replace(asked, answer=None)

    def _answer(self, path: str | None, question: Question, known: Known) -> Any:
        with self.pause():
            result = self.known_calls.answered(question, known)
        for inner in map(question.modules.get, known.called):
            self._inner_calls.note(self._module_paths.get(id(inner), ""), None)
        if self._seen is not None:
            self._seen.update(map(id, question.tensors))
        self.state_reads.note((question.tensors, question.own), result)
        self.kept_state.note_answered(question.modules, known.values)
        if known.draws:
            self.drawing.add(self._whole_path or path or "")
        return result

    def note_changes(self, path: str, names: Collection[str]) -> None:
        """An opened module has changed what has these names."""
        if names:
            self.changed_by_opened[path] = sorted(names)[0]
            if not self._settings.learned.watches_state:
                self.lessons.append(self._settings.learned.watch_state)

    def _may_leave_tensors(self) -> bool:
        """Returns True if the opened module that runs may set tensors on itself: if they are set in every run."""
        return False

    def _record_whole_module(
        self, original_call: Callable[..., Any], path: str, module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        asked = self._ask(path, module, args, kwargs)
        if asked is not None and asked.answer is not None:
            self.shared_state.note_begin(path, module)
            return self._record_answer(path, asked, asked.answer)
        self.passing_hooks.note_call(path, modules_inside(module).values())
        # Containers and objects among the arguments; the module may look at a part of them, and may change them.
        objects = [value for value in (*args, *kwargs.values()) if not is_value(value)]
        before = self._template_of(objects)
        own, in_place = [*module.parameters(), *module.buffers()], self.in_place.reached_by(module)
        touched = [*(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), *before.tensors]
        # What it draws is its own affair; what opened code draws would decide what is recorded.
        self._whole_path = path
        with (  # the watch itself looks at all tensors, so it stands outside
            self.between.call(module, (args, kwargs)),
            watch_mutation([*touched, *own]) as mutated,
            self.in_place.watching(module, in_place) as changed_in_place,
            self._seen_tensors(bool(objects)) as seen,
            isolated_rng(),
            self._own_effects(module),
            self.shared_state.of(path, module),
            self.kept_state.of(path, module) as call,
            self.state_reads.of(path, touched),
            self._inner_calls.of(path),
        ):
            watched = partial(self.kept_state.watched, original_call)
            result, sides = self._result_without_data(watched, path, module, args, kwargs, asked)
        self._whole_path = None
        mutated |= changed_in_place | running_statistics(module) | self.kept_state.changed_operands(call)
        after = self._template_of(objects) if objects else before
        changed = after.structure != before.structure or [*map(id, after.tensors)] != [*map(id, before.tensors)]
        made_anew: dict[int, fx.Node] = {}
        holder = None
        if changed or not all(map(is_plain, objects)):
            seen.update(id(tensor) for tensor in self._template_of(result).tensors)
            sent = [index for index, tensor in enumerate(before.tensors) if id(tensor) in seen]
            holder, items = self._refill(before, sent, len(objects))
            made_anew = {id(value): item for value, item in zip(objects, items, strict=True)}

        def argument(value: Any) -> Any:
            return made_anew[id(value)] if id(value) in made_anew else self.argument(value)

        node_args = tuple(map(argument, args))
        node_kwargs = {key: argument(value) for key, value in (kwargs | self.kept_state.keywords(call)).items()}
        places = self._settings.learned.inner_results.get(path, ())
        taken = [self._inner_calls.tensor(place) for place in places]
        returned = (result, (*sides.values(), *taken)) if sides or taken else result
        node = self._append("call_module", path, node_args, node_kwargs, path, mutated, returned)
        node.meta["inner_results"] = places
        if not (own or in_place or has_hooks(module)) and is_torch_leaf(path, module):
            node.meta["stateless"] = module
        if sides:
            node.meta["sides"] = tuple(sides)
            self.sides.update({(f"{path}.{inner}".strip("."), name): side for (inner, name), side in sides.items()})
        node.meta["module_storages"] = changed_in_place.union(storage_key(tensor) for tensor in (*own, *in_place))
        self.kept_state.add(call, node)
        with self.pause():
            read_by = self._inner_calls.read_by(self._tensor_fqns)
            node.meta["reads_batch"] = read_by if read_by and any(self._example(t) is not None for t in touched) else None
        if changed and holder is not None:
            self._bind_inside(holder, after, node)
        return result

    def _record_answer(self, path: str, question: Question, known: Known) -> Any:
        with self.kept_state.of(path, question.module) as call:
            result = self._answer(path, question, known)
        node_args = tuple(map(self.argument, question.args))
        kwargs = {**question.kwargs, **self.kept_state.keywords(call)}
        node_kwargs = {key: self.argument(value) for key, value in kwargs.items()}
        mutated = running_statistics(question.module)
        node = self._append("call_module", path, node_args, node_kwargs, path, mutated, result)
        node.meta["inner_results"] = ()
        node.meta["alike"] = known  # the same for all calls that are answered from it
        node.meta["module_storages"] = frozenset(map(storage_key, question.own))
        self.kept_state.add(call, node)
        return result

    def _result_without_data(
        self, original_call: Callable[..., Any], path: str, module: nn.Module, args: Any, kwargs: Any, asked: Question | None
    ) -> tuple[Any, dict[tuple[str, str], Tensor]]:
        """Runs a whole module on fakes or, where it looks at values, on made-up data.

        Returns what it returns and the tensors that it leaves on itself and its submodules, by relative path and attribute.
        """
        packed = None if kwargs or has_hooks(module) else self._packed_sequences.result_of_layer(module, args)
        if packed is not None:
            return packed, {}
        before = self._template_of((args, kwargs))
        values: set[tuple[str, str]] = set()
        try:
            made = partial(self.known_calls.made, asked, original_call)
            return with_assigned_tensors(values, made, module, *args, **kwargs)
        except Exception as error:
            try:
                graft((args, kwargs), before.fill(before.tensors))  # what it did to them before it failed
                if self._seen is not None:
                    self._seen.update(map(id, before.tensors))
                self._inner_calls.starts_again()
                probe = Probe(
                    call=partial(self.shared_state.noting, with_assigned_tensors, values, original_call),
                    module=module,
                    template=before,
                    example=self._example,
                )
                with self._inner_calls.on_made_up_data():
                    (result, sides), changed_args, changed_kwargs = probe.result()
                graft((args, kwargs), (changed_args, changed_kwargs))
                for (inner, name), tensor in sides.items():
                    setattr(module.get_submodule(inner), name, tensor)
                    self.state_reads.note_made(tensor)
                return result, sides
            except ProbeFailed as failure:
                raise RecordError(f"{path} cannot run without data ({error_words(error)}), nor {failure}") from error
        finally:
            self.left_values.update((f"{path}.{inner}".strip("."), name) for inner, name in values)

    def _name_unknown(self, tensor: Tensor) -> str:
        way = self._inner_calls.way_to(tensor, self._settings.learned)
        if way is None:
            return super()._name_unknown(tensor)
        self.lessons.append(way)  # and see what else there is to know
        return _UNREACHED

    def _example(self, tensor: Tensor) -> Tensor | None:
        """The tensor's value in the traced call, where it follows from the inputs."""
        node = self._nodes.get(id(tensor))
        try:
            return None if node is None else self._examples.value(node)
        except NoExample:
            return None

    def _follows_from_inputs(self, tensor: Any) -> bool:
        node = self._nodes.get(id(tensor)) if isinstance(tensor, FakeTensor) else None
        return node is not None and any(other.op == "placeholder" and "draw" not in other.meta for other in cone(node))

    def _look(self, func: Callable[..., Any], tensor: Tensor) -> Any:
        """Answers code that looks at a value as in the traced call; a call with another answer gets a trace of its own."""
        if len(self._module_stack) > 1 and not (self._settings.answers_looks or self.looks.may_branch(func)):
            raise RecordError("its Python reads values that depend on the inputs")  # and it can stay whole
        try:
            with self.pause():
                return self.looks.answer(func, self._tensor_argument(tensor), self._examples)
        except NoExample as error:
            if func is Tensor.__bool__:
                return self._decide(tensor)
            raise RecordError(f"its Python reads a value that is not known in advance: {error}") from error

    def _with_numbers(self, value: Any) -> Any:
        """An index with a number in place of each tensor that bounds a slice."""
        if isinstance(value, tuple):
            return tuple(self._with_numbers(item) for item in value)
        if isinstance(value, slice):
            return slice(*(self._bind(bound) for bound in (value.start, value.stop, value.step)))
        return value

    def _bind(self, value: Any) -> Any:
        return self._look(Tensor.__index__, value) if self._follows_from_inputs(value) else value

    def constant(self, tensor: Tensor) -> Tensor:
        """Returns the value that a tensor has in every call; raises :class:`NoExample` if it is unknown, or may differ."""
        if (node := self._nodes.get(id(tensor))) is None:
            raise NoExample("it is not a result of a traced call")
        value: Tensor = self._examples.constant(node)
        return value

    def _decide(self, tensor: Tensor) -> bool:
        """Answers ``if tensor:`` in opened code as the traced call does, and has it checked in every later call."""
        try:
            with self.pause():
                outcomes = self._examples.outcomes(node := self._tensor_argument(tensor))
        except NoExample as error:
            raise RecordError(f"its Python reads a value that is not known in advance: {error}") from error
        if len(outcomes) > 1:
            raise RecordError("its Python chooses a path at random")
        (expected,) = outcomes
        self._call_here(same_answer(expected, user_source()), (node,)).meta["checks"] = True
        return expected

    # ------------------------------------------------------------------ state

    @contextmanager
    def watching(self, *states: Snapshot) -> Iterator[None]:
        """The block is opened code, of which ``states`` show what it changes."""
        self._watches += states
        try:
            yield
        finally:
            del self._watches[len(self._watches) - len(states) :]

    @contextmanager
    def _own_effects(self, module: nn.Module) -> Iterator[None]:
        """The block runs a whole module: what it changes outside of itself it changes again in its stage."""
        # It does not matter by whom, as long as nothing has changed; torch's recurrent layers change lists of their weights.
        watches, inside = self._settings.learned.watches_state, modules_inside(module).values()
        has_any = any(isinstance(m, nn.RNNBase) or (watches and (is_users(type(m)) or has_hooks(m))) for m in inside)
        with passing_over(self._watches if has_any else ()):
            yield

    @property
    def is_recording(self) -> bool:
        """True if what runs now becomes part of the graph."""
        return not self.is_paused

    def _runs_step(self) -> bool:
        return False

    @contextmanager
    def _seen_tensors(self, asked: bool) -> Iterator[set[int]]:
        """Records nothing during the block; collects the ids of the tensors that calls are made with, if asked."""
        before, seen = self._seen, set[int]()
        self._seen = seen if asked else before
        try:
            with self.pause():
                yield seen
        finally:
            self._seen = before
