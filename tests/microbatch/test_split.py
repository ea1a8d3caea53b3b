"""Batches split into microbatches as ``torch.chunk`` does, and the results of microbatches put together again."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_fxpipe.errors import BatchError
from lightning_fxpipe.microbatch.split import (
    Pass,
    batch_size,
    count_samples,
    default_num_microbatches,
    first_microbatch,
    plan_passes,
    split_batch,
    without_single_samples,
)


class Pair(NamedTuple):
    image: Any
    label: Any


class Encoding(UserDict):  # type: ignore[type-arg]
    """As a tokenizer's: a mapping with an attribute and a constructor of its own."""

    def __init__(self, data: dict[str, Any], encodings: str, *, kind: str) -> None:
        super().__init__(data)
        self.encodings, self.kind = encodings, kind


@dataclass(frozen=True)
class Record:
    image: Any
    names: Any
    scale: InitVar[int] = 1
    derived: Any = field(init=False, default=None)

    def __post_init__(self, scale: int) -> None:
        object.__setattr__(self, "derived", self.image * scale)


def samples(count: int, *shape: int) -> Tensor:
    """Every element different, so that no two slices are equal by chance."""
    size = torch.Size((count, *shape)).numel()
    return torch.arange(size, dtype=torch.float32).reshape(count, *shape)


# --------------------------------------------------------------------------------------------------------------- passes


@given(st.integers(1, 300), st.integers(1, 40))
@settings(deadline=None)
def test_passes_are_the_chunks_of_torch(num_samples: int, num_microbatches: int) -> None:
    passes = plan_passes(num_samples, num_microbatches)
    sizes = [part.size for part in passes for _ in range(part.count)]
    chunks = [len(chunk) for chunk in torch.arange(num_samples).chunk(num_microbatches)]
    if chunks[-1] == 1 < chunks[0]:  # a batch norm would refuse a sample that is left over
        chunks[-2:] = [chunks[-2] + 1]
    assert sizes == chunks
    assert sum(sizes) == num_samples
    assert len(sizes) <= num_microbatches
    # The schedule receives into buffers of one shape: only the last microbatch may have another size, and then runs alone.
    assert 1 <= len(passes) <= 2
    assert all(part.count == 1 and part.size != passes[0].size for part in passes[1:])
    assert [part.first for part in passes] == [0, passes[0].count][: len(passes)]


def test_passes_of_an_even_and_of_an_uneven_batch() -> None:
    assert plan_passes(16, 4) == (Pass(first=0, count=4, size=4),)
    assert plan_passes(7, 4) == (Pass(first=0, count=2, size=2), Pass(first=2, count=1, size=3))
    assert plan_passes(8, 3) == (Pass(first=0, count=2, size=3), Pass(first=2, count=1, size=2))


def test_more_microbatches_than_samples_gives_one_sample_each() -> None:
    assert plan_passes(3, 8) == (Pass(first=0, count=3, size=1),)


