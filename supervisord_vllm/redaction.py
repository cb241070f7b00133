"""Secrets and control characters, taken out of everything that is printed, stored or served.

A secret is known by the name of its flag (``--api-key``), by the name of its variable (``*TOKEN*``, ``*KEY*``,
``*SECRET*``, ``*PASSWORD*``), or by its value: values that were declared secret, Hugging Face (``hf_…``) and OpenAI
style (``sk-…``) keys and bearer headers. Text is an engine's output, that is hostile: every rule takes time linear in
the length of the text.

For a line of an engine's output call `printable` first: escape codes inside a secret would hide it from
`Redactor.text`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import quote

MASK = "***"

SHORTEST = 6
"""A known value of fewer characters is not searched for: it would hide half of a log."""

_SECRET_NAME = re.compile(r"TOKEN(?!S(?:_|$)|IZ)|KEY(?!WORD|BOARD|POINT)|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL")
_NOT_ITSELF = ("FILE", "PATH", "DIR", "DIRECTORY")
"""Endings of variables that say where a secret lies, not what it is."""

_SECRET_FLAG = re.compile(r"--(?:api-k(?:ey?)?|(?:[a-z0-9-]{0,40}-)?(?:key|token|secret|password|passphrase))")
_SECRET_KEY = re.compile(
    r"(?:.*[_-])?(?:api[_-]?key|hf[_-]?token|(?:auth|access)[_-]?(?:token|key)|secret|password|passwd)"
)
_NAMED = re.compile(
    # --api-key X, --api-key=X, and the same as items of a printed list
    r"(?<![A-Za-z0-9_-])(?P<flag>--[A-Za-z0-9_-]{3,60})[\"']?(?:=|,?[ \t]{1,8})"
    # HF_TOKEN=X, 'HF_TOKEN': 'X'
    r"|(?<![A-Za-z0-9_])(?P<variable>[A-Z][A-Z0-9_]{2,80})[\"']?[ \t]{0,4}[=:][ \t]{0,4}"
    # api_key='X', 'hf_token': X, "password": ["X"]
    r"|(?<![A-Za-z0-9])(?P<key>[A-Za-z_-]{6,40})[\"']?[ \t]{0,4}[=:][ \t]{0,4}",
)
_VALUE = re.compile(r"\[[^\]\n]{0,4096}\]?|\"[^\"\n]{0,4096}\"?|'[^'\n]{0,4096}'?|[^\s,;)}\]\"'\[]+")
_EMPTY = frozenset({"None", "null", "''", '""', "[]", "[None]", "True", "False", "true", "false"})
_BY_FORM = re.compile(
    r"(?P<bearer>(?i:\bbearer)[ \t]{1,8})[^\s\"',]{6,}"
    r"|(?<![A-Za-z0-9_])hf_[A-Za-z0-9]{16,}"
    r"|(?<![A-Za-z0-9_])sk-[A-Za-z0-9_-]{16,}"
)

_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor movement
    r"|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)"  # OSC and other strings: titles, links
    r"|\x1b[ -/]+[0-~]|\x1b[0-OQ-WYZ\\`-~]"
    r"|\x9b[0-?]*[ -/]*[@-~]"
)
_CONTROLS: Mapping[int, str] = {
    **{code: f"\\x{code:02x}" for code in (*range(9), *range(10, 32), *range(0x7F, 0xA0))},
    ord("\n"): "\\n",
    ord("\r"): "\\r",
    **{
        code: f"\\u{code:04x}"
        for code in (*range(0x200B, 0x2010), *range(0x2028, 0x202F), *range(0x2066, 0x206A), 0xFEFF)
    },
    **{code: f"\\u{code:04x}" for code in range(0xD800, 0xE000)},
    **{code: f"\\x{code - 0xDC00:02x}" for code in range(0xDC80, 0xDD00)},  # bytes that were no UTF-8 (surrogateescape)
}


def printable(text: str) -> str:
    r"""A line without terminal escape sequences, every other control character but tab written as ``\\xNN`` or
    ``\uNNNN``.

    Direction marks, invisible characters and undecodable bytes count as control characters: they make a line read as
    what it is not.
    """
    return _ESCAPES.sub("", text).translate(_CONTROLS) if not text.isprintable() else text


def secret_variable(name: str) -> bool:
    """Whether a variable's name says that its value is a secret."""
    return _SECRET_NAME.search(name.upper()) is not None and not name.upper().endswith(_NOT_ITSELF)


def secret_flag(word: str) -> bool:
    """Whether a flag (without its value) says that its value is a secret."""
    return _SECRET_FLAG.fullmatch(word.lower().replace("_", "-")) is not None


def secrets_in(argv: Sequence[str], env: Mapping[str, str]) -> tuple[str, ...]:
    """The secret values of a command line and an environment, by the names of their flags and variables."""
    found = [value for name, value in env.items() if secret_variable(name) and value]
    found += [argv[index].partition("=")[2] if joined else argv[index] for index, joined in _secret_words(argv)]
    return tuple(dict.fromkeys(found))


class Redactor:
    """Replaces secrets by ``***``. ``secrets`` are known values; those of fewer than 6 characters are ignored."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        forms: set[str] = set()
        for secret in secrets:
            for line in secret.splitlines():
                forms |= {line, line.strip(), json.dumps(line)[1:-1], repr(line)[1:-1]}
                forms |= {quote(line, safe, errors="replace") for safe in ("/", "")}
        known = sorted((form for form in forms if len(form) >= SHORTEST), key=lambda form: (-len(form), form))
        self._known = re.compile("|".join(map(re.escape, known))) if known else None

    def __repr__(self) -> str:
        return "Redactor(…)"

    def text(self, text: str) -> str:
        """A text without secrets."""
        if self._known is not None:
            text = self._known.sub(MASK, text)
        return _BY_FORM.sub(lambda match: (match["bearer"] or "") + MASK, _without_named(text))

    def argv(self, argv: Sequence[str]) -> tuple[str, ...]:
        """A command line without secrets; as many words as before."""
        words = list(argv)
        for index, joined in _secret_words(argv):
            words[index] = f"{words[index].partition('=')[0]}={MASK}" if joined else MASK
        return tuple(map(self.text, words))

    def env(self, env: Mapping[str, str]) -> dict[str, str]:
        """An environment without secrets."""
        return {name: MASK if secret_variable(name) and value else self.text(value) for name, value in env.items()}


def _secret_words(argv: Sequence[str]) -> Iterable[tuple[int, bool]]:
    """The words that hold secrets: index, and whether the flag is in the word. ``--api-key`` takes several."""
    follows = False
    for index, word in enumerate(argv):
        if word.startswith("-"):
            name, joined, value = word.partition("=")
            secret = secret_flag(name)
            if secret and joined and value:
                yield index, True
            follows = secret and not joined
        elif follows:
            yield index, False


def _without_named(text: str) -> str:
    """The text with the values behind secret names masked. Only names are consumed, so that no value hides another
    name.
    """
    parts: list[str] = []
    done = at = 0
    while match := _NAMED.search(text, at):
        at = match.end()
        value = _VALUE.match(text, at) if _names_secret(match) else None
        if value and value[0] not in _EMPTY and not (match["flag"] and value[0].startswith("--")):
            parts += (text[done:at], MASK)
            done = at = value.end()
    return "".join((*parts, text[done:])) if parts else text


def _names_secret(match: re.Match[str]) -> bool:
    if match["flag"] is not None:
        return secret_flag(match["flag"])
    if match["variable"] is not None:
        return secret_variable(match["variable"])
    return _SECRET_KEY.fullmatch(match["key"].lower()) is not None
