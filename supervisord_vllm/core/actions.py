"""Actions: what the core asks the shell to do. Each ends in a fact; none is carried out here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from supervisord_vllm.core.decision import Decision
from supervisord_vllm.core.levers import Levers


@dataclass(frozen=True, slots=True)
class Action:
    """Base of all actions."""


@dataclass(frozen=True, slots=True)
class Decide(Action):
    """Record the decision (intent) before the actions that follow it in the same step are carried out."""

    decision: Decision


@dataclass(frozen=True, slots=True)
class Reap(Action):
    """End everything that carries this instance's marker → `LeftoversReaped`."""


@dataclass(frozen=True, slots=True)
class WatchGate(Action):
    """Sample memory, port and locks until `Spawn` or `CloseGate` → `GateSampled`, again and again."""

    launch: int


@dataclass(frozen=True, slots=True)
class CloseGate(Action):
    """Stop sampling and give back the locks."""


@dataclass(frozen=True, slots=True)
class Spawn(Action):
    """Start the engine with exactly these levers → `Spawned` or `SpawnFailed`, later `Exited`, `Diagnosed`."""

    launch: int
    levers: Levers
    environment: tuple[tuple[str, str], ...] = ()
    """Variables beyond the policy's own, sorted by name."""


@dataclass(frozen=True, slots=True)
class Adopt(Action):
    """Go on with a launch that an earlier daemon spawned, or judge how it ended → as after `Spawn`. ``cut`` is the
    position in its log where our first signal was sent, if one was."""

    launch: int
    levers: Levers
    environment: tuple[tuple[str, str], ...]
    pid: int
    start_ticks: int
    healthy: bool = False
    cut: int | None = None


@dataclass(frozen=True, slots=True)
class Canary(Action):
    """Send one request of one token → `CanaryDone`."""

    launch: int


@dataclass(frozen=True, slots=True)
class Burst(Action):
    """Send so many requests at once, each of about so many tokens, and yield to real traffic → `BurstDone`, after
    ``max_ns`` at the latest."""

    launch: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    max_ns: int


@dataclass(frozen=True, slots=True)
class Weigh(Action):
    """Say what memory did since the soak began → `SoakDone`."""

    launch: int


@dataclass(frozen=True, slots=True)
class Stop(Action):
    """End a living engine, politely first → `Exited`, `Diagnosed`, `TreeEnded`. ``phase`` chooses the signals: an
    engine that hangs has nothing to drain."""

    launch: int
    phase: Literal["starting", "serving", "hung"]
    waited_ns: int = 0
    """How long a daemon before this one has waited already."""
    signalled: bool = False
    """That one sent the first signal, so that it is not sent again: to some releases a second one means haste."""


@dataclass(frozen=True, slots=True)
class EndTree(Action):
    """The main process is gone: end what it left behind → `Diagnosed`, `TreeEnded`."""

    launch: int


@dataclass(frozen=True, slots=True)
class Force(Action):
    """An operator asked for the stop a second time: KILL what a `Stop` in progress still waits for."""

    launch: int


@dataclass(frozen=True, slots=True)
class Clean(Action):
    """Move aside what dead owners left in the way of a start: locks in caches, shared-memory segments → `Cleaned`.
    ``target`` is ``drop_page_cache`` where the machine's page cache is in the way on unified memory."""

    launch: int
    target: str = ""


@dataclass(frozen=True, slots=True)
class Proven(Action):
    """Remember this launch as proven and, where ``good``, its target levers as last known good of the policy."""

    launch: int
    target: Levers
    good: bool = True


@dataclass(frozen=True, slots=True)
class GiveUp(Action):
    """Tell everybody that nothing automatic is right any more. ``exhausted_until_ns`` is set when a window ran out:
    until then a later start in this boot gives up again with the same text."""

    text: str
    exhausted_until_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Exit(Action):
    """End the daemon with this exit status."""

    code: int
