"""Whether a stage treats samples one by one, by trial: one sample of a microbatch is changed, and no other may notice.

The symbolic shapes of a trace show most of what mixes samples (:mod:`lightning_fxpipe.division`), but not what keeps the shape:
sorting, rolling or flipping a batch, attention between its samples, a module that subtracts the batch's mean. So when the first
microbatch of a new trace has gone through a stage, the stage runs twice more on it, the second time with a copy of the second
sample in the first one's place. Batch norms, of which the user knows, use their running statistics meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_fxpipe.rng import isolated_rng
from lightning_fxpipe.snapshot import Snapshot

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def mixing_call(
    module: fx.GraphModule,
    inputs: Sequence[Tensor | None],
    dims: Sequence[int | None],
    rows_of: Callable[[str], int | None],
    num_rows: int,
) -> str | None:
    """The first call of a stage in which samples notice each other; None where there is none.

    Args:
        module: The stage.
        inputs: What it gets for a microbatch.
        dims: Dimension of each input that has the samples; None where none has.
        rows_of: The dimension of a node's result that has the samples, by the node's name; None where none has.
        num_rows: Samples in the microbatch.
    """
    if num_rows < 2:
        return None
    changed = [
        value if value is None or dim is None else _with_first_replaced(value, dim)
        for value, dim in zip(inputs, dims, strict=True)
    ]
    if all(one is other for one, other in zip(inputs, changed, strict=True)):
        return None
    with torch.no_grad():
        results = [_results(module, values) for values in (inputs, changed)]
    for node in module.graph.nodes:
        dim = rows_of(node.name)
        before, after = (result.get(node.name) for result in results)
        if dim is None or before is None or after is None or before.shape != after.shape or before.shape[dim] != num_rows:
            continue
        if not _alike(before.movedim(dim, 0)[1:], after.movedim(dim, 0)[1:]):
            return _described(node)
    return None


def _with_first_replaced(tensor: Tensor, dim: int) -> Tensor:
    changed = tensor.detach().clone()
    changed.select(dim, 0).copy_(tensor.detach().select(dim, 1))
    return changed


def _results(module: fx.GraphModule, values: Sequence[Any]) -> dict[str, Tensor]:
    """What each call gives, by the name of its node; copies, because later calls may change it in place."""
    found: dict[str, Tensor] = {}

    class Noting(fx.Interpreter):
        def run_node(self, node: fx.Node) -> Any:
            result = super().run_node(node)
            if isinstance(result, Tensor) and node.op not in ("placeholder", "get_attr"):
                found[node.name] = result.clone()
            return result

    with isolated_rng(), _untouched(module):
        own = [value.detach().clone() if isinstance(value, Tensor) else value for value in values]
        Noting(module, garbage_collect_values=True).run(*own)
    return found


@contextmanager
def _untouched(module: nn.Module) -> Iterator[None]:
    """After the block the stage's modules and buffers are what they were; in it batch norms use their running statistics."""
    modules = list(module.modules())
    before = Snapshot({"self": module})
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    norms = [each for each in modules if isinstance(each, _NORMS) and each.training and each.running_mean is not None]
    for norm in norms:
        norm.training = False
    try:
        yield
    finally:
        before.restore()
        for norm in norms:
            norm.training = True
        with torch.no_grad():
            for buffer, values in buffers:
                buffer.copy_(values)


def _alike(one: Tensor, other: Tensor) -> bool:
    """Equal but for rounding: kernels may sum in another order."""
    if not one.is_floating_point():
        return torch.equal(one, other)
    tolerance = 1e-3 if one.dtype in (torch.float16, torch.bfloat16) else 1e-4
    return torch.allclose(one.float(), other.float(), rtol=tolerance, atol=tolerance, equal_nan=True)


def _described(node: fx.Node) -> str:
    if node.op == "call_module":
        return str(node.target)
    path, source = node.meta.get("module_path"), node.meta.get("source")
    name = getattr(node.target, "__name__", str(node.target))
    return name + (f" in {path}" if path else "") + (f", {source}" if source else "")
