"""A canary for each private name of torch and Lightning that the package uses: what it is needed for must still work.

A failure here names what a new release changed; the rest of the suite then fails for reasons that are harder to read.
"""

from __future__ import annotations

import ast
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import pytest
import sympy
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.fx.experimental import symbolic_shapes
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_fxpipe._compat import checkpoints as _compat_checkpoints
from lightning_fxpipe._compat import lightning as _compat_lightning
from lightning_fxpipe._compat import operators
from lightning_fxpipe._compat import torch as _compat
from lightning_fxpipe._compat.torch import FakeTensor, FakeWorld


def test_every_function_here_has_a_canary() -> None:
    trees = [
        ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
        for module in (_compat, _compat_checkpoints, _compat_lightning)
    ]
    nodes = [node for tree in trees for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    names = [node.name for node in nodes if node.name[0] != "_"]
    tests = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    called = ("_compat.{}(", "_compat_lightning.{}(", " {}(", "={}(", "={})")
    assert [name for name in names if not any(form.format(name) in tests for form in called)] == []


# ------------------------------------------------------------------ fake tensors with symbolic sizes


def test_fake_tensor_mode_computes_shapes_without_data() -> None:
    world = FakeWorld()
    x, weight = world.input(torch.ones(6, 4), [0]), world.static(nn.Parameter(torch.ones(5, 4)))
    with world.active():
        y = F.linear(x, weight).relu()
    assert isinstance(y, FakeTensor)
    assert y.requires_grad
    assert y.shape[1] == 5
    assert y.shape[0] is x.shape[0] or _compat.symbolic_expression(y.shape[0]) == _compat.symbolic_expression(x.shape[0])


def test_symbols_do_not_look_for_the_code_they_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """For that torch imports its compiler. The first line is what a symbol does without this."""
    asked = []

    def files() -> set[str]:
        asked.append(True)
        return set()

    monkeypatch.setattr(symbolic_shapes, "uninteresting_files", files)
    symbolic_shapes.ShapeEnv()._get_stack_summary()
    assert asked
    asked.clear()
    x = FakeWorld().input(torch.ones(6, 4), [0])
    assert x.shape[0] + 1 > 1
    assert not asked


def test_dim_dynamic_static_keeps_a_size_a_number() -> None:
    x = FakeWorld().input(torch.ones(6, 4), [0])
    assert isinstance(x.shape[0], torch.SymInt)
    assert type(x.shape[1]) is int


def test_dim_dynamic_duck_shares_a_symbol_between_equal_sizes() -> None:
    world = FakeWorld()
    a, b, c = world.input(torch.ones(6, 4), [0]), world.input(torch.ones(6), [0]), world.input(torch.ones(7), [0])
    symbols = [_compat.symbolic_expression(fake.shape[0]) for fake in (a, b, c)]
    assert symbols[0] == symbols[1] != symbols[2]
    assert all(isinstance(symbol, sympy.Symbol) for symbol in symbols)
    assert world.guards() == []


def test_constant_source_takes_any_number_of_inputs() -> None:
    """Each with symbols, and a size that the trace ran with, of its own."""
    world = FakeWorld()
    fakes = [world.input(torch.ones(size, 2), [0]) for size in (3, 4, 5)]
    symbols = {_compat.symbolic_expression(fake.shape[0]) for fake in fakes}
    assert len(symbols) == 3
    assert [_compat.size_hint(fake.shape[0]) for fake in fakes] == [3, 4, 5]


def holds(conditions: list[Any], symbol: Any, size: int) -> bool:
    return all(bool(condition.xreplace({symbol: sympy.Integer(size)})) for condition in conditions)


def test_a_question_about_a_size_becomes_a_guard() -> None:
    world = FakeWorld()
    x = world.input(torch.ones(6, 4), [0])
    assert x.shape[0] > 3
    symbol = _compat.symbolic_expression(x.shape[0])
    assert world.guards() != []
    assert holds(world.guards(), symbol, 4)
    assert not holds(world.guards(), symbol, 3)


def test_a_size_found_to_be_a_number_is_a_replacement_or_a_guard() -> None:
    world = FakeWorld()
    x = world.input(torch.ones(6, 4), [0])
    symbol = x.shape[0].node.expr
    assert x.shape[0] == 6
    conditions = [*world.guards(), *(sympy.Eq(left, right) for left, right in world.replacements().items())]
    assert holds(conditions, symbol, 6)
    assert not holds(conditions, symbol, 7)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.pad(x, (1, 1)),
        lambda x: F.interpolate(x, scale_factor=2.0),
        lambda x: F.conv1d(x, torch.ones(2, 4, 3)),
        lambda x: x.reshape(x.shape[0], -1),
    ],
    ids=["pad", "interpolate", "conv", "reshape"],
)
def test_python_dispatcher_keeps_the_batch_size_open(function: Callable[[Tensor], Tensor]) -> None:
    world = FakeWorld()
    x = world.input(torch.ones(6, 4, 8), [0])
    symbol = _compat.symbolic_expression(x.shape[0])
    with world.active():
        y = function(x)
    assert _compat.symbolic_expression(y.shape[0]) == symbol
    assert symbol not in world.replacements()
    assert holds(world.guards(), symbol, 5)


