"""``status``: what the engine does, since when, why, and what comes next, in a dozen lines.

Asks the daemon; where none runs, the store. Nothing here imports aiohttp, pydantic, structlog or pynvml.
"""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import closing
from typing import Annotated, Any

import typer

from supervisord_vllm.cli.daemon import DaemonError, NoDaemonError, ask, fail
from supervisord_vllm.cli.instance import (
    ConfigOption,
    Instance,
    InstanceError,
    NameOption,
    StateDirOption,
    find,
)
from supervisord_vllm.cli.strained import told
from supervisord_vllm.clock import parse_rfc3339
from supervisord_vllm.core.ledger import gib
from supervisord_vllm.exitcodes import ExitCode
from supervisord_vllm.proof_bars import line, summary
from supervisord_vllm.redaction import printable
from supervisord_vllm.status import NO_DAEMON, Document, show_lever, status_from_history
from supervisord_vllm.store.history import History
from supervisord_vllm.store.schema import StoreError

JsonOption = Annotated[bool, typer.Option("--json", help="For programs: one JSON document, schema 1.")]
WatchOption = Annotated[bool, typer.Option("--watch", help="A live view on the terminal, until Ctrl-C.")]
WIDTH = 100
HOLDERS = 3
"""Holders of a device that are named; the JSON names all."""
MANY_REQUESTS, FAR_ABOVE = 1000, 4
"""After so many requests a length of so many times the longest is worth a word."""


def status(
    as_json: JsonOption = False,
    watch: WatchOption = False,
    name: NameOption = None,
    config: ConfigOption = None,
    state_dir: StateDirOption = None,
) -> None:
    """Say what the engine does, since when, why, and what comes next."""
    if watch:
        if as_json:
            fail("status: --json and --watch exclude each other; ask --json again and again", ExitCode.USAGE)
        from supervisord_vllm.cli.watch import watch as live  # rich, and only here

        live(lambda: find(name, config, state_dir))
        return
    document = asked(
        lambda: find(name, config, state_dir),
        "/status",
        lambda instance, history: status_from_history(instance.name, history),
    )
    print(json.dumps(document, indent=2) if as_json else render(document, time.time()))


def asked(which: Callable[[], Instance], target: str, recorded: Callable[[Instance, History], Document]) -> Document:
    """The daemon's document, else what the store says; ends the program with one line where neither is there."""
    try:
        instance = which()
        try:
            return ask(instance.socket, target)
        except NoDaemonError:
            history = History.open(instance.store)
        if history is None:
            missing = f"{instance.name}: no daemon runs and there is no history at {instance.store}"
            fail(missing, ExitCode.REFUSED)
        with closing(history):
            return recorded(instance, history)
    except InstanceError as error:
        fail(str(error), error.code)
    except (DaemonError, StoreError) as error:
        fail(str(error), ExitCode.REFUSED)


def render(document: Document, now: float, width: int | None = None) -> str:
    """The document for a person; ``now`` is the wall time."""
    width = width or min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)
    lines = [_headline(document, now), *_launch(document, now), *_memory(document)]
    if document.get("load"):
        lines.append(("load", _load(document["load"])))
        lines += _length(document)
    if slow := told(document.get("pressure") or {}):
        lines.append(("pressure", slow))
    lines += _proof(document)
    decision = document.get("decision")
    if decision:
        lines.append((f"decision {decision.get('number')}", _decision(decision, now)))
    budget = document.get("budget")
    if document.get("state") != NO_DAEMON:
        lines.append(("next", _next(document.get("next") or {}, now)))
    if budget:
        left, window = budget.get("left"), span(float(budget.get("window_s") or 0))
        lines.append(("budget", f"{left} same-again restart{'' if left == 1 else 's'} left in {window}"))
    lost = {what: count for what, count in ((document.get("daemon") or {}).get("counters") or {}).items() if count}
    if lost:
        lines.append(("lost", ", ".join(f"{count} {what.replace('_', ' ')}" for what, count in sorted(lost.items()))))
    return "\n".join(folded(label, text, width) for label, text in lines)


