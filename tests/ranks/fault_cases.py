"""Where, when and on which rank of a run there is a fault, and how the run must end. ``tests.ranks.faults`` runs them."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

# After which a rank that does not come is given up, where it says all the while that it is there.
TIMEOUT_SECONDS = 12.0

STEP_PLACES = ("prelude", "forward", "backward", "tensor_hook", "scheduler", "optimizer", "write_checkpoint", "between_runs")
DATA_PLACES = ("dataset", "worker", "collate", "iterable", "sampler")
LAST_STAGE_PLACES = ("after_model", "logger", "validation_loss")
ERRORS = {"error": "ValueError", "memory": "MemoryError", "device_memory": "OutOfMemoryError", "own": "MyOwnError"}
# Errors that cannot be sent, received or printed, or that Lightning's loops take for something else.
ODD_ERRORS = {
    **{"unsendable": "Unsendable", "unreceivable": "Unreceivable", "speechless": "Speechless", "hostile": "Hostile"},
    **{"stop": "FxPipeError", "generator_exit": "GeneratorExit"},
}
# "different": another error on each rank; "twice": one more in on_exception; "end": os._exit(0); "freeze": SIGSTOP.
PASS_PLACES = ("forward", "backward", "tensor_hook", "send", "receive")  # in the middle of a schedule
OTHER_KINDS = (
    *("exit", "exit_text", "interrupt", "kill", "signal_self", "signal_group"),
    *("freeze", "end", "different", "twice"),
)
# An error where the user has a hook for uncaught ones: from before the run, from within it, or around the one before it.
HOOK_KINDS = ("hook_before", "hook_within", "hook_around")
# From the beginning to the end, and at which call.
PARTS_OF_RUN = (
    *(("module.setup", 1), ("module.configure_optimizers", 1), ("module.on_train_batch_start", 1), ("prelude", 6)),
    *(("backward", 6), ("optimizer", 2), ("dataset", 3), ("callback.on_validation_batch_end", 2)),
    *(("write_checkpoint", 1), ("callback.on_train_end", 1), ("between_runs", 1)),
)
KINDS_ON_REPLICAS = (
    *("error", "error on all", "different", "own", "memory", "unreceivable", "exit", "interrupt", "kill", "end"),
    *("freeze", "hang", "cut"),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A fault.

    Attributes:
        place: Where.
        kind: What happens there; a key of ``ERRORS`` or ``ODD_ERRORS``, or one of ``OTHER_KINDS`` or ``HOOK_KINDS``. Besides:
            "unwinding", as "different", but the errors take their time to come out on some ranks; "twice_apart", as "twice",
            but on_exception fails on the other ranks; "kill_worker" in a worker; "hang", which waits for nothing; "cut", of
            the cable between two hosts; "suspend", which stops all ranks for a while and is no fault.
        rank: On which rank; -1 for every rank.
        at: At which call.
        num_ranks: Ranks of all pipelines.
        num_stages: Of each pipeline; None: there is one.
        shards: Whether replicas share out the optimizer.
        num_hosts: Network namespaces, among which the ranks are shared out in their order; 1: that of this process.
        schedule: Name of the schedule, of four microbatches; None: that of the strategy's choice.
    """

    place: str
    kind: str
    rank: int
    at: int = 1
    num_ranks: int = 2
    num_stages: int | None = None
    shards: bool = False
    num_hosts: int = 1
    schedule: str | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a case ended.

    Attributes:
        reached: Whether the fault happened.
        reached_by: The ranks on which it did.
        seconds: From the fault to the end of the last rank; of what a rank has started, if that ended later. Where the rank
            is stopped, the longer one of two times: from when it is given up to the end of the others, and, when it is then
            continued, to its own end.
        codes: Exit statuses by rank, negative for signals.
        outputs: What each rank has printed.
        left_over: Processes that had to be killed.
        exceptions: Types that ``on_exception`` got, by rank.
    """

    reached: bool
    reached_by: list[int]
    seconds: float
    codes: list[int]
    outputs: list[str]
    left_over: int
    exceptions: list[list[str]]

    def complaints(self, case: Case, *, limit_seconds: float = 5.0) -> list[str]:
        """What is not as it must be."""
        if not self.reached:
            return ["the fault was not reached"]
        found = [f"{self.left_over} processes hung"] if self.left_over else []
        if case.kind == "suspend":
            return found + [f"exit status {self.codes}"] * any(self.codes)
        if self.seconds > limit_seconds + TIMEOUT_SECONDS * (case.kind == "hang"):
            found.append(f"took {self.seconds:.1f} s")
        text = "".join(self.outputs)
        if case.kind in ERRORS or case.kind in ODD_ERRORS:
            says = {
                "speechless": r"(?:<exception str|\(no text)",
                "hostile": r"\(no text",
                "stop": "User code raised StopIteration",
            }.get(case.kind, "injected fault")
            # What cannot be sent to other ranks is a RuntimeError that names it; what planning meets is part of a refusal.
            observed = r"(?:\(|: )" if case.kind == "hostile" else r"\("  # as a cause it cannot be printed
            before = rf"^(?:\[rank\d\]: )?(?:RuntimeError: |  Observed: .*{observed})?(?:[\w.]+\.)?"
            line = f"{before}{(ERRORS | ODD_ERRORS)[case.kind]}: {says}"
            times = [len(re.findall(line, text, re.MULTILINE)) for text in self.outputs]
            if sum(times) != 1:
                found.append(f"the original error was told {times} times by the ranks")
        if 0 in [code for rank, code in enumerate(self.codes) if case.kind != "end" or rank != case.rank]:
            found.append(f"exit status {self.codes}")
        found += self._complaints_of_further_kinds(case)
        # Between two runs a rank is not asked why it ends.
        if case.kind == "exit" and case.place != "between_runs" and any(code != 3 for code in self.codes):
            found.append(f"exit status {self.codes} instead of 3")
        if case.kind in ("interrupt", "signal_self", "signal_group") and "KeyboardInterrupt" not in text:
            found.append("not told of an interrupt")
        if case.kind in ("kill", "end") and f"rank {case.rank} failed: the process died" not in text:
            found.append("not told that a process died")
        # Of those that wait in vain each may be the first to tell; one that gives up closes its connections.
        if case.kind == "hang":
            if not re.search(r"^\[rank\d\]: RuntimeError: .*(Timed out waiting|timeout)", text, re.MULTILINE):
                found.append("not told that a rank has waited in vain")
            if not all(re.search(r"Timed out|timeout|the same error", text) for text in self.outputs):
                found.append("not told on all ranks")
        stopped = [
            text
            for rank, text in enumerate(self.outputs)
            if rank != case.rank
            and not re.search(r"^.*(Error|able|Hostile|less): (injected|\(no text|<exc)", text, re.MULTILINE)
        ]
        if (
            case.kind not in ("exit", "exit_text", "hang")
            and case.rank >= 0
            and any(text.count("Traceback") for text in stopped)
        ):
            found.append("other ranks print tracebacks")
        return found

    def _complaints_of_further_kinds(self, case: Case) -> list[str]:
        told_once = {
            "exit_text": [f"injected fault in {case.place}"],
            "twice_apart": [
                f"ValueError: injected fault in {case.place}",
                r"\[rank \d\] stopped, because .*; then TypeError: injected fault in on_exception",
            ],
            "twice": [
                f"ValueError: injected fault in {case.place}",
                r"(?:\[rank \d\] the same error; then )?TypeError: injected fault in on_exception",
            ],
            "different": [f"ValueError: injected fault in {case.place} on rank {rank}" for rank in self.reached_by],
            "unwinding": [f"ValueError: injected fault in {case.place} on rank {rank}" for rank in self.reached_by],
            "hook_before": [f"told by the user's hook: injected fault in {case.place}"],
            "hook_within": [f"told by the user's hook: injected fault in {case.place}"],
            "hook_around": [
                f"told by the user's hook: injected fault in {case.place}",
                f"ValueError: injected fault in {case.place}",
            ],
            "kill_worker": [r"RuntimeError: DataLoader worker \(pid"],
        }
        found = []
        for line in told_once.get(case.kind, []):
            times = [len(re.findall(rf"^(?:\[rank\d\]: )?{line}", text, re.MULTILINE)) for text in self.outputs]
            expected = case.num_ranks - 1 if case.kind == "twice_apart" and "then" in line else 1
            # Torch's error of a worker has another as its cause.
            if sum(map(bool, times) if case.kind == "kill_worker" else times) != expected:
                found.append(f"{line!r} was told {times} times by the ranks")
        if case.kind in ("hook_before", "hook_within") and any(
            "ValueError: injected" in line for line in self._lines_of_errors()
        ):
            found.append("told beside the user's hook")
        if case.kind == "freeze" and not all(f"rank {case.rank} has not answered" in text for text in self.outputs):
            found.append("not told that a rank is stopped")
        if case.kind == "cut" and not all(
            "has not answered" in text or "have exited without this one" in text for text in self.outputs
        ):
            found.append("not told that the other host does not answer")
        return found

    def _lines_of_errors(self) -> list[str]:
        """What the ranks print, but the lines in which they say why they are stopped."""
        return [line for text in self.outputs for line in text.splitlines() if not re.match(r"\[rank \d\] stopped", line)]


def hook_places() -> list[str]:
    """Every hook that the run calls, of a callback and of the module."""
    import lightning as L

    never = ("predict", "exception", "idx", "gpu", "train_dataloader", "test_model", "on_load_checkpoint")
    more = {
        "callback": ["setup", "teardown", "state_dict"],
        "module": [
            *("setup", "teardown", "configure_model", "configure_optimizers", "optimizer_step", "optimizer_zero_grad"),
            *("lr_scheduler_step", "configure_gradient_clipping", "transfer_batch_to_device"),
        ],
    }
    found = []
    for owner, kind in (("callback", L.Callback), ("module", L.LightningModule)):
        hooks = [hook for hook in dir(kind) if hook.startswith("on_") and not any(word in hook for word in never)]
        found += [f"{owner}.{hook}" for hook in (*hooks, *more[owner])]
    return found


def random_cases(seed: int, count: int, *, replicas: bool = False) -> list[Case]:
    """Places, ranks, kinds and moments, chosen at random; in one pipeline, or in two replicas of two stages."""
    choose = random.Random(seed)
    hooks = hook_places()
    cases = []
    for _ in range(count):
        group = choose.choice([STEP_PLACES, STEP_PLACES, DATA_PLACES, LAST_STAGE_PLACES, hooks, hooks])
        place = choose.choice(list(group))
        num_ranks = 4 if replicas else choose.choice([2, 3])
        last = choose.choice([0, 2]) if replicas and place != "logger" else 0
        rank = last if place in LAST_STAGE_PLACES else choose.randrange(num_ranks)
        kind = choose.choice([*ERRORS, "kill_worker"] if place == "worker" else [*ERRORS, *ERRORS, *ODD_ERRORS, *OTHER_KINDS])
        kind = "error" if kind == "stop" and place in DATA_PLACES else kind  # there it is the end of the data
        if kind == "different":  # in the steps the ranks take turns, and planning tells one error for all
            place, rank = choose.choice([hook for hook in hooks if ".on_" in hook]), -1
        at = (
            choose.choice([1, 2, 3, 6])
            if place in (*STEP_PLACES[:4], *DATA_PLACES, *LAST_STAGE_PLACES)
            else choose.choice([1, 1, 2])
        )
        stages = 2 if replicas else None
        shards = bool(replicas and len(cases) % 2)
        case = Case(place=place, kind=kind, rank=rank, at=at, num_ranks=num_ranks, num_stages=stages, shards=shards)
        cases.append(case)
    return cases


def cases_of_schedules(schedules: Sequence[str], seed: int, count: int) -> list[Case]:
    """Each schedule by turns: errors, kills and stops in forward and backward actions, in sends and in receives."""
    choose = random.Random(seed)
    kinds = ("error", "own", "kill", "freeze", "end", "exit", "signal_self", "unsendable")
    cases = []
    for number in range(count):
        num_ranks = choose.choice([2, 3])
        place, kind = choose.choice(PASS_PLACES), choose.choice(kinds)
        # A forward that raises an error at its tenth call depends on how often other blocks were called, and is refused.
        latest = 6 if place == "forward" and (kind in ERRORS or kind in ODD_ERRORS) else 24
        cases.append(
            Case(
                place=place,
                kind=kind,
                rank=choose.randrange(num_ranks),
                at=choose.randint(1, latest),
                num_ranks=num_ranks,
                schedule=schedules[number % len(schedules)],
            )
        )
    return cases


def cases_of_replicas(num_hosts: Sequence[int]) -> list[Case]:
    """Each kind of fault in each part of a run, on two replicas of two stages: by turns on each rank, with the optimizer's
    states on all replicas and shared out, and on so many hosts."""
    cases: list[Case] = []
    for place, at in PARTS_OF_RUN:
        for kind in KINDS_ON_REPLICAS:
            number = len(cases)
            hosts = 2 if kind == "cut" else num_hosts[number // 2 % len(num_hosts)]
            if hosts not in num_hosts:
                continue
            everywhere = kind in ("different", "error on all")
            cases.append(
                Case(
                    place=place,
                    kind="error" if kind == "error on all" else kind,
                    # The first replica writes.
                    rank=-1 if everywhere else number // 4 % (2 if place == "write_checkpoint" else 4),
                    at=at,
                    num_ranks=4,
                    num_stages=2,
                    shards=number % 2 == 1,
                    num_hosts=hosts,
                )
            )
    # In the steps ranks take turns, planning tells one error for all, and a run that is over has nobody to ask.
    return [case for case in cases if case.kind != "different" or ".on_" in case.place]
