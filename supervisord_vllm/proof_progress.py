"""How far the proof of a launch is: the ``proof`` object of the status document."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from supervisord_vllm.clock import SECOND_NS
from supervisord_vllm.core import proof
from supervisord_vllm.core.facts import DeviceSoak
from supervisord_vllm.core.policy import Policy
from supervisord_vllm.core.proving import too_large
from supervisord_vllm.core.state import Launch, State

Document = dict[str, Any]


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