def folded(label: str, text: str, width: int) -> str:
    """One entry, wrapped and indented behind its label; without a label it is a headline."""
    if not label:
        return textwrap.fill(printable(text), max(30, width), subsequent_indent="  ", break_on_hyphens=False)
    indent = " " * 14
    wrapped = textwrap.wrap(printable(text), max(30, width - len(indent)), break_on_hyphens=False) or [""]
    return "\n".join([f"  {printable(label):<11} {wrapped[0]}", *(indent + line for line in wrapped[1:])])


def _headline(document: Document, now: float) -> tuple[str, str]:
    state = str(document.get("state"))
    if state == NO_DAEMON:
        since = when(document.get("since"), now)
        entry = f"; the last entry is of {since}" if since else ""
        keeps = f"; {held(document.get('hold'), now)}" if document.get("held") else ""
        return "", f"{document['name']}: no daemon runs{entry}{keeps}"
    words = [state]
    if document.get("ready"):
        words.append("ready")
    if document.get("proven"):
        words.append("proven")
    if document.get("degraded"):
        words.append("below what was declared")
    if document.get("held"):
        words.append(held(document.get("hold"), now))
    if document.get("act") is False:
        words.append("only watching (act = false)")
    head = f"{document['name']}: {', '.join(words)}, since {when(document.get('since'), now)}"
    return "", head + (f". {document['given_up']}" if document.get("given_up") else "")


def held(hold: dict[str, Any] | None, now: float) -> str:
    """A hold for a person: ``held by ada (demo) since 2026-…, until 2026-…``."""
    if not hold:
        return "held"
    words = ["held"]
    if hold.get("by"):
        words.append(f"by {hold['by']}")
    if hold.get("reason"):
        words.append(f"({hold['reason']})")
    if hold.get("since"):
        words.append(f"since {when(hold['since'], now)}")
    return " ".join(words) + (f" until {when(hold['until'], now)}" if hold.get("until") else " until `resume`")


def _launch(document: Document, now: float) -> list[tuple[str, str]]:
    launch, declared = document.get("launch"), document.get("declared") or {}
    if not launch:
        return [("declared", levers(declared))] if declared else []
    parts = [f"started {when(launch.get('started_at'), now)}"]
    if launch.get("ended_at"):
        parts.append(f"ended {when(launch['ended_at'], now)}: {launch.get('outcome') or 'outcome unknown'}")
    elif launch.get("pid") and document.get("state") != NO_DAEMON:
        parts.insert(0, f"pid {launch['pid']}")
        if launch.get("phase") and not document.get("ready"):
            parts.append(f"phase {launch['phase']}")
    elif document.get("state") == NO_DAEMON:
        parts.append("its end is not recorded")
    running = launch.get("levers") or {}
    return [
        (f"launch {launch.get('number')}", ", ".join(parts)),
        ("levers", levers(running, declared)),
        ("log", str(launch.get("log"))),
    ]


def levers(values: dict[str, Any], declared: dict[str, Any] | None = None) -> str:
    """Levers for a person, each with what was declared where that differs."""
    shown = []
    for lever, value in values.items():
        text = f"{lever} {show_lever(lever, value)}"
        wanted = (declared or {}).get(lever, value) if declared else value
        shown.append(text if wanted == value else f"{text} (declared {show_lever(lever, wanted)})")
    return ", ".join(shown) or "vLLM's defaults"


