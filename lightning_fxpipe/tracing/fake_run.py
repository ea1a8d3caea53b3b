"""A module while its tensors are fakes and a recorder watches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fxpipe._compat.torch import (
    FakeTensor,
    FakeWorld,
    depends_on_data,
    forget_fakes,
    size_hint,
    symbolic_expression,
    tracing_friendly_torch,
)
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.pytree.shapes import batch_dim_of
from lightning_fxpipe.reporting.wording import without_symbols
from lightning_fxpipe.tracing.guards import GuardKey, noted_guards
from lightning_fxpipe.tracing.held_numbers import CallArgument, HeldNumbers, as_symbols
from lightning_fxpipe.tracing.record import Recorder
from lightning_fxpipe.tracing.recordable import INPUT_PREFIX, Recordable, context_of, taken_apart
from lightning_fxpipe.tracing.recorder_settings import RecorderSettings
from lightning_fxpipe.tracing.recording import recording
from lightning_fxpipe.tracing.signals import Learned, MustStayWhole, RecordError
from lightning_fxpipe.tracing.tensor_classes import check_tensor_classes
from lightning_fxpipe.user_code.exchange import exchanged_tensors
from lightning_fxpipe.user_code.inference_mode import without_inference_modes
from lightning_fxpipe.user_code.iterators import StepIterators
from lightning_fxpipe.user_code.memos import no_fakes_remembered
from lightning_fxpipe.user_code.objects import lasting_objects
from lightning_fxpipe.user_code.placement import Placement, device_of
from lightning_fxpipe.user_code.silence import silencing


def symbol_values(fakes: Iterable[Tensor]) -> dict[Any, int]:
    """The example's value of every expression that is a size of the inputs and no number.

    Raises:
        UnsupportedError: The size of an input depends on values.
    """
    sizes = [size for fake in fakes for size in fake.shape if isinstance(size, torch.SymInt)]
    if any(map(depends_on_data, sizes)):
        raise UnsupportedError(
            "The model is called with a tensor whose size depends on values of the batch.",
            observed="a tensor that the step makes by nonzero(), unique() or an index, before it calls the model",
            expected="sizes determined by the shapes of the batch",
            todo="Choose with a mask of the batch's size (hidden[labels > 0]), or where the batch is made.",
        )
    return {symbolic_expression(size): size_hint(size) for size in sizes}


def _batch_dims(tensor: Tensor, call: Recordable) -> tuple[int, ...]:
    dim = batch_dim_of(tensor.shape, call.batch_size, call.batch_dim)
    return (dim,) if call.batch_size > 1 and dim is not None else ()


@dataclass(frozen=True, kw_only=True)
class FakeRun:
    """The module while its tensors are fakes and a recorder watches.

    Attributes:
        device: Where the fakes of the module's tensors are.
        example: The region's example with fakes for its tensors, whose shapes are ``input_shapes``.
        lasting: By ``id``, objects that modules keep from one call to the next.
        batch_symbols: Sizes of the fakes' dimensions that are the batch.
        sizes: What the symbols in their shapes are in the example.
        guards: Plain values that the recorded code has read from modules so far.
        numbers: The numbers that are inputs.
    """

    world: FakeWorld
    recorder: Recorder
    device: torch.device
    example: Any
    lasting: Mapping[int, Any]
    input_shapes: tuple[tuple[Any, ...], ...]
    batch_symbols: frozenset[Any]
    sizes: Mapping[Any, int]
    guards: Mapping[GuardKey, Any]
    numbers: HeldNumbers


@contextmanager
def fake_run(
    root: nn.Module,
    call: Recordable,
    is_whole: Callable[[str, nn.Module], bool],
    device: torch.device | None,
    learned: Learned | None = None,
    answers_looks: bool = True,
) -> Iterator[FakeRun]:
    """Exchanges all tensors of the module for fakes, and records what the block runs."""
    world = FakeWorld()
    lasting = lasting_objects(root)
    template = taken_apart(call, lasting)
    check_tensor_classes(root, template.tensors)
    context = context_of(call)
    placement = Placement(root, device or device_of(template.tensors))
    fqns: dict[int, str] = {}

    def fake_of(tensor: Tensor, fqn: str) -> Tensor:
        # A step may have kept what a metric gave it for a microbatch, and the batch's rest is traced now.
        fake = tensor if isinstance(tensor, FakeTensor) else world.static(tensor, placement.device_of(tensor))
        fqns[id(fake)] = fqn
        return fake

    group_of = {place: number for number, group in enumerate(call.varying) for place in group}

    def fake_input(position: int, tensor: Tensor) -> Tensor:
        groups = {dim: group_of[position, dim] for dim in range(tensor.dim()) if (position, dim) in group_of}
        detached = tensor.detach().requires_grad_(tensor.requires_grad)
        return world.input(detached, _batch_dims(tensor, call), groups)

    with (
        no_fakes_remembered(root),
        exchanged_tensors(root, fake_of) as before,
        placement.naming(),
        torch.inference_mode(False),
        context.active(),
        as_symbols(root, call.numbers, world.shape_env.number) as (exchange_numbers, exchange_argument, numbers),
    ):
        fakes = [fake_input(position, tensor) for position, tensor in enumerate(template.tensors)]
        inputs = {f"{INPUT_PREFIX}{index}": tensor for index, tensor in enumerate(template.tensors)}
        sizes = symbol_values(fakes)

        def number_argument(place: CallArgument, value: Any) -> Any:
            number = exchange_argument(place, value)
            sizes.update(numbers.recorded)
            return number

        def begin_region() -> bool:
            sizes.update(exchange_numbers())
            return bool(numbers.places)

        settings = RecorderSettings(
            modules=dict(root.named_modules()),
            tensor_fqns=fqns,
            is_whole=is_whole,
            device_type=placement.device.type,
            lasting=lasting,
            answers_looks=answers_looks,
            learned=learned or Learned(),
            inputs=inputs,
            sizes=sizes,
            before=before,
            begin_region=begin_region,
            number_argument=number_argument,
        )
        recorder = call.make_recorder(settings)
        recorder.begin()
        for name, fake in zip(inputs, fakes, strict=True):
            recorder.add_input(name, fake)
        with (
            silencing(),
            without_inference_modes(),
            tracing_friendly_torch(),
            world.active(),
            noted_guards(
                root,
                lambda: recorder.is_recording,
                recorder.known_calls.names_read,
                recorder.attributes_read,
                recorder.kept_state,
                numbers.computed,
                recorder.between,
            ) as guards,
            StepIterators().one_run(),
            recording(recorder),
        ):
            try:
                yield FakeRun(
                    world=world,
                    recorder=recorder,
                    device=placement.device,
                    example=template.fill(fakes),
                    lasting=lasting,
                    input_shapes=tuple(tuple(symbolic_expression(size) for size in fake.shape) for fake in fakes),
                    batch_symbols=frozenset(
                        symbolic_expression(fake.shape[dim])
                        for fake, tensor in zip(fakes, template.tensors, strict=True)
                        for dim in _batch_dims(tensor, call)
                    ),
                    sizes=sizes,
                    guards=guards,
                    numbers=numbers,
                )
            except (RecordError, MustStayWhole) as stop:
                stop.reason = without_symbols(stop.reason, sizes)
                raise
            finally:
                forget_fakes()
