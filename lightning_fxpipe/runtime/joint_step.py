"""Steps that every rank runs from its first line to its last, with each call of the model a pipeline of its own.

Such a step may call the model as often as it likes, call backward and step its optimizers where it likes, and use what one call
gives for the next: GANs, several optimizers, rollouts. As the Python is the same on all ranks, and the results of the calls
are, too, all come to the same calls in the same order. What the step does to parameters each rank does to those that it has;
looks at others are answered as in a hook (``hooks.user_hooks``).

What it costs beside a step that is pipelined as one region: the calls' results go to every rank, and stages wait for each other
between the calls.
"""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from functools import partial
from typing import Any

import torch
import torch.distributed.distributed_c10d as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_fxpipe._compat.modes import function_mode_removed
from lightning_fxpipe._compat.torch import patched_attributes
from lightning_fxpipe.distributed.decisions import Decisions
from lightning_fxpipe.distributed.replica import Replica
from lightning_fxpipe.distributed.topology import Topology
from lightning_fxpipe.distributed.values import broadcast_tensor
from lightning_fxpipe.errors import FxPipeError, UnsupportedError
from lightning_fxpipe.hooks.user_hooks import Hooks
from lightning_fxpipe.microbatch.draws import BatchDraws
from lightning_fxpipe.microbatch.split import count_samples, default_num_microbatches
from lightning_fxpipe.planner.plan import PartitionPlan
from lightning_fxpipe.pytree.structure import describe
from lightning_fxpipe.recording.recorder import Recorder
from lightning_fxpipe.rng import rng_state, set_rng_state
from lightning_fxpipe.runtime.joint_pass import Backwards, JointPass
from lightning_fxpipe.runtime.pass_setup import PassSetups
from lightning_fxpipe.runtime.stage_changes import StageChanges
from lightning_fxpipe.runtime.stage_trace import StageTrace
from lightning_fxpipe.runtime.stage_traces import StageTraces
from lightning_fxpipe.stages.gradients import SharedParameters
from lightning_fxpipe.tracing.recordable import RegionCall
from lightning_fxpipe.tracing.trace_log import TraceLog
from lightning_fxpipe.user_code.calls import calls_through, classes_with_own_call
from lightning_fxpipe.user_code.frames import user_source
from lightning_fxpipe.user_code.step import Step


