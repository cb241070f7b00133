"""Single values of a policy: what each may be, in words.

A reader takes what TOML gave and returns the typed value, or raises ``ValueError`` with "got …; what is allowed".
(pydantic turns a ``ValueError`` into a finding; a ``TypeError`` would pass through it.)
"""
# ruff: noqa: TRY004

from __future__ import annotations

import re

from supervisord_vllm.config.errors import did_you_mean, given
from supervisord_vllm.config.units import Duration, positive_duration, size
from supervisord_vllm.core.levers import LEVERS, Weights
from supervisord_vllm.core.windows import Window

LEVER_KEYS = {name.replace("_", "-"): name for name in LEVERS}
"""A lever as a policy writes it, and its name in the core."""

VERBS = ("wait", "same-again", "reap", "clean", "stop")
"""What a remedy may be besides a lever."""

LEAST_LOG = 8 * 2**20
"""Bytes that a launch's log may at least take."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_LISTEN = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253}):(\d{1,5})")
_WINDOW = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-4]):([0-5]\d)")
_URL = re.compile(r"https?://(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::\d{1,5})?(?:/[^\s?#]*)?")


def plain(value: object) -> str:
    """Read a text that a command line can carry."""
    if not isinstance(value, str):
        raise ValueError(f'got {given(value)}; write a text in quotes: "…"')
    if "\0" in value:
        raise ValueError("holds a NUL character, which no command line can carry; remove it")
    return value


def filled(value: object) -> str:
    """Read a text that says something; anything else raises ``ValueError``."""
    if not (text := plain(value)).strip():
        raise ValueError("is empty; give a value or remove the key")
    return text


def model(value: object) -> str:
    """Read a model's name or path."""
    if (text := filled(value)).startswith("-"):
        raise ValueError(f"got {given(value)}, which vLLM would take for a flag; give a model's name or path")
    return text


def name(value: object) -> str:
    """Read the name of an instance, that names folders too; anything else raises ``ValueError``."""
    text = plain(value)
    if not _NAME.fullmatch(text):
        raise ValueError(f"got {given(value)}; up to 63 letters, digits, dots, dashes and underscores are allowed")
    return text


def command(value: object) -> list[str]:
    """Read a program and its words."""
    if not isinstance(value, list) or not value:
        raise ValueError(f'got {given(value)}; write the program and its words as a list: ["vllm", "serve"]')
    return [filled(value[0]), *(plain(word) for word in value[1:])]


def words(value: object) -> list[str]:
    """Read a list of texts."""
    if not isinstance(value, list):
        raise ValueError(f'got {given(value)}; write a list of texts: ["--flag", "value"]')
    for word in value:
        if not isinstance(word, str):
            raise ValueError(f'got {given(word)} in the list; every word is a text in quotes: "{word}"')
    return [plain(word) for word in value]


def environment(value: object) -> dict[str, str]:
    """Read a table of variables. A value may be a secret: it is never shown."""
    if not isinstance(value, dict):
        raise ValueError('is no table; write { NAME = "value" }')
    for name, text in value.items():
        if not name or "=" in name or "\0" in name:
            raise ValueError(f"{given(name)} cannot be the name of a variable; correct it")
        if not isinstance(text, str):
            raise ValueError(f'{name} is no text; put its value in quotes: {name} = "…"')
        plain(text)
    return dict(value)


def url(value: object) -> str:
    """Read where the engine answers; no slash at the end."""
    text = plain(value)
    if not _URL.fullmatch(text) and not re.fullmatch(r"unix:/[^\s]+", text):
        raise ValueError(
            f"got {given(value)}; write http://HOST:PORT, https://HOST:PORT/ROOT/PATH or unix:/PATH/TO/SOCKET"
        )
    return text.rstrip("/")


def listen(value: object) -> str:
    """Read an address to listen on, or nothing."""
    text = plain(value)
    match = _LISTEN.fullmatch(text)
    if text and (match is None or int(match[2]) > 65535):
        raise ValueError(f'got {given(value)}; write "HOST:PORT" like "127.0.0.1:9620", or "" for no HTTP')
    return text


def source(value: object) -> str:
    """Read where memory is looked up."""
    text = plain(value)
    if text not in {"auto", "nvml", "host"} and not re.fullmatch(r"card:.+", text):
        raise ValueError(f'got {given(value)}; allowed are "auto", "nvml", "host" and "card:PATH"')
    return text


def patience(value: object) -> Duration | None:
    """Read a duration; ``auto`` is ``None``."""
    return None if value == "auto" else positive_duration(value)


def windows(value: object) -> tuple[Window, ...]:
    """Read one time of day or several, from and to; anything else raises ``ValueError``."""
    texts = value.split(",") if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f'got {given(value)}; write "02:00-05:00", or a list of such')
    return tuple(_window(text.strip()) for text in texts if text.strip())


def _window(text: str) -> Window:
    match = _WINDOW.fullmatch(text)
    if match is None or (match[3] == "24" and match[4] != "00"):
        raise ValueError(f'got {given(text)}; write from and to with two digits each, like "02:00-05:00"')
    begin, end = int(match[1]) * 60 + int(match[2]), int(match[3]) * 60 + int(match[4])
    if begin == end:
        raise ValueError(f'got {given(text)}, which is open for no time; "00:00-24:00" is the whole day')
    return Window(begin, end)


def log_bound(value: object) -> int:
    """Read the bound of one launch's log, in bytes."""
    if (read := size(value)) < LEAST_LOG:
        raise ValueError(f'got {given(value)}; at least "8MiB" is needed for a start and what came last')
    return read


def utilization(value: object) -> int:
    """Read a utilization in (0, 1] with at most three decimals, as per mille."""
    number = float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else -1.0
    if not 0 < number <= 1:
        raise ValueError(f"got {given(value)}; a utilization is a fraction above 0 and at most 1, like 0.90")
    if abs(number * 1000 - round(number * 1000)) > 1e-6:
        raise ValueError(
            f"got {given(value)}; at most three decimals are allowed, like {max(1, round(number * 1000)) / 1000}"
        )
    return round(number * 1000)


def weights(value: object) -> Weights:
    """Read a model's name or path, alone or with its quantization; anything else raises ``ValueError``."""
    if isinstance(value, str):
        return Weights(model(value))
    if not isinstance(value, dict) or "model" not in value:
        raise ValueError(f'got {given(value)}; write {{ model = "NAME", quantization = "METHOD" }}')
    for key in value:
        if key not in {"model", "quantization"}:
            raise ValueError(f"unknown key {given(key)}; {did_you_mean(str(key), ['model', 'quantization'])}")
    method = value.get("quantization")
    return Weights(model(value["model"]), None if method is None else filled(method))


def lever(value: object) -> str:
    """Read a lever's name; the core's name is returned."""
    text = plain(value)
    if text not in LEVER_KEYS:
        raise ValueError(f"got {given(value)}, which is no lever; {did_you_mean(text, LEVER_KEYS)}")
    return LEVER_KEYS[text]


def remedies(value: object) -> list[str]:
    """Read a list of levers and verbs; the core's names are returned."""
    if not isinstance(value, list) or not value:
        raise ValueError(f'got {given(value)}; write a list like ["gpu-memory-utilization", "stop"]')
    known = [*LEVER_KEYS, *VERBS]
    for word in value:
        if word not in known:
            raise ValueError(
                f"got {given(word)}, which is neither a lever nor a remedy; {did_you_mean(str(word), known)}"
            )
        if value.count(word) > 1:
            raise ValueError(f"{given(word)} stands in the list twice; remove one")
    return [LEVER_KEYS.get(str(word), str(word)) for word in value]
