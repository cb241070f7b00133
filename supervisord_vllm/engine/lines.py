"""One line of an engine's output, taken apart: who wrote it, at what level, and what it says.

`parse` understands every shape that vLLM 0.6-0.33 and the common carriers produce: ``(EngineCore pid=7) ERROR 12-01
01:23:19 [core.py:1330] text``, bare V0 records, uvicorn's ``INFO:     text``, untagged tracebacks (0.31 and later),
JSON logging, ANSI colours, and the prefixes of docker, compose, Kubernetes, journald, Ray and torch. It never raises,
its cost is linear in the line's length, and what lies beyond `LIMIT` bytes of a line is dropped unread.

Sources: vLLM ``logger.py``, ``logging_utils/formatter.py``, ``utils/system_utils.py`` (``decorate_logs``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

LIMIT = 64 * 1024
"""Bytes (or characters) of one raw line that are looked at."""
MAX_TEXT = 16 * 1024
"""Characters of one message that patterns see."""
MAX_SEGMENTS = 64
"""Redraws of one progress bar line that are looked at, the last ones."""

Role = Literal["engine", "api", "kernel", "systemd", ""]

_ANSI = re.compile(r"\x1b\[[0-9;?]{0,32}[ -/]{0,4}[@-~]")
_CARRIERS = tuple(
    re.compile(pattern)
    for pattern in (
        # docker, kubectl logs --timestamps, CRI files, journalctl -o short-iso
        # (then a host and a unit in the journal's form, a level and a logger in the form of Python's basicConfig)
        (
            r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)? (?:std(?:out|err) [FP] )?"
            r"(?:[^\s:(]{1,255} (?:[\w.@-]{1,64}\[\d{1,10}\]|(?P<unit>kernel)): )?"
        ),
        # the journal and syslog; its unit says whether the kernel or systemd itself speaks
        r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d [^\s:]{1,255} (?P<unit>[\w.@-]{1,64})(?:\[\d{1,10}\])?: ",
        r"(?P<unit>kernel): ",
        r"\[ {0,8}\d{1,10}\.\d{6}\] (?=NVRM|Out of memory|oom-kill|Memory cgroup|nvidia-nvswitch)(?P<unit>)",
        # Google's logging, and a reader that keeps the container's line behind its own level
        r"(?:INFO|ERROR|DEFAULT) \d{4}-\d\d-\d\dT[\d:.]{8,30}Z (?:\[resource[^\]]{0,200}\] )?",
        r"\[\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?Z?\] (?!\[)",
        r"[\w.-]{1,64} {0,32}\| ",
        r"\[pod/[^\] ]{1,200}\] ",
        r"\[rank\d{1,4}\]: ?",
        r" {0,8}[|+] (?=Traceback|  |[\w.]{1,80}Error|\[\d{4}-|\[rank\d|(?:INFO|WARNING|ERROR|CRITICAL) )",
    )
)
_TAG = re.compile(
    r"\((?P<process>[A-Za-z][\w.-]{0,80}(?:\([\w()]{1,80}\))?)(?: rank=(?P<rank>\d{1,5})| TP(?P<tp>\d{1,5}))?,?"
    r"(?: pid=(?P<pid>\d{1,10})(?:, ip=[^)]{1,64})?)?\) ?"
)
_RANK = re.compile(r"(?:^|_)TP(\d{1,5})(?:_|$)")
_LEVELS = "DEBUG|INFO|WARNING|ERROR|CRITICAL"
_RECORD = re.compile(rf"(?P<level>{_LEVELS}) \d\d-\d\d \d\d:\d\d:\d\d \[?(?P<source>[\w./-]{{1,200}}):\d{{1,7}}\] ?")
_UVICORN = re.compile(rf"(?P<level>{_LEVELS}):\s{{1,9}}")
_PYTHON = re.compile(rf"- (?P<level>{_LEVELS}) - (?P<source>[\w./-]{{1,200}}):\d{{1,7}} - ")
_GLOG = re.compile(r"\[?(?P<level>[IWEF])\d{3,4} \d\d:\d\d:\d\d[.\d]{0,12} {1,4}(?:\d{1,10} )?")
_GLOG_LEVELS = {"I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL"}
_PREFIX_ROOM = 64
"""Characters that an operator's VLLM_LOGGING_PREFIX may take before the level of an untagged record."""
SERVER_PROCESSES = ("apiserver", "dpsupervisor", "dpcoordinator")
_SERVER_SOURCES = re.compile(
    r"(?:.*/)?(?:serving\w*|api_server|async_llm|async_llm_engine|launcher|loggers?|metrics|protocol|chat_utils|"
    r"client|core_client|api_utils)\.py"
)