def test_a_parameter_on_the_meta_device_is_faked_on_the_device_it_will_be_on() -> None:
    for tensor in (nn.Parameter(torch.empty(4, 3, device="meta")), torch.empty(4, 3, device="meta").t()):
        fake = FakeWorld().static(tensor, torch.device("cpu"))
        assert isinstance(fake, Tensor)
        assert fake.device.type == "cpu"
        assert (fake.shape, fake.stride()) == (tensor.shape, tensor.stride())
        assert isinstance(fake, nn.Parameter) == isinstance(tensor, nn.Parameter)
        assert fake.requires_grad == tensor.requires_grad


def test_unset_fake_temporarily_gives_tensors_data_again() -> None:
    world = FakeWorld()
    with world.active():
        with _compat.outside_fakes():
            real = torch.arange(3) * 2
        fake = torch.arange(3) * 2
    assert not isinstance(real, FakeTensor)
    assert real.tolist() == [0, 2, 4]
    assert isinstance(fake, FakeTensor)


def test_symbolic_expression_of_a_size_that_became_a_number_is_one() -> None:
    x = FakeWorld().input(torch.ones(6, 4), [0])
    assert x.shape[0] == 6
    assert type(_compat.symbolic_expression(x.shape[0])) is int


def test_what_torch_keeps_of_fakes_can_be_forgotten() -> None:
    """Without, each trace would leave a megabyte: a method of ``ShapeEnv`` keeps all that it has been called for."""
    world = FakeWorld()
    x, weight = world.input(torch.ones(6, 4), [0]), world.static(torch.ones(4))
    with world.active():
        torch.relu(weight)
        assert torch.cat([x, x]).shape[0] > x.shape[0] + 1
    symbols = weakref.ref(world.shape_env)
    del world, x, weight
    gc.collect()
    assert symbols() is not None
    assert FakeTensorMode.cache
    _compat.forget_fakes()
    gc.collect()
    assert symbols() is None
    assert not FakeTensorMode.cache


def test_symbolic_expression_passes_other_values_on() -> None:
    assert _compat.symbolic_expression(3) == 3
    assert _compat.symbolic_expression("x") == "x"


def test_size_hint_of_a_size_that_depends_on_data_is_refused() -> None:
    world = FakeWorld()
    x = world.input(torch.ones(6), [])
    with world.active():
        found = torch.nonzero(x)
    with pytest.raises(ValueError, match="depends on data"):
        _compat.size_hint(found.shape[0])
    assert _compat.size_hint(7) == 7


@pytest.mark.filterwarnings("error::FutureWarning", "error::DeprecationWarning")
def test_symbols_of_a_size_have_the_values_that_the_trace_ran_with() -> None:
    world = FakeWorld()
    a, b = world.input(torch.ones(6, 4), [0]), world.input(torch.ones(5), [0])
    first, second = (_compat.symbolic_expression(fake.shape[0]) for fake in (a, b))
    assert _compat.symbol_hints(a.shape[0] * 2 + b.shape[0]) == {first: 6, second: 5}
    assert world.guards() == []