def _memory(document: Document) -> list[tuple[str, str]]:
    lines = []
    for device in document.get("memory") or []:
        parts = [f"{gib(device['free_bytes'])} of {gib(device['total_bytes'])} free"]
        if device.get("requested_bytes") is not None:
            parts.append(f"{gib(device['requested_bytes'])} requested")
        if device.get("own_bytes"):
            parts.append(f"ours {gib(device['own_bytes'])}")
        if (device.get("growth") or {}).get("creeps"):
            parts.append(growing(device["growth"]))
        foreign = [holder for holder in device.get("holders") or [] if not holder.get("ours")]
        for holder in foreign[:HOLDERS]:
            size = holder.get("memory_bytes")
            who = f"pid {holder.get('pid')} ({holder.get('command') or 'unknown'})"
            parts.append(who if size is None else f"{who} holds {gib(size)}")
        if len(foreign) > HOLDERS:
            parts.append(f"{len(foreign) - HOLDERS} more")
        # The first block of a UUID names a card well enough; `host-memory` is host memory.
        name = str(device["gpu"])
        lines.append(
            (
                name[:12] if name.startswith(("GPU-", "MIG-")) else name.replace("host-memory", "memory"),
                ", ".join(parts),
            )
        )
    if document.get("memory_error"):
        lines.append(("memory", f"unknown: {document['memory_error']}"))
    return lines


def growing(growth: dict[str, Any]) -> str:
    """Memory that creeps, for a person: ``grows 210 MiB/h (95 %: 180 MiB to 240 MiB)``."""
    rate, low, high = (gib(int(growth.get(name) or 0)) for name in ("bytes_per_hour", "low", "high"))
    return f"grows {rate}/h (95 %: {low} to {high}, seen over {growth.get('hours')} h)"


def _proof(document: Document) -> list[tuple[str, str]]:
    """Bars while a launch is proven, later what its proof has measured."""
    shown = document.get("proof")
    if not shown:
        return []
    if document.get("state") == "proving":
        return [("proof", line(shown, plain=(sys.stdout.encoding or "").lower() not in ("utf-8", "utf8")))]
    told = summary(shown) if document.get("proven") else ""
    return [("proof", told)] if told else []


def _load(load: dict[str, Any]) -> str:
    parts = [f"{load[name]} {name}" for name in ("running", "waiting") if load.get(name) is not None]
    if load.get("kv_usage") is not None:
        parts.append(f"KV cache {load['kv_usage']:.0%} used")
    if load.get("preemptions_total"):
        parts.append(f"{load['preemptions_total']} preemptions since its start")
    return ", ".join(parts) or "unknown"


def _length(document: Document) -> list[tuple[str, str]]:
    """Whether far longer requests are permitted than come."""
    load, levers = document["load"], (document.get("launch") or {}).get("levers") or {}
    most, longest = levers.get("max_model_len"), load.get("longest_request")
    finished = load.get("request_success_total") or 0
    if not most or not longest or finished < MANY_REQUESTS or most < FAR_ABOVE * longest:
        return []
    seen = f"none of {finished:,} requests had more than {longest:,} tokens"
    return [("length", f"max_model_len {most:,} is far above what comes: {seen}. Less would start with less KV cache")]


def _decision(decision: Document, now: float) -> str:
    outcome = f" Outcome: {decision['outcome']}." if decision.get("outcome") else ""
    return f"{when(decision.get('at'), now)}: {decision.get('sentence')}{outcome}"


def _next(coming: dict[str, Any], now: float) -> str:
    at = coming.get("at")
    what = str(coming.get("what") or "nothing")
    word = "not before" if coming.get("earliest") else "at the latest"
    return what if at is None else f"{what}, {word} {when(at, now)}"


def when(text: str | None, now: float) -> str:
    """A moment with its distance from now: ``2026-12-01 09:12:33 UTC (2 h 14 min ago)``."""
    if not text:
        return "an unknown time"
    try:
        moment = parse_rfc3339(text)
    except ValueError:
        return text
    distance = now - moment
    shown = text[:19].replace("T", " ") + " UTC"
    return f"{shown} ({span(distance)} ago)" if distance >= 0 else f"{shown} (in {span(-distance)})"


def span(seconds: float) -> str:
    """A duration for a person: ``45 s``, ``12 min``, ``2 h 14 min``, ``3 d 4 h``."""
    whole = int(seconds)
    if whole < 120:
        return f"{whole} s"
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if minutes < 120 and whole % 3600:
        return f"{minutes} min"
    if hours < 48:
        return f"{hours} h {minutes % 60} min" if minutes % 60 else f"{hours} h"
    return f"{days} d {hours % 24} h"