@dataclass(frozen=True, slots=True)
class Line:
    """A parsed line. ``number`` counts raw lines from 1; ``process`` is vLLM's name of the writer (``EngineCore``,
    ``Worker_TP0``; empty where the line is not tagged); ``stream`` tells writers apart; ``level`` is empty for what is
    no log record. ``tagged`` says that vLLM itself named the writer, rather than the role being concluded. ``rank``
    is the
    tensor parallel rank where the tag names it.
    """

    number: int
    text: str
    role: Role = ""
    process: str = ""
    stream: str = ""
    level: str = ""
    source: str = ""
    tagged: bool = False
    rank: int | None = None


def segments(raw: bytes | str) -> list[str]:
    """A raw line without colour codes, cut at carriage returns (progress bars redraw themselves); no empty parts."""
    text = raw[:LIMIT].decode("utf-8", "replace") if isinstance(raw, bytes) else raw[:LIMIT]
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    if "\r" not in text:
        return [text] if text else []
    return [part for part in text.split("\r") if part][-MAX_SEGMENTS:]


def parse(text: str, number: int) -> Iterator[Line]:
    """The lines that one segment holds: one, or several for a JSON record whose message has several."""
    rest, carrier_role = _strip_carriers(text.rstrip("\n"))
    if rest.startswith('{"log":'):  # docker's json-file driver, as it lies on the disk
        rest, carrier_role = _strip_carriers(_docker_line(rest))
    if rest.startswith("{") and '"levelname"' in rest:
        record = _json_record(rest, number)
        if record is not None:
            for part in record.text.splitlines() or [""]:
                yield replace(record, text=part[:MAX_TEXT])
            return
    yield _plain(rest, number, carrier_role)


def role_of(process: str) -> Role:
    """The role of a process by the name that vLLM gives it."""
    name = process.lower().replace("_", "")
    return "api" if name.startswith(SERVER_PROCESSES) else "engine"


def _strip_carriers(text: str) -> tuple[str, Role]:
    role: Role = ""
    for _ in range(4):
        for carrier in _CARRIERS:
            match = carrier.match(text)
            if match is not None:
                unit = match.groupdict().get("unit")
                if unit in ("kernel", ""):
                    role = "kernel"
                elif unit == "systemd":
                    role = "systemd"
                text = text[match.end() :]
                break
        else:
            break
    return text, role


def _plain(text: str, number: int, carrier_role: Role) -> Line:
    process = stream = ""
    rank: int | None = None
    server = False
    for _ in range(3):  # writers interleave: "(APIServer pid=1) (EngineCore pid=2) INFO ..."
        tag = _TAG.match(text)
        if tag is None or (tag["pid"] is None and tag["process"] != "raylet"):
            break
        process, stream = tag["process"], f"{tag['process']} {tag['pid']}"
        server = server or role_of(process) == "api"
        named = tag["rank"] or tag["tp"] or (_RANK.search(process) or [None, None])[1]
        rank = int(named) if named is not None else rank
        text = text[tag.end() :]
    # Behind the server's tag another one may be a client's words, on a line of their own: the server answers for them.
    role: Role = ("api" if server else "engine") if process else carrier_role
    level, source, text, concluded = _record(text)
    if not process and concluded:
        role = concluded
    return Line(number, text[:MAX_TEXT], role, process, stream, level, source, bool(process), rank)


def _record(text: str) -> tuple[str, str, str, Role]:
    """Level, source file, message and, for records that name a file of the API server, the role that this implies."""
    match = _RECORD.match(text) or _PYTHON.match(text) or _RECORD.search(text, 0, 2 * _PREFIX_ROOM)
    if match is not None and match.start() <= _PREFIX_ROOM:
        source = match["source"]
        return match["level"], source, text[match.end() :], "api" if _SERVER_SOURCES.fullmatch(source) else ""
    match = _UVICORN.match(text)
    if match is not None:
        return match["level"], "uvicorn", text[match.end() :], "api"
    match = _GLOG.match(text)
    if match is not None:
        return _GLOG_LEVELS[match["level"]], "", text[match.end() :], ""
    return "", "", text, ""


def _docker_line(text: str) -> str:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return text
    line = data.get("log") if isinstance(data, dict) else None
    return line.rstrip("\r\n") if isinstance(line, str) else text


def _json_record(text: str, number: int) -> Line | None:
    """A record of ``--logging-config.formatter json`` and alike: levelname, name, processName, process, message."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict):
        return None
    message, level = str(data.get("message", "")), str(data.get("levelname", ""))[:8].upper()
    trace = data.get("exc_info") or data.get("exc_text")
    if isinstance(trace, str):
        message = f"{message}\n{trace}"
    process, pid = str(data.get("processName", ""))[:80], str(data.get("process", ""))[:10]
    if process in ("", "MainProcess"):
        process = "APIServer"
    return Line(number, message, role_of(process), process, f"{process} {pid}", level, str(data.get("name", "")), True)