def test_free_unbacked_symbols_tell_sizes_of_inputs_from_numbers_out_of_tensors() -> None:
    world = FakeWorld()
    x = world.input(torch.ones(6, dtype=torch.int64), [0])
    with world.active():
        count, item = torch.nonzero(x).shape[0], x[0].item()
    assert _compat.depends_on_data(count)
    assert _compat.depends_on_data(item)
    assert _compat.depends_on_data(count + x.shape[0])
    assert not _compat.depends_on_data(x.shape[0])
    assert not _compat.depends_on_data(x.shape[0] * 2 + 1)


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
def test_storage_key_is_equal_for_tensors_that_share_memory(fake: bool) -> None:
    world = FakeWorld()
    x = world.input(torch.ones(6, 4), [0]) if fake else torch.ones(6, 4)
    with world.active() if fake else nullcontext():
        sharing = [x[1:], x.view(-1), x.t(), x.detach(), x.unsqueeze(0)[0]]
        copies = [x.clone(), x + 0, torch.ones(6, 4)]
        assert all(_compat.storage_key(tensor) == _compat.storage_key(x) for tensor in sharing)
        assert all(_compat.storage_key(tensor) != _compat.storage_key(x) for tensor in copies)
        memory = {_compat.storage_key(x)}
        assert all(_compat.is_in_memory(tensor, memory) for tensor in sharing)
        assert not any(_compat.is_in_memory(tensor, memory) for tensor in copies)


def test_a_dispatch_mode_sees_operators_and_is_called_as_it_is_written() -> None:
    seen: list[str] = []

    def note(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(func.__name__)
        return func(*args, **(kwargs or {}))

    mode = type("Mode", (_compat.TorchDispatchMode,), {"__torch_dispatch__": note})
    with _compat.TorchDispatchMode(), pytest.raises(NotImplementedError):
        torch.ones(1)  # the one of torch, with nothing to do
    with mode():
        F.linear(torch.ones(2, 3), torch.ones(4, 3))
    assert "mm.default" in seen
    assert vars(mode)["__torch_dispatch__"] is note, "torch has put something around it, which takes longer than it does itself"


def test_registries_are_the_dictionaries_that_a_module_itself_uses() -> None:
    module = nn.BatchNorm1d(2)
    modules, parameters, buffers = _compat.registries(module)
    assert (list(modules), list(parameters)) == ([], ["weight", "bias"])
    assert list(buffers) == ["running_mean", "running_var", "num_batches_tracked"]
    module.inner = nn.Linear(2, 2)
    module.bias = None
    assert modules == {"inner": module.inner}
    assert parameters["bias"] is None


def test_modules_inside_are_those_of_torch() -> None:
    shared = nn.Linear(2, 2)
    module = nn.Sequential(shared, nn.Sequential(nn.ReLU(), shared), nn.ModuleDict({"a": nn.Module()}))
    module.register_module("missing", None)
    module.scripted = torch.jit.script(nn.Sequential(nn.Tanh()))
    module.again = module[1]
    found = _compat.modules_inside(module)
    assert list(found.items()) == list(module.named_modules())
    assert "scripted.0" in found


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
def test_version_of_grows_with_changes_of_a_tensor_and_its_views(fake: bool) -> None:
    world = FakeWorld()
    x = world.input(torch.ones(6, 4), [0]) if fake else torch.ones(6, 4)
    changes: list[Callable[[], Any]] = [
        lambda: x.add_(1),
        lambda: x[1:].mul_(2),
        lambda: x.view(-1).zero_(),
        lambda: torch.relu_(x),
        lambda: x.__setitem__(0, 1.0),
    ]
    with world.active() if fake else nullcontext():
        for change in changes:
            before = _compat.version_of(x)
            change()
            assert _compat.version_of(x) > before
        before = _compat.version_of(x)
        x.add(1).mul_(2)
        assert _compat.version_of(x) == before


def test_tree_flatten_with_path_says_where_a_leaf_is() -> None:
    found, _ = _compat.tree_flatten_with_path({"a": [1, (2,)], "b": 3})
    assert [("".join(map(str, path)), leaf) for path, leaf in found] == [("['a'][0]", 1), ("['a'][1][0]", 2), ("['b']", 3)]


def test_trees_are_taken_apart_and_put_together() -> None:
    tree = {"a": [1, (2, None)], "b": 3}
    leaves, structure = _compat.tree_flatten(tree)
    assert leaves == [1, 2, None, 3] == _compat.tree_leaves(tree)
    assert _compat.tree_unflatten(leaves, structure) == tree
    assert structure == _compat.tree_flatten({"a": [5, (6, 7)], "b": 8})[1]
    assert structure != _compat.tree_flatten({"a": [5, [6, 7]], "b": 8})[1]
    assert _compat.tree_map(str, tree) == {"a": ["1", ("2", "None")], "b": "3"}


# ------------------------------------------------------------------ torch's own modules


def test_causal_mask_detection_does_not_look_at_the_mask() -> None:
    import torch.nn.modules.transformer as transformer

    detect, fastpath = transformer._detect_is_causal_mask, torch.backends.mha.get_fastpath_enabled()
    world = FakeWorld()
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False)
    for module in encoder.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, world.static(parameter))
    x, mask = world.input(torch.ones(6, 5, 8), [0]), world.input(torch.zeros(5, 5), [])
    with _compat.tracing_friendly_torch(), world.active():
        assert not torch.backends.mha.get_fastpath_enabled()
        out = encoder(x, mask=mask)
    assert _compat.symbolic_expression(out.shape[0]) == _compat.symbolic_expression(x.shape[0])
    assert transformer._detect_is_causal_mask is detect
    assert torch.backends.mha.get_fastpath_enabled() == fastpath


