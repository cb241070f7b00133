"""What is wrong with a policy, in lines that a person can act on."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable

_SHOWN = 60
_FEW = 50


class ConfigError(Exception):
    """The policy cannot be used. Every problem is one line, ``PLACE: key: problem; fix``; ``str()`` joins the lines."""

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(self.problems)


def given(value: object) -> str:
    """A wrong value as a message shows it: as JSON, on one line, at most 60 characters."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):  # a date or an integer of thousands of digits
        text = type(value).__name__
    except RecursionError:
        text = "a deeply nested value"
    text = "".join(char if char.isprintable() else "?" for char in text[: _SHOWN + 1])
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A suggestion for a name that is not known: the nearest one, or the known ones where none is near."""
    names = list(known)
    near = difflib.get_close_matches(word[:_SHOWN].lower().replace("_", "-"), names, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]}?"
    if len(names) > _FEW:
        return "config.example.toml shows every key"
    return f"known are {', '.join(names)}" if names else "remove it"
