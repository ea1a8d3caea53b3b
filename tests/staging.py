"""Runs the stages of a model one after another in one process, each as on a rank of its own, to compare with the whole model.

Each stage runs on a copy of the module in which whatever belongs to other stages is unusable, on contiguous copies of the
tensors that the previous stage sends, and with the gradients that the next stage sends back.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from lightning_fxpipe._compat.torch import tree_flatten, tree_leaves
from lightning_fxpipe.planner.assignment import Assignment
from lightning_fxpipe.planner.cost import Chain, build_chain, canonical_fqns
from lightning_fxpipe.stages.build import Stage, boundary_specs, build_stage
from lightning_fxpipe.tracing.gradient_flow import GradientSources
from lightning_fxpipe.tracing.recordable import RegionCall
from lightning_fxpipe.tracing.trace import trace_region

BATCH = 4
WIDTH = 6


def call_of(*args: Tensor) -> RegionCall:
    return RegionCall(path="", args=args, kwargs={}, batch_size=args[0].shape[0])


def chain_of(model: nn.Module, *args: Tensor, opened: Any = None) -> Chain:
    return build_chain(trace_region(model, call_of(*args), opened=opened))


def batch(size: int = BATCH, width: int = WIDTH) -> Tensor:
    return torch.randn(size, width, generator=torch.Generator().manual_seed(size))


class Outcome(NamedTuple):
    """All that must be equal."""

    result: Any
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def backward_from(tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    pairs = [(t, g) for t, g in zip(tensors, gradients, strict=True) if t.requires_grad and g is not None]
    if pairs:
        torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])


def gradient_for(output: Tensor) -> Tensor:
    """Some gradient of a loss, different for every element, exact in every float type."""
    return (torch.arange(output.numel()) % 7 - 3).to(output.dtype).reshape(output.shape)


def run_whole(model: nn.Module, args: Sequence[Tensor], seed: int = 0) -> Outcome:
    model = copy.deepcopy(model)
    torch.manual_seed(seed)
    result = model(*[arg.clone() for arg in args])
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    backward_from(outputs, [gradient_for(output) for output in outputs])
    return Outcome(
        result=result,
        gradients={fqn: p.grad for fqn, p in model.named_parameters() if p.grad is not None},
        buffers=dict(model.named_buffers()),
    )


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One stage on its own copy of the module."""

    stage: Stage
    root: nn.Module
    held: frozenset[str]
    inputs: list[Tensor | None]


def make_rank(assignment: Assignment, index: int, args: Sequence[Tensor]) -> Rank:
    chain = assignment.chain
    root = copy.deepcopy(chain.traced.root)
    held = assignment.fqns(index)
    for fqn, first_name in canonical_fqns(root).items():
        if first_name not in held:
            spoil(root, fqn)
    here = replace(chain, traced=replace(chain.traced, root=root))
    return Rank(
        stage=build_stage(replace(assignment, chain=here), index),
        root=root,
        held=held,
        # Nothing is drawn ahead: what the graph draws, it draws where it stands.
        inputs=[*(arg.clone() for arg in args), *(None for _ in chain.traced.draw_nodes)],
    )


def spoil(root: nn.Module, fqn: str) -> None:
    """What another rank holds is a placeholder without data here, as after ``drop_other_stages``."""
    path, _, name = fqn.rpartition(".")
    module = root.get_submodule(path)
    tensor = getattr(module, name)
    empty = torch.empty_like(tensor, device="meta")
    setattr(module, name, nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty)