def test_causal_mask_detection_is_needed_to_be_replaced() -> None:
    """The day torch stops looking, ``tracing_friendly_torch`` can go."""
    import torch.nn.modules.transformer as transformer

    world = FakeWorld()
    mask = world.input(torch.zeros(5, 5), [])
    # torch 2.12.1 raises while it writes this error: `filename` of a frame that is not there.
    with world.active(), pytest.raises(Exception, match="data-dependent|DataDependent|guard|'filename'"):
        transformer._detect_is_causal_mask(mask, None, 5)


def test_parametrizations_are_cached_in_a_block_of_cached() -> None:
    assert not _compat.parametrizations_are_cached()
    with nn.utils.parametrize.cached():
        assert _compat.parametrizations_are_cached()
    assert not _compat.parametrizations_are_cached()


def test_torch_is_restored_after_an_exception() -> None:
    import torch.nn.modules.transformer as transformer

    detect = transformer._detect_is_causal_mask

    def fail() -> None:
        with _compat.tracing_friendly_torch():
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert transformer._detect_is_causal_mask is detect


@pytest.mark.parametrize(
    "register",
    [
        lambda m: m.register_forward_pre_hook(lambda *_: None),
        lambda m: m.register_forward_pre_hook(lambda *_: None, with_kwargs=True),
        lambda m: m.register_forward_hook(lambda *_: None),
        lambda m: m.register_forward_hook(lambda *_: None, always_call=True),
        lambda m: m.register_full_backward_pre_hook(lambda *_: None),
        lambda m: m.register_full_backward_hook(lambda *_: None),
        lambda m: m.register_backward_hook(lambda *_: None),
    ],
    ids=["pre", "pre with kwargs", "forward", "forward always", "full backward pre", "full backward", "backward"],
)
def test_has_hooks_sees_each_kind(register: Callable[[nn.Module], Any]) -> None:
    module = nn.Linear(2, 2)
    assert not _compat.has_hooks(module)
    handle = register(module)
    assert _compat.has_hooks(module)
    assert len(_compat.hooks_of(module)) == 1
    handle.remove()
    assert not _compat.has_hooks(module)


def test_has_hooks_ignores_those_that_do_not_run_around_forward() -> None:
    module = nn.Linear(2, 2)
    module.register_state_dict_post_hook(lambda *_: None)
    module.register_load_state_dict_post_hook(lambda *_: None)
    module.weight.register_hook(lambda grad: None)
    assert not _compat.has_hooks(module)


def test_saved_buffers_are_those_of_the_state_dict() -> None:
    module = nn.Module()
    module.register_buffer("saved", torch.ones(1))
    module.register_buffer("table", torch.ones(1), persistent=False)
    assert _compat.is_saved_buffer(module, "saved")
    assert not _compat.is_saved_buffer(module, "table")
    assert list(module.state_dict()) == ["saved"]


# ------------------------------------------------------------------ patches and random numbers


def test_patched_attributes_are_restored_in_reverse() -> None:
    class Owner:
        shared = "class"

    owner = Owner()
    owner.own = "own"  # type: ignore[attr-defined]
    with _compat.patched_attributes((owner, "own", 1), (owner, "own", 2), (owner, "shared", 3), (Owner, "new", 4)):
        assert (owner.own, owner.shared, owner.new) == (2, 3, 4)  # type: ignore[attr-defined]
    assert vars(owner) == {"own": "own"}
    assert owner.shared == "class"
    assert not hasattr(Owner, "new")


# ------------------------------------------------------------------ questions about values, checkpoints


