"""The diagram of the state machine, drawn from the table, so that it cannot lie."""

from __future__ import annotations

from supervisord_vllm.core.machine import TABLE, Cell
from supervisord_vllm.core.state import StateName

MEANING = {
    StateName.ADOPTING: "every daemon start and every fresh start: what an earlier launch left is ended",
    StateName.STOPPED: "no engine is wanted",
    StateName.GATING: "waiting for port, memory and lock",
    StateName.STARTING: "spawned, not healthy yet",
    StateName.PROVING: "answers; canary, burst, soak; ready after the canary",
    StateName.SERVING: "proven",
    StateName.DRAINING: "not ready; running requests finish, then the plan is carried out",
    StateName.STOPPING: "the tree is being ended, the failure judged",
    StateName.BACKING_OFF: "a growing, capped, jittered delay",
    StateName.GIVEN_UP: "nothing automatic is right; it says why",
}


def mermaid() -> str:
    """A state diagram in Mermaid's language: one arrow for each pair of states, with the facts that lead there."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for name, row in TABLE.items():
        for fact, entry in row.items():
            if isinstance(entry, Cell):
                for to in sorted(entry.to - {name}, key=lambda state: state.value):
                    arrows.setdefault((name.value, to.value), []).append(fact.__name__)
    lines = ["stateDiagram-v2", "    [*] --> adopting"]
    lines += [f"    {_id(a)} --> {_id(b)}: {', '.join(facts)}" for (a, b), facts in arrows.items()]
    return "\n".join(lines)


def _id(name: str) -> str:
    return name.replace("-", "_")


def table() -> str:
    """The whole table in Markdown: for each state what each fact may lead to; ``·`` is an explicit ignore."""
    facts = list(next(iter(TABLE.values())))
    lines = ["| state | " + " | ".join(fact.__name__ for fact in facts) + " |", "|---" * (len(facts) + 1) + "|"]
    for name, row in TABLE.items():
        cells = []
        for fact in facts:
            entry = row[fact]
            if not isinstance(entry, Cell):
                cells.append("·")
            else:
                cells.append(", ".join(sorted(to.value for to in entry.to - {name})) or "stays")
        lines.append(f"| {name.value} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def page() -> str:
    """docs/states.md."""
    meanings = "\n".join(f"| `{name.value}` | {MEANING[name]} |" for name in StateName)
    return f"""# States

This page is written by `python scripts/states.py`, from the table in `core/machine.py`
that the daemon runs by; a test fails where the two differ.

| state | meaning |
|---|---|
{meanings}

```mermaid
{mermaid()}
```

Each cell is what a fact may lead to besides staying; `·` is an explicit ignore, and there is no cell without an entry.

{table()}

A fact of another launch than the present one is dropped and counted. `hold` stands beside the states: while it lasts, a
change of configuration becomes the same again within the budget, and planned changes wait.
"""
