"""The engine's process tree: what is proven ours, and ending all of it.

Ours is what carries our instance's marker in its environment, is in the cgroup of one of our launches, descends from a
recorded process (pid and start time), or shares the session that this process leads (sessions are inherited, never
entered). Nothing else is ever signalled:
an environment that can't be read proves nothing, a name or an NVML pid neither. Signals go through pidfds whose start
time was compared, so that a reused pid can't hit a stranger. Nothing here waits for ever: what does not end within the
deadline (a process inside a driver call) is returned by name.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from supervisord_vllm.core.facts import ProcessRef
from supervisord_vllm.engine.command import MARKER
from supervisord_vllm.host import cgroup, procfs
from supervisord_vllm.host.process import Child, reap_orphans

Phase = Literal["starting", "serving", "hung"]
"""What the engine was doing when it is stopped; it chooses the signals."""


class Identity(NamedTuple):
    """One process for ever, within this boot."""

    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds that each stage of an end may take."""

    interrupt: float = 5.0
    terminate: float = 5.0
    alone: float = 3.0
    """For an API server whose engine processes are gone: nothing is left to lose, it may wait for ever."""
    tracker: float = 1.0
    """For multiprocessing's resource tracker once all others are gone: it removes what the dead left in /dev/shm."""
    deadline: float = 30.0
    """For the whole tree after the first KILL."""
    poll: float = 0.5
    """Between two looks at the tree while the engine stops by itself."""


DEFAULT_PATIENCE = Patience()
SWEEPS = 4
"""Looks that each found processes which the one before had not seen, until nothing in the cgroup is spared."""
_TRACKER = "from multiprocessing.resource_tracker import main"
"""How CPython 3.10 to 3.13 starts it: ``python -c 'from multiprocessing.resource_tracker import main;main(FD)'``."""


def _own_line() -> frozenset[int]:
    """This process and its ancestors: never a target, whatever environment they were started with."""
    line: list[int] = []
    pid = os.getpid()
    while pid > 0 and pid not in line:
        line.append(pid)
        found = procfs.stat(pid)
        pid = found.ppid if found is not None else 0
    return frozenset(line)


def _carries(pid: int, needle: bytes) -> bool:
    raw = procfs.environ(pid)
    return raw.startswith(needle) or b"\0" + needle in raw


def owned(instance: str, roots: Iterable[Identity] = ()) -> list[procfs.Stat]:
    """Every living process that is proven ours. One pass over /proc: some 10 µs a process, not for the event loop.

    Without ``roots`` it looks for what any earlier daemon left, wherever in the tree of cgroups that one ran.
    """
    everything = procfs.stats()
    # After the look at start times: a pid that was reused since does not have the start time that a signal compares.
    groups = cgroup.of_instance(instance)
    leaders = {
        root.pid
        for root in roots
        if (found := everything.get(root.pid)) is not None and found.start_ticks == root.start_ticks
    }
    needle = f"{MARKER}={instance}.".encode()
    inside = {pid for group in groups for pid in group.members()}
    anywhere = not leaders
    proven: dict[int, bool] = dict.fromkeys(_own_line(), False)

    def is_ours(pid: int) -> bool:
        line: list[int] = []
        answer = False
        while pid not in proven:
            found = everything.get(pid)
            if found is None or pid in line:
                break
            line.append(pid)
            if (
                pid in leaders
                or found.session in leaders
                or pid in inside
                or _carries(pid, needle)
                or (anywhere and cgroup.member(pid, instance))
            ):
                answer = True
                break
            pid = found.ppid
        else:
            answer = proven[pid]
        proven.update(dict.fromkeys(line, answer))
        return answer

    return [found for pid, found in everything.items() if found.alive and is_ours(pid)]


def find_owned(instance: str, *, roots: Iterable[Identity] = ()) -> list[ProcessRef]:
    """Every living process that is proven ours, as an operator would look for it."""
    return list(_describe_all(Identity(found.pid, found.start_ticks) for found in owned(instance, roots)))


def owned_pids(instance: str, *, roots: Iterable[Identity] = ()) -> frozenset[int]:
    """Ids of every living process that is proven ours, for a memory sample."""
    return frozenset(found.pid for found in owned(instance, roots))


