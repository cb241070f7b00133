"""The fast path: INFO records that say nothing which counts, told apart in one look at the raw bytes.

Most of a serving engine's log is access lines, requests and load lines. A line is *ordinary* if it is one INFO or DEBUG
record (of vLLM or of uvicorn, with or without process tag and a container's or journal's prefix) whose message begins
with none of the texts that a signature wants at that level; a *load* line is the ten-second one. Everything else is
looked at closely. Whole runs of such lines of the server are passed over without leaving the regular expression.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from supervisord_vllm.engine.lines import SERVER_PROCESSES

_CARRIER: Final = (
    r"(?:(?!INFO|DEBUG|\()(?:"
    r"\d{4}-\d\d-\d\d[T ][\d:.,]{8,18}(?:Z|[+-]\d\d:?\d\d)? (?:std(?:out|err) [FP] )?|"
    r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d [^\s:]{1,255} [\w.@-]{1,64}(?:\[\d{1,10}\])?: |"
    r"[\w.-]{1,64} {0,32}\| )){0,2}"
)
_TAG: Final = (
    r"(?:(?:\x1b\[1;36m)?\(([A-Za-z][\w.-]{0,80})(?: rank=\d{1,5}| TP\d{1,5})? pid=\d{1,10}\)(?:\x1b\[0;0m)? ){0,3}"
)
_SERVER_TAG: Final = r"(?:(?:\x1b\[1;36m)?\((?:APIServer|ApiServer_\d{1,4}) pid=\d{1,10}\)(?:\x1b\[0;0m)? )?"
_RECORD: Final = r"(?:INFO|DEBUG)(?: \d\d-\d\d \d\d:\d\d:\d\d \[?[\w./-]{1,200}:\d{1,7}\] ?|:[ \t]{1,9})"
_LOAD: Final = r"(?:(?:Engine \d{3}: )?|(?=\d{1,3} E)\d{1,3} Engines Aggregated: )Avg prompt throughput: "
LOAD_MARK: Final = b"Avg prompt throughput: "


@dataclass(frozen=True)
class Ordinary:
    """Compiled for one catalogue's texts (`Catalogue.told_at_info`). Group 1 of a line is its process, group 2 is there
    for a load line. ``run`` matches whole lines of the server, ordinary ones and load lines.
    """

    raw: re.Pattern[bytes]
    run: re.Pattern[bytes]
    pattern: str

    @cached_property
    def text(self) -> re.Pattern[str]:
        """``raw`` for lines that come as text."""
        return re.compile(self.pattern)

    @classmethod
    def but_for(cls, told: tuple[str, ...]) -> Ordinary:
        """The patterns that know every ordinary record but those whose message begins with one of ``told``."""
        wanted = [start for start in told if not _begins_load(start)]
        begins = "".join(sorted({re.escape(start[0]) for start in wanted}))
        refused = rf"(?:(?=[^{begins}\r\n])|(?!{_tree(wanted)}))"
        line = rf"{_CARRIER}{_TAG}{_RECORD}(?:({_LOAD})|{refused})"
        # a load line is passed over like any other: who wants it finds it by its mark
        run = rf"(?:{_CARRIER}{_SERVER_TAG}{_RECORD}{refused}[^\r\n]*\n){{1,4096}}"
        return cls(re.compile(line.encode()), re.compile(run.encode()), line)


def _tree(texts: list[str]) -> str:
    """One pattern for all texts that looks at each letter once; ``(?!)`` where there is no text."""
    if not texts:
        return r"(?!)"
    if "" in texts:
        return ""
    branches = []
    for letter in sorted({text[0] for text in texts}):
        rest = [text[1:] for text in texts if text[0] == letter]
        branches.append(re.escape(letter) + (re.escape(rest[0]) if len(rest) == 1 else _tree(rest)))
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


def by_server(process: str) -> bool:
    """Whether a tag is one of the server's."""
    return process.lower().replace("_", "").startswith(SERVER_PROCESSES)


def _begins_load(start: str) -> bool:
    return start in ("Engine ", "Avg prompt throughput: ") or start.isdigit()
