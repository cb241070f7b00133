"""One instance of the unit on a `Machine`, on the stand-in engine: policy, drop-ins, systemctl, status, processes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from daemon_process import DEFAULTS, MODEL, POLICY, free_port, get
from real.machine import ROOT, Json, Machine
from real.waiting import until
from supervisord_vllm.places import instance

PATIENCE_S = 60.0
PROGRAM = "/usr/local/bin/vllm-supervise"
ROGUE = ROOT / "tests" / "chaos" / "rogue.py"


class Service:
    """``vllm-supervise@NAME`` with a folder, ports and a card of its own."""

    def __init__(self, machine: Machine, name: str) -> None:
        self.machine = machine
        self.name = name
        self.unit = f"vllm-supervise@{name}.service"
        self.folder = f"/srv/{name}"
        self.port, self.http = free_port(), free_port()
        card = f'schema = 1\nbase = "h200"\n[card]\nuuid = "GPU-{name}"\n[timing]\nspeed = 400\n'
        machine.write(f"{self.folder}/card.toml", card)
        machine.path(self.folder).chmod(0o777)  # whichever user the unit runs as keeps the card's file there
        self.configure()

    # --- set up ---

    def configure(self, more: str = "", **values: object) -> None:
        """Write the policy file; the folders are left to systemd."""
        place = {"folder": self.folder, "port": self.port, "http": self.http}
        lines = POLICY.format(**{**DEFAULTS, **place, **values}).splitlines(keepends=True)
        text = "".join(line for line in lines if not line.startswith(("name =", "state-dir =", "runtime-dir =")))
        self.machine.write(f"/etc/vllm-supervise/{self.name}.toml", text + more)

    def misbehave(self, *faults: str) -> None:
        """Take the rogue engine, with a fault for each launch."""
        path = f"/etc/vllm-supervise/{self.name}.toml"
        text = self.machine.path(path).read_text()
        stand_in = '"-m", "supervisord_vllm.simulation", "serve"'
        assert stand_in in text
        env = f"ROGUE_FOLDER = {json.dumps(self.folder)}\nROGUE_PLAN = {json.dumps(json.dumps(faults))}"
        text = text.replace(stand_in, f'"-S", {json.dumps(str(ROGUE))}, "serve"')
        self.machine.write(path, text.replace("[engine.env]", f"[engine.env]\n{env}"))

    def drop_in(self, name: str, text: str) -> None:
        """Add a drop-in to this instance's unit."""
        self.machine.write(f"/etc/systemd/system/{self.unit}.d/{name}.conf", text)
        self.machine.run("systemctl", "daemon-reload")

    def take(self, name: str) -> None:
        """Add one of the drop-ins that the project brings."""
        self.drop_in(name, (ROOT / "systemd" / f"{name}.conf").read_text())

    # --- what an operator does ---

    def systemctl(self, verb: str, *words: str, status: int | None = 0) -> str:
        """``systemctl VERB … UNIT``."""
        return self.machine.run("systemctl", verb, *words, self.unit, status=status)

    def verb(self, *words: str, status: int | None = 0) -> str:
        """A verb of ours for this instance, as root."""
        return self.machine.run(PROGRAM, *words, "--name", self.name, status=status)

    def kill(self, number: str = "KILL") -> None:
        """A signal to the daemon alone."""
        self.systemctl("kill", "--kill-whom=main", f"--signal={number}")

    # --- what is seen ---

    def show(self, *names: str) -> dict[str, str]:
        """Properties of the unit."""
        return self.machine.show(self.unit, *names)

    def state(self) -> str:
        """active, activating, failed, …"""
        return self.show("ActiveState")["ActiveState"]

    @property
    def restarts(self) -> int:
        """How often systemd has started the daemon by itself."""
        return int(self.show("NRestarts")["NRestarts"])

    @property
    def main_pid(self) -> int:
        """The daemon, as the machine numbers it; 0 where there is none."""
        return int(self.show("MainPID")["MainPID"])

    def status(self) -> Json:
        """``/api/v1/status``, empty where nobody answers."""
        code, body = get(f"http://127.0.0.1:{self.http}/api/v1/status")
        return json.loads(body) if code == 200 else {}

    def complete(self) -> bool:
        """Whether the engine answers a completion."""
        body = {"model": MODEL, "prompt": "a", "max_tokens": 4}
        return get(f"http://127.0.0.1:{self.port}/v1/completions", body)[0] == 200

    def history(self) -> dict[str, Any]:
        """``history --json``, from the store."""
        document: dict[str, Any] = json.loads(self.verb("history", "--json"))
        return document

    def group_of(self, pid: int) -> str:
        """The cgroup of a process inside, below the unit's; empty for the unit's own."""
        line = self.machine.path(f"/proc/{pid}/cgroup").read_text().splitlines()[-1]  # the v2 tree is the last
        _, unit, below = line.partition(f"/{self.unit}")
        assert unit, f"{line} is not of {self.unit}"
        return below.strip("/")

    def exists(self, pid: int) -> bool:
        """Whether a process lives inside."""
        try:
            return self.machine.path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except OSError:
            return False

    def identity(self, pid: int) -> tuple[int, int]:
        """A process for ever: pid and start time."""
        return pid, int(self.machine.path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])

    def marked(self) -> list[int]:
        """Living processes inside that carry this instance's marker."""
        state = self.machine.run("realpath", f"/var/lib/vllm-supervise/{self.name}").strip()
        needle = f"SUPERVISE_LAUNCH={instance(Path(state))}.".encode()
        found = []
        for entry in self.machine.path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and needle in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return found

    def told(self) -> str:
        """For a failing test: the unit and the end of its journal."""
        lines = [f"{line.get('PRIORITY')} {line.get('MESSAGE')}" for line in self.machine.journal(self.unit)]
        return "\n".join([self.systemctl("status", status=None), *lines[-60:]])

    # --- what is awaited ---

    def reaches(self, state: str, launch: int | None = None, other_than: int = 0) -> Json:
        """Wait until a daemon (with ``other_than``: a later one) says that it is in a state (with this launch)."""

        def there() -> Json | None:
            found = self.status()
            assert found or self.state() != "failed", f"failed instead of {state}:\n{self.told()}"
            right = found.get("state") == state and found["daemon"]["pid"] != other_than
            number = (found.get("launch") or {}).get("number")
            return found if right and launch in (None, number) else None

        found = until(there, PATIENCE_S, lambda: f"{state} (launch {launch}): {self.status()}\n{self.told()}")
        assert found is not None
        return found

    def becomes(self, state: str) -> None:
        """Wait until systemd says that the unit is in a state, for good."""

        def there() -> bool:
            found = self.show("ActiveState", "SubState")
            return found["ActiveState"] == state and found["SubState"] != "auto-restart"

        until(there, PATIENCE_S, lambda: f"{state}:\n{self.told()}")

    def is_empty(self) -> None:
        """Assert that nothing of this instance lives."""
        assert self.marked() == [], self.told()
        group = self.show("ControlGroup")["ControlGroup"]
        path = self.machine.path("/sys/fs/cgroup" + group) / "cgroup.procs"
        assert not group or not path.exists() or path.read_text() == "", self.told()

    def close(self) -> None:
        """Stop it; nothing may be left, and neither its policy nor its drop-ins stay."""
        self.systemctl("stop", status=None)
        self.is_empty()
        self.systemctl("disable", status=None)
        self.machine.run("rm", "-rf", f"/etc/systemd/system/{self.unit}.d", f"/etc/vllm-supervise/{self.name}.toml")
        self.systemctl("reset-failed", status=None)
        self.machine.run("systemctl", "daemon-reload")


@contextmanager
def service(machine: Machine, name: str) -> Iterator[Service]:
    """An instance, not started; at the end it is stopped and nothing is left."""
    made = Service(machine, name)
    try:
        yield made
    finally:
        made.close()
