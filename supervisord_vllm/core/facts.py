"""Facts: everything that can reach `decide`, as frozen values.

The shell observes and puts facts into one queue; the core never asks. ``at_ns`` is CLOCK_BOOTTIME in nanoseconds (wall
clock is only for people and is added by the store). ``launch`` is the launch a fact belongs to, 0 where it belongs to
none; a fact of another launch than the current one is dropped and counted by `decide`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from supervisord_vllm.core.creep import Growth
from supervisord_vllm.core.diagnosis import Diagnosis, Number
from supervisord_vllm.core.levers import Levers
from supervisord_vllm.core.observations import Observation

Phase = Literal["importing", "weights", "compiling", "profiling", "capturing", "serving"]
Verb = Literal["start", "stop", "hold", "resume", "shutdown", "restart", "drain", "reset", "step"]
Verdict = Literal["kv", "slot", "compute"]
"""Which resource binds an engine that is too slow: KV cache, sequence slots, or the card itself."""


@dataclass(frozen=True, slots=True)
class ProcessRef:
    """A process as an operator would look for it. Memory is what it holds on the device in question, if known."""

    pid: int
    user: str = ""
    command: str = ""
    memory_bytes: int | None = None
    ours: bool = False
    state: str = ""
    """For a process that cannot be ended: its state and where in the kernel it waits, as ``D in nvidia_ioctl``."""

    def __str__(self) -> str:
        state = f", state {self.state}" if self.state else ""
        return f"pid {self.pid} ({self.command or 'unknown'}{state})"


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """One sample of one device. ``total_bytes`` is what vLLM will see as total (NVML total minus reserved; for a CPU
    engine the cgroup limit or the machine); ``free_bytes`` is before our engine's own context is taken off;
    ``context_bytes`` is the first guess of that context. Holders are sorted by size, the largest first.
    """

    device: str
    total_bytes: int
    free_bytes: int
    context_bytes: int
    own_bytes: int = 0
    holders: tuple[ProcessRef, ...] = ()

    @property
    def foreign_bytes(self) -> int:
        """Memory that other processes hold: neither free, nor our engine's, nor page cache (a holder of pid 0)."""
        cache = sum(holder.memory_bytes or 0 for holder in self.holders if holder.pid == 0)
        return max(0, self.total_bytes - self.free_bytes - self.own_bytes - cache)


@dataclass(frozen=True, slots=True)
class DeviceSoak:
    """What one device showed during a soak. ``own`` is what our engine holds (0 where that is not told), in bytes;
    ``slope_bytes_per_hour`` is the trend of it, ``None`` where the samples do not say."""

    device: str
    total_bytes: int
    context_bytes: int
    own_first_bytes: int
    own_most_bytes: int
    own_last_bytes: int
    free_first_bytes: int
    free_last_bytes: int
    samples: int
    slope_bytes_per_hour: float | None = None

    @property
    def growth_bytes(self) -> int:
        """What our engine took during the soak; where its own use is not told, what is no longer free."""
        if self.own_last_bytes:
            return max(0, self.own_last_bytes - self.own_first_bytes)
        return max(0, self.free_first_bytes - self.free_last_bytes)


