"""The faults, each as one run of the daemon, with what must come of it.

1 a neighbour holds memory at the gate      4 a length above the KV cache
2 a neighbour grows while the engine serves 5 a utilization below the weights
3 a neighbour comes during the start        6 a flag that vLLM does not know
7 too few slots for the load                8 the daemon is killed and replaced under load
9 too small a KV cache for the load
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.gpu.load import Answer, Crowd, Trickle, ask, burst, summary
from benchmarks.gpu.neighbour import Neighbour
from benchmarks.gpu.rig import Rig
from benchmarks.gpu.supervised import BenchError, Record, Supervised, free_ports, policy_text
from benchmarks.gpu.timeline import Json
from supervisord_vllm.clock import boottime_ns

UTILIZATION, LENGTH = "gpu-memory-utilization", "max-model-len"


class NotHere(Exception):  # noqa: N818 - an answer, not a mistake
    """This fault cannot be made by real means on this rig; one line that says why."""


@dataclass
class Story:
    """One fault while it runs, and what it leaves. Without a moment of its own (``fault_ns``) it lies in the
    configuration: it is there from the first spawn on."""

    rig: Rig
    folder: Path
    deadline: float
    observe: Callable[[str, Supervised], None]
    fault_ns: int | None = None
    answers: list[Answer] = field(default_factory=list)
    long: list[Answer] = field(default_factory=list)
    daemon: Supervised | None = None
    exit_status: int | None = None
    rates: list[float] = field(default_factory=list)
    """Answers a second before a change and after it."""
    same_engine: bool | None = None

    @contextlib.contextmanager
    def supervised(
        self,
        levers: Mapping[str, object],
        ladder: Sequence[Mapping[str, object]],
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        more: str = "",
    ) -> Iterator[Supervised]:
        """A daemon with this policy, gone at the end of the block."""
        ports = free_ports()
        text = policy_text(self.rig, self.folder, ports, levers, ladder, args, env, more)
        self.daemon = Supervised(self.folder, text, ports, self.deadline)
        with self.daemon as daemon:
            yield daemon

    def strike(self) -> None:
        """Now is the moment of the fault."""
        self.fault_ns = boottime_ns()

    @property
    def rung(self) -> Json:
        """How far the utilization may move."""
        return {"lever": UTILIZATION, "step": 0.05, "min": self.rig.floor, "max": 0.95}


def held_at_the_gate(story: Story) -> None:
    """1."""
    rig = story.rig
    with Neighbour(rig.where) as neighbour:
        neighbour.hold(rig.neighbour)
        story.strike()
        with story.supervised({UTILIZATION: rig.declared, LENGTH: rig.length}, [story.rung]) as daemon:
            daemon.serving(1)
            story.observe("serving beside a neighbour", daemon)
            story.answers = burst(daemon.port, 8, 64, 16)


def grows_while_serving(story: Story) -> None:
    """2."""
    rig = story.rig
    if rig.serving is None:
        raise NotHere("a CPU engine does not run out of memory by an allocator's word: the kernel kills")
    count, tokens = rig.burst
    with (
        Neighbour(rig.where) as neighbour,
        story.supervised({UTILIZATION: rig.serving, LENGTH: rig.length}, [story.rung]) as daemon,
    ):
        daemon.serving(1)
        story.observe("serving alone", daemon)
        with Trickle(daemon.port) as trickle:
            # The daemon's own sampler must have had a look at a quiet engine, as in real life.
            until_answered(trickle, 8)
            neighbour.leave(rig.left)
            story.strike()
            story.long = burst(daemon.port, count, tokens, 16)
            daemon.serving(2)
            story.observe("recovered beside the neighbour", daemon)
            until_answered(trickle, len(trickle.answers) + 4)
        story.answers = trickle.answers


def comes_during_the_start(story: Story) -> None:
    """3."""
    rig = story.rig
    with (
        Neighbour(rig.where) as neighbour,
        story.supervised({UTILIZATION: rig.declared, LENGTH: rig.length}, [story.rung]) as daemon,
    ):
        daemon.until("launch 1 starts", lambda status: status["state"] == "starting", every=0.02)
        neighbour.hold(rig.neighbour)
        story.strike()
        daemon.serving(2)
        story.answers = burst(daemon.port, 8, 64, 16)


def length_above_the_cache(story: Story) -> None:
    """4."""
    rig = story.rig
    ladder = [{**story.rung, "min": 0.05}, {"lever": LENGTH, "min": 256}]
    if UTILIZATION not in rig.long_levers:
        ladder = ladder[1:]
    levers = {**rig.long_levers, LENGTH: rig.long_length}
    with story.supervised(levers, ladder, rig.long_args) as daemon:
        daemon.serving(2)
        story.answers = burst(daemon.port, 8, 64, 16)


def below_the_weights(story: Story, env: Mapping[str, str]) -> None:
    """5."""
    rig = story.rig
    with story.supervised(
        {UTILIZATION: rig.tiny, LENGTH: rig.length}, [{**story.rung, "min": 0.005}], env=env
    ) as daemon:
        daemon.serving(2)
        story.observe("serving, the card named by UUID" if env else "serving", daemon)
        story.answers = burst(daemon.port, 8, 64, 16)


def bad_flag(story: Story) -> None:
    """6."""
    rig = story.rig
    with story.supervised({LENGTH: rig.length}, [story.rung], ["--no-such-flag"]) as daemon:
        story.exit_status = daemon.ends()


PRESSURE = '[pressure]\nttft-p95 = "2s"\n[stop]\ndrain = "15s"\n'
MEASURED_S = 30.0


def under_pressure(story: Story, levers: Mapping[str, object], ladder: Sequence[Mapping[str, object]]) -> None:
    """7 and 9: a crowd that the engine is too slow for, before and after the change against it."""
    rig = story.rig
    with contextlib.ExitStack() as stack:
        # Eager: a restart is cheap, so that one run has time for the episode, the change and what came of it.
        daemon = stack.enter_context(
            story.supervised({LENGTH: rig.length, "enforce-eager": True, **levers}, ladder, more=PRESSURE)
        )
        daemon.serving(1)
        story.strike()
        crowd = stack.enter_context(Crowd(daemon.port, rig.crowd, *rig.request))
        daemon.until("a change against pressure", lambda status: status["state"] in {"draining", "stopping"})
        story.rates = [crowd.rate(MEASURED_S)]
        daemon.serving(2)
        crowd.settle(MEASURED_S)
        story.rates.append(crowd.rate(MEASURED_S))
        story.observe("serving after the change", daemon)
        crowd.leave()
        story.answers = burst(daemon.port, 8, 64, 16)


def killed_and_replaced(story: Story) -> None:
    """8."""
    rig = story.rig
    with story.supervised({UTILIZATION: rig.declared, LENGTH: rig.length}, [story.rung]) as daemon:
        first = engine(daemon.serving(1))
        story.strike()
        with Trickle(daemon.port) as trickle, ThreadPoolExecutor(8) as clients:
            long = [clients.submit(ask, daemon.port, 64, rig.long_answer) for _ in range(8)]
            seen = []
            for _ in range(3):
                daemon.die()
                seen.append(engine(daemon.serving(1)))
                daemon.verb("upgrade")
                seen.append(engine(daemon.serving(1)))
            story.long = [answer.result() for answer in long]
        story.answers = trickle.answers
        story.same_engine = all(one == first for one in seen)


def engine(status: Json) -> tuple[int, int, str]:
    """Launch number, pid and start time of the engine's main process."""
    launch = status["launch"]
    ticks = Path(f"/proc/{launch['pid']}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    return launch["number"], launch["pid"], ticks


def until_answered(trickle: Trickle, count: int) -> None:
    """Wait until this many requests came back, good or bad."""
    deadline = time.monotonic() + 60
    while len(trickle.answers) < count:
        if time.monotonic() > deadline:
            raise BenchError(f"only {len(trickle.answers)} of {count} requests came back within 60 s")
        time.sleep(0.05)


@dataclass(frozen=True)
class Fault:
    """One fault: its title, how many seconds it needs on a real card, and what must come of it.

    ``kinds`` are the kinds that its decisions may name, ``launches`` how many there must be.
    """

    number: int
    title: str
    needs_s: float
    run: Callable[[Story], None]
    launches: int
    kinds: frozenset[str]
    moves: str = ""


def every(uuid: str | None) -> dict[int, Fault]:
    """The faults by number; ``uuid`` names the card for the engine of fault 5."""
    named = {"CUDA_VISIBLE_DEVICES": uuid} if uuid else {}
    foreign = frozenset({"gpu_busy_foreign"})
    faults = (
        Fault(1, "a neighbour holds memory at the gate", 140, held_at_the_gate, 1, foreign, "down"),
        Fault(2, "a neighbour grows while serving", 190, grows_while_serving, 2, foreign | {"oom_runtime"}, "down"),
        Fault(3, "a neighbour comes during the start", 160, comes_during_the_start, 2, foreign, "down"),
        Fault(4, "a length above the KV cache", 190, length_above_the_cache, 2, frozenset({"kv_len_too_long"})),
        Fault(
            5,
            "a utilization below the weights",
            160,
            lambda story: below_the_weights(story, named),
            2,
            frozenset({"kv_no_blocks"}),
            "up",
        ),
        Fault(6, "a flag that vLLM does not know", 45, bad_flag, 1, frozenset({"bad_config"})),
        Fault(
            7,
            "too few slots for the load",
            400,
            lambda story: under_pressure(
                story, {**story.rig.long_levers, "max-num-seqs": 24}, [{"lever": "max-num-seqs", "min": 8, "max": 256}]
            ),
            2,
            frozenset({"overload"}),
        ),
        Fault(8, "the daemon is killed and replaced under load", 150, killed_and_replaced, 0, frozenset()),
        Fault(
            9,
            "too small a KV cache for the load",
            400,
            lambda story: under_pressure(
                story, {**story.rig.long_levers, "max-num-seqs": 256}, [{**story.rung, "min": 0.05, "max": 0.60}]
            ),
            2,
            frozenset({"overload"}),
        ),
    )
    return {fault.number: fault for fault in faults}


def _shape(move: Json) -> tuple[str, str, str]:
    return move["lever"], move["direction"], move["how"]


def checks(fault: Fault, story: Story, record: Record) -> list[tuple[str, bool]]:
    """What must hold afterwards, and whether it does."""
    decisions = record.decisions
    launches = {fact["launch"] for name, fact in record.facts if name == "Spawned"}
    moves = [move for decision in decisions for move in decision["moves"]]
    found = [
        (f"{fault.launches} launch(es)", len(launches) == fault.launches),
        (
            f"kinds are of {sorted(fault.kinds)}",
            {d["kind"] for d in decisions} <= fault.kinds and bool(decisions) is bool(fault.kinds),
        ),
        ("every decision says a command", all("`vllm-supervise " in d["sentence"] for d in decisions)),
    ]
    if fault.moves:
        found.append(
            (
                f"the utilization went {fault.moves}, computed, once",
                [(m["lever"], m["direction"], m["how"]) for m in moves]
                == [("gpu_memory_utilization", fault.moves, "computed")],
            )
        )
    if fault.number == 2:
        first = next((d for d in decisions if d["launch"] == 1), None)
        found.append(("the verdict names the runtime OOM", first is not None and first["kind"] == "oom_runtime"))
        found.append(("the verdict names the neighbour", first is not None and "python" in first["sentence"]))
        found.append(("requests were lost", summary(story.long)["failed"] != 0))
    if story.rates:
        lever = "max_num_seqs" if fault.number == 7 else "gpu_memory_utilization"
        found.append((f"{lever} went up, computed", (lever, "up", "computed") in [_shape(move) for move in moves]))
        found.append(("more is answered a second than before", story.rates[-1] > 1.1 * story.rates[0]))
    if fault.number == 8:
        found.append(("it is the same engine throughout", story.same_engine is True))
        found.append(("no request was lost", summary([*story.long, *story.answers])["failed"] == 0))
    if fault.number == 6:
        found.append(("the daemon gave up with 69", story.exit_status == 69))
    else:
        last = story.answers[-4:]
        found.append(("requests are answered at the end", bool(last) and all(answer.ok for answer in last)))
    return found