def test_size_of_symbol_is_the_size_that_has_it() -> None:
    world = _compat.FakeWorld()
    like = world.input(torch.ones(3, 5), [0])
    (symbol,) = _compat.symbolic_expression(like.shape[0] * 5).free_symbols
    size = _compat.size_of_symbol(symbol, like, 3)
    assert _compat.symbolic_expression(size) == symbol
    assert _compat.size_hint(size) == 3
    assert _compat.symbolic_expression(size * 2 - like.shape[0]) == symbol
    assert world.guards() == []


def test_unknown_size_is_a_size_that_depends_on_data() -> None:
    world = FakeWorld()
    like = world.input(torch.ones(3, 2), [0])
    with world.active():
        size = _compat.unknown_size(like)
        assert _compat.depends_on_data(size)
        assert _compat.depends_on_data(torch.empty(size, 2).shape[0])


def test_kernels_that_need_values_say_so() -> None:
    with FakeWorld().active():
        lengths, targets = torch.zeros(2, dtype=torch.long), torch.zeros(2, 3, dtype=torch.long)
        with pytest.raises(_compat.NEEDS_VALUES):
            F.ctc_loss(torch.zeros(3, 2, 5), targets, lengths, lengths)


@pytest.mark.parametrize("replaced", [True, False])
def test_checkpoint_runs_its_function_in_the_replacement(replaced: bool) -> None:
    seen: list[Any] = []
    inside: list[bool] = []

    @contextmanager
    def block() -> Iterator[None]:
        inside.append(True)
        yield
        inside.append(False)

    def replacement(options: dict[str, Any]) -> Any:
        seen.append(options)
        return block() if replaced else None

    def double(x: Tensor, *, by: float, y: Any = None) -> Tensor:
        seen.append(inside[-1:])
        return x * by

    with _compat.patched_attributes(_compat.checkpoints_replaced(replacement)):
        x = torch.ones(2, requires_grad=True)
        out = checkpoint(double, x, by=2.0, use_reentrant=False, preserve_rng_state=False, early_stop=False)
        (2 * out.sum()).backward()
    options = seen[0]
    assert (options["preserve_rng_state"], options["early_stop"]) == (False, False)
    assert {"context_fn", "determinism_check", "debug"} <= options.keys()
    assert seen[1:] == [[True]] if replaced else [[], []]  # the second time in backward
    assert torch.equal(out, torch.full((2,), 2.0))
    # A stage calls it with the same options.
    assert torch.equal(checkpoint(double, x, by=2.0, use_reentrant=False, **options), out)


def test_apply_of_autograd_functions_is_bound_by_its_descriptor() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 2

    original, seen = vars(torch.autograd.Function)["apply"], []

    def apply(cls: Any, *args: Any) -> Any:
        seen.append(cls)
        return original.__get__(None, cls)(*args)

    x = torch.ones(2, requires_grad=True)
    with _compat.patched_attributes((torch.autograd.Function, "apply", classmethod(apply))):
        Double.apply(x).sum().backward()
    assert seen == [Double]
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0]
    assert vars(torch.autograd.Function)["apply"] is original


# ------------------------------------------------------------------ watching a step


def test_a_stand_in_has_a_shape_and_no_data() -> None:
    stand_in = _compat.StandIns().make((2, 3), torch.float64, torch.device("cpu"), requires_grad=True)
    assert (tuple(stand_in.shape), stand_in.dtype, stand_in.device.type, stand_in.requires_grad) == (
        (2, 3),
        torch.float64,
        "cpu",
        True,
    )
    assert isinstance(stand_in, _compat.FakeTensor)
    with pytest.raises(Exception, match="fake|Fake"):
        (stand_in + torch.ones(2, 3, dtype=torch.float64)).sum().item()


def test_loggers_are_silent_for_a_while(tmp_path: Path) -> None:
    module = L.LightningModule()
    with _compat_lightning.silenced_loggers(module):
        pass  # no Trainer yet
    logger = CSVLogger(tmp_path)
    module.trainer = L.Trainer(accelerator="cpu", logger=logger, enable_checkpointing=False, enable_progress_bar=False)
    with _compat_lightning.silenced_loggers(module):
        assert module.logger is not logger
        assert module.trainer.log_dir == module.logger.log_dir == logger.log_dir  # where a step may write to
        assert (module.logger.save_dir, module.logger.version) == (logger.save_dir, logger.version)
        module.logger.log_metrics({"a": 1.0})
    assert module.logger is logger
    assert logger.experiment.metrics == []