def run_staged(assignment: Assignment, args: Sequence[Tensor], seed: int = 0) -> Outcome:
    """Forward through all stages, then backward through them in reverse."""
    traced = assignment.chain.traced
    sizes = traced.bind_sizes(tuple(tuple(arg.shape) for arg in args))
    assert sizes is not None
    training = torch.is_grad_enabled()  # a schedule for evaluation sends no gradients
    ranks = [make_rank(assignment, index, args) for index in range(assignment.num_stages)]
    stages = [rank.stage for rank in ranks]
    received: list[list[Tensor]] = []
    sent: list[list[Tensor]] = []
    torch.manual_seed(seed)  # the stages draw one after another, as the whole module does
    for rank in ranks:
        stage = rank.stage
        arriving = [t.detach().clone().requires_grad_(t.requires_grad and training) for t in come_to(stage, stages, sent)]
        specs = boundary_specs(stage.boundary_in, sizes)
        # A gradient may be expected in vain (of a tensor that is written into only later), but none may be lost.
        assert all(spec.requires_grad for spec, t in zip(specs, arriving, strict=True) if t.requires_grad)
        assert [(tuple(t.shape), t.dtype) for t in arriving] == [(spec.shape, spec.dtype) for spec in specs], (
            f"what stage {stage.index} receives is not what its receive buffers are made for"
        )
        before = [tensor.detach().clone() for tensor in arriving]
        outputs = stage.module(*arriving, *[rank.inputs[i] for i in stage.region_inputs])
        assert all(isinstance(output, Tensor) for output in outputs)
        # A schedule may use the receive buffers again, or still need them for a relay: a stage must not write to them.
        assert all(torch.equal(now, then) for now, then in zip(arriving, before, strict=True))
        received.append(arriving)
        sent.append([output.contiguous() if stage.boundary_out else output for output in outputs])
    outputs_of_last = sent[-1]
    retain_gradients(outputs_of_last)
    result = traced.result(sent[-1])
    sent[-1] = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]  # one may be there twice
    gradients: list[Tensor | None] = [gradient_for(output) for output in sent[-1]]
    for stage, outputs in zip(reversed(stages), reversed(sent), strict=True):
        backward_from(outputs, gradients if stage is stages[-1] else come_back_to(stage, stages, received))
    check_gradient_flow(assignment, stages, received, outputs_of_last)
    return Outcome(
        result=result,
        gradients=summed_gradients(ranks),
        buffers=held_buffers(ranks),
    )


def retain_gradients(outputs: Sequence[Tensor]) -> None:
    """Keeps the gradients of what the last stage gives."""
    for output in outputs:
        if output.requires_grad:
            output.retain_grad()


def check_gradient_flow(
    assignment: Assignment, stages: Sequence[Stage], received: Sequence[Sequence[Tensor]], outputs: Sequence[Tensor]
) -> None:
    """Exactly those tensors that a trace says get a gradient have got one, unless a module ran on dummy values.

    ``outputs`` are those of the last stage.
    """
    results = assignment.chain.traced.output_node.args[0]
    assert isinstance(results, (list, tuple))
    sources = GradientSources([node for node in results if isinstance(node, fx.Node)])
    stage_of = {node: stage.index for stage in stages for node in assignment.nodes(stage.index)}
    made = [node for node in stage_of if isinstance(node.meta.get("val"), Tensor) and node.meta["val"].requires_grad]
    is_unknown = not all("gradient_operands" in node.meta for node in made)
    trained = {number for number, output in enumerate(outputs) if output.requires_grad and output.grad is not None}
    for stage, tensors in zip(stages, received, strict=True):
        for node, tensor in zip(stage.boundary_in, tensors, strict=True):
            here = sources.of(node, lambda user, stage=stage: stage_of.get(user, len(stages)) >= stage.index)
            expected = tensor.requires_grad and not trained.isdisjoint(here)
            assert expected or tensor.grad is None, f"{node.name} has a gradient"
            assert tensor.grad is not None or not expected or is_unknown, f"{node.name} has no gradient"


