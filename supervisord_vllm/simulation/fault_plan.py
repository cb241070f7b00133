"""The faults of one launch, as the stand-in's two processes ask for them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping

from supervisord_vllm.simulation.fault import VARIABLE, Fault, read_faults
from supervisord_vllm.simulation.shared_card import SharedCard

WAIT_FOR_NEIGHBOUR = 30.0
"""Seconds that a launch waits for a neighbour that was announced."""


_LEAVE = """
import pathlib, subprocess, sys
line = [line for line in open("/proc/self/cgroup") if line.startswith("0::")]
inside = pathlib.Path(line[0].strip()[4:] if line else "")
for mount in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"):
    procs = pathlib.Path(mount, inside.parent, "cgroup.procs")
    if inside.name.startswith("supervise-") and pathlib.Path(mount, inside).is_dir():
        procs.write_text("0")
"""
"""A neighbour is nobody's relation: whoever starts it leaves the launch's cgroup first, if it is in one."""


class FaultPlan:
    """Faults of the card's file and of ``SIMULATED_FAULTS`` that belong to this launch. Raises `FaultError`."""

    def __init__(self, shared: SharedCard, environment: Mapping[str, str], launch: int) -> None:
        every = (*shared.card().faults, *read_faults(environment.get(VARIABLE, "")))
        self._shared = shared
        self._faults = tuple(fault for fault in every if fault.applies(launch))

    def find(self, kind: str) -> Fault | None:
        """The fault of a kind that has no stage, or ``None``."""
        return next((fault for fault in self._faults if fault.kind == kind), None)

    def at(self, stage: str) -> tuple[Fault, ...]:
        """What strikes at a stage, neighbours first."""
        found = [fault for fault in self._faults if fault.at == stage]
        return tuple(sorted(found, key=lambda fault: "neighbour" not in fault.kind))

    @property
    def slowness(self) -> float:
        """By how much a start is longer than usual."""
        slow = self.find("slow-start")
        return 1.0 if slow is None else slow.factor

    def neighbour(self, fault: Fault) -> None:
        """Start a neighbour (``neighbour-takes``), or not, and wait until foreign processes hold that much.

        The neighbour runs in a session of its own, without the supervisor's variables, and is nobody's child: it is
        handed to init, or to the nearest subreaper.
        """
        size = fault.bytes or 0
        before = sum(holder.bytes for holder in self._shared.holders())
        if fault.kind == "neighbour-takes":
            command = [sys.executable, "-m", "supervisord_vllm.simulation.neighbour", "--card", str(self._shared.path)]
            command += ["--bytes", f"{size}B", *(["--for", f"{fault.seconds:f}s"] if fault.seconds is not None else [])]
            environment = {key: value for key, value in os.environ.items() if not key.startswith("SUPERVISE_")}
            launcher = _LEAVE + "subprocess.Popen(sys.argv[1:], start_new_session=True, stdin=-3, stdout=-3)"
            subprocess.run([sys.executable, "-c", launcher, *command], env=environment, check=True)
            size += before
        deadline = time.monotonic() + WAIT_FOR_NEIGHBOUR
        while time.monotonic() < deadline:
            if sum(holder.bytes for holder in self._shared.holders()) >= size:
                return
            time.sleep(0.01)