def test_readings_of_the_trainers_counters_are_seen_and_answered() -> None:
    module, seen = L.LightningModule(), []

    def read_as(name: str, value: Any) -> Any:
        seen.append((name, value))
        return value + 5 if name == "global_step" else value

    def read_other_as(name: str, value: Any, reader: FrameType) -> Any:
        if reader.f_code.co_name == test_readings_of_the_trainers_counters_are_seen_and_answered.__name__:
            seen.append((name, value))
        return value

    module.trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    with _compat_lightning.watched_trainer(module, read_as, read_other_as):
        assert module.global_step == 5
        assert module.trainer.current_epoch == 0
        assert not module.trainer.sanity_checking
        assert module.trainer.num_nodes == 1
        module.trainer.save_checkpoint  # noqa: B018  # a method is no value
    assert module.current_epoch == 0
    assert module.trainer.num_nodes == 1
    assert seen == [("global_step", 0), ("current_epoch", 0), ("sanity_checking", False), ("num_nodes", 1)]
    assert "__getattribute__" not in vars(L.Trainer)
    for name in _compat_lightning._RUN_STATE:
        assert isinstance(vars(L.Trainer)[name], property)


def test_what_counts_of_the_trainers_metrics_and_loops_is_numbers() -> None:
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    metrics = {"loss": torch.tensor(2.0), "rows": torch.ones(3)}
    assert _compat_lightning.trainer_value("callback_metrics", metrics) == {"loss": 2.0}
    before = _compat_lightning.trainer_value("fit_loop", trainer.fit_loop)
    trainer.fit_loop.epoch_loop.batch_progress.current.ready += 1
    assert before != _compat_lightning.trainer_value("fit_loop", trainer.fit_loop)
    assert _compat_lightning.trainer_value("num_nodes", 1) == 1
    assert _compat_lightning.trainer_value("inner_loop", 5) == 5  # of the user's own


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, ShardedGradScaler])
def test_what_a_scaler_found_decides_about_step_and_scale(kind: Any) -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = kind("cpu", init_scale=8.0, **({} if kind is torch.amp.GradScaler else {"process_group": None}))
    seen: list[dict[torch.device, Tensor]] = []

    def overflow_elsewhere(found: dict[torch.device, Tensor]) -> None:
        seen.append(dict(found))
        for flag in found.values():
            flag.fill_(1.0)

    with _compat.patched_attributes(_compat.unscaling_watched(scaler, overflow_elsewhere)):
        for gradient in (torch.ones(2), None):  # a rank without gradients is asked, too
            scaler.scale(weight.sum())
            weight.grad = gradient
            if kind is torch.amp.GradScaler:
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            else:  # whose own unscale_ talks to other ranks
                scaler._unscale_grads_(optimizer, torch.ones(()), torch.zeros(1))
    assert [list(found) for found in seen] == [[torch.device("cpu")], [torch.device("cpu")]]
    assert torch.equal(weight, torch.ones(2))  # both steps were skipped
    if kind is torch.amp.GradScaler:
        assert scaler.get_scale() == 2.0
    assert "_unscale_grads_" not in vars(scaler)


# ------------------------------------------------------------------ dataloaders


def test_kept_workers_of_a_dataloader_end() -> None:
    loader = DataLoader(TensorDataset(torch.arange(4.0)), num_workers=1, persistent_workers=True)
    assert len(list(loader)) == 4
    (worker,) = loader._iterator._workers  # type: ignore[union-attr]
    _compat.end_workers(loader)
    worker.join(10)
    assert worker.exitcode is not None
    assert len(list(loader)) == 4
    _compat.end_workers(loader)
    _compat.end_workers([1, 2])


def test_an_operator_tells_whether_it_takes_a_device_and_draws() -> None:
    assert not _compat.takes_device(torch.ops.aten.normal_.default)
    assert _compat.takes_device(torch.ops.aten.empty.memory_format)
    assert _compat.num_results_of(torch.ops.aten.max.dim) == 2
    assert torch.Tag.nondeterministic_seeded in torch.ops.aten.normal_.default.tags


def test_freed_memory_goes_back_to_the_system() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    blocks = [torch.ones(8000) for _ in range(4000)]
    blocks = blocks[-1:]  # the last one keeps what lies before it
    before = resident()
    _compat.return_memory()
    assert len(blocks) == 1
    assert before - resident() > 50e6