class JointSteps:
    """Runs them. Made by every rank of the pipeline.

    Args:
        root: The LightningModule, with this rank's stage on its device.
        plan: Where each parameter lives.
        topology: This rank's place.
        hooks: Shows user code the whole model.
        replica: What user code sees of the ranks.
        shared: Parameters of which several stages have a copy.
        num_microbatches: Microbatches of a call; None chooses by its number of samples.
        log: Gets each trace that is made.
        decisions: Has the ranks agree on making one.
        recorder: Notes what runs.
    """

    def __init__(
        self,
        root: Any,
        plan: PartitionPlan,
        topology: Topology,
        *,
        hooks: Hooks,
        replica: Replica,
        shared: SharedParameters,
        num_microbatches: int | None,
        log: TraceLog,
        decisions: Decisions,
        recorder: Recorder | None = None,
    ) -> None:
        self.root = root
        self.topology = topology
        self.batch_dim = plan.batch_dim
        self.num_microbatches = num_microbatches
        self.traces = StageTraces(root, plan, topology, log, decisions)
        self.setups = PassSetups(root, plan, topology, log, everywhere=True, recorder=recorder)
        self.backwards = Backwards(shared, hooks.meet)
        self.outside = hooks.outside
        self._hooks = hooks
        self._warn = log.warn
        self._replica = replica
        self._plan = plan
        self._fqns = {id(p): fqn for fqn, p in root.named_parameters(remove_duplicate=False) if plan.stages_of(fqn)}
        self.called = {
            id(module): path
            for path, module in reversed(list(root.named_modules()))
            if any(plan.stages_of(f"{path}.{name}" if path else name) for name, _ in module.named_parameters())
            if not _is_opened(path, plan.regions)
        }

    def instead_of_stages(self, reason: FxPipeError) -> JointSteps:
        """Says why every rank runs the training step from now on; returns itself."""
        facts = "; ".join(text for text in (reason.where, reason.observed) if text)
        self._warn(
            "The training_step makes other calls of the model than the plan was made for. Every rank runs it from now on, with "
            f"a separate pipeline for each call, so the stages do not overlap. Results are unchanged. Reason: {reason.what} "
            f"({facts})"
        )
        return self

    def run(self, step: Step, batch: Any) -> Any:
        """Runs a step; returns what it returns, on every rank. Called by every rank."""
        if self.topology.num_ranks == 1:
            with step.context():
                return step.function(batch, *step.rest)
        calls = _Calls(self, step)
        try:
            with self.user_code(), step.context(), calls_through(calls):
                return step.function(batch, *step.rest)
        finally:
            self.backwards.forget()

    @contextmanager
    def user_code(self) -> Iterator[None]:
        """The block is the step's, or called by it: it sees the whole model, and is one replica. Entered by every rank."""
        if self.topology.num_ranks == 1 or self._hooks.are_running:
            yield
            return
        # What the block prints is printed once.
        one_voice = nullcontext() if self.topology.is_last else redirect_stdout(io.StringIO())
        with self._hooks.running(self.root.trainer, "the step", is_joint=True), self._replica.computing(), one_voice:
            yield

    def staged_fqn(self, tensor: Tensor) -> str | None:
        """The name of a parameter in the stages; None for another tensor."""
        return self._fqns.get(id(tensor)) if isinstance(tensor, nn.Parameter) else None

    def spread_gradients(self, own: list[tuple[tuple[Tensor, str], Tensor | None]]) -> list[Tensor | None]:
        """Gives every rank the gradients of parameters that one rank has. Called by every rank.

        Args:
            own: Parameters, their names, and what this rank has found for them.
        """
        found: list[Tensor | None] = []
        for (parameter, fqn), gradient in own:
            source = self.topology.rank_of(self._plan.stages_of(fqn)[0])
            is_there = torch.tensor([float(gradient is not None)])
            dist.broadcast(is_there, src=source, group=self.topology.control_group)
            if not is_there:
                found.append(None)
                continue
            if gradient is None or dist.get_rank() != source:
                gradient = torch.empty(parameter.shape, dtype=parameter.dtype, device=self.topology.device)
            gradient = gradient.contiguous()
            broadcast_tensor(gradient, source, self.topology.group)
            found.append(gradient)
        return found