def send(identity: Identity, number: int) -> bool:
    """Signals exactly this process; False if it is gone, not permitted or not the same any more."""
    try:
        pidfd = os.pidfd_open(identity.pid)
    except OSError:
        return False
    try:
        found = procfs.stat(identity.pid)
        # Compared after the pidfd was opened: if the start time still fits, the descriptor is of this very process.
        if found is None or found.start_ticks != identity.start_ticks:
            return False
        signal.pidfd_send_signal(pidfd, number)
    except OSError:
        return False
    finally:
        os.close(pidfd)
    return True


def _is_tracker(pid: int) -> bool:
    return any(argument.startswith(_TRACKER) for argument in procfs.cmdline(pid)[1:])


def _sweep(
    instance: str, roots: tuple[Identity, ...], spare_tracker: bool, groups: Sequence[cgroup.LaunchGroup] = ()
) -> tuple[set[Identity], bool]:
    """Kills what is ours; returns what was alive and whether only resource trackers were. Members of ``groups`` are
    killed at once, unless a resource tracker is to be spared, and counted however short they live."""
    members: dict[int, procfs.Stat] = {}
    for group in groups:
        stats = (procfs.stat(pid) for pid in group.members())
        inside = {
            found.pid: found
            for found in stats
            if found is not None and found.alive and cgroup.member(found.pid, instance)
        }
        members.update(inside)
        if inside and not (spare_tracker and any(_is_tracker(pid) for pid in inside)):
            group.kill()
    living = list({**members, **{found.pid: found for found in owned(instance, roots)}}.values())
    trackers = {found.pid for found in living if _is_tracker(found.pid)}
    only_trackers = len(trackers) == len(living)
    for found in living:
        if not (spare_tracker and found.pid in trackers):
            send(Identity(found.pid, found.start_ticks), signal.SIGKILL)
    return {Identity(found.pid, found.start_ticks) for found in living}, only_trackers