# ------------------------------------------------------------------ what operators write


@pytest.mark.parametrize(
    ("call", "written"),
    [
        (lambda x, y: x.add_(y), "x"),
        (lambda x, y: torch.add(x, y), ""),
        (lambda x, y: torch.mul(x, y, out=y), "y"),
        (lambda x, y: x.__setitem__(0, 1.0), "x"),
        (lambda x, y: torch._foreach_mul_([x, y], 2.0), "xy"),
        (lambda x, y: F.batch_norm(torch.ones(4, 3), x, y, training=True), "xy"),
    ],
)
def test_schemas_tell_what_an_operator_writes(call: Any, written: str) -> None:
    x, y = torch.ones(3), torch.ones(3)
    found: set[str] = set()

    class Watch(_compat.TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names = {x.untyped_storage().data_ptr(): "x", y.untyped_storage().data_ptr(): "y"}
            written = operators.written_arguments(func, args, kwargs or {})
            found.update(names.get(tensor.untyped_storage().data_ptr(), "") for tensor in written)
            return func(*args, **(kwargs or {}))

    with Watch():
        call(x, y)
    assert "".join(sorted(found)) == written
    assert operators.written_arguments(torch.Tensor.mul_, (x, 2.0), {}) == []  # no operator
    assert operators.is_writing(torch.ops.aten.mul_.Scalar)
    assert not operators.is_writing(torch.ops.aten.mul.Scalar)
    assert not operators.is_writing(torch.Tensor.mul_)


# ------------------------------------------------------------------ what moves along with a module


def test_an_apply_of_a_class_s_own_tells_what_moves_along_with_a_module() -> None:
    class Moves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.lstm, self.mean = nn.Linear(2, 2), nn.LSTM(2, 2), MeanMetric()
            self.table, self.other = torch.ones(2), torch.ones(2)

        def _apply(self, fn: Any, recurse: bool = True) -> Any:
            super()._apply(fn, recurse)
            self.table = fn(self.table)
            return self

    module = Moves()
    found = [id(tensor) for tensor in _compat.tensors_moved_along(module)]
    assert {id(module.table), id(module.mean.mean_value)} <= set(found)
    assert id(module.other) not in found
    assert not set(found) & {id(parameter) for parameter in module.parameters()}
    assert module.to(torch.float64).table.dtype == torch.float64


def test_distributions_draw_standard_normal_numbers_by_a_function_of_theirs() -> None:
    def draw(shape: Any, dtype: Any, device: Any) -> Tensor:
        return torch.full(shape, 2.0, dtype=dtype, device=device)

    zeros, eye = torch.zeros(3), torch.eye(3)
    made = [
        torch.distributions.Normal(zeros, 1.0),
        torch.distributions.MultivariateNormal(zeros, eye),
        torch.distributions.LowRankMultivariateNormal(zeros, torch.zeros(3, 1), torch.ones(3)),
    ]
    with _compat.patched_attributes(*_compat.standard_normals(draw)):
        assert [each.rsample().tolist() for each in made] == [[2.0, 2.0, 2.0]] * 3
    torch.manual_seed(1)
    expected = torch.randn(4, 3)
    torch.manual_seed(1)
    assert torch.equal(made[0].rsample((4,)), expected)


def test_sequences_are_packed_and_padded_by_these_functions() -> None:
    seen: list[Any] = []

    class Notes(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Notes():
        packed = nn.utils.rnn.pack_padded_sequence(torch.randn(3, 2, 1), torch.tensor([3, 1]))
        nn.utils.rnn.pad_packed_sequence(packed)
    assert seen.count(_compat.PACK_PADDED) == seen.count(_compat.PAD_PACKED) == 1


def test_recurrent_layers_keep_their_weights_a_second_time() -> None:
    own = vars(nn.LSTM(2, 3)).keys() - vars(nn.Linear(2, 3)).keys()
    assert set(_compat.RECURRENT_WEIGHT_LISTS) == {name for name in own if "flat" in name and "names" not in name}


def test_a_profiler_does_not_note_what_begins_unprofiled() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        with _compat.unprofiled(), torch.profiler.record_function("hidden"):
            torch.ones(2)
        with torch.profiler.record_function("shown"):
            torch.zeros(2)
    names = {event.name for event in profiler.events()}
    assert {"shown", "aten::zeros"} <= names
    assert not {"hidden", "aten::ones"} & names
