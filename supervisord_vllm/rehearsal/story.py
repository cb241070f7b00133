"""What a rehearsal says: a story for people, an object for programs, and the difference between two policies."""

from __future__ import annotations

import textwrap
from typing import Any

from supervisord_vllm.core import codec
from supervisord_vllm.core.levers import Levers, show
from supervisord_vllm.core.telling import LABELS
from supervisord_vllm.rehearsal.play import Judged, Play, Played
from supervisord_vllm.simulation.quantity import GIB

WIDTH = 100
_INDENT = " " * 11


def clock(seconds: float) -> str:
    """Virtual time as ``h:mm:ss``."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def shown(levers: Levers) -> str:
    """A lever vector in one line."""
    return ", ".join(f"{LABELS.get(name, name)} {show(name, value)}" for name, value in levers.items())


def story(play: Play) -> str:
    """The human story: what was seen, what was decided and why, and how it ended."""
    scenario, device = play.scenario, play.scenario.card.device
    lines = [
        f"Scenario {scenario.name}: {scenario.title}.",
        f"On {device.name} with {device.usable / GIB:.1f} GiB, in virtual time; policy {play.policy.name} asks for",
        *textwrap.wrap(shown(play.policy.declared) + ".", WIDTH, initial_indent="  ", subsequent_indent="  "),
        "",
    ]
    told: list[tuple[float, int, list[str]]] = []
    for launch in play.launches:
        told += [(at, 1, _line(at, text)) for at, text in _chapters(launch)]
    told += [(judged.at_s, 0, _paragraph(judged)) for judged in play.decisions]
    told += [
        (moment.at_s, 2, _line(moment.at_s, moment.what))
        for moment in play.timeline
        if moment.state in ("draining", "stopped") or (moment.state == "given-up" and not play.decisions)
    ]
    for _, _, block in sorted(told, key=lambda one: (one[0], one[1])):
        lines += block
    notes = sorted({note for launch in play.launches for note in launch.notes})
    lines.append("")
    for text in (_ending(play), *(f"Note: {note}" for note in notes)):
        lines += textwrap.wrap(text, WIDTH, break_on_hyphens=False)
    return "\n".join(lines)


def _chapters(launch: Played) -> list[tuple[float, str]]:
    told = [(launch.at_s, f"launch {launch.number} starts: {shown(launch.levers)}")]
    if launch.ready_s is not None:
        pool = f", KV cache {launch.course.kv_tokens:,} tokens" if launch.course.kv_tokens else ""
        told.append(
            (launch.ready_s, f"launch {launch.number} answers after {launch.ready_s - launch.at_s:.0f} s{pool}")
        )
    if launch.proven_s is not None:
        told.append((launch.proven_s, f"launch {launch.number} is proven"))
    return told


def _line(at_s: float, text: str) -> list[str]:
    return textwrap.wrap(f"{clock(at_s):>8}   {text}", WIDTH, subsequent_indent=_INDENT, break_on_hyphens=False)


def _paragraph(judged: Judged) -> list[str]:
    decision = judged.decision
    head = f"{clock(judged.at_s):>8} ! {decision.sentence}"
    return textwrap.wrap(head, WIDTH, subsequent_indent=_INDENT, break_on_hyphens=False)


def _ending(play: Play) -> str:
    state = play.state.name.value
    launches = f"{len(play.launches)} launch{'es' if len(play.launches) != 1 else ''}"
    levers = f" with {shown(play.launches[-1].levers)}" if play.launches and play.state.ready else ""
    status = f" (exit status {play.exit})" if play.exit is not None else ""
    return (
        f"End: {state}{status} after {clock(play.seconds)}{levers}. {launches}, {len(play.decisions)} decisions, not"
        f" serving for {clock(play.downtime_s)}."
    )


def document(play: Play) -> dict[str, Any]:
    """The object of ``rehearse --json`` (schema 1). Times are seconds of virtual time."""
    return {
        "schema": 1,
        "scenario": play.scenario.name,
        "title": play.scenario.title,
        "timeline": [{"at_s": round(m.at_s, 3), "state": m.state, "what": m.what} for m in play.timeline],
        "launches": [_launch(launch) for launch in play.launches],
        "decisions": [_decision(judged) for judged in play.decisions],
        "downtime_s": round(play.downtime_s, 3),
        "final": {
            "state": play.state.name.value,
            "levers": play.launches[-1].levers.to_json() if play.launches else None,
            "kv_tokens": play.kv_tokens,
            "exit": play.exit,
        },
    }


def _launch(launch: Played) -> dict[str, Any]:
    return {
        "number": launch.number,
        "levers": launch.levers.to_json(),
        "started_at_s": round(launch.at_s, 3),
        "ready_at_s": None if launch.ready_s is None else round(launch.ready_s, 3),
        "proven_at_s": None if launch.proven_s is None else round(launch.proven_s, 3),
        "ended_at_s": None if launch.ended_s is None else round(launch.ended_s, 3),
        "outcome": launch.outcome,
        "kv_tokens": launch.course.kv_tokens,
        "notes": list(launch.notes),
    }


def _decision(judged: Judged) -> dict[str, Any]:
    data = codec.to_json(judged.decision)
    named = ("number", "launch", "kind", "action", "moves", "target", "evidence", "arithmetic", "skipped", "acted")
    return {
        **{name: data[name] for name in named},
        "at_s": round(judged.at_s, 3),
        "next": {"state": data["then"], "delay_s": data["then_ns"] / 1e9},
        "sentence": data["sentence"],
        "outcome": judged.outcome or None,
    }


def comparison(one: Play, other: Play, names: tuple[str, str]) -> str:
    """Two policies on the same scenario, side by side."""
    rows = [("", *names), *((what, first, second) for what, first, second in _compared(one, other))]
    wide = [max(len(row[column]) for row in rows) for column in range(3)]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, wide, strict=True)).rstrip() for row in rows]
    return "\n".join([f"Scenario {one.scenario.name}: {one.scenario.title}.", "", *table])


def _compared(one: Play, other: Play) -> list[tuple[str, str, str]]:
    def pair(what: str, of: Any) -> tuple[str, str, str]:  # noqa: ANN401 - a function of a play
        return what, str(of(one)), str(of(other))

    return [
        pair("launches", lambda play: len(play.launches)),
        pair("decisions", lambda play: len(play.decisions)),
        pair("not serving", lambda play: clock(play.downtime_s)),
        pair("end", lambda play: play.state.name.value),
        pair("KV cache at the end", lambda play: f"{play.kv_tokens:,} tokens"),
        pair("levers at the end", lambda play: shown(play.launches[-1].levers) if play.launches else "none"),
    ]
