"""A verdict as people and programs read it, and as a policy would act on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from supervisord_vllm.core.diagnosis import Action, Change, Diagnosis, Kind, Number

if TYPE_CHECKING:
    from supervisord_vllm.core.policy import Policy
    from supervisord_vllm.core.remedies import Choice
    from supervisord_vllm.engine.launches import Launch, Launches

HEALTHY = (Kind.NONE, Kind.FALSE_ALARM)
_LEFT_ALONE = (Action.NO_ACTION, Action.OBSERVE, Action.WAIT, Action.PLANNED_RECYCLE)
_EARLIER_SHOWN = 3


def to_json(verdict: Diagnosis) -> dict[str, Any]:
    """The public object, schema 1 (docs/diagnosis.md)."""
    return {
        "schema": 1,
        "kind": verdict.kind.value,
        "phase": verdict.phase,
        "action": verdict.action.value,
        "change": [{"lever": c.lever, "direction": c.direction, "to": c.to} for c in verdict.change],
        "target": verdict.target,
        "numbers": dict(verdict.numbers),
        "confidence": verdict.confidence,
        "evidence": [{"line": e.line, "role": e.role, "text": e.text} for e in verdict.evidence],
        "summary": verdict.summary,
        "advice": verdict.advice,
    }


def earlier_to_json(launches: tuple[Launch, ...]) -> list[dict[str, Any]]:
    """The launches before the last one, shortly."""
    return [
        {
            "lines": [launch.first, launch.last],
            "reached": launch.phase,
            "kind": launch.verdict.kind.value,
            "action": launch.verdict.action.value,
            "summary": launch.verdict.summary,
        }
        for launch in launches
    ]


def to_text(verdict: Diagnosis, choice: Choice | None = None) -> str:
    """Three to six lines: what happened, the evidence, what to do, which flag to set to what."""
    lines = [f"{verdict.kind.value} ({verdict.phase}): {verdict.summary}"]
    lines += [
        f"  line {item.line}{f', {item.role}' if item.role else ''}: {_shortened(item.text)}"
        for item in verdict.evidence[:2]
    ]
    if verdict.advice:
        lines.append(f"  do: {verdict.advice}")
    settings = ", or ".join(_setting(change) for change in verdict.change[:3])
    if settings:
        lines.append(f"  set: {settings}")
    if verdict.numbers:
        shown = ", ".join(f"{name} {_number(value)}" for name, value in list(verdict.numbers.items())[:8])
        lines.append(f"  numbers: {shown}")
    target = f" ({verdict.target})" if verdict.target else ""
    lines.append(f"  action: {verdict.action.value}{target}, confidence {verdict.confidence:.2f}")
    if len(lines) > 6:
        lines = [line for line in lines if not line.startswith("  numbers: ")][:6]
    if choice is not None:
        lines += policy_lines(choice)
    return "\n".join(lines)


def earlier_to_text(launches: tuple[Launch, ...]) -> str:
    """One line per earlier launch, the latest first; the older ones are counted."""
    lines = [
        f"  earlier, lines {launch.first}-{launch.last}: {launch.verdict.kind.value}: "
        f"{_shortened(launch.verdict.summary, 140)}"
        for launch in reversed(launches[-_EARLIER_SHOWN:])
    ]
    if len(launches) > _EARLIER_SHOWN:
        lines.append(f"  and {len(launches) - _EARLIER_SHOWN} launches before")
    return "\n".join(lines)


def chosen(policy: Policy, launches: Launches, verdict: Diagnosis) -> Choice | None:
    """What this policy would do about the verdict; ``None`` where nothing is to be done about it. The launch ran with
    the
    values that its log printed, with the declared ones where it printed none.
    """
    from supervisord_vllm.core.case import Case
    from supervisord_vllm.core.ledger import Ledger, Room, to_bytes
    from supervisord_vllm.core.levers import BATCHED_TOKENS, MODEL_LEN, NUM_SEQS, UTILIZATION
    from supervisord_vllm.core.remedies import choose

    if verdict.action in _LEFT_ALONE:
        return None
    total, free = verdict.number("total_gib"), verdict.number("free_gib")
    room = Room("GPU", to_bytes(total), to_bytes(free)) if total and free is not None else None
    printed = {**launches.current.ledger, **verdict.numbers}
    ran = policy.declared
    for lever in (MODEL_LEN, NUM_SEQS, BATCHED_TOKENS):
        if isinstance(printed.get(lever), int):
            ran = ran.with_(**{lever: int(printed[lever])})
    if isinstance(printed.get("util"), (int, float)):
        ran = ran.with_(**{UTILIZATION: round(1000 * float(printed["util"]))})
    case = Case(
        diagnosis=verdict,
        launch=len(launches.earlier) + 1,
        levers=ran,
        target=policy.declared,
        ledger=Ledger(launches.current.ledger),
        room=room,
        host_memory="node" in (verdict.evidence[0].text if verdict.evidence else "") and "CPU" in verdict.summary,
        repeated=1 + sum(launch.verdict.signature == verdict.signature for launch in launches.earlier),
    )
    return choose(policy, case)


def policy_to_json(name: str, choice: Choice) -> dict[str, Any]:
    """The policy's choice: what is done, which levers it moves together, the arithmetic, what it passed over and
    why."""
    from supervisord_vllm.core.levers import value_to_json

    return {
        "name": name,
        "action": choice.action.value,
        "moves": [
            {
                "lever": move.lever,
                "from": None if move.before is None else value_to_json(move.lever, move.before),
                "to": value_to_json(move.lever, move.after),
                "direction": move.direction,
                "how": move.how,
            }
            for move in choice.moves
        ],
        "arithmetic": choice.arithmetic,
        "skipped": list(choice.skipped),
    }


def policy_lines(choice: Choice) -> list[str]:
    """The policy's choice for people."""
    from supervisord_vllm.core.levers import value_to_json

    moves = ", ".join(
        f"{move.lever} {'vLLM’s default' if move.before is None else value_to_json(move.lever, move.before)} → "
        f"{value_to_json(move.lever, move.after)}"
        for move in choice.moves
    )
    lines = [f"  this policy: {choice.action.value}{f': {moves}' if moves else ''}"]
    if choice.arithmetic:
        lines.append(f"    because {choice.arithmetic}")
    lines += [f"    not {reason}" for reason in choice.skipped]
    return lines


def _setting(change: Change) -> str:
    flag = change.lever if ":" in change.lever else "--" + change.lever.replace("_", "-")
    if change.to is not None:
        return f"{flag} {_number(change.to)}"
    return {"up": f"a higher {flag}", "down": f"a lower {flag}", "switch": f"another {flag}"}[change.direction]


def _number(value: Number) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _shortened(text: str, width: int = 220) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
