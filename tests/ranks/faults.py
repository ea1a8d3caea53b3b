"""Runs a training with a fault in it, and says how it ended. ``python -m tests.ranks.faults`` serves one case a line.

Importing torch and Lightning takes seconds, so one process imports them and forks the ranks of each case. The ranks are then
what torchrun would have started, each with its own output; their end is that of a script: an uncaught error goes to
``sys.excepthook``, exit handlers run.
"""

from __future__ import annotations

import atexit
import ctypes
import dataclasses
import faulthandler
import json
import os
import posix
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.launch.hosts import ADDRESSES, TwoHosts
from tests.ports import free_port
from tests.ranks.fault_cases import (
    ERRORS,
    HOOK_KINDS,
    ODD_ERRORS,
    TIMEOUT_SECONDS,
    Case,
    Outcome,
)

_HARD_LIMIT_SECONDS = 240.0  # from the start; a busy machine takes a minute to import all
_SILENCE_SECONDS = 3.0  # after which a rank that is stopped is given up
_HOSTS = "FXPIPE_TEST_HOSTS"  # names of the network namespaces, for the server


# ---------------------------------------------------------------------------------------------------- a rank


class MyOwnError(BaseException):
    """Which no ``except Exception`` catches."""


class Unsendable(Exception):
    """Which cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("not to be taken apart")


class Unreceivable(Exception):
    """Which can be pickled, and not be made again."""

    def __init__(self, message: str, further: int) -> None:
        super().__init__(message)


class Speechless(Exception):
    """Which cannot say what it is."""

    def __str__(self) -> str:
        raise ValueError("no words")


class Hostile(Exception):
    """Which refuses whatever is asked of it, but what ``contextlib`` sets."""

    @property
    def _refused(self) -> Any:
        raise ValueError("not to be asked")

    __cause__ = __context__ = __notes__ = _refused  # type: ignore[assignment]

    def __str__(self) -> str:
        raise KeyboardInterrupt

    def __bool__(self) -> bool:
        raise ValueError("neither")

    def add_note(self, note: str) -> None:
        raise ValueError("not to be written on")


def _install_users_hook(*, calls_other: bool) -> None:
    before = sys.excepthook

    def tell(kind: Any, error: Any, where: Any) -> None:
        print(f"told by the user's hook: {error}", file=sys.stderr)
        if calls_other:
            before(kind, error, where)

    sys.excepthook = tell


class _Fault:
    """Makes the case's fault happen on its rank."""

    def __init__(self, case: Case, rank: int, folder: Path) -> None:
        self._case, self._rank, self._folder = case, rank, folder
        self._calls = 0
        self.has_happened = False
        self.pid = os.getpid()

    def __call__(self, place: str) -> None:
        if place != self._case.place or (self._case.kind == "kill_worker" and os.getpid() == self.pid):
            return
        self._calls += 1  # on every rank: what the model changes is seen
        if self._case.rank not in (self._rank, -1):
            return
        # An error repeats itself: the step runs on fakes first, where it may not count.
        repeats = self._case.kind in (*ERRORS, *ODD_ERRORS, *HOOK_KINDS, "different", "twice", "twice_apart", "unwinding")
        if self._calls == self._case.at or (self._calls > self._case.at and repeats):
            self.has_happened = True
            # Not by `open` and `os.open`, which write nothing in the step of a rank that is not the last stage's.
            for name in ("fault", f"reached{self._rank}"):
                marker = posix.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.write(marker, str(time.time()).encode())
                os.close(marker)
            self._happen(self._case.kind)

    def _happen(self, kind: str) -> None:
        import torch

        message = f"injected fault in {self._case.place}"
        if kind in ERRORS:
            raise {"error": ValueError, "memory": MemoryError, "device_memory": torch.OutOfMemoryError, "own": MyOwnError}[
                kind
            ](message)
        if kind == "unreceivable":
            raise Unreceivable(message, 1)
        if kind in ODD_ERRORS:
            odd: dict[str, type[BaseException]] = {"unsendable": Unsendable, "speechless": Speechless, "hostile": Hostile}
            odd |= {"stop": StopIteration, "generator_exit": GeneratorExit}
            raise odd[kind](message)
        if kind in ("hook_within", "hook_around"):
            _install_users_hook(calls_other=kind == "hook_around")
        if kind in (*HOOK_KINDS, "twice", "twice_apart"):
            raise ValueError(message)
        if kind in ("different", "unwinding"):
            try:
                raise ValueError(f"{message} on rank {self._rank}")
            finally:
                if kind == "unwinding" and self._rank > 0:
                    time.sleep(2)
        if kind in ("exit", "exit_text"):
            sys.exit(3 if kind == "exit" else message)
        if kind == "end":
            os._exit(0)
        if kind == "interrupt":
            raise KeyboardInterrupt
        if kind == "kill":
            os.kill(self.pid, signal.SIGKILL)
        elif kind == "kill_worker":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "suspend":
            os.killpg(0, signal.SIGSTOP)
        elif kind == "freeze":
            os.kill(self.pid, signal.SIGSTOP)
        elif kind == "signal_self":
            os.kill(self.pid, signal.SIGINT)
        elif kind == "signal_group":
            os.killpg(0, signal.SIGINT)
        elif kind == "cut":
            subprocess.run(["ip", "link", "set", "cable0", "down"], check=True)
        elif kind == "hang":
            time.sleep(10 * _HARD_LIMIT_SECONDS)
        time.sleep(0.01)  # the signal arrives here and not later in the step


