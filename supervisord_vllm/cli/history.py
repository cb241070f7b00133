"""``history``: launches and decisions in the order of time. ``explain``: the last decision told in full."""

from __future__ import annotations

import json
import time
from typing import Any

from supervisord_vllm.cli.instance import ConfigOption, NameOption, StateDirOption, find
from supervisord_vllm.cli.status import WIDTH, JsonOption, asked, folded, held, levers, span, when
from supervisord_vllm.clock import parse_rfc3339
from supervisord_vllm.status import NO_DAEMON, Document, history_document, show_lever, status_from_history


def history(
    as_json: JsonOption = False,
    name: NameOption = None,
    config: ConfigOption = None,
    state_dir: StateDirOption = None,
) -> None:
    """Tell the launches and decisions, the oldest first."""
    document = asked(
        lambda: find(name, config, state_dir),
        "/history",
        lambda instance, recorded: history_document(instance.name, recorded),
    )
    print(json.dumps(document, indent=2) if as_json else render_history(document))


def explain(
    name: NameOption = None,
    config: ConfigOption = None,
    state_dir: StateDirOption = None,
) -> None:
    """Tell the last decision in full: what happened, evidence, arithmetic, what was passed over; why the engine is
    below what is declared, and what is next."""
    document = asked(
        lambda: find(name, config, state_dir),
        "/status",
        lambda instance, recorded: status_from_history(instance.name, recorded),
    )
    print(render_explanation(document, time.time()))


def render_history(document: Document, width: int = WIDTH) -> str:
    """The history for a person."""
    launches, decisions = document["launches"], document["decisions"]
    # Of what has the same time a launch comes before the decisions on it, and those before the next launch.
    entries = [
        *(
            (one["started_at"], one["number"], 0, f"launch {one['number']}", _launch(one))
            for one in document["launches"]
        ),
        *((one["at"], one["launch"], 1, f"decision {one['number']}", _decision(one)) for one in decisions),
    ]
    if not entries:
        return f"{document['name']}: nothing has happened yet"
    lines = [f"{document['name']}: {len(launches)} launches, {len(decisions)} decisions"]
    lines += [folded(label, f"{_clock(at)}  {text}", width) for at, _, _, label, text in sorted(entries)]
    return "\n".join(lines)


def render_explanation(document: Document, now: float, width: int = WIDTH) -> str:
    """The last decision for a person."""
    decision = document.get("decision")
    head = f"{document['name']}: "
    if not decision:
        return "\n".join([head + "no decision has been made yet", *_way_back(document, now, width)])
    if document.get("state") == NO_DAEMON:
        head += "no daemon runs; "
    lines = [head + f"decision {decision['number']} on launch {decision['launch']}, {when(decision['at'], now)}"]
    lines.append(folded("what", str(decision["sentence"]), width))
    lines.append(folded("kind", f"{decision['kind']} → {decision['action']}", width))
    for index, move in enumerate(decision["moves"]):
        lines.append(folded("moves" if index == 0 else " ", _move(move), width))
    if decision.get("target"):
        lines.append(folded("target", str(decision["target"]), width))
    for index, line in enumerate(decision["evidence"]):
        role = line.get("role")
        # Line 0 is no line of the log: it is what we measured ourselves.
        place = f"line {line['line']}" + (f" ({role})" if role else "") if line.get("line") else f"{role or 'seen'}"
        lines.append(folded("evidence" if index == 0 else " ", f"{place}: {line.get('text')}", width))
    if decision["arithmetic"]:
        lines.append(folded("arithmetic", str(decision["arithmetic"]), width))
    for index, skipped in enumerate(decision["skipped"]):
        lines.append(folded("skipped" if index == 0 else " ", str(skipped), width))
    if not decision["acted"]:
        lines.append(folded("acted", "no: act = false, this is only what would be done", width))
    if decision.get("unrecorded"):
        lines.append(folded("recorded", "no: the disk did not take it in time", width))
    lines.append(folded("outcome", str(decision["outcome"] or "not known yet"), width))
    lines += _way_back(document, now, width)
    coming = document.get("next") or {}
    if coming.get("what"):
        word = "not before" if coming.get("earliest") else "at the latest"
        at = f", {word} {when(coming['at'], now)}" if coming.get("at") else ""
        lines.append(folded("next", f"{coming['what']}{at}", width))
    return "\n".join(lines)


def _way_back(document: Document, now: float, width: int) -> list[str]:
    """Why it is not at what is declared and when it will be; who holds it."""
    lines = []
    back = document.get("way_back") or {}
    for index, below in enumerate(back.get("levers") or []):
        lever = str(below.get("lever"))
        values = f"{show_lever(lever, below.get('now'))}, declared {show_lever(lever, below.get('declared'))}"
        lines.append(folded("below" if index == 0 else " ", f"{lever} {values}: {below.get('why')}", width))
    if back.get("waits_for"):
        at = f", not before {when(back['at'], now)}" if back.get("at") else ""
        lines.append(folded("way back", f"{back['waits_for']}{at}", width))
    if document.get("held"):
        lines.append(folded("hold", held(document.get("hold"), now), width))
    return lines


def _launch(launch: Document) -> str:
    parts = [levers(launch["levers"])]
    ready, ended = launch.get("ready_at"), launch.get("ended_at")
    if ready:
        parts.append(f"ready after {_between(launch['started_at'], ready)}")
    if launch.get("proven_at"):
        parts.append("proven")
    if ended:
        parts.append(f"ended after {_between(launch['started_at'], ended)}: {launch.get('outcome') or 'unknown'}")
    return "; ".join(parts)


def _decision(decision: Document) -> str:
    outcome = f" Outcome: {decision['outcome']}." if decision.get("outcome") else ""
    return f"{decision['kind']} → {decision['action']}: {decision['sentence']}{outcome}"


def _move(move: dict[str, Any]) -> str:
    lever = str(move.get("lever"))
    before, after = show_lever(lever, move.get("from")), show_lever(lever, move.get("to"))
    return f"{lever} {before} → {after} ({move.get('direction')}, {move.get('how')})"


def _clock(text: str) -> str:
    return text[:19].replace("T", " ")


def _between(begin: str, end: str) -> str:
    try:
        return span(parse_rfc3339(end) - parse_rfc3339(begin))
    except ValueError:
        return "an unknown time"