@dataclass(frozen=True, slots=True)
class Hold:
    """An operator's word that the configuration stays as it is. Times are CLOCK_BOOTTIME of this boot, so that a hold
    from before it began at a negative one; without ``until_ns`` it lasts until ``resume``."""

    by: str = ""
    reason: str = ""
    since_ns: int = 0
    until_ns: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """What every fact carries."""

    at_ns: int
    launch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonStarted(Fact):
    """First fact of every daemon run, with what the store remembers. ``exhausted`` is the text of a give-up by an
    exhausted budget earlier in this boot whose window has not passed."""

    boot_id: str
    next_launch: int
    next_decision: int
    last_known_good: Levers | None = None
    exhausted: str | None = None
    held: bool = False
    observations: tuple[Observation, ...] = ()
    wall_s: int = 0
    """Wall time at ``at_ns``, in whole seconds: observations age in it, since it outlives a boot."""
    carried: str | None = None
    """The state of the daemon before, of this boot (`core.adopting.carry`)."""
    engine: Literal["none", "lives", "ended"] = "none"
    """What became of the engine in it; ``none``: there is none that is certainly ours, or it was ended with its
    daemon."""
    utc_offset_s: int = 0
    """What the host's local time is ahead of UTC."""
    hold: Hold | None = None
    """A hold that is not over; ``held`` is its older form, without a name and an end."""
    failed_climbs: int = 0
    roll_backs: Mapping[str, int] = field(default_factory=dict)
    planned: tuple[int, ...] = ()
    """What the way back up counts (see `State`), also across a boot: a moment before this one is negative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftoversReaped(Fact):
    """Everything that carried our instance's marker was ended; ``survivors`` could not be."""

    ended: tuple[ProcessRef, ...] = ()
    survivors: tuple[ProcessRef, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSampled(Fact):
    """One look at what must hold before a launch. ``devices`` is empty where memory cannot be read
    (``memory_error``); ``port_owner`` is who listens on the engine's port, ``lock_owner`` who holds the
    device's lock."""

    devices: tuple[DeviceMemory, ...] = ()
    memory_error: str | None = None
    port_owner: ProcessRef | None = None
    lock_owner: ProcessRef | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spawned(Fact):
    """The engine's main process exists. ``argv`` has secrets redacted."""

    pid: int
    start_ticks: int
    argv: tuple[str, ...]
    log: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnFailed(Fact):
    """The engine could not be executed at all; ``lasting``: nor would it be the next time (no such command, ...)."""

    error: str
    lasting: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSeen(Fact):
    """The engine's output entered a new phase of the start."""

    phase: Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSeen(Fact):
    """Numbers of vLLM's memory account that a line printed, under their canonical names."""

    numbers: Mapping[str, Number] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FatalSeen(Fact):
    """A line of the engine core says that it is dying; it clears readiness at once and proves nothing by itself."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthSeen(Fact):
    """/health changed: the HTTP status, or ``None`` for no answer. Only changes are facts."""

    status: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryDone(Fact):
    """The one-token request was answered, or failed with ``detail``."""

    ok: bool
    detail: str = ""
    seconds: float = 0.0
    status: int | None = None
    first_token_s: float | None = None
    """From the request to its first token, where the answer was streamed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstDone(Fact):
    """The burst of the proof is over.

    Of ``requests`` that were wanted, ``answered`` were answered in full, ``failed`` were not, ``refused`` were turned
    away by the engine's own queue limit; ``real`` is what real traffic finished meanwhile, which counts as well.
    ``ok``: none failed. ``silent``: nothing came at all, in the whole time that a burst may take."""

    ok: bool
    requests: int = 0
    answered: int = 0
    failed: int = 0
    refused: int = 0
    real: int = 0
    seconds: float = 0.0
    first_token_s: float | None = None
    """The median of the requests' first tokens."""
    silent: bool = False
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakDone(Fact):
    """What memory did between the beginning of the soak and now; ``error`` where it could not be read."""

    devices: tuple[DeviceSoak, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Signalled(Fact):
    """Our first signal to an engine that we end is about to be sent, when its log had so many bytes."""

    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited(Fact):
    """The engine's main process ended; exactly one of code and signal is set, both ``None`` when unknown."""

    code: int | None = None
    signal: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosed(Fact):
    """The output has ended and was judged. ``devices`` is the last memory sample before the end, ``after`` one taken
    once the engine was gone."""

    diagnosis: Diagnosis
    devices: tuple[DeviceMemory, ...] = ()
    after: tuple[DeviceMemory, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeEnded(Fact):
    """Every process of the launch is gone but ``survivors``."""

    survivors: tuple[ProcessRef, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalled(Fact):
    """The verdict of `core.progress` on a living engine: it hangs, or its start is wedged. ``text`` is what was seen,
    as it goes on after "Launch 3 hangs: " or "Launch 3 does not come up: "."""

    what: Literal["hung", "wedged"]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSeen(Fact):
    """A line of the kernel log about a GPU or about memory. ``number`` is the Xid or SXid, ``bus_id`` its GPU in the
    form ``0000:3b:00``, ``pid`` the process that the OOM killer ended. ``ours``: that GPU or process is this launch's;
    ``None`` where it cannot be told."""

    kind: Literal["xid", "sxid", "oom_killer"]
    text: str
    bus_id: str = ""
    number: int | None = None
    pid: int | None = None
    ours: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OomKilled(Fact):
    """The kernel ended so many processes of our cgroup for memory since this launch began (memory.events, or
    memory.oom_control of cgroup v1)."""

    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesSeen(Fact):
    """Device memory can no longer be read (``error`` says why), or again (``None``). Only changes are facts.
    ``vanished``: the driver says that a GPU of ours is lost or gone."""

    error: str | None
    vanished: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleaned(Fact):
    """What dead owners had left in the way was moved aside: locks of caches and shared-memory segments."""

    moved: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSeen(Fact):
    """The engine became idle (nothing runs or waits in two scrapes in a row) or busy. Only changes are facts."""

    running: int = 0
    waiting: int = 0

    @property
    def idle(self) -> bool:
        """Whether no request is in the engine."""
        return self.running + self.waiting == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomSeen(Fact):
    """Device memory beside a serving engine that a neighbour had lowered, once it changes what would fit
    (`core.climbing.room_matters`)."""

    devices: tuple[DeviceMemory, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressed(Fact):
    """The verdict of `core.pressure` on an engine that serves too slowly for long enough to pay for a restart.

    ``lost_s`` is what slowness has cost (outage-equivalent seconds), ``cost_s`` what a restart costs, ``loss`` the
    share that is lost now. ``sequences`` is how many of the requests seen the KV cache holds at once, ``engines`` how
    many engines of this size would serve the load (`core.overload`), where that is known."""

    verdict: Verdict
    loss: float
    lost_s: float
    cost_s: float
    sequences: int | None = None
    text: str = ""
    engines: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReliefJudged(Fact):
    """What a change against pressure has brought: kept, or no better than before."""

    keep: bool
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreepSeen(Fact):
    """The own memory of a serving engine creeps, does so at another rate, or (``None``) no longer does
    (`core.creep.creep_matters`)."""

    growth: Growth | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockSeen(Fact):
    """The wall clock was set, or its offset from UTC changed (summer time). Only changes are facts."""

    wall_s: int
    utc_offset_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick(Fact):
    """A timer that the state asked for (`State.wake_at_ns`) is due."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commanded(Fact):
    """An operator's verb, or ``shutdown`` for SIGTERM to the daemon."""

    verb: Verb
    reason: str = ""
    by: str = ""
    lever: str = ""
    direction: Literal["up", "down"] = "down"
    """``lever`` and ``direction`` belong to ``step``."""
    for_ns: int | None = None
    """How long a ``hold`` lasts; ``None``: until ``resume``."""


FACTS: tuple[type[Fact], ...] = (
    DaemonStarted,
    LeftoversReaped,
    GateSampled,
    Spawned,
    SpawnFailed,
    PhaseSeen,
    LedgerSeen,
    FatalSeen,
    HealthSeen,
    CanaryDone,
    BurstDone,
    SoakDone,
    Signalled,
    Exited,
    Diagnosed,
    TreeEnded,
    Stalled,
    KernelSeen,
    OomKilled,
    DevicesSeen,
    Cleaned,
    LoadSeen,
    RoomSeen,
    Pressed,
    ReliefJudged,
    CreepSeen,
    ClockSeen,
    Tick,
    Commanded,
)
