"""A step on a whole batch after its microbatches have run: the pipelined call returns what they gave, put together.

Outputs of the region are joined along their batch dimension, which the symbolic shapes of the trace name. An output without one
(a loss that the model computes itself) is another one for the whole batch: the last stage computes it again, from what it
received for all microbatches. Where it cannot, a tensor without data stands for the output, so that the step can use it for
nothing that matters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from lightning_fxpipe._compat import StandIns, symbolic_expression
from lightning_fxpipe.following import follow_plan
from lightning_fxpipe.lru import LruCache
from lightning_fxpipe.objects import lasting_objects
from lightning_fxpipe.plan import PartitionPlan
from lightning_fxpipe.region import StepCall, find_region, replaced_region
from lightning_fxpipe.replay import Replayer, watched_step
from lightning_fxpipe.rng import isolated_rng, rng_state, same_rng
from lightning_fxpipe.span import Span, StepRegion
from lightning_fxpipe.split import Stage, build_stage
from lightning_fxpipe.step import BatchRun, KeptOutputs
from lightning_fxpipe.structure import Template
from lightning_fxpipe.trace import TracedRegion, trace_region

# By the trace of the microbatches, and the number of samples.
WholeTraces = LruCache[Any, TracedRegion]


class NotJoinable(Exception):
    """What the microbatches gave does not make what the whole batch would give."""


class WholeBatch:
    """What the region gives for a whole batch.

    Args:
        run: The batch, after all its microbatches have run on the last stage.
        batch: The whole batch.
        plan: Which stage holds what.
        traces: Remembers what has been traced for whole batches.
    """

    def __init__(self, run: BatchRun, batch: Any, plan: PartitionPlan, traces: WholeTraces | None = None) -> None:
        assert run.kept
        self._run = run
        self._batch = batch
        self._plan = plan
        self._traces = traces if traces is not None else LruCache(1)
        self._kept: list[KeptOutputs] = list(run.kept.values())
        self._setup = self._kept[0].setup
        self._sizes = tuple(run.sizes)
        self._must_be_complete = False
        self._missing: list[str] = []
        self._obstacle = ""

    @property
    def is_complete(self) -> bool:
        """Whether all outputs have data."""
        return not self._missing

    @property
    def reason(self) -> str:
        """What is missing, and why."""
        return (
            f"it uses {', '.join(self._missing)} of the model, which has no batch dimension along which to join microbatches, "
            f"and {self._obstacle}"
        )

    @property
    def is_of_one_trace(self) -> bool:
        """Whether the same graph has run for all microbatches."""
        return all(kept.setup.traced is self._setup.traced for kept in self._kept)

    @contextmanager
    def in_place_of_region(self, *, must_be_complete: bool = False) -> Iterator[None]:
        """In the block, the step's code for the whole batch, the region returns its outputs for the whole batch.

        Args:
            must_be_complete: Whether nothing may stand for an output that cannot be had.

        Raises:
            NotJoinable: Outputs cannot be put together.
        """
        run = self._run
        self._must_be_complete = must_be_complete
        # The trace of a single sample does not tell which dimension is the batch.
        traced = self._setup.traced
        if self._sizes[0] == 1:
            traced = self._traces.get((traced, sum(self._sizes)), self._trace_whole)
        if traced.record is None:
            path = traced.signature.path
            assert path is not None

            def run_region(*args: Any, **kwargs: Any) -> Any:
                with mode.in_stage():
                    inputs = traced.input_tensors(args, kwargs)
                    if inputs is None:
                        raise NotJoinable("the model is called with other arguments for the whole batch")
                    tensors = self._outputs(traced, inputs, inputs)
                return traced.result(tensors)

            with watched_step(run.root, run.randomness.draws) as mode, replaced_region(run.root, path, run_region):
                yield
            return
        example = self._batch, run.step.rest[1:]
        given = Template.of(example, shared=lasting_objects(run.root)).tensors
        replayer = Replayer(run.root, traced.record, _sizes(traced, given), run.device.type)
        with replayer.lead(example, run.randomness.draws, lambda inputs: self._outputs(traced, inputs, given)):
            yield

    def _trace_whole(self) -> TracedRegion:
        """The graph of the whole batch."""
        run, record = self._run, self._setup.traced.record
        step = StepCall(function=run.step.function, args=(self._batch, *run.step.rest), kwargs={})
        num_samples, dim = sum(self._sizes), self._setup.traced.batch_dim
        if record is not None:
            span = Span(first=record.first, last=record.last, wanted=record.outputs)
            region: Any = StepRegion(step=step, span=span, batch_size=num_samples, batch_dim=dim)
        else:
            pipelined = run.root.get_submodule(self._setup.traced.signature.path or "")
            region = find_region(
                run.root, step, batch_size=num_samples, batch_dim=dim, is_region=lambda module: module is pipelined
            )
        known = self._setup.traced
        return trace_region(run.root, region, opened=known.opened, device=run.device, wanted=known.wanted)

    # ------------------------------------------------------------------ the region's outputs

    def _outputs(self, traced: TracedRegion, inputs: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
        """The region's outputs. What its own Python draws is drawn, as on one device.

        Args:
            traced: The graph.
            inputs: The region's input tensors.
            given: The tensors that the graph's sizes follow from.
        """
        sizes = _sizes(traced, given)
        symbols = self._batch_symbols(traced, sizes)
        drawn = [node.meta["draw"].make(self._run.randomness.draws, sizes) for node in traced.draw_nodes]
        nodes: Sequence[Any] = traced.output_node.args[0]  # type: ignore[assignment]
        parts = [[kept.outputs[i] for kept in self._kept] for i in range(len(nodes))]
        outputs = [self._joined(node, tensors, symbols) for node, tensors in zip(nodes, parts, strict=True)]
        if all(output is not None for output in outputs):
            return [output for output in outputs if output is not None]
        try:
            again = self._computed_again(traced, [*inputs, *drawn], symbols)
            return [other if output is None else output for output, other in zip(outputs, again, strict=True)]
        except NotJoinable as error:
            if self._must_be_complete:
                raise
            self._obstacle = str(error)
        self._missing = [
            f"an output of shape {tuple(tensors[0].shape)} ({node.meta.get('source') or node.name})"
            for node, output, tensors in zip(nodes, outputs, parts, strict=True)
            if output is None
        ]
        stand_ins = [StandIns().make(tuple(p[0].shape), p[0].dtype, self._run.device, requires_grad=False) for p in parts]
        return [stand_in if output is None else output for output, stand_in in zip(outputs, stand_ins, strict=True)]

    def _batch_symbols(self, traced: TracedRegion, sizes: Mapping[Any, int]) -> frozenset[Any]:
        """The symbols that stand for the number of samples: they differ between a microbatch and the batch, others do not."""
        if traced is not self._setup.traced:
            return frozenset(sizes)  # nothing but the batch is a symbol in it
        before = self._setup.sizes
        return frozenset(symbol for symbol, size in sizes.items() if size != before[symbol])

    def _joined(self, node: fx.Node, parts: Sequence[Tensor], symbols: Set[Any]) -> Tensor | None:
        """A node's result for the whole batch, from those for the microbatches; None where they do not tell."""
        dimension = batch_dimension(node, symbols)
        if dimension is not None:
            others = {(*part.shape[:dimension], *part.shape[dimension + 1 :]) for part in parts}
            if len(others) > 1:
                raise NotJoinable(f"its microbatches have other sizes beside the batch's: {[tuple(p.shape) for p in parts]}")
            return torch.cat([part.to(self._run.device) for part in parts], dim=dimension)
        if not _depends_on_inputs(node) and all(torch.equal(part, parts[0]) for part in parts):
            return parts[0].to(self._run.device)
        return None

    def _computed_again(self, traced: TracedRegion, values: Sequence[Tensor], symbols: Set[Any]) -> tuple[Tensor, ...]:
        """What the last stage gives for what it received for all microbatches.

        Raises:
            NotJoinable: It received what cannot be joined, or it draws random numbers, which would be others.
        """
        stage = self._stage_of(traced)
        received = []
        for i, node in enumerate(stage.boundary_in):
            tensor = self._joined(node, [kept.received[i] for kept in self._kept], symbols)
            if tensor is None:
                raise NotJoinable(f"neither has what the last stage receives from {node.name}")
            received.append(tensor)
        with torch.no_grad(), isolated_rng():
            before = rng_state()
            outputs: tuple[Tensor, ...] = stage.module(*received, *(values[i] for i in stage.region_inputs))
            after = rng_state()
        if not same_rng(before, after):
            raise NotJoinable("the last stage draws random numbers (dropout), so that it cannot compute the output again")
        return outputs

    def _stage_of(self, traced: TracedRegion) -> Stage:
        """The last stage in a graph of the same step."""
        known = self._setup.stage
        if traced is self._setup.traced:
            return known
        stage = build_stage(follow_plan(self._plan, traced), known.index)
        if [node.name for node in stage.boundary_in] != [node.name for node in known.boundary_in]:
            raise NotJoinable("the stages of the whole batch receive other tensors")
        return stage