async def _kill_all(
    instance: str, roots: tuple[Identity, ...], patience: Patience, groups: Sequence[cgroup.LaunchGroup] = ()
) -> tuple[set[Identity], set[Identity]]:
    """Kills until nothing is left, new forks included; returns all that was seen and what survives the deadline.

    What was seen stays a root: the children of a process without a readable environment are ours by descent. What
    forks faster than it is found ends with its cgroup, where there is one.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience.deadline
    seen: set[Identity] = set()
    alone_since: float | None = None
    pause, empty, fresh = 0.01, 0, 0
    while True:
        spare = alone_since is None or loop.time() < alone_since + patience.tracker
        polite = spare and fresh < SWEEPS
        living, only_trackers = await asyncio.to_thread(_sweep, instance, (*roots, *seen), polite, groups)
        fresh += bool(living - seen)
        seen |= living
        reap_orphans()
        # A process that forks and goes between the list of pids and the look at it is missed, and so is its child: the
        # next look finds it.
        # In a cgroup nothing is missed.
        empty = 0 if living else empty + 1
        if empty == (1 if groups else 2) or loop.time() >= deadline:
            return seen, living
        if only_trackers and alone_since is None:
            alone_since = loop.time()
        await asyncio.sleep(pause if living else 0)
        pause = min(0.1, pause * 1.5)


def _describe_all(identities: Iterable[Identity]) -> tuple[ProcessRef, ...]:
    return tuple(
        replace(
            procfs.describe(one.pid, memory_bytes=procfs.rss_bytes(one.pid), ours=True),
            state=procfs.waits(one.pid),
        )
        for one in sorted(identities)
    )


async def end_tree(child: Child, *, patience: Patience = DEFAULT_PATIENCE) -> tuple[ProcessRef, ...]:
    """KILLs everything of this launch that still lives, its main process included; returns the survivors.

    When the main process has ended, its status is collected: afterwards `Child` is history.
    """
    root = Identity(child.pid, child.start_ticks)
    group = child.group or await asyncio.to_thread(cgroup.of_marker, child.marker)
    # Of an adopted engine whose marker nobody could read any more: no other launch of this instance lives.
    groups = [group] if group is not None else await asyncio.to_thread(cgroup.of_instance, child.instance)
    _, living = await _kill_all(child.instance, (root,), patience, groups)
    survivors = await asyncio.to_thread(_describe_all, living)
    if root not in living:
        await _exits_within(child, 1.0)  # the kernel may show the zombie a moment before the pidfd is readable
    child.release()
    reap_orphans()
    for left in groups:
        left.remove()
    return survivors


async def _exits_within(child: Child, seconds: float, force: asyncio.Event | None = None) -> bool:
    """Whether it has exited, after at most this long; less once the operator forces the stop."""
    if not child.exited.done() and (force is None or not force.is_set()):
        forced = asyncio.ensure_future(force.wait()) if force is not None else None
        waits: set[asyncio.Future[Any]] = {child.exited, *([forced] if forced is not None else [])}
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if forced is not None:
            forced.cancel()
    return child.exited.done()


def _has_company(child: Child) -> bool:
    root = Identity(child.pid, child.start_ticks)
    return any(found.pid != child.pid and not _is_tracker(found.pid) for found in owned(child.instance, (root,)))


async def _terminate_serving(
    child: Child, grace_s: float, patience: Patience, force: asyncio.Event | None, *, signalled: bool
) -> None:
    """TERM, then waits for the exit, at most ``grace_s``; less once an engine that had other processes has none."""
    loop = asyncio.get_running_loop()
    had_company = signalled or await asyncio.to_thread(_has_company, child)
    if not signalled:
        child.send(signal.SIGTERM)
    deadline = loop.time() + grace_s
    alone_since: float | None = None
    while (now := loop.time()) < deadline and not (force is not None and force.is_set()):
        if alone_since is not None and now >= alone_since + patience.alone:
            return
        if await _exits_within(child, min(patience.poll, max(0.0, deadline - now)), force):
            return
        if had_company and alone_since is None and not await asyncio.to_thread(_has_company, child):
            alone_since = loop.time()


async def stop(
    child: Child,
    *,
    phase: Phase,
    grace_s: float,
    patience: Patience = DEFAULT_PATIENCE,
    force: asyncio.Event | None = None,
    signalled: bool = False,
) -> tuple[ProcessRef, ...]:
    """Ends the launch, politely first; returns what survives KILL (a process that hangs inside a driver). Whoever had
    ``signalled`` it before us need not be repeated: to some releases a second TERM means haste.

    While vLLM initialises it swallows TERM and listens to INT, hence INT, TERM, KILL. When it serves, TERM goes to the
    main process only, and the tree gets ``grace_s`` seconds (vLLM's own shutdown time-out and a margin). One that hangs
    has nothing to drain: TERM, so that its server can answer who waits, and ``patience.alone``. ``force`` ends all
    politeness at once.
    """
    if not child.exited.done():
        if phase == "starting":
            child.send(signal.SIGINT)
            if not await _exits_within(child, patience.interrupt, force):
                child.send(signal.SIGTERM)
                await _exits_within(child, patience.terminate, force)
        elif phase == "hung":
            child.send(signal.SIGTERM)
            await _exits_within(child, patience.alone, force)
        else:
            await _terminate_serving(child, grace_s, patience, force, signalled=signalled)
    return await end_tree(child, patience=patience)


async def reap_leftovers(
    instance: str, *, patience: Patience = DEFAULT_PATIENCE
) -> tuple[tuple[ProcessRef, ...], tuple[ProcessRef, ...]]:
    """Ends whatever an earlier daemon of this state directory left behind; returns (ended, survivors)."""
    before = {ref.pid: ref for ref in await asyncio.to_thread(lambda: find_owned(instance))}
    groups = await asyncio.to_thread(cgroup.of_instance, instance)
    seen, living = await _kill_all(instance, (), patience, groups)
    await asyncio.to_thread(cgroup.remove_empty, instance)
    ended = tuple(before.get(one.pid, ProcessRef(one.pid, ours=True)) for one in sorted(seen - living))
    return ended, await asyncio.to_thread(_describe_all, living)