def _train(case: Case, fault: _Fault, folder: Path) -> None:
    """What a user's script does."""
    import lightning as L
    import torch
    import torch.distributed.distributed_c10d as dist
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers.logger import Logger
    from torch import Tensor, nn
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

    from lightning_fxpipe import FxPipeStrategy

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            fault("backward")
            return gradient

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            fault("forward")
            fault("caught")
            y = self.linear(Backward.apply(x))
            if y.requires_grad and type(y) is Tensor:
                y.register_hook(lambda gradient: fault("tensor_hook"))
            return y.relu()

    class Optimizer(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            fault("optimizer")
            return result

    class Scheduler(torch.optim.lr_scheduler.StepLR):
        def step(self, epoch: Any = None) -> None:
            super().step(epoch)
            if hasattr(self, "ready"):
                fault("scheduler")
            self.ready = True

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Sequential(*(Block() for _ in range(4 if case.schedule is None else 6)))

        def _loss(self, batch: Any) -> Tensor:
            fault("prelude")
            output = self.model(batch)
            fault("after_model")
            return output.pow(2).mean()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            try:
                loss = self._loss(batch)
            except Exception:
                if case.place == "caught":
                    return None
                raise
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            loss = self._loss(batch)
            fault("validation_loss")
            self.log("val_loss", loss)

        test_step = validation_step

        def configure_optimizers(self) -> Any:
            optimizer = Optimizer(self.parameters(), lr=0.1)
            return [optimizer], [{"scheduler": Scheduler(optimizer, 2), "interval": "step"}]

    class Samples(Dataset[Tensor]):
        def __len__(self) -> int:
            return 16

        def __getitem__(self, index: int) -> Tensor:
            fault("dataset")
            fault("worker")
            return torch.full((8,), float(index))

    class Stream(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            for index in range(16):
                fault("iterable")
                yield torch.full((8,), float(index))

    class Order(RandomSampler):
        def __iter__(self) -> Iterator[int]:
            for index in super().__iter__():
                fault("sampler")
                yield index

    def collate(samples: Any) -> Tensor:
        fault("collate")
        return torch.stack(samples)

    class MyLogger(Logger):
        name, version = "mine", 0

        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            fault("logger")

        def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
            pass

    class Exceptions(L.Callback):
        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            with (folder / f"exceptions{os.environ['RANK']}").open("a") as file:
                file.write(f"{type(exception).__name__}\n")
            if case.kind == ("twice" if fault.has_happened else "twice_apart"):
                raise TypeError("injected fault in on_exception")

    def before(owner: Any, hook: str, place: str) -> Any:
        original = getattr(owner, hook)

        def call(*args: Any, **kwargs: Any) -> Any:
            fault(place)
            return original(*args, **kwargs)

        return call

    where, _, hook = case.place.partition(".")
    module_type = type("Module", (Module,), {hook: before(Module, hook, case.place)} if where == "module" else {})
    callback_type = type("Mine", (L.Callback,), {hook: before(L.Callback, hook, case.place)} if where == "callback" else {})
    if case.place == "write_checkpoint":
        FileSystemWriter.write_data = before(FileSystemWriter, "write_data", case.place)
    if case.place in ("send", "receive"):
        transport = {"send": "isend", "receive": "irecv"}[case.place]
        setattr(dist, transport, before(dist, transport, case.place))
    stream = case.place == "iterable"
    samples: Any = Stream() if stream else Samples()
    loader = DataLoader(
        samples,
        batch_size=4,
        sampler=None if stream else Order(samples),
        collate_fn=collate,
        num_workers=int(case.place == "worker"),
    )
    if case.kind == "hook_before":
        _install_users_hook(calls_other=False)
    L.seed_everything(1, verbose=False)
    keep = ModelCheckpoint(dirpath=folder / "checkpoints", save_last=True)
    options: Any = {"heartbeat_timeout": _SILENCE_SECONDS}
    options |= {} if case.num_stages is None else {"num_stages": case.num_stages, "shard_optimizer_state": case.shards}
    options |= {} if case.schedule is None else {"schedule": case.schedule, "num_microbatches": 4}
    options |= {"timeout": TIMEOUT_SECONDS} if case.kind == "hang" else {}
    options |= {"save_distributed_checkpoint": True} if case.place == "write_checkpoint" else {}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=case.num_ranks // case.num_hosts,
        num_nodes=case.num_hosts,
        strategy=FxPipeStrategy(**options),
        max_epochs=2,
        logger=MyLogger(),
        log_every_n_steps=1,
        callbacks=[Exceptions(), callback_type(), keep],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = module_type()
    trainer.fit(module, loader, DataLoader(Samples(), batch_size=4))
    fault("between_runs")
    trainer.test(module, DataLoader(Samples(), batch_size=4), ckpt_path=keep.last_model_path, verbose=False)


def _run_rank(case: Case, rank: int, port: int, folder: Path) -> int:
    """A process's life, as the interpreter would lead it; returns its exit status."""
    output = os.open(folder / f"out{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.register(signal.SIGUSR1, file=output)  # to say where it hangs
    host, local_rank = divmod(rank, case.num_ranks // case.num_hosts)
    ranks = {"RANK": rank, "LOCAL_RANK": local_rank, "NODE_RANK": host, "WORLD_SIZE": case.num_ranks, "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in ranks.items()} | {"MASTER_ADDR": "127.0.0.1"})
    if case.num_hosts > 1:
        os.environ |= {"MASTER_ADDR": ADDRESSES[0], "GLOO_SOCKET_IFNAME": "cable0"}
        _move_to_host(os.environ[_HOSTS].split()[host])
    code = 0
    try:
        _train(case, _Fault(case, rank, folder), folder)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        code = 1
        sys.last_value = sys.exception()
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _move_to_host(name: str) -> None:
    """This process, which has one thread, goes on in a network namespace."""
    with Path("/run/netns", name).open() as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"setns to {name}")


# ---------------------------------------------------------------------------------------------------- the server


def _run_case(case: Case) -> Outcome:
    if case.num_hosts > 1:
        for name in os.environ[_HOSTS].split():  # the case before may have cut the cable
            subprocess.run(["ip", "-n", name, "link", "set", "cable0", "up"], check=True)
    folder = Path(tempfile.mkdtemp())  # a TemporaryDirectory would be removed by the ranks, whose exit handlers are copies
    port = free_port()
    # A session of their own, so that an interrupt reaches all of them and nobody else, and none can hide.
    session = os.fork()
    if session == 0:
        try:
            _lead_session(case, port, folder)
        finally:
            os._exit(0)
    deadline = time.time() + _HARD_LIMIT_SECONDS
    left, continued = {session: "S"}, 0.0
    while left and time.time() < deadline:
        time.sleep(0.02)  # nothing tells of the end of processes that are not children
        running = {session: "S"} if os.waitid(os.P_PID, session, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None else {}
        left = _of_session(session) or running
        stopped = [pid for pid, state in left.items() if state == "T"]
        # Where not all shall stop, who leads the session waits for those that have. All do not stop at once.
        is_suspended = case.kind == "suspend"
        if not continued and stopped and len(left) - len(stopped) <= (0 if is_suspended else 1):
            if is_suspended:
                time.sleep(2 * _SILENCE_SECONDS)
            continued = time.time()
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
    ended = time.time()
    if left:
        for pid in left.keys() - {session}:
            os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5)  # until they have written it
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    os.waitpid(session, 0)
    fault = folder / "fault"

    def texts(name: str) -> list[str]:
        files = [folder / f"{name}{rank}" for rank in range(case.num_ranks)]
        return [file.read_text(errors="replace") if file.exists() else "" for file in files]

    begin = float(fault.read_text()) if fault.exists() else ended
    seconds = max(continued - begin - 1.2 * _SILENCE_SECONDS, ended - continued) if continued else ended - begin
    outcome = Outcome(
        reached=fault.exists(),
        reached_by=[rank for rank in range(case.num_ranks) if (folder / f"reached{rank}").exists()],
        seconds=seconds,
        codes=[int(text or -9) for text in texts("code")],
        outputs=texts("out"),
        left_over=len(left),
        exceptions=[text.split() for text in texts("exceptions")],
    )
    shutil.rmtree(folder)
    return outcome


def _lead_session(case: Case, port: int, folder: Path) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pids = []
    for rank in range(case.num_ranks):
        pid = os.fork()
        if pid == 0:
            os._exit(_run_rank(case, rank, port, folder))
        pids.append(pid)
    for rank, pid in enumerate(pids):
        _, status = os.waitpid(pid, 0)
        (folder / f"code{rank}").write_text(str(os.waitstatus_to_exitcode(status)))


def _of_session(session: int) -> dict[int, str]:
    """Processes of a session that have not ended, and their states."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            state, _, _, of = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):
            continue
        if int(of) == session and state != "Z":
            found[int(entry.name)] = state
    return found


def serve() -> None:
    """Answers each case on standard input with its outcome."""
    import tests.ranks.imported  # noqa: F401

    for line in sys.stdin:
        print(json.dumps(dataclasses.asdict(_run_case(Case(**json.loads(line))))), flush=True)


def run_cases(cases: Sequence[Case]) -> Iterator[tuple[Case, Outcome]]:
    """Runs cases one after the other in a server of their own."""
    command = [sys.executable, "-m", "tests.ranks.faults"]
    with ExitStack() as stack:
        environment = dict(os.environ)
        if any(case.num_hosts > 1 for case in cases):
            environment[_HOSTS] = " ".join(stack.enter_context(TwoHosts()).names)
        server = stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        )
        assert server.stdin is not None
        assert server.stdout is not None
        for case in cases:
            print(json.dumps(dataclasses.asdict(case)), file=server.stdin, flush=True)
            yield case, Outcome(**json.loads(server.stdout.readline()))
        server.stdin.close()


if __name__ == "__main__":
    serve()