def batch_dimension(node: fx.Node, symbols: Set[Any]) -> int | None:
    """The dimension of a node's result that is the batch; None where none is, or several depend on its size.

    Args:
        node: The node.
        symbols: Those that stand for the size of the batch.
    """
    sizes = [symbolic_expression(size) for size in node.meta["val"].shape]
    depending = [dim for dim, size in enumerate(sizes) if not isinstance(size, int) and size.free_symbols & symbols]
    return depending[0] if len(depending) == 1 and sizes[depending[0]] in symbols else None


def _depends_on_inputs(node: fx.Node) -> bool:
    """Whether a placeholder goes into a node's result."""
    waiting, seen = [node], {node}
    while waiting:
        current = waiting.pop()
        if current.op == "placeholder":
            return True
        new = [used for used in current.all_input_nodes if used not in seen]
        seen.update(new)
        waiting += new
    return False


def _sizes(traced: TracedRegion, given: Sequence[Tensor]) -> dict[Any, int]:
    """Values of the symbols for a call.

    Raises:
        NotJoinable: The graph is one of other sizes.
    """
    sizes = traced.bind_sizes(tuple(tuple(tensor.shape) for tensor in given))
    if sizes is None:
        raise NotJoinable("the graph that was recorded for a microbatch is not that of the whole batch")
    return sizes
