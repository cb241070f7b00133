"""Files that hold secrets or settings for the engine: ``env-file`` and ``api-key-file``.

A path is relative to the policy file's folder; ``~/`` is the home directory; ``credential:NAME`` is a systemd
credential.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from supervisord_vllm.config.contradictions import environment_problem
from supervisord_vllm.config.errors import ConfigError
from supervisord_vllm.config.tomlfile import read_text

_LINE = re.compile(r"(?:export[ \t]+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)")


def located(name: str, folder: Path, environ: Mapping[str, str]) -> Path:
    """The absolute path that a policy means.

    Raises:
        ValueError: for a credential or ``~/`` where the environment does not say where they are.
    """
    for prefix, variable in (("credential:", "CREDENTIALS_DIRECTORY"), ("~/", "HOME")):
        if name.startswith(prefix):
            if not environ.get(variable):
                raise ValueError(
                    f"{name} needs the environment variable {variable}, which is not set; give a plain path"
                )
            return Path(environ[variable]) / name[len(prefix) :]
    return Path(folder.absolute() / name)


def environment_file(path: Path) -> dict[str, str]:
    """The variables of a file of ``NAME=VALUE`` lines, as systemd's EnvironmentFile= without continuation lines.

    Empty lines and lines that begin with ``#`` or ``;`` say nothing; one pair of quotes around a value is taken off.

    Raises:
        ConfigError: with file and line; a value is never shown.
    """
    found: dict[str, str] = {}
    problems: list[str] = []
    for number, raw in enumerate(read_text(path, "an env-file").splitlines(), start=1):
        line = raw.strip()
        if not line or line[0] in "#;":
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            problems.append(f"{path}:{number}: is no NAME=VALUE line; correct it or make it a comment with #")
            continue
        name, value = match[1], match[2].strip()
        if (problem := environment_problem(name)) is not None:
            problems.append(f"{path}:{number}: {name}: {problem}")
        if len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        found[name] = value
    if problems:
        raise ConfigError(*problems[:20])
    return found


def secret(path: Path, what: str) -> str:
    """The one secret in a file, without the newline at its end.

    Raises:
        ConfigError: where there is none, or more than one line.
    """
    text = read_text(path, what).strip()
    if not text or "\n" in text:
        raise ConfigError(
            f"{path}: holds {'no' if not text else 'more than one'} line; put the key alone into the file"
        )
    return text


def readable_by_others(path: Path) -> bool:
    """Whether every user of the machine may read a file."""
    try:
        return bool(path.stat().st_mode & 0o004)
    except OSError:
        return False
