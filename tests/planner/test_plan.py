"""The plan as data: lookups, JSON and back, the fit check, and the table that ``print(plan)`` shows."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fxpipe.errors import PartitionError
from lightning_fxpipe.planner.plan import SCHEMA_VERSION, BoundaryTensor, PartitionPlan, RecomputedTensor, StageSpec, run_words
from lightning_fxpipe.simulation.costs import StageWork


def boundary(name: str, **changes: Any) -> BoundaryTensor:
    values: dict[str, Any] = {
        "name": name,
        "module": "body.0",
        "shape": (8, 16),
        "dtype": "float32",
        "requires_grad": True,
        "producer_stage": 0,
        "consumer_stages": (1,),
        "num_bytes": 512,
    }
    return BoundaryTensor(**(values | changes))


# Three stages: `skip` goes from stage 0 to 2 past stage 1; `tied.weight` lives in the first and the last.
PLAN = PartitionPlan(
    region="model",
    stages=(
        StageSpec(
            index=0,
            first_module="model.embed",
            last_module="model.body.0",
            fqns=("tied.weight", "body.0.weight"),
            num_parameters=500,
            outputs=(boundary("skip", consumer_stages=(2,), receiver_stage=2), boundary("hidden", num_bytes=1024)),
        ),
        StageSpec(
            index=1,
            first_module="model.body.1",
            last_module="model.body.1",
            fqns=("body.1.weight", "body.1.mean"),
            num_parameters=300,
            outputs=(boundary("next", producer_stage=1, consumer_stages=(2,), receiver_stage=2),),
        ),
        StageSpec(
            index=2,
            first_module="",
            last_module="model.head",
            fqns=("tied.weight", "head.bias"),
            num_parameters=200,
            outputs=(),
        ),
    ),
    microbatch_size=8,
    parameter_shapes={"tied.weight": (20, 20), "body.0.weight": (10, 10), "body.1.weight": (10, 30), "head.bias": (200,)},
    outside_fqns=("criterion.temperature",),
    prelude_fqns=("frozen.weight",),
    opened=("model.body",),
    kept_whole={"model.gate": "it looks at values"},
    recomputed=(RecomputedTensor(name="mask", module="model.mask", stages=(1, 2), num_bytes=64),),
)


def test_totals_are_sums_over_the_stages() -> None:
    assert PLAN.num_stages == 3
    assert PLAN.num_parameters == 1000
    assert [stage.output_bytes for stage in PLAN.stages] == [1536, 512, 0]
    assert [stage.skipping_bytes for stage in PLAN.stages] == [512, 0, 0]  # past stage 1


@pytest.mark.parametrize(
    ("fqn", "stages"),
    [
        ("body.0.weight", (0,)),
        ("body.1.mean", (1,)),
        ("tied.weight", (0, 2)),
        ("criterion.temperature", (2,)),  # used after the region, so with the last stage
        ("frozen.weight", ()),  # used before the region, so on every rank
        ("unheard.of", ()),
    ],
)
def test_stages_that_hold_a_tensor(fqn: str, stages: tuple[int, ...]) -> None:
    assert PLAN.stages_of(fqn) == stages


def test_plan_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PLAN.region = "other"  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        PLAN.stages[0].index = 3  # type: ignore[misc]


# ---------------------------------------------------------------------------------------------------------------- JSON


def test_saved_plan_loads_equal(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    assert PartitionPlan.load(tmp_path / "plan.json") == PLAN
    assert PartitionPlan.load(str(tmp_path / "plan.json")) == PLAN


names = st.text(max_size=8)
shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
some_boundaries = st.builds(
    BoundaryTensor,
    name=names,
    module=names,
    shape=shapes,
    dtype=st.sampled_from(["float32", "int64"]),
    requires_grad=st.booleans(),
    producer_stage=st.integers(0, 3),
    consumer_stages=st.lists(st.integers(0, 3), max_size=3).map(tuple),
    num_bytes=st.integers(0, 2**60),
)
some_stages = st.builds(
    StageSpec,
    index=st.integers(0, 3),
    first_module=names,
    last_module=names,
    fqns=st.lists(names, max_size=3).map(tuple),
    num_parameters=st.integers(0, 2**60),
    outputs=st.lists(some_boundaries, max_size=2).map(tuple),
)
shares = st.floats(0, 9)
some_work = st.builds(
    StageWork, forward=shares, input_backward=shares, weight_backward=shares, kept_bytes=st.integers(0, 2**60)
)
some_plans = st.builds(
    PartitionPlan,
    region=names,
    stages=st.tuples(
        *(some_stages.map(lambda stage, index=index: dataclasses.replace(stage, index=index)) for index in range(4))
    ),
    microbatch_size=st.integers(1, 99),
    parameter_shapes=st.dictionaries(names, shapes, max_size=3),
    outside_fqns=st.lists(names, max_size=2).map(tuple),
    prelude_fqns=st.lists(names, max_size=2).map(tuple),
    opened=st.lists(names, max_size=2).map(tuple),
    kept_whole=st.dictionaries(names, names, max_size=2),
    recomputed=st.lists(
        st.builds(
            RecomputedTensor,
            name=names,
            module=names,
            stages=st.lists(st.integers(0, 3), max_size=3).map(tuple),
            num_bytes=st.integers(0, 2**60),
        ),
        max_size=2,
    ).map(tuple),
    stage_work=st.one_of(st.just(()), st.lists(some_work, min_size=4, max_size=4).map(tuple)),
)


@given(some_plans)
@settings(max_examples=100, deadline=None)
def test_any_plan_survives_json(plan: PartitionPlan) -> None:
    assert PartitionPlan.from_dict(json.loads(json.dumps(dataclasses.asdict(plan)))) == plan


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PartitionError, match=r"No such file: .*absent\.json"):
        PartitionPlan.load(tmp_path / "absent.json")


@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe\x00"])
def test_file_that_is_not_json_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(PartitionError, match="Cannot read the partition plan") as caught:
        PartitionPlan.load(path)
    assert caught.value.where == str(path)


@pytest.mark.parametrize("content", ["[]", "3", "null", "{}", '{"schema_version": 99}'])
def test_json_of_another_layout_is_refused_with_both_versions(tmp_path: Path, content: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(content)
    with pytest.raises(PartitionError, match="This version cannot read the file as a partition plan") as caught:
        PartitionPlan.load(path)
    version = 99 if "99" in content else None
    assert caught.value.observed == f"schema_version {version}"
    assert caught.value.expected == f"schema_version {SCHEMA_VERSION}"


_OPTIONAL = ("schema_version", "outside_reason", "joint_reason", "alternatives", "checkpointed_modules", "stage_work")


@pytest.mark.parametrize("key", [field.name for field in dataclasses.fields(PartitionPlan) if field.name not in _OPTIONAL])
def test_plan_without_one_of_its_parts_is_damaged(key: str) -> None:
    data = dataclasses.asdict(PLAN)
    del data[key]
    with pytest.raises(PartitionError, match="The partition plan is damaged"):
        PartitionPlan.from_dict(data)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("stages", 3), ("stages", [{}]), ("stages", [None]), ("stages", []), ("parameter_shapes", []), ("opened", None)),
        *(("recomputed", [3]), ("microbatch_size", -2), ("microbatch_size", "2"), ("microbatch_size", True), ("region", 3)),
        *(("parameter_shapes", {"a": [-1]}), ("parameter_shapes", {"a": ["1"]}), ("without_batch", [1]), ("batch_dim", 0.5)),
    ],
)
def test_plan_with_a_part_of_another_kind_is_damaged(key: str, value: object) -> None:
    with pytest.raises(PartitionError, match="The partition plan is damaged"):
        PartitionPlan.from_dict(dataclasses.asdict(PLAN) | {key: value})


WORK: dict[str, Any] = {"forward": 0.3, "input_backward": 0.3, "weight_backward": 0.4, "kept_bytes": 8}


@pytest.mark.parametrize(
    "work",
    [[WORK] * 2, [WORK, WORK, {**WORK, "forward": -0.5}], [WORK, WORK, {**WORK, "forward": float("nan")}], [WORK, WORK, {}]]
    + [[WORK, WORK, {**WORK, "forward": "0.3"}], [WORK, WORK, {**WORK, "kept_bytes": 0.5}], 3],
)
def test_plan_with_impossible_work_of_its_stages_is_damaged(work: object) -> None:
    data = dataclasses.asdict(PLAN)
    assert PartitionPlan.from_dict(data | {"stage_work": [WORK] * 3}).stage_work == (StageWork(**WORK),) * 3
    with pytest.raises(PartitionError, match="The partition plan is damaged"):
        PartitionPlan.from_dict(data | {"stage_work": work})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("index", 1), ("num_parameters", -1), ("num_parameters", 1.5), ("fqns", [None])),
        *(
            ("outputs.num_bytes", -8),
            ("outputs.shape", [-1]),
            ("outputs.producer_stage", 99),
            ("outputs.consumer_stages", [99]),
        ),
        *(("outputs.requires_grad", "yes"), ("outputs.dtype", 3)),
    ],
)
def test_plan_with_an_impossible_stage_is_damaged(key: str, value: object) -> None:
    data = dataclasses.asdict(PLAN)
    owner, _, name = key.rpartition(".")
    changed = data["stages"][0]["outputs"][0] if owner else data["stages"][0]
    assert name in changed
    changed[name] = value
    with pytest.raises(PartitionError, match="damaged") as caught:
        PartitionPlan.from_dict(data)
    assert str(value).strip("[]") in str(caught.value)


# ----------------------------------------------------------------------------------------------------------- check_fits


def test_fits_the_model_it_was_made_for() -> None:
    PLAN.check_fits(dict(PLAN.parameter_shapes))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"head.bias": (1,)}, "head.bias: plan (200,), model (1,)"),
        ({"new.weight": (2, 3)}, "new.weight: plan absent, model (2, 3)"),
        ({"body.0.weight": None}, "body.0.weight: plan (10, 10), model absent"),
    ],
)
def test_other_model_is_refused_and_the_difference_named(changes: dict[str, Any], named: str) -> None:
    shapes = {fqn: shape for fqn, shape in {**PLAN.parameter_shapes, **changes}.items() if shape is not None}
    with pytest.raises(PartitionError, match="made for a different model") as caught:
        PLAN.check_fits(shapes)
    assert caught.value.observed == named


def test_many_differences_are_counted_not_listed() -> None:
    with pytest.raises(PartitionError) as caught:
        PLAN.check_fits({**PLAN.parameter_shapes, **{f"layer{i}": (i,) for i in range(8)}})
    observed = caught.value.observed or ""
    assert observed.count("plan absent") == 5
    assert observed.endswith("; and 3 more")


# ---------------------------------------------------------------------------------------------------------------- table


def cells(line: str) -> list[str]:
    return [cell for cell in line.split("  ") if cell.strip()]


def test_table_has_a_row_for_every_stage_with_its_share() -> None:
    rows = [[cell.strip() for cell in cells(line)] for line in str(PLAN).splitlines()[3:6]]
    assert rows == [
        ["0", "model.embed to model.body.0", "500", "50.0 %", "1.5 KiB"],
        ["1", "model.body.1", "300", "30.0 %", "512 B"],
        ["2", "(root) to model.head", "600", "60.0 %", "-"],  # its copy of what stage 0 holds, too, included
    ]


def test_caption_says_what_the_stages_do_not() -> None:
    text = " ".join(str(PLAN).split())
    assert text.startswith("Pipeline of model ")
    assert "1 K parameters in 3 stages; bytes are for one microbatch of 8 samples" in text
    assert "Shared by stages, counted in each: tied.weight (400) in 0 and 2" in text
    assert "Included in these sizes, sent past stages that do not use it: 512 B from stage 0 to 2 (1 tensor)" in text
    assert "Recomputed in each stage that uses them instead of sent: values of model.mask" in text
    assert "Split modules: model.body" in text
    assert "Not split: model.gate (it looks at values)" in text
    assert "Outside the pipeline, on the last stage (rank 0): criterion (" in text
    assert " % of the model): the step uses them after the pipelined calls or not at all" in text
    assert "Before the pipeline, replicated on every rank: frozen (" in text


def test_caption_says_why_a_part_is_outside() -> None:
    plan = dataclasses.replace(PLAN, outside_reason="step.py:7 cannot run on tensors without data (ValueError: x)")
    assert "% of the model): step.py:7 cannot run on tensors without data (ValueError: x)" in " ".join(str(plan).split())
    assert PartitionPlan.from_dict(dataclasses.asdict(plan)) == plan


def test_modules_that_are_all_outside_are_named_not_their_parameters() -> None:
    shapes = {**PLAN.parameter_shapes, **{f"vae.decoder.{i}.weight": (4, 2) for i in range(9)}, "vae.mean": (3,)}
    outside = tuple(fqn for fqn in shapes if fqn.startswith("vae"))
    text = " ".join(str(dataclasses.replace(PLAN, parameter_shapes=shapes, outside_fqns=outside)).split())
    assert "(rank 0): vae (75 parameters" in text
    shapes["vae.encoder.weight"] = (5,)
    text = " ".join(str(dataclasses.replace(PLAN, parameter_shapes=shapes, outside_fqns=outside)).split())
    assert "(rank 0): vae.decoder, vae.mean (75 parameters" in text


@pytest.mark.parametrize("num_stages", [1, 2, 16])
def test_a_plan_of_long_names_fits_the_narrowest_terminal_and_loses_nothing(num_stages: int) -> None:
    paths = [f"model.transformer.h.{i}.attn.rotary_embedding.original_projection.c_proj" for i in range(num_stages)]
    stages = tuple(
        dataclasses.replace(PLAN.stages[-1], index=i, first_module=path, last_module=f"model.transformer.h.{i}.mlp.c_proj")
        for i, path in enumerate(paths)
    )
    text = str(dataclasses.replace(PLAN, stages=stages, opened=tuple(paths)))
    table = text[: text.index(" parameters in ")].splitlines()[:-1]
    assert max(map(len, table)) <= 80
    names = [line.split()[1] if "%" in line else line.split()[0] for line in table[3:]]
    for stage in stages:
        assert stage.first_module in "".join(names)
        assert stage.last_module in "".join(names)
    assert f" in {num_stages} stage{'s' * (num_stages > 1)};" in text


def test_caption_shortens_long_lists_of_parameters() -> None:
    plan = dataclasses.replace(PLAN, outside_fqns=tuple(f"p{i}" for i in range(9)))
    assert "(rank 0): p0, p1, p2, p3 and 5 more (" in " ".join(str(plan).split())


def test_caption_leaves_out_what_there_is_not() -> None:
    plan = dataclasses.replace(PLAN, region="", opened=(), kept_whole={}, recomputed=(), outside_fqns=(), prelude_fqns=())
    text = str(plan)
    assert text.startswith("Pipeline of the module\n")
    for absent in ("Split modules", "Not split", "Recomputed in each", "Outside", "Before the"):
        assert absent not in text


def test_plan_of_a_module_without_parameters_prints() -> None:
    stages = tuple(dataclasses.replace(stage, num_parameters=0) for stage in PLAN.stages)
    assert str(dataclasses.replace(PLAN, stages=stages)).split("parameters in")[0].count("0.0 %") == 3


def test_plan_of_before_skips_is_read(tmp_path: Path) -> None:
    """What each stage sent, it sent to the next one."""
    path = tmp_path / "plan.json"
    PLAN.save(path)
    data = json.loads(path.read_text())
    for stage in data["stages"]:
        for tensor in stage["outputs"]:
            del tensor["receiver_stage"]
    path.write_text(json.dumps(data))
    found = PartitionPlan.load(path)
    assert [[tensor.receiver_stage for tensor in stage.outputs] for stage in found.stages] == [[None, None], [None], []]
    assert [stage.skipping_bytes for stage in found.stages] == [0, 0, 0]
    assert "sent past stages" not in str(found)


def plan_of(sizes: list[int]) -> PartitionPlan:
    shapes = {f"w{index}": (size,) for index, size in enumerate(sizes)}
    stages = [
        StageSpec(index=index, first_module="a", last_module="a", fqns=(f"w{index}",), num_parameters=size, outputs=())
        for index, size in enumerate(sizes)
    ]
    return PartitionPlan(region="m", stages=tuple(stages), microbatch_size=2, parameter_shapes=shapes)


def test_stages_without_parameters_or_with_most_of_them_are_warned_of() -> None:
    assert "Warning" not in str(plan_of([3, 4, 2, 3]))
    text = " ".join(str(plan_of([30, 0, 2, 0])).split())
    assert "Warning: stages without parameters: 1, 3. Use fewer stages" in text
    assert "Warning: far more parameters than the mean, so other stages may wait: stage 0 (3.8 times)" in text


def test_a_run_is_described_by_schedule_microbatches_and_ranks() -> None:
    plan = plan_of([1, 1, 1, 1])
    assert run_words(plan, "1f1b", 1, [(3,), (2,), (1,), (0,)]) == (
        "Schedule 1f1b, 1 microbatch of 2 samples; rank 0: stage 3, rank 1: stage 2,\n  rank 2: stage 1, rank 3: stage 0"
    )
    assert "microbatches of 2 samples; rank 0: stages 0 and 3," in run_words(plan, "v_half", None, [(0, 3), (1, 2)])