def come_to(stage: Stage, stages: Sequence[Stage], sent: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Of what earlier stages have sent, what comes to this one."""
    sources = dict.fromkeys(stage.boundary_in, stage.index - 1) | {skip.node: skip.source for skip in stage.skips_in}
    return [sent[source][stages[source].boundary_out.index(node)] for node, source in sources.items()]


def come_back_to(stage: Stage, stages: Sequence[Stage], received: Sequence[Sequence[Tensor]]) -> list[Tensor | None]:
    """Of the gradients of what later stages have received, those of what this one has sent."""
    targets = dict.fromkeys(stage.boundary_out, stage.index + 1) | {skip.node: skip.destination for skip in stage.skips_out}
    return [received[target][stages[target].boundary_in.index(node)].grad for node, target in targets.items()]


def summed_gradients(ranks: Sequence[Rank]) -> dict[str, Tensor]:
    """By FQN; the copies of a shared parameter in the order in which one backward pass would meet its uses."""
    total: dict[str, Tensor] = {}
    for rank in reversed(ranks):
        for fqn, parameter in rank.root.named_parameters():
            if parameter.grad is not None:
                total[fqn] = total[fqn] + parameter.grad if fqn in total else parameter.grad
    return total


def held_buffers(ranks: Sequence[Rank]) -> dict[str, Tensor]:
    """By FQN. Copies of a buffer on several ranks must agree, or one of them will be saved with a wrong value."""
    found: dict[str, Tensor] = {}
    for rank in ranks:
        for fqn, buffer in rank.root.named_buffers():
            if fqn in rank.held:
                assert fqn not in found or torch.equal(found[fqn], buffer), fqn
                found[fqn] = buffer
    return found


def assert_equal(staged: Outcome, whole: Outcome) -> None:
    """Bit for bit."""
    found, structure = tree_flatten(staged.result)
    expected, expected_structure = tree_flatten(whole.result)
    assert structure == expected_structure
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        if isinstance(b, Tensor):
            assert a.dtype == b.dtype
            assert a.requires_grad == b.requires_grad, f"output {index}"
            assert torch.equal(a, b), f"output {index}"
        else:
            assert a == b
    assert staged.gradients.keys() == whole.gradients.keys()
    for fqn, gradient in whole.gradients.items():
        assert torch.equal(staged.gradients[fqn], gradient), f"gradient of {fqn}"
    for fqn, buffer in staged.buffers.items():
        assert torch.equal(buffer, whole.buffers[fqn]), f"buffer {fqn}"


def assert_stages_equal_whole(assignment: Assignment, *args: Tensor) -> None:
    """From stage to stage, and past stages."""
    whole = run_whole(assignment.chain.traced.root, args)
    assert_equal(run_staged(assignment, args), whole)
    past = assignment.with_skips()
    if past.skips:
        assert_equal(run_staged(past, args), whole)


class Layers(nn.Module):
    """``a`` to ``d`` and what a subclass adds, used as ``run`` says."""

    def __init__(self, run: Callable[[Any, Tensor], Any], **children: Any) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.run = run
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def assert_exact_at_every_cut(model: nn.Module, *, opened: Any = None, sizes: Sequence[int] = (BATCH, 7)) -> Chain:
    """Cuts at each legal site alone, and at all of them at once."""
    chain = chain_of(model, batch(), opened=opened)
    legal = [site.position for site in chain.sites[:-1] if site.obstacle is None]
    assert legal
    for cuts in [*((position,) for position in legal), tuple(legal)]:
        for size in sizes:
            assert_stages_equal_whole(Assignment(chain=chain, cuts=cuts), batch(size))
    return chain


def legal_after(chain: Chain, name: str) -> bool:
    return any(unit.nodes[0].name == name and chain.sites[i].obstacle is None for i, unit in enumerate(chain.units))


def position_of(chain: Chain, name: str) -> int:
    return next(i for i, unit in enumerate(chain.units) if unit.nodes[0].name == name)


class Counter(nn.Module):
    """Its result depends on how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x * self.calls


class Double(torch.autograd.Function):
    """With a gradient that autograd would not find."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        return x * factor, x.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * -7, None
