"""What the daemon before this one left: its state, and what has become of its engine.

The state comes out of the store after a crash, and out of the process' own memory after an `upgrade` (execve). Only a
state of this boot counts: an engine does not outlive one, and times are CLOCK_BOOTTIME.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from supervisord_vllm.core.adopting import carried
from supervisord_vllm.handover import Handover
from supervisord_vllm.host import adoption
from supervisord_vllm.host.adoption import Found
from supervisord_vllm.host.process import reserve

CARRIED = "carried"
"""The store's meta value ``{"boot_id": …, "state": …}``; the state is what `core.adopting.carry` made."""


@dataclass(frozen=True, slots=True)
class Inheritance:
    """``carried`` is the state as text, ``None`` where there is none; ``found`` its engine."""

    carried: str | None
    found: Found


NOTHING = Inheritance(None, Found("none"))


def kept(state: Mapping[str, Any], boot_id: str) -> dict[str, Any]:
    """The form in which a state lies in the store."""
    return {"boot_id": boot_id, "state": state}


def inherit(stored: object, handover: Handover | None, instance: str, boot_id: str) -> Inheritance:
    """What is there to go on with. The exit status of an engine that is our child is kept for us from here on, so call
    it before orphans are collected (`host.process.watch_orphans`)."""
    if handover is not None:
        text: str | None = handover.carried
    else:
        text = None
        if isinstance(stored, Mapping) and stored.get("boot_id") == boot_id:
            text = json.dumps(stored.get("state"))
    state = carried(text) if text is not None else None
    if text is None or state is None:
        return NOTHING
    launch = state.launch
    if launch is None or launch.pid is None:
        return Inheritance(text, Found("none"))
    outlived = handover is not None or adoption.outlives(os.environ)
    found = adoption.look(launch.pid, launch.start_ticks, instance, outlived=outlived)
    if found.engine != "none":
        reserve(launch.pid, launch.start_ticks)
    return Inheritance(text, found)
