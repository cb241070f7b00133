"""Results: what one fault leaves in OUT/fault-N, and the table that docs/gpu.md shows.

``result.json`` is what was measured, ``record.json`` the run as the store has it (policy, facts, decisions; enough to
replay it), ``launch-N.log`` the engine's output, ``daemon.log`` the daemon's. Names of this machine's folders are taken
out of all of them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.gpu.faults import Fault, Story, checks
from benchmarks.gpu.load import summary
from benchmarks.gpu.timeline import Json, context_mib, memory_after, middle, own_share, parts, times

Names = Mapping[str, str]
"""What stands for a path of this machine."""


def generalised(text: str, names: Names) -> str:
    """The text without this machine's paths, the longest first."""
    for name in sorted(names, key=len, reverse=True):
        text = text.replace(name, names[name])
    return text


class Results:
    """The folder of one run's results."""

    def __init__(self, out: Path, names: Names, command: str, rig: str, smi: Json | None) -> None:
        self._out, self._names, self._command, self._rig = out, names, command, rig
        self._card = f"{smi['name']}, driver {smi['driver']}" if smi else {"cpu": "none", "standin": "simulated"}[rig]

    def folder(self, number: int) -> Path:
        """Where one fault's results lie."""
        return self._out / f"fault-{number}"

    def there(self, number: int) -> bool:
        """Whether a fault was run."""
        return (self.folder(number) / "result.json").exists()

    def good(self, number: int) -> bool:
        """Whether it went as it must."""
        found: Json = json.loads((self.folder(number) / "result.json").read_text(encoding="utf-8"))
        return bool(found.get("as_it_must", True))

    def write_truth(self, found: Json) -> None:
        """The comparison of NVML with CUDA."""
        self._save(0, "result.json", {**self._head(0, "NVML beside CUDA"), "found": found})

    def write(self, fault: Fault, story: Story, observed: Json, trouble: str) -> Json:
        """Everything of one fault; returns its result."""
        assert story.daemon is not None
        record = story.daemon.record()
        launches = times(record.facts)
        fault_ns = story.fault_ns or (launches[0].spawned if launches else None)
        found = checks(fault, story, record)
        result = {
            **self._head(fault.number, fault.title),
            "vllm": next((n["version"] for one in launches if (n := one.numbers) and "version" in n), None),
            "trouble": generalised(trouble, self._names),
            "as_it_must": not trouble and all(holds for _, holds in found),
            "checks": [{"what": what, "holds": holds} for what, holds in found],
            "requests": summary(story.answers),
            "long_requests": summary(story.long),
            "answers_per_s": story.rates,
            "launches": [
                {
                    "number": one.number,
                    "exit": one.exit,
                    "kind": one.kind,
                    "seconds": parts(
                        one,
                        launches[index - 1] if index else None,
                        fault_ns if index == 1 else None,
                    ),
                    "context_mib": context_mib(one),
                    "numbers": one.numbers,
                    "memory_after": memory_after(one),
                }
                for index, one in enumerate(launches)
            ],
            "own_share": own_share(launches, record.policy["gate"]["patience_ns"] if record.policy else 0),
            "decisions": [
                {key: d.get(key) for key in ("launch", "kind", "action", "moves", "arithmetic", "sentence")}
                for d in record.decisions
            ],
            "observed": observed,
        }
        self._save(fault.number, "result.json", result)
        rows = {"policy": record.policy, "facts": record.facts, "decisions": record.decisions}
        self._save(fault.number, "record.json", rows)
        for one in launches:
            self._copy(story.daemon.log(one.number), fault.number, f"launch-{one.number}.log")
        self._copy(story.folder / "daemon.log", fault.number, "daemon.log")
        return result

    def _head(self, number: int, title: str) -> Json:
        return {
            "fault": number,
            "title": title,
            "rig": self._rig,
            "card": self._card,
            "date": time.strftime("%Y-%m-%d %H:%MZ", time.gmtime()),
            "command": generalised(self._command, self._names),
        }

    def _save(self, number: int, name: str, content: Json) -> None:
        self.folder(number).mkdir(parents=True, exist_ok=True)
        text = json.dumps(content, indent=1, ensure_ascii=False)
        (self.folder(number) / name).write_text(generalised(text, self._names) + "\n", encoding="utf-8")

    def _copy(self, source: Path, number: int, name: str) -> None:
        if source.exists():
            text = source.read_text(encoding="utf-8", errors="replace")
            (self.folder(number) / name).write_text(generalised(text, self._names), encoding="utf-8")


