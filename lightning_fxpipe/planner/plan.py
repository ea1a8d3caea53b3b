"""The partition plan: which stage holds what, as frozen data that can be printed, saved as JSON and used again.

A plan speaks of module paths and parameter FQNs only, never of graph nodes: the training graph, the evaluation graph and the
graph of another batch shape differ in their nodes, yet all must agree on where each parameter lives.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from lightning_fxpipe.errors import PartitionError
from lightning_fxpipe.planner.alternatives import Alternative, alternatives_table
from lightning_fxpipe.reporting.table import WIDTH, human_bytes, human_count, render_table
from lightning_fxpipe.simulation.costs import StageWork

_MAKE_AGAIN = "Pass the path of a plan, or create one with `fxpipe plan`."
SCHEMA_VERSION = 4
# A stage with so many times the mean of the parameters is heavy.
_HEAVY = 2
_UNBROKEN = "\N{NO-BREAK SPACE}"


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundaryTensor:
    """A tensor that one stage sends to another.

    Attributes:
        name: Name of the graph node that produced it.
        module: Path of the module that produced it.
        shape: Its shape for the example microbatch.
        dtype: For instance ``"float32"``.
        requires_grad: Whether a gradient of the same size comes back in training.
        producer_stage: Stage that computed it.
        consumer_stages: Stages that use it.
        num_bytes: Bytes of one microbatch.
        receiver_stage: Stage that it is sent to, past those that do not use it; None, in plans that do not say so, for the
            next one.
    """

    name: str
    module: str
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    producer_stage: int
    consumer_stages: tuple[int, ...]
    num_bytes: int
    receiver_stage: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RecomputedTensor:
    """A value that follows from the inputs cheaply, such as a mask: each stage that uses it computes it, and none sends it.

    Attributes:
        name: Name of the graph node that produces it.
        module: Path of the module that produces it.
        stages: Stages that use it.
        num_bytes: Bytes of one microbatch.
    """

    name: str
    module: str
    stages: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSpec:
    """One stage of a plan.

    Attributes:
        index: Position in the pipeline, 0 is the first.
        first_module: Path of the first module that it calls; if it calls none, of the module whose code it runs.
        last_module: Path of the last module that it calls, likewise.
        fqns: Parameters and buffers that the stage uses; a shared parameter is listed by every stage that holds a copy.
        num_parameters: Parameters counted for this stage; a shared one counts in the first stage that uses it.
        outputs: Tensors that it sends to later stages.
    """

    index: int
    first_module: str
    last_module: str
    fqns: tuple[str, ...]
    num_parameters: int
    outputs: tuple[BoundaryTensor, ...]

    @property
    def output_bytes(self) -> int:
        """Bytes that leave the stage for each microbatch, forward."""
        return sum(tensor.num_bytes for tensor in self.outputs)

    @property
    def skipping_bytes(self) -> int:
        """Number of the bytes that are sent past the next stage, to one that uses them."""
        return sum(tensor.num_bytes for tensor in self.outputs if tensor.receiver_stage not in (None, self.index + 1))


@dataclass(frozen=True, kw_only=True)
class PartitionPlan:
    """A complete plan.

    Attributes:
        region: Path of the module whose call is pipelined (``""`` is the traced module itself).
        stages: In pipeline order.
        microbatch_size: Samples in the microbatch that the shapes and bytes of the boundaries are given for.
        parameter_shapes: Shape of every parameter of the module, by FQN; identifies the model.
        outside_fqns: Parameters that the step uses after the region, or not at all; they belong to the last stage.
        prelude_fqns: Parameters that the step uses before the region, without training them; every rank keeps them.
        opened: Modules that were opened so that a cut could fall inside.
        kept_whole: Modules that could not be opened, with the reason.
        recomputed: What would cross a cut if each stage that uses it did not compute it for itself.
        batch_dim: Dimension of the batch's tensors along which it is cut into microbatches.
        without_batch: Tensors in the batch that have none, and go whole to each microbatch.
        outside_reason: Why parameters are outside, if not because the step uses them after the region or not at all.
        joint_reason: Why every rank runs the whole training step, with each of the planned calls a pipeline of its own; empty
            where they are one.
        checkpointed_modules: Modules whose activations are recomputed in the backward pass instead of being stored.
        alternatives: Where the plan was chosen, schedules and numbers of microbatches, with what each would cost; the chosen
            one first.
        stage_work: What the stages take beside each other, where the order of a schedule is made from it; else empty.
        schema_version: Version of the JSON layout.
    """

    region: str
    stages: tuple[StageSpec, ...]
    microbatch_size: int
    parameter_shapes: Mapping[str, tuple[int, ...]]
    outside_fqns: tuple[str, ...] = ()
    prelude_fqns: tuple[str, ...] = ()
    opened: tuple[str, ...] = ()
    kept_whole: Mapping[str, str] = field(default_factory=dict)
    recomputed: tuple[RecomputedTensor, ...] = ()
    batch_dim: int = 0
    without_batch: tuple[str, ...] = ()
    outside_reason: str = ""
    joint_reason: str = ""
    checkpointed_modules: tuple[str, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    stage_work: tuple[StageWork, ...] = ()
    schema_version: int = SCHEMA_VERSION

    @property
    def chosen(self) -> Alternative | None:
        """The schedule and the microbatches that it was chosen for; None where the plan is for any."""
        return self.alternatives[0] if self.alternatives else None

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.stages)

    @property
    def num_parameters(self) -> int:
        """Parameters of all stages, shared ones counted once."""
        return sum(stage.num_parameters for stage in self.stages)

    @property
    def regions(self) -> tuple[str, ...]:
        """Paths of the modules whose calls are pipelined: several where every rank runs the step."""
        return tuple(self.region.split(", "))

    def num_held(self, stage: int) -> int:
        """Parameters that a stage holds, those included that others hold, too."""
        shapes = self.parameter_shapes
        return sum(math.prod(shapes[fqn]) for fqn in {*self.stages[stage].fqns} & shapes.keys())

    def stages_of(self, fqn: str) -> tuple[int, ...]:
        """Indices of the stages that hold the parameter or buffer ``fqn``, in order; empty where every rank does."""
        return self._holders.get(fqn, ())

    @cached_property
    def _holders(self) -> dict[str, tuple[int, ...]]:
        found = dict.fromkeys(self.outside_fqns, (self.num_stages - 1,))
        by_stage: dict[str, tuple[int, ...]] = {}
        for stage in self.stages:
            for fqn in dict.fromkeys(stage.fqns):
                by_stage[fqn] = (*by_stage.get(fqn, ()), stage.index)
        return found | by_stage

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> PartitionPlan:
        """Reads a plan written by :meth:`save`.

        Raises:
            PartitionError: The file is not a plan, or has a layout that this version does not know.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise PartitionError(f"No such file: {path}", todo=_MAKE_AGAIN) from None
        except (OSError, ValueError, RecursionError) as error:
            raise PartitionError(
                "Cannot read the partition plan.", where=str(path), observed=str(error), todo=_MAKE_AGAIN
            ) from error
        return cls.from_dict(data, where=str(path))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, where: str = "plan") -> PartitionPlan:
        """Inverse of ``dataclasses.asdict``. Raises :class:`PartitionError` as :meth:`load` does."""
        version = data.get("schema_version") if isinstance(data, Mapping) else None
        if version != SCHEMA_VERSION:
            raise PartitionError(
                "This version cannot read the file as a partition plan.",
                where=where,
                observed=f"schema_version {version}",
                expected=f"schema_version {SCHEMA_VERSION}",
                todo=_MAKE_AGAIN,
            )
        try:
            plan = cls(
                region=data["region"],
                stages=tuple(_stage_from_dict(stage) for stage in data["stages"]),
                microbatch_size=data["microbatch_size"],
                parameter_shapes={fqn: tuple(shape) for fqn, shape in data["parameter_shapes"].items()},
                outside_fqns=tuple(data["outside_fqns"]),
                prelude_fqns=tuple(data["prelude_fqns"]),
                opened=tuple(data["opened"]),
                kept_whole=dict(data["kept_whole"]),
                recomputed=tuple(RecomputedTensor(**{**of, "stages": tuple(of["stages"])}) for of in data["recomputed"]),
                batch_dim=data["batch_dim"],
                without_batch=tuple(data["without_batch"]),
                outside_reason=data.get("outside_reason", ""),
                joint_reason=data.get("joint_reason", ""),
                checkpointed_modules=tuple(data.get("checkpointed_modules", ())),
                alternatives=tuple(Alternative(**of) for of in data.get("alternatives", ())),
                stage_work=tuple(StageWork(**of) for of in data.get("stage_work", ())),
            )
            complaint = next(_complaints(plan), None)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise _damaged(where, repr(error)) from error
        if complaint is not None:
            raise _damaged(where, complaint)
        return plan

    def check_fits(self, parameter_shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises :class:`PartitionError` unless the plan was made for a model with these parameters."""
        differing = [
            f"{fqn}: plan {self.parameter_shapes.get(fqn, 'absent')}, model {parameter_shapes.get(fqn, 'absent')}"
            for fqn in sorted({*self.parameter_shapes, *parameter_shapes})
            if self.parameter_shapes.get(fqn) != parameter_shapes.get(fqn)
        ]
        if differing:
            raise PartitionError(
                "The plan was made for a different model.",
                observed="; ".join(differing[:5]) + (f"; and {len(differing) - 5} more" if len(differing) > 5 else ""),
                expected="parameters with the same names and shapes",
                todo="Make the plan again for this model, with `make_plan` or `fxpipe plan`.",
            )

    def __str__(self) -> str:
        table = _plan_table(self)
        return f"{table}\n\n{alternatives_table(self.alternatives)}" if self.alternatives else table


def _complaints(plan: PartitionPlan) -> Iterator[str]:
    """Yields contents that no planner writes: a file may have been changed, by hand or by chance."""
    outputs = [tensor for stage in plan.stages for tensor in stage.outputs]
    parts: list[PartitionPlan | StageSpec | BoundaryTensor | RecomputedTensor | Alternative | StageWork] = [
        plan,
        *plan.recomputed,
        *plan.alternatives,
        *plan.stage_work,
        *plan.stages,
        *outputs,
    ]
    for part in parts:
        for field_ in fields(part):
            value = getattr(part, field_.name)
            kind, is_several = _KINDS.get(str(field_.type), (None, False))
            for entry in value if is_several else (value,):
                if entry is None and str(field_.type).endswith("| None"):
                    continue
                if kind is not None and (type(entry) is not kind or (isinstance(entry, int) and entry < 0)):
                    yield f"{field_.name}: {value}"
    for name, shape in plan.parameter_shapes.items():
        if any(type(size) is not int or size < 0 for size in shape):
            yield f"parameter_shapes: {name} {shape}"
    if not plan.stages or [stage.index for stage in plan.stages] != [*range(plan.num_stages)]:
        yield f"stages: {[stage.index for stage in plan.stages]}"
    if len(plan.stage_work) not in (0, plan.num_stages) or not all(each.is_possible for each in plan.stage_work):
        yield f"stage_work: {plan.stage_work}"
    uses = [(tensor.name, (tensor.producer_stage, *tensor.consumer_stages, tensor.receiver_stage or 0)) for tensor in outputs]
    for name, stages in (*uses, *((tensor.name, tensor.stages) for tensor in plan.recomputed)):
        if any(stage >= plan.num_stages for stage in stages):
            yield f"stages of {name}: {stages}"


# By its annotation: the type of a field's value, or of its entries.
_KINDS: dict[str, tuple[type | None, bool]] = {
    "str": (str, False),
    "int": (int, False),
    "int | None": (int, False),
    "bool": (bool, False),
    "float": (float, False),
    "tuple[int, ...]": (int, True),
    "tuple[str, ...]": (str, True),
}


def _damaged(where: str, observed: str) -> PartitionError:
    return PartitionError(
        "The partition plan is damaged.",
        where=where,
        observed=observed,
        todo=_MAKE_AGAIN,
    )


def _stage_from_dict(data: Mapping[str, Any]) -> StageSpec:
    outputs = tuple(
        BoundaryTensor(**{**out, "shape": tuple(out["shape"]), "consumer_stages": tuple(out["consumer_stages"])})
        for out in data["outputs"]
    )
    return StageSpec(**{**data, "fqns": tuple(data["fqns"]), "outputs": outputs})


def _shorten(names: Sequence[str], shown: int = 4) -> str:
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


def _num(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _parts(fqns: Collection[str], others: Collection[str]) -> list[str]:
    """The modules that have all of their parameters among ``fqns``, and the parameters of which that cannot be said."""
    parts: dict[str, None] = {}
    for fqn in fqns:
        steps = fqn.split(".")
        paths = [".".join(steps[:end]) for end in range(1, len(steps))]
        parts[next((path for path in paths if not any(other.startswith(f"{path}.") for other in others)), fqn)] = None
    return list(parts)


def _plan_table(plan: PartitionPlan) -> str:
    """The table shown before the first step and by ``print(plan)``."""
    total = max(plan.num_parameters, 1)
    rows = []
    for stage in plan.stages:
        first, last = stage.first_module or "(root)", stage.last_module or "(root)"
        rows.append(
            (
                str(stage.index),
                first if first == last else f"{first} to {last}",
                human_count(held := plan.num_held(stage.index)),
                f"{100 * held / total:.1f} %",
                human_bytes(stage.output_bytes) if stage.outputs else "-",
            )
        )
    return render_table(
        f"Pipeline of {plan.region or 'the module'}",
        ("Stage", "Modules", "Parameters", "Share", "Sends"),
        rows,
        right_aligned=("Stage", "Parameters", "Share", "Sends"),
        caption="\n".join(_caption(plan)),
    )


def _caption(plan: PartitionPlan) -> Iterator[str]:
    """Yields the facts that are not in the table's rows."""
    yield (
        f"{human_count(plan.num_parameters)} parameters in {_num(plan.num_stages, 'stage')}; bytes are for one "
        f"microbatch of {_num(plan.microbatch_size, 'sample')}"
    )
    if skips := _skips(plan):
        yield f"Included in these sizes, sent past stages that do not use it: {_shorten(skips)}"
    whole = f"; passed unsplit to each microbatch: {_shorten(plan.without_batch)}" if plan.without_batch else ""
    if plan.joint_reason:
        yield f"Every rank runs the whole step, and each of these calls is a separate pipeline. Reason: {plan.joint_reason}"
    if plan.batch_dim or whole:
        yield f"The batch is dimension {plan.batch_dim} of its tensors{whole}"
    yield from _uneven(plan)
    copies = [
        f"{fqn} ({human_count(math.prod(plan.parameter_shapes[fqn]))}) in {' and '.join(map(str, stages))}"
        for fqn in plan.parameter_shapes
        if len(stages := plan.stages_of(fqn)) > 1
    ]
    if copies:
        yield f"Shared by stages, counted in each: {_shorten(copies)}"
    if plan.checkpointed_modules:
        yield f"Activation checkpointing: {_shorten(plan.checkpointed_modules)}"
    if plan.opened:
        yield f"Split modules: {_shorten([path or '(root)' for path in plan.opened], shown=12)}"
    if plan.kept_whole:
        yield "Not split: " + _shorten([f"{path} ({reason})" for path, reason in plan.kept_whole.items()], shown=12)
    if plan.recomputed:
        modules = dict.fromkeys(tensor.module or "(root)" for tensor in plan.recomputed)
        yield f"Recomputed in each stage that uses them instead of sent: values of {_shorten(list(modules))}"
    staged = {fqn for stage in plan.stages for fqn in stage.fqns}
    why = plan.outside_reason or "the step uses them after the pipelined calls or not at all"
    for where, fqns, more in (
        ("Outside the pipeline, on the last stage (rank 0)", plan.outside_fqns, f": {why}"),
        ("Before the pipeline, replicated on every rank", plan.prelude_fqns, ""),
    ):
        if fqns:
            parts = _parts(fqns, {*plan.parameter_shapes} - {*fqns} | staged)
            yield f"{where}: {_shorten(parts)} ({_share(plan, fqns)}){more}"


def _uneven(plan: PartitionPlan) -> Iterator[str]:
    """Warnings of stages that hold nothing, or far more than the others."""
    held = [plan.num_held(stage.index) for stage in plan.stages]
    mean = sum(held) / len(held)
    if empty := [str(index) for index, count in enumerate(held) if not count and mean]:
        yield f"Warning: stages without parameters: {_shorten(empty, shown=12)}. Use fewer stages"
    if heavy := [f"stage {index} ({count / mean:.1f} times)" for index, count in enumerate(held) if count > _HEAVY * mean]:
        yield f"Warning: far more parameters than the mean, so other stages may wait: {_shorten(heavy)}"


def run_words(plan: PartitionPlan, schedule: str, num_microbatches: int | None, by_rank: Sequence[Sequence[int]]) -> str:
    """The lines below a plan that say how a run goes with it.

    Args:
        plan: The plan.
        schedule: Its name.
        num_microbatches: Of a batch; None if that is not known.
        by_rank: The stages of each rank of a pipeline.
    """
    count = {None: "microbatches", 1: "1 microbatch"}.get(num_microbatches, f"{num_microbatches} microbatches")
    held = [f"rank {rank}: {_stages(stages)}".replace(" ", _UNBROKEN) for rank, stages in enumerate(by_rank)]
    how = "" if plan.joint_reason else f"Schedule {schedule}, {count} of {_num(plan.microbatch_size, 'sample')}; "
    lines = textwrap.wrap(how + _shorten(held, shown=8), WIDTH, subsequent_indent="  ")
    return "\n".join(lines).replace(_UNBROKEN, " ")


def _stages(stages: Sequence[int]) -> str:
    return f"stage{'s'[: len(stages) > 1]} {' and '.join(map(str, stages))}"


def _skips(plan: PartitionPlan) -> list[str]:
    """Describes the values that are sent past stages, by sender and receiver."""
    found: dict[tuple[int, int], list[int]] = {}
    for stage in plan.stages:
        for out in stage.outputs:
            if out.receiver_stage not in (None, stage.index + 1):
                found.setdefault((stage.index, out.receiver_stage), []).append(out.num_bytes)
    return [
        f"{human_bytes(sum(sizes))} from stage {source} to {receiver} ({_num(len(sizes), 'tensor')})"
        for (source, receiver), sizes in found.items()
    ]


def _share(plan: PartitionPlan, fqns: Sequence[str]) -> str:
    sizes = {fqn: math.prod(shape) for fqn, shape in plan.parameter_shapes.items()}
    count = sum(sizes.get(fqn, 0) for fqn in fqns)
    return f"{human_count(count)} parameter{'s'[: count != 1]}, {100 * count / max(sum(sizes.values()), 1):.1f} % of the model"
