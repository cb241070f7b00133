"""Findings in our words: where, which key, what was given, what is allowed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import islice
from typing import Any

from pydantic_core import ErrorDetails

from supervisord_vllm.config import schema
from supervisord_vllm.config.errors import ConfigError, did_you_mean, given
from supervisord_vllm.config.schema import PolicyFile, Table
from supervisord_vllm.config.sources import Merged
from supervisord_vllm.config.tomlfile import KeyPath

_MOST_PROBLEMS = 20

_MISSING = {
    ("schema",): "missing; begin the file with `schema = 1`",
    ("engine",): 'missing; add `[engine]` with `model = "NAME OR PATH"`',
    ("engine", "model"): 'missing; name what is served: `model = "NAME OR PATH"`',
}
_EXPECTED = {
    "string_type": 'write a text in quotes: "…"',
    "bool_type": "write true or false",
    "int_type": "write a whole number",
    "float_type": "write a number",
    "list_type": "write a list: […]",
    "dict_type": "write a table: [section]",
    "model_type": "write a table: [section]",
    "finite_number": "write a finite number",
}
_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}


def refusal(problems: Iterable[str], count: int) -> ConfigError:
    """One error of all problems, the first twenty in words (a hostile file could have a hundred thousand)."""
    shown = list(dict.fromkeys(islice(problems, _MOST_PROBLEMS)))
    rest = count - _MOST_PROBLEMS
    return ConfigError(*shown, *([f"… and {rest} more"] if rest > 0 else []))


def line(merged: Merged, key: KeyPath, problem: str) -> str:
    """``FILE:LINE: key: problem; fix``."""
    return f"{merged.place(key)}: {dotted(key)}: {problem}"


def dotted(key: KeyPath) -> str:
    """A key as messages and `Settings.origins` name it: ``engine.port``, ``ladder[0].min``."""
    text = ""
    for part in key:
        shown = part if isinstance(part, int) or re.fullmatch(r"[A-Za-z0-9_-]{1,64}", part) else given(part)
        text += f"[{shown}]" if isinstance(part, int) else f".{shown}" if text else str(shown)
    return text


def problem_of(detail: ErrorDetails) -> str:
    """One of pydantic's findings in our words: what was given, what is allowed."""
    kind, key, value = detail["type"], detail["loc"], detail["input"]
    context: dict[str, Any] = detail.get("ctx", {})
    if kind == "extra_forbidden":
        return f"unknown key; {_suggestion(key)}"
    if kind == "missing":
        return _MISSING.get(tuple(map(str, key)), "missing; add the key")
    if kind == "value_error":
        return str(context.get("error", detail["msg"]))
    if kind == "literal_error":
        return f"got {given(value)}; allowed: {str(context.get('expected', '')).replace(chr(39), chr(34))}"
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return f"got {given(value)}; {words} {context.get(name)} is allowed"
    return f"got {given(value)}; {_EXPECTED.get(kind, detail['msg'])}"


def _suggestion(key: KeyPath) -> str:
    table: type[Table] | None = PolicyFile
    for part in key[:-1]:
        if table is not None and isinstance(part, str) and (annotation := schema.fields(table).get(part)) is not None:
            table = schema.table_of(annotation)
    last = str(key[-1])
    known = list(schema.fields(table)) if table else []
    if last == "weights" and key[:-1] == ("levers",):
        return "the declared weights are [engine] model and quantization"
    elsewhere = [".".join(path) for path, _ in schema.every_key() if path[-1] == last.replace("_", "-")]
    if last.replace("_", "-") not in known and elsewhere:
        place = "it stands at the top of the file, before the first [section]" if "." not in elsewhere[0] else ""
        return f"did you mean {elsewhere[0]}?{' ' if place else ''}{place}"
    return did_you_mean(last, known)