@given(st.integers(1, 300), st.integers(1, 9))
@settings(deadline=None)
def test_default_fills_the_pipeline_wherever_the_batch_allows(num_samples: int, num_ranks: int) -> None:
    count = default_num_microbatches(num_samples, num_ranks)
    assert 1 <= count <= min(num_samples, 4 * num_ranks)
    passes = plan_passes(num_samples, count)
    assert sum(part.count for part in passes) >= min(num_samples // 2, num_ranks)
    assert min(part.size for part in passes) >= min(num_samples, 2)


@pytest.mark.parametrize(
    ("num_samples", "num_ranks", "expected"),
    [
        (64, 4, 16),  # four for each rank
        (60, 4, 15),  # 16 would leave a remainder
        (62, 4, 16),  # 2 divides, but leaves the pipeline empty: better a remainder
        (3, 4, 1),  # no two microbatches of two samples
        (8, 2, 4),  # not eight of one sample
        (7, 2, 4),  # two of two, and one of three
        (13, 2, 7),
        (14, 2, 7),
        (1, 4, 1),
        (8, 1, 1),  # a single rank never waits
    ],
)
def test_default_prefers_equal_microbatches_to_exactly_four_for_each_rank(
    num_samples: int, num_ranks: int, expected: int
) -> None:
    assert default_num_microbatches(num_samples, num_ranks) == expected


# ------------------------------------------------------------------------------------------------------------ splitting


@given(st.integers(1, 40), st.integers(1, 12))
@settings(deadline=None)
def test_the_parts_of_a_batch_together_are_the_batch(num_samples: int, num_microbatches: int) -> None:
    batch = {"x": samples(num_samples, 2, 3), "pair": (samples(num_samples), [samples(num_samples, 1).long()])}
    passes = plan_passes(num_samples, num_microbatches)
    parts = split_batch(batch, passes)
    assert torch.equal(torch.cat([part["x"] for part in parts]), batch["x"])
    assert torch.equal(torch.cat([part["pair"][0] for part in parts]), batch["pair"][0])
    assert torch.equal(torch.cat([part["pair"][1][0] for part in parts]), batch["pair"][1][0])
    assert parts[0]["pair"][1][0].dtype == torch.int64


def test_microbatches_are_views_of_the_batch() -> None:
    x = samples(5, 2)
    parts = split_batch(x, plan_passes(5, 2))
    assert [part.data_ptr() - x.data_ptr() for part in parts] == [0, 3 * 2 * 4]


def test_split_keeps_the_types_of_nested_containers() -> None:
    batch = {"pair": Pair(samples(4, 3), [samples(4), (samples(4, 2),)]), "ordered": OrderedDict(a=samples(4))}
    first, second = split_batch(batch, plan_passes(4, 2))
    assert type(first["pair"]) is Pair
    assert type(first["ordered"]) is OrderedDict
    assert torch.equal(first["pair"].image, batch["pair"].image[:2])
    assert torch.equal(second["pair"].label[0], batch["pair"].label[0][2:])
    assert torch.equal(second["pair"].label[1][0], batch["pair"].label[1][0][2:])
    assert torch.equal(second["ordered"]["a"], batch["ordered"]["a"][2:])


def test_what_has_no_batch_dimension_goes_to_every_microbatch_as_it_is() -> None:
    scale = torch.tensor(3.0)
    batch = {"x": samples(4), "scale": scale, "name": "train", "none": None, "count": 7, "flag": True}
    for part in split_batch(batch, plan_passes(4, 4)):
        assert part["scale"] is scale
        assert {key: part[key] for key in ("name", "none", "count", "flag")} == {
            "name": "train",
            "none": None,
            "count": 7,
            "flag": True,
        }


def test_mappings_and_dataclasses_are_split_like_dicts() -> None:
    encoding = Encoding({"ids": samples(4, 2), "text": "all"}, "fast", kind="bert")
    first, second = split_batch(
        {"encoding": encoding, "record": Record(samples(4), ["a", "b", "c", "d"], 3)}, plan_passes(4, 2)
    )
    assert type(second["encoding"]) is Encoding
    assert (second["encoding"].encodings, second["encoding"].kind, second["encoding"]["text"]) == ("fast", "bert", "all")
    assert torch.equal(second["encoding"]["ids"], samples(4, 2)[2:])
    assert torch.equal(encoding["ids"], samples(4, 2)), "the batch itself stays whole"
    assert type(first["record"]) is Record
    assert torch.equal(second["record"].derived, samples(4)[2:] * 3)
    assert (first["record"].names, second["record"].names) == (["a", "b"], ["c", "d"])
    assert batch_size(encoding) == batch_size(Record(samples(4), None)) == 4


def test_default_dict_keeps_its_default() -> None:
    batch = defaultdict(list, x=samples(4))
    assert split_batch(batch, plan_passes(4, 2))[1]["missing"] == []


words = st.lists(st.text(max_size=2), max_size=3)


@given(st.integers(1, 12), st.integers(1, 6), st.data())
@settings(deadline=None)
def test_an_entry_for_each_sample_stays_with_its_sample(num_samples: int, num_microbatches: int, data: st.DataObject) -> None:
    """Strings, numbers, None or lists of words: in a list, a tuple or an array as long as the batch."""
    kinds = st.one_of(st.text(max_size=3), st.integers(), st.none(), words)
    per_sample = data.draw(st.lists(kinds, min_size=num_samples, max_size=num_samples))
    batch = {"x": samples(num_samples), "list": per_sample, "tuple": tuple(per_sample), "array": np.arange(num_samples) * 2}
    passes = plan_passes(num_samples, num_microbatches)
    position = 0
    for part in split_batch(batch, passes):
        rows = [int(row) for row in part["x"]]
        assert rows == list(range(position, position + len(rows)))
        assert part["list"] == [per_sample[row] for row in rows]
        assert part["tuple"] == tuple(per_sample[row] for row in rows)
        assert part["array"].tolist() == [2 * row for row in rows]
        position += len(rows)
    assert position == num_samples


@given(st.integers(2, 9), st.integers(0, 12), st.integers(2, 4))
@settings(deadline=None)
def test_a_list_of_another_length_goes_to_every_microbatch(num_samples: int, length: int, num_microbatches: int) -> None:
    # (height, width) of all images, names of the classes.
    names, array = [str(index) for index in range(length)], np.arange(length)
    parts = split_batch({"x": samples(num_samples), "names": names, "array": array}, plan_passes(num_samples, num_microbatches))
    for part in parts:
        size = len(part["x"])
        assert len(part["names"]) == len(part["array"]) == (size if length == num_samples else length)


def test_fields_dimensions_and_lists_with_tensors_are_no_samples() -> None:
    batch = {"x": samples(2), "pair": Pair("image", "label"), "shape": torch.Size((5, 7)), "both": [samples(2), "name"]}
    first, second = split_batch(batch, plan_passes(2, 2))
    for part in (first, second):
        assert part["pair"] == Pair("image", "label")
        assert part["shape"] == (5, 7)
        assert part["both"][1] == "name"
    assert torch.equal(second["both"][0], samples(2)[1:])


def test_strings_collated_by_column_are_cut_inside_their_columns() -> None:
    # What the default collate makes of samples that are lists of two words.
    batch = {"x": samples(3), "words": [("a", "b", "c"), ("d", "e", "f")]}
    assert [part["words"] for part in split_batch(batch, plan_passes(3, 3))] == [
        [("a",), ("d",)],
        [("b",), ("e",)],
        [("c",), ("f",)],
    ]


class Opaque:
    def __init__(self) -> None:
        self.boxes = samples(4, 2)


def test_tensors_inside_an_object_of_any_type_are_split() -> None:
    batch = {"x": samples(4), "targets": Opaque()}
    first, second = split_batch(batch, plan_passes(4, 2))
    assert isinstance(first["targets"], Opaque)
    assert torch.equal(first["targets"].boxes, batch["targets"].boxes[:2])
    assert torch.equal(second["targets"].boxes, batch["targets"].boxes[2:])


def test_first_microbatch_is_the_first_of_the_split() -> None:
    batch = (samples(7, 2), samples(7))
    part, size = first_microbatch(batch, 4, 2)
    expected = split_batch(batch, plan_passes(7, 4))[0]
    assert size == 2
    assert torch.equal(part[0], expected[0])
    assert torch.equal(part[1], expected[1])


@pytest.mark.parametrize("batch", [samples(6), [samples(6, 2), torch.tensor(1.0)], {"a": {"b": (samples(6, 1),)}, "c": "text"}])
def test_batch_size_is_the_first_dimension(batch: Any) -> None:
    assert batch_size(batch) == 6


@pytest.mark.parametrize("batch", [{}, "text", [1, 2.0, None], {"scale": torch.tensor(1.0)}, object()])
def test_batch_without_a_batch_dimension_is_refused_by_its_type(batch: Any) -> None:
    with pytest.raises(BatchError, match="The batch cannot be split into microbatches") as caught:
        batch_size(batch)
    assert f"no tensor with a batch dimension in a batch of type {type(batch).__name__}" in str(caught.value)


def test_tensors_of_different_sizes_are_named() -> None:
    batch = {"x": samples(4, 2), "nested": [samples(4), samples(3)], "weights": samples(10)}
    with pytest.raises(BatchError) as caught:
        batch_size(batch)
    assert caught.value.observed == (
        "tensors with different batch sizes: batch['x']: 4, batch['nested'][0]: 4, batch['nested'][1]: 3, batch['weights']: 10"
    )


def test_two_sizes_are_one_too_many() -> None:
    with pytest.raises(BatchError, match="tensors with different batch sizes"):
        batch_size([samples(4, 2), samples(3)])


class Graph:
    """A graph, or several in one, as libraries for them make batches."""

    def __init__(self, num_nodes: int = 5, num_edges: int = 7, num_graphs: int = 3) -> None:
        self.x = samples(num_nodes, 2)
        self.edge_index = torch.zeros(2, num_edges, dtype=torch.long)
        self.y = samples(num_graphs)


class GraphTuple(NamedTuple):
    x: Tensor
    edge_index: Tensor


def boxes(*counts: int) -> list[dict[str, Tensor]]:
    """Targets of a detector: for each image so many boxes."""
    return [{"boxes": samples(count, 4) + 100 * i, "labels": samples(count).long()} for i, count in enumerate(counts)]


def images(*sizes: int) -> list[Tensor]:
    return [samples(3, size, size) + 100 * i for i, size in enumerate(sizes)]


UNCUTTABLE: dict[str, Any] = {
    "graph": Graph(),
    "graph in a dict": {"graph": Graph(), "label": samples(3)},
    "named tuple": GraphTuple(samples(5, 2), torch.zeros(2, 7, dtype=torch.long)),
    "images of different sizes": {"images": images(4, 5), "labels": samples(2)},
    "no tensor": {"a": 1, "b": ["x"]},
    "numbers alone": {"scale": torch.tensor(1.0)},
}


@pytest.mark.parametrize("name", UNCUTTABLE)
def test_any_batch_is_one_microbatch(name: str) -> None:
    batch = UNCUTTABLE[name]
    for num_microbatches in (1, None):
        counted = count_samples(batch, num_microbatches)
        assert counted.num_samples == 1
        assert (counted.reason is None) == (num_microbatches == 1)
        microbatch, size = first_microbatch(batch, num_microbatches, 2)
        assert microbatch is batch
        assert size == 1


@pytest.mark.parametrize("name", UNCUTTABLE)
def test_several_microbatches_of_what_cannot_be_split_are_refused(name: str) -> None:
    with pytest.raises(BatchError, match="The batch cannot be split into microbatches") as caught:
        count_samples(UNCUTTABLE[name], 2)
    assert "num_microbatches=1" in str(caught.value)


@pytest.mark.parametrize("num_microbatches", [None, 1, 4])
def test_a_batch_of_no_samples_is_one_microbatch(num_microbatches: int | None) -> None:
    batch = {"x": samples(0, 3), "y": samples(0)}
    counted = count_samples(batch, num_microbatches)
    assert (counted.num_samples, counted.reason) == (1, None)
    assert first_microbatch(batch, num_microbatches, 2) == (batch, 1)


@pytest.mark.parametrize("counts", [(2, 3, 1, 2), (4, 4, 4, 4), (0, 0, 0, 0)])
def test_a_list_with_a_dict_for_each_sample_is_cut_like_the_samples(counts: tuple[int, ...]) -> None:
    batch = {"images": samples(4, 3, 2, 2), "targets": boxes(*counts), "names": ["a", "b", "c", "d"]}
    assert batch_size(batch) == 4
    first, second = split_batch(batch, plan_passes(4, 2))
    assert torch.equal(first["images"], batch["images"][:2])
    assert (first["targets"], second["targets"]) == (batch["targets"][:2], batch["targets"][2:])
    assert (first["names"], second["names"]) == (["a", "b"], ["c", "d"])


def test_images_of_different_sizes_are_cut_beside_their_targets() -> None:
    batch = (images(4, 5, 6, 7), boxes(1, 2, 4, 2))
    assert batch_size(batch) == 4
    assert split_batch(batch, plan_passes(4, 2)) == [(batch[0][:2], batch[1][:2]), (batch[0][2:], batch[1][2:])]


def test_a_batch_may_be_a_list_with_a_dict_for_each_sample() -> None:
    batch = [{"image": image, **target} for image, target in zip(images(4, 5, 6, 7), boxes(1, 2, 4, 2), strict=True)]
    assert batch_size(batch) == 4
    assert split_batch(batch, plan_passes(4, 2)) == [batch[:2], batch[2:]]


def test_dicts_of_batches_are_no_samples() -> None:
    batch = [{"x": samples(8)}, {"x": samples(8)}]
    assert batch_size(batch) == 8
    assert [len(part[1]["x"]) for part in split_batch(batch, plan_passes(8, 2))] == [4, 4]


def test_targets_for_other_samples_than_the_batch_s_are_not_cut() -> None:
    with pytest.raises(BatchError, match="different batch size"):
        batch_size({"x": samples(8, 2), "targets": boxes(1, 2, 4)})


# -------------------------------------------------------------------------------------------------------------- merging


def test_labels_beside_sequences_are_cut_in_their_first_dimension() -> None:
    """With batch_dim=1, a tensor of one dimension has the batch first."""
    batch = {"x": torch.arange(24).reshape(3, 4, 2), "y": torch.arange(4)}
    assert batch_size(batch, 1) == 4
    parts = split_batch(batch, plan_passes(4, 2), 1)
    assert [part["y"].tolist() for part in parts] == [[0, 1], [2, 3]]
    assert [part["x"].shape for part in parts] == [(3, 2, 2)] * 2


@given(num_samples=st.integers(2, 40), count=st.integers(1, 12))
def test_no_microbatch_is_a_single_sample(num_samples: int, count: int) -> None:
    found = without_single_samples(num_samples, count)
    assert 1 <= found <= count
    assert all(part.size > 1 for part in plan_passes(num_samples, found))
