"""The state of one simulated card, shared by every process that "uses" it.

A JSON file, replaced as a whole under an exclusive lock on ``FILE.lock``: a process that is killed in the middle leaves
the old state and no lock. It holds the card's TOML text, the memory that each process has, the number of launches, the
compile cache's keys and the stage of the last launch. A holder whose process is gone (or a zombie, or another process
with the same pid) holds nothing; one that lives keeps what it has, an orphan too.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import pwd
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from supervisord_vllm.simulation.card import Card, CardError, card_text, parse_card

CARD_VARIABLE = "SIMULATED_CARD"
TOML_VARIABLE = "SIMULATED_CARD_TOML"


class CardFullError(Exception):
    """An allocation does not fit. ``free`` is what the card had, ``tried`` what was asked, in bytes."""

    def __init__(self, tried: int, free: int) -> None:
        super().__init__(f"{tried} bytes asked, {free} bytes free")
        self.tried = tried
        self.free = free


@dataclass(frozen=True, slots=True)
class Holder:
    """A living process that holds memory of the card."""

    pid: int
    start_ticks: int
    bytes: int
    command: str
    user: str


def start_ticks(pid: int) -> int | None:
    """Start time of a living process in clock ticks since boot; ``None`` for one that is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (OSError, UnicodeDecodeError):
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


class SharedCard:
    """Handle on a card's state file; every call reads the file anew.

    Raises:
        CardError: the file is damaged, or its card text is wrong.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> SharedCard:
        """The card named by ``SIMULATED_CARD``; it is made on first use.

        Its text comes from ``SIMULATED_CARD_TOML`` (a path or a packaged name), else from the file beside the state
        file with the suffix ``.toml``, else it is the packaged ``h200``. Where the variable is set, it rules anew each
        time.
        """
        path = environment.get(CARD_VARIABLE)
        if not path:
            raise CardError(f"{CARD_VARIABLE} is not set; set it to the path of the card's state file")
        card = cls(path)
        source = environment.get(TOML_VARIABLE)
        if source:
            card.insert(card_text(source))
        elif not card.path.exists():
            beside = card.path.with_suffix(".toml")
            card.insert(card_text(beside if beside.exists() and beside != card.path else "h200"))
        return card

    def insert(self, text: str) -> None:
        """Put the card's TOML text in; holders and launches of an existing state are kept."""
        parse_card(text, str(self.path))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._changing() as state:
            state["toml"] = text

    @property
    def exists(self) -> bool:
        """Whether the state file is still there; a holder ends when its card was taken away."""
        return self.path.exists()

    def card(self) -> Card:
        """The card's description."""
        return _card_of(self._read(), self.path)

    def holders(self) -> tuple[Holder, ...]:
        """Who holds memory now, the largest first."""
        found = _living(self._read())
        return tuple(sorted(found, key=lambda holder: (-holder.bytes, holder.pid)))

    def free(self) -> int:
        """Free bytes of what vLLM sees as the total."""
        state = self._read()
        return _free(state, _card_of(state, self.path))

    def hold(self, size: int, command: str, pid: int | None = None) -> int:
        """Set what a process (default: this one) holds; returns what is free afterwards.

        Raises:
            CardFullError: it does not fit; nothing changes.
        """
        return self._set(pid or os.getpid(), command, lambda _old, _free: size)

    def grow(self, size: int, command: str, pid: int | None = None) -> int:
        """Add to what a process holds; otherwise as `hold`."""
        return self._set(pid or os.getpid(), command, lambda old, _free: old + size)

    def fill(self, leave: int, command: str, pid: int | None = None) -> int:
        """Take everything but ``leave`` bytes (nothing if less is free); returns what is free afterwards."""
        return self._set(pid or os.getpid(), command, lambda old, free: old + max(0, free - leave))

    def release(self, pid: int | None = None) -> None:
        """Give back all that a process holds."""
        with self._changing() as state:
            state["holders"].pop(str(pid or os.getpid()), None)

    def count_launch(self) -> int:
        """Number of this launch of an engine on the card, from 1."""
        with self._changing() as state:
            state["launches"] += 1
            state["stage"] = "importing"
            return int(state["launches"])

    def enter(self, stage: str) -> None:
        """Note the stage that the current launch has reached."""
        with self._changing() as state:
            state["stage"] = stage

    def progress(self) -> tuple[int, str]:
        """Launches so far, and the stage of the last one."""
        state = self._read()
        return int(state["launches"]), str(state["stage"])

    def compiled(self, key: str) -> bool:
        """Whether the compile cache has an entry for this key."""
        return key in self._read()["compiled"]

    def remember_compiled(self, key: str) -> None:
        """Add an entry to the compile cache (the newest 256 are kept)."""
        with self._changing() as state:
            state["compiled"] = [*(k for k in state["compiled"] if k != key), key][-256:]

    def _set(self, pid: int, command: str, size: Callable[[int, int], int]) -> int:
        with self._changing() as state:
            card = _card_of(state, self.path)
            old = int(state["holders"].get(str(pid), {"bytes": 0})["bytes"])
            free = _free(state, card)
            new = size(old, free)
            if new - old > free:
                raise CardFullError(new - old, free)
            ticks = start_ticks(pid)
            if ticks is not None:
                state["holders"][str(pid)] = {
                    "start_ticks": ticks,
                    "bytes": new,
                    "command": command,
                    "user": _user(),
                }
            return free - (new - old)

    def _read(self) -> dict[str, Any]:
        try:
            state = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CardError(f"{self.path}: no such card; start an engine with {CARD_VARIABLE} first") from None
        except (OSError, ValueError) as error:
            raise CardError(f"{self.path}: no card's state file ({error}); remove it") from None
        if not isinstance(state, dict) or state.get("schema") != 1:
            raise CardError(f"{self.path}: no card's state file of schema 1; remove it")
        return state

    @contextmanager
    def _changing(self) -> Iterator[dict[str, Any]]:
        with Path(f"{self.path}.lock").open("w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self.path.exists():
                state = self._read()
            else:
                state = {"schema": 1, "toml": "", "launches": 0, "stage": "", "compiled": [], "holders": {}}
            state["holders"] = {
                str(holder.pid): {
                    "start_ticks": holder.start_ticks,
                    "bytes": holder.bytes,
                    "command": holder.command,
                    "user": holder.user,
                }
                for holder in _living(state)
            }
            yield state
            new = Path(f"{self.path}.new")
            new.write_text(json.dumps(state), encoding="utf-8")
            new.replace(self.path)


@functools.lru_cache(maxsize=8)
def _parsed(text: str, place: str) -> Card:
    return parse_card(text, place)


def _card_of(state: Mapping[str, Any], path: Path) -> Card:
    return _parsed(str(state["toml"]), str(path))


def _living(state: Mapping[str, Any]) -> list[Holder]:
    found = []
    for pid, entry in state["holders"].items():
        if start_ticks(int(pid)) == entry["start_ticks"]:
            found.append(Holder(int(pid), entry["start_ticks"], entry["bytes"], entry["command"], entry["user"]))
    return found


def _free(state: Mapping[str, Any], card: Card) -> int:
    return card.device.usable - sum(holder.bytes for holder in _living(state))


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())
