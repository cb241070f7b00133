"""How far the proof of a launch is: the ``proof`` object of the status document, and a line of bars for a person.

Imports the standard library and the core only: ``status`` starts in no time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from supervisord_vllm.clock import SECOND_NS
from supervisord_vllm.core import proof
from supervisord_vllm.core.facts import DeviceSoak
from supervisord_vllm.core.policy import Policy
from supervisord_vllm.core.proving import too_large
from supervisord_vllm.core.state import Launch, State

Document = dict[str, Any]
WIDTH = 10
"""Characters of one bar."""


@dataclass(frozen=True, slots=True)
class Flying:
    """A burst that is on its way: requests that are over, and whether real traffic keeps it below its size."""

    done: int = 0
    yields: bool = False


def document(
    policy: Policy, state: State, now_ns: int, flying: Flying | None = None, devices: tuple[DeviceSoak, ...] = ()
) -> Document | None:
    """Part and progress of the present launch's proof; ``None`` before its engine answers. ``devices`` is what the soak
    has seen so far."""
    launch = state.launch
    if launch is None or launch.healthy_ns is None:
        return None
    part = None if launch.proven else proof.part(policy, launch)
    seen = devices if launch.soak is None else launch.soak.devices
    found = too_large(policy, state)
    return {
        "part": part,
        "canary": {
            "percent": 100 if launch.ready_ns is not None else 0,
            "first_token_s": launch.first_token_s,
        },
        "burst": _burst(policy, launch, flying),
        "soak": {
            "percent": _soaked(policy, launch, now_ns),
            "seconds": policy.soak_ns / SECOND_NS,
            "memory": [_device(device) for device in seen],
            "finding": None if found is None else found.text,
        },
    }


def _burst(policy: Policy, launch: Launch, flying: Flying | None) -> Document | None:
    asked, seen = proof.burst_of(policy, launch), launch.burst
    if seen is None:
        if asked is None:
            return None
        done = flying.done if flying is not None else 0
        yields = flying is not None and flying.yields
        return {
            "percent": 100 * done // asked.requests,
            "requests": asked.requests,
            "done": done,
            "yields": yields,
            "ok": None,
        }
    done = seen.answered + seen.failed + seen.refused + seen.real
    return {
        "percent": 100,
        "requests": seen.requests,
        "done": min(seen.requests, done),
        "yields": False,
        "ok": seen.ok,
        "answered": seen.answered,
        "failed": seen.failed,
        "refused": seen.refused,
        "real": seen.real,
        "seconds": round(seen.seconds, 2),
        "first_token_s": seen.first_token_s,
        "detail": seen.detail or None,
    }


def _soaked(policy: Policy, launch: Launch, now_ns: int) -> int:
    began = proof.soak_began_ns(policy, launch)
    if launch.proven:
        return 100
    if began is None:
        return 0
    return min(100, 100 * (now_ns - began) // policy.soak_ns) if policy.soak_ns else 100


def _device(seen: DeviceSoak) -> Document:
    return {
        "gpu": seen.device,
        "own_bytes": seen.own_last_bytes,
        "own_most_bytes": seen.own_most_bytes,
        "growth_bytes": seen.growth_bytes,
        "free_bytes": seen.free_last_bytes,
        "slope_bytes_per_hour": seen.slope_bytes_per_hour,
    }


def percents(shown: Mapping[str, Any]) -> dict[proof.Part, int]:
    """Percent by part, without a burst that there is not."""
    return {part: int(shown[part]["percent"]) for part in proof.PARTS if shown.get(part) is not None}


def bar(percent: int, *, plain: bool = False) -> str:
    """A bar of `WIDTH` characters; ``plain`` for a terminal without box characters."""
    full = max(0, min(WIDTH, percent * WIDTH // 100))
    return ("#" if plain else "█") * full + ("." if plain else "░") * (WIDTH - full)


def line(shown: Mapping[str, Any], *, plain: bool = False) -> str:
    """The whole proof in one line: ``canary ██████████ burst ███░░░░░░░ 5 of 16 soak ░░░░░░░░░░``."""
    parts = []
    for part, percent in percents(shown).items():
        text = f"{part} {bar(percent, plain=plain)}"
        burst = shown["burst"]
        if part == "burst" and percent < 100:
            text += f" {burst['done']} of {burst['requests']}" + (", yields to real traffic" if burst["yields"] else "")
        elif 0 < percent < 100:
            text += f" {percent} %"
        parts.append(text)
    return "  ".join(parts)


def summary(shown: Mapping[str, Any]) -> str:
    """A proof that is over, in one line for a person: what was measured."""
    burst, soak, said = shown.get("burst"), shown["soak"], []
    first = shown["canary"].get("first_token_s")
    if first is not None:
        said.append(f"first token after {first:.2f} s")
    if burst is not None and burst.get("answered") is not None:
        median = f", first token {burst['first_token_s']:.2f} s (median)" if burst.get("first_token_s") else ""
        rest = f" ({burst['detail']})" if burst.get("detail") else ""
        said.append(
            f"{burst['answered']} of {burst['requests']} at once answered in {burst['seconds']:g} s{median}{rest}"
        )
    if soak.get("finding"):
        said.append(f"memory: {soak['finding']}")
    return "; ".join(said)
