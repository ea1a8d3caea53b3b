"""In-place changes and aliases across cuts: stages equal the whole module bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fxpipe import UnsupportedError
from lightning_fxpipe.planner.assignment import Assignment
from lightning_fxpipe.stages.build import boundary_specs
from tests.staging import (
    WIDTH,
    Counter,
    Layers,
    assert_exact_at_every_cut,
    assert_stages_equal_whole,
    batch,
    chain_of,
    legal_after,
    make_rank,
)


def test_received_tensor_may_be_changed_in_place() -> None:
    chain = assert_exact_at_every_cut(Layers(lambda m, x: m.b(F.relu(m.a(x), inplace=True))))
    assert legal_after(chain, "a")


def test_received_tensor_changed_through_a_view() -> None:
    def run(m: Layers, x: Tensor) -> Tensor:
        h = m.a(x)
        h[:, 0] = 0
        h[:, 1:3].mul_(2)
        return m.b(h)

    chain = assert_exact_at_every_cut(Layers(run))
    assert legal_after(chain, "a")


def test_tensor_changed_in_place_is_relayed_with_its_new_value() -> None:
    def run(m: Layers, x: Tensor) -> Tensor:
        h = m.a(x)
        same = h.view(-1, WIDTH)
        other = m.b(x)
        h.add_(1)
        return m.d(m.c(other)) + h + same

    chain = assert_exact_at_every_cut(Layers(run))
    assert not legal_after(chain, "b")  # two names of one memory before it changes
    assert legal_after(chain, "c")


def test_copy_made_by_contiguous_is_not_the_received_tensor() -> None:
    # The transposed tensor arrives contiguous, so that `contiguous` and `reshape` no longer copy. Whole numbers, and no layer
    # afterwards, because products of matrices of another layout may round otherwise.
    def run(m: Layers, x: Tensor) -> Tensor:
        y = m.a(x.round()).t()
        z = y.contiguous()
        z.relu_()
        w = y.reshape(-1)
        w += 1
        return y + z + w.view(WIDTH, -1)

    assert_exact_at_every_cut(Layers(run))


def test_memory_layout_of_what_crosses_is_kept_for_later_views() -> None:
    # As attention does it: heads are transposed away and back, and `view` works because nothing moved in memory meanwhile.
    def run(m: Layers, x: Tensor) -> Tensor:
        heads = m.a(x).view(-1, 2, 3).transpose(1, 2)
        heads = torch.tanh(heads)
        return m.b(heads.transpose(1, 2).view(-1, WIDTH))

    assert_exact_at_every_cut(Layers(run))


def test_view_of_a_transposed_tensor_that_arrives_is_still_a_view() -> None:
    # In the whole model `contiguous` returns its argument, so that the in-place change reaches both.
    def run(m: Layers, x: Tensor) -> Tensor:
        y = m.a(x).t().contiguous().t()
        same = y.t().contiguous()
        same.add_(1)
        return y + same.t()

    assert_exact_at_every_cut(Layers(run))


def test_expanded_tensor_crosses_as_a_full_one() -> None:
    # Whole numbers, so that the rows' gradients may be summed in any order.
    def run(m: Layers, x: Tensor) -> Tensor:
        row = m.a(x.round())[:1].expand(x.shape[0], WIDTH)
        return row * 3 + row.contiguous().add_(1)

    assert_exact_at_every_cut(Layers(run))


def test_tensor_written_into_through_an_index_crosses_with_its_gradient() -> None:
    # `out` needs no gradient until something that does is written into a part of it.
    def run(m: Layers, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        out[:, 0] = m.a(x)[:, 0]
        out = m.b(out) + out
        more = torch.zeros_like(x)
        more[:, 1:3] += m.c(x)[:, 1:3]
        return m.d(out + more)

    assert_exact_at_every_cut(Layers(run))


def test_tensor_that_gets_its_gradient_from_a_later_change_is_sent_without() -> None:
    def run(m: Layers, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for layer in (m.a, m.b, m.c):
            total += layer(x)
        return m.d(total)

    chain = assert_exact_at_every_cut(Layers(run))
    assert legal_after(chain, "a")


def test_tensor_whose_shape_changes_in_place_is_sent_as_it_was() -> None:
    def run(m: Layers, x: Tensor) -> Tensor:
        h = m.a(x) + 1
        h.unsqueeze_(1)
        return m.b(h).squeeze(1)

    chain = assert_exact_at_every_cut(Layers(run))
    assert legal_after(chain, "add")


def test_input_changed_in_place_is_seen_changed_by_the_code_after_the_call() -> None:
    # The loss of an autoencoder compares with the batch, on the last stage's rank.
    def run(m: Layers, x: Tensor) -> Tensor:
        x.mul_(2)
        return m.c(m.b(m.a(x)))

    model = Layers(run)
    chain = chain_of(model, batch())
    x = batch()
    model(x)
    for site in chain.sites[:-1]:
        if site.obstacle is None:
            ranks = [make_rank(Assignment(chain=chain, cuts=(site.position,)), index, [batch()]) for index in range(2)]
            received: tuple[Tensor, ...] = ()
            for rank in ranks:
                received = rank.stage.module(*received, *[rank.inputs[i] for i in rank.stage.region_inputs])
            assert torch.equal(ranks[-1].inputs[0], x), f"cut after {chain.units[site.position].nodes[0].name}"


def test_size_that_depends_on_data_is_used_where_it_is_known() -> None:
    def run(m: Layers, x: Tensor) -> Tensor:
        h = m.a(x)
        count = h[h[:, 0] > 0].shape[0]
        return m.c(m.b(h)) * count

    model = Layers(run)
    chain = chain_of(model, batch())
    for site in chain.sites[:-1]:
        if site.obstacle is None:
            assert_stages_equal_whole(Assignment(chain=chain, cuts=(site.position,)), batch())


def test_tensor_of_a_size_that_depends_on_data_has_no_buffer_to_be_received_into() -> None:
    def run(m: Layers, x: Tensor) -> Tensor:
        h = m.a(x)
        return m.b(h[h[:, 0] > 0])

    traced = chain_of(Layers(run), batch()).traced
    sizes = traced.bind_sizes((tuple(batch().shape),))
    chosen = next(node for node in traced.graph.nodes if node.name == "b").all_input_nodes[0]
    with pytest.raises(UnsupportedError, match="The size of a tensor that other ranks need depends on values of the batch"):
        boundary_specs((chosen,), sizes)


@pytest.mark.parametrize("opened", [(), None], ids=["whole", "opened"])
def test_module_that_counts_its_calls(opened: Any) -> None:
    assert_exact_at_every_cut(Layers(lambda m, x: m.b(m.count(m.a(m.count(x)))), count=Counter()), opened=opened)


def test_batch_norm_called_twice() -> None:
    assert_exact_at_every_cut(Layers(lambda m, x: m.c(m.bn(m.b(m.bn(m.a(x))))), bn=nn.BatchNorm1d(WIDTH)))


def test_running_statistics_read_after_they_were_updated() -> None:
    assert_exact_at_every_cut(Layers(lambda m, x: m.c(m.b(m.bn(m.a(x))) - m.bn.running_mean), bn=nn.BatchNorm1d(WIDTH)))


def test_weight_clamped_before_its_module_runs() -> None:
    def run(m: Layers, x: Tensor) -> Tensor:
        with torch.no_grad():
            m.b.weight.clamp_(-0.1, 0.1)
        return m.c(m.b(m.a(x)))

    assert_exact_at_every_cut(Layers(run))