def told(result: Json) -> str:
    """One fault for a person."""
    lines = [f"fault {result['fault']}: {result['title']}"]
    lines += [f"  TROUBLE {result['trouble']}"] if result["trouble"] else []
    for one in result["launches"]:
        spent = ", ".join(f"{name} {value}" for name, value in one["seconds"].items() if value is not None)
        lines.append(
            f"  launch {one['number']}: exit {one['exit']} {one['kind']}; {spent}; context {one['context_mib']}"
        )
    lines += [f"  » {decision['sentence']}" for decision in result["decisions"]]
    lines.append(f"  requests {result['requests']}; long {result['long_requests']}")
    lines += [f"  {'ok  ' if check['holds'] else 'FAIL'} {check['what']}" for check in result["checks"]]
    return "\n".join(lines)


def results(folders: Iterable[Path]) -> list[Json]:
    """The results in these folders, by fault; a later folder's replaces an earlier one's."""
    found: dict[int, Json] = {}
    for folder in folders:
        for path in sorted(folder.glob("fault-*/result.json")):
            result = json.loads(path.read_text(encoding="utf-8"))
            found[result["fault"]] = result
    return [found[number] for number in sorted(found)]


COLUMNS = (
    "fault", "launches", "fault → noticed", "→ exit", "→ gate", "→ spawn", "→ healthy", "→ ready",
    "requests lost", "verdict", "free after",
)  # fmt: skip
NAMES = (
    "fault_to_noticed", "noticed_to_exit", "exit_to_gate", "gate_to_spawn", "spawn_to_healthy", "healthy_to_ready",
)  # fmt: skip


def table(folders: Sequence[Path]) -> str:
    """What lies in these folders as a table in Markdown, and the supervisor's own share below it."""
    rows = [result for result in results(folders) if result["fault"]]
    lines = [f"| {' | '.join(COLUMNS)} |", f"| {' | '.join('---' for _ in COLUMNS)} |"]
    lines += [f"| {' | '.join(_row(result))} |" for result in rows]
    spawn = [value for result in rows for value in result["own_share"]["exit_to_spawn"]]
    ready = [value for result in rows for value in result["own_share"]["healthy_to_ready"]]
    share = (
        f"The supervisor's own share, median: exit → spawn {middle(spawn)} s ({len(spawn)} recoveries that waited for"
        f" nobody), healthy → ready {middle(ready)} s ({len(ready)} starts)."
    )
    return "\n".join([*lines, "", share])


def _row(result: Json) -> list[str]:
    launches = result["launches"]
    seconds = launches[-1]["seconds"] if launches else {}
    if len(launches) == 1 and seconds.get("healthy_to_ready") is None:
        seconds = {**seconds, "noticed_to_exit": seconds.get("spawn_to_exit")}
    sent, lost = (result["requests"][key] + result["long_requests"][key] for key in ("sent", "failed"))
    verdict = "; ".join(f"{d['kind']}: {_moves(d['moves']) or d['action']}" for d in result["decisions"])
    gone = [device["free_bytes"] for one in launches for device in one["memory_after"][:1]]
    end = result["observed"].get("after the daemon's end")
    if isinstance(end, dict) and launches and not launches[-1]["memory_after"]:
        gone.append(end["sampler"]["free_bytes"])
    free = ", ".join(f"{size / (1 << 30):.1f}" for size in gone)
    return [
        f"{result['fault']} {result['title']}",
        str(len(launches)),
        *(_shown(seconds.get(name)) for name in NAMES),
        f"{lost} of {sent}",
        verdict + ("" if result["as_it_must"] else " **(not as it must)**"),
        f"{free} GiB" if free else "–",
    ]


def _moves(moves: Iterable[Json]) -> str:
    return ", ".join(f"{move['lever']} {move['from']} → {move['to']}" for move in moves)


def _shown(value: object) -> str:
    return "–" if value is None else f"{value}"