class _Calls(TorchFunctionMode):
    """Makes the calls of modules that have parameters in the stages, in one run of a step."""

    def __init__(self, steps: JointSteps, step: Step) -> None:
        super().__init__()
        self._steps = steps
        self._step = step
        self._count = 0
        self._is_inside = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.autograd.grad:
            return self._gradients(func, *args, **(kwargs or {}))
        if func is Tensor.backward and (inputs := (kwargs or {}).get("inputs")) is not None:
            for fqn in filter(None, map(self._steps.staged_fqn, [inputs] if isinstance(inputs, Tensor) else inputs)):
                raise _backward_to(fqn)
        return func(*args, **(kwargs or {}))

    def _gradients(self, grad: Callable[..., Any], outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """``torch.autograd.grad``, to which the parameters in the stages are no part of the graph."""
        asked = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        names = [self._steps.staged_fqn(tensor) for tensor in asked]
        if not any(names):
            return grad(outputs, inputs, *args, **kwargs)
        arguments = inspect.signature(grad).bind(outputs, inputs, *args, **kwargs).arguments
        allows_unused = bool(arguments.get("allow_unused"))
        others = [tensor for tensor, fqn in zip(asked, names, strict=True) if fqn is None]
        parameters = [(tensor, fqn) for tensor, fqn in zip(asked, names, strict=True) if fqn is not None]
        here = [parameter for parameter, _ in parameters if not parameter.is_meta]
        backwards, found = self._steps.backwards, iter(())

        def run() -> None:
            nonlocal found
            ends = [*others, *here, *backwards.anchors]
            gradients = grad(**{**arguments, "inputs": ends, "allow_unused": True})
            found = iter(gradients)
            # Those that the step uses by itself; what flows through the stages is in `.grad`.
            for parameter, gradient in zip(here, gradients[len(others) :], strict=False):
                if gradient is not None:
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

        own = backwards.gradients_of([tensor for tensor, _ in parameters if isinstance(tensor, nn.Parameter)], run)
        staged = iter(self._steps.outside(self._steps.spread_gradients)(list(zip(parameters, own, strict=True))))
        result = tuple(next(found) if fqn is None else next(staged) for fqn in names)
        if not allows_unused and any(gradient is None for gradient in result):
            raise RuntimeError("One of the differentiated Tensors appears to not have been used in the graph.")
        return result

    def classes_with_own_call(self) -> set[type[nn.Module]]:
        """Classes of the modules, and their bases, that override ``nn.Module.__call__``."""
        return classes_with_own_call(self._steps.root.modules())

    def call_module(self, original_call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Makes the call; hooks on the module run on every rank."""
        path = None if self._is_inside else self._steps.called.get(id(module))
        if path is None:
            return original_call(module, *args, **kwargs)
        run = partial(self._forward, module, path, module.forward)
        with patched_attributes((module, "forward", run)):
            return original_call(module, *args, **kwargs)

    def _forward(self, module: nn.Module, path: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._is_inside:
            return forward(*args, **kwargs)
        self._is_inside = True
        try:
            with patched_attributes((module, "forward", forward)):
                return self._steps.outside(self._run)(path, args, kwargs)
        finally:
            self._is_inside = False

    def _run(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        steps = self._steps
        with function_mode_removed(self):
            # A call without a dimension of samples, such as one that draws noise itself, is one microbatch.
            count = count_samples((args, kwargs), None, steps.batch_dim).num_samples
            region = RegionCall(path=path, args=args, kwargs=kwargs, batch_size=count, batch_dim=steps.batch_dim)
            trace, shapes = steps.traces.find_call(self._step.kind, region)
            sizes = trace.traced.bind_sizes(shapes)
            inputs = trace.traced.input_tensors(args, kwargs)
            if sizes is None or inputs is None:
                raise _varying(path, args, kwargs)
            call = self._through_stages(trace, sizes, count, inputs)
            return trace.traced.result(call.results(), sizes)

    def _through_stages(self, trace: StageTrace, sizes: Any, num_samples: int, inputs: tuple[Tensor, ...]) -> JointPass:
        steps, training = self._steps, torch.is_grad_enabled()
        wanted = steps.num_microbatches or default_num_microbatches(num_samples, steps.topology.num_ranks)
        key = (*self._step.random_key, "call", self._count)
        self._count += 1
        before, values = rng_state(), trace.traced.values(sizes)
        while True:
            setup = steps.setups.get(trace, sizes, num_samples, wanted, training=training, before=lambda: None)
            draws = BatchDraws(num_samples, steps.batch_dim)
            is_cut = setup.num_microbatches > 1
            tries = None if steps.setups.is_proven(trace, setup) else StageChanges(steps.root)
            call = JointPass(
                setup=setup,
                inputs=inputs,
                drawn=[node.meta["draw"].make(draws, values) if is_cut else None for node in trace.traced.draw_nodes],
                topology=steps.topology,
                backwards=steps.backwards,
                random_key=key,
                training=training,
                tries=tries,
                aside=steps.outside,
            )
            call.run_stages()
            if tries is None or steps.setups.prove(trace, call.obstacle, tries.changed()):
                steps.setups.left.share()
                return call
            tries.restore()
            set_rng_state(before)


def _is_opened(path: str, planned: Collection[str]) -> bool:
    """Returns True if the code of a module is the step's, because it was planned by the calls inside."""
    return path not in planned and any(other.startswith(f"{path}." if path else "") for other in planned)


def _backward_to(fqn: str) -> UnsupportedError:
    return UnsupportedError(
        "The step calls backward for some parameters only.",
        where=user_source(),
        observed=f"backward(inputs=...) with {fqn}, which is in a stage",
        expected="backward for all trainable parameters, or torch.autograd.grad",
        todo="Disable the gradients of the other parameters with requires_grad_(False) before the model's call, or use "
        "toggle_optimizer.",
    )


def _varying(path: str, args: Any, kwargs: Any) -> UnsupportedError:
    return UnsupportedError(
        f"The call of {path or 'the module'} cannot be repeated with the same arguments.",
        observed=describe((args, kwargs)),
        expected="tensors, containers and plain values",
        todo="Pass the tensors as separate arguments.",
    )
