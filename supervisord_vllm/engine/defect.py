"""A failure that no message names, but whose traceback says that the engine's own code is at fault.

Python's errors for broken programs (assertion, key, index, attribute, type, …) are a defect wherever they end an
engine.
``ValueError`` and ``RuntimeError`` are vLLM's way to refuse a configuration too: while starting they stay unknown,
while
serving no configuration was refused and they are a defect. Where the traceback went through the code that prepares one
request (structured output, its grammars), one request ended the engine for all others.
"""

from __future__ import annotations

import re
from typing import Final

from supervisord_vllm.core.diagnosis import Action, Kind
from supervisord_vllm.engine.signature import Outcome

_BROKEN: Final = re.compile(
    r"(?:AssertionError|KeyError|IndexError|AttributeError|TypeError|NameError|UnboundLocalError|NotImplementedError|"
    r"ZeroDivisionError|SystemError|RecursionError|StopIteration|UnicodeDecodeError|OverflowError)(?::|$|\()"
)
_ANY: Final = re.compile(r"(?:[\w.]{1,120}\.)?[A-Z]\w{0,80}(?:Error|Exception)(?::|$|\()")
_REQUEST_FILES: Final = re.compile(
    r"(?:backend_(?:xgrammar|guidance|outlines|lm_format_enforcer)|grammar_matcher|structured_output\w{0,20})\.py:"
)
_REQUEST_FRAMES: Final = frozenset(
    {
        "compile_grammar",
        "_create_grammar",
        "_async_create_grammar",
        "grammar_init",
        "_check_grammar_completion",
        "get_structured_output_key",
        "structured_output_key",
        "compile_json_schema",
        "grammar_bitmask",
        "accept_tokens",
    }
)

BUG_SERVING = Outcome(
    id="engine-bug-serving",
    kind=Kind.ENGINE_BUG,
    action=Action.RESTART_SAME,
    summary=("The engine ended with a Python error of its own while serving.",),
    advice=("Start again with the same flags; if it repeats, report the traceback with the vLLM version.",),
    confidence=0.7,
)
BUG_STARTING = Outcome(
    id="engine-bug-starting",
    kind=Kind.ENGINE_BUG,
    action=Action.STOP_EXPLAIN,
    summary=("vLLM's own code failed during the start (a broken assumption, not a refused value).",),
    advice=("It will fail again: go back to the vLLM version that worked, or report the traceback.",),
    confidence=0.7,
)
POISON = Outcome(
    id="poison-request-grammar",
    kind=Kind.POISON_REQUEST,
    action=Action.RESTART_SAME,
    summary=("One request's grammar (structured output) ended the engine for all.",),
    advice=(
        "Start again with the same flags; keep this request away, and upgrade vLLM: newer releases refuse it alone.",
    ),
    confidence=0.8,
)


def defect(error: str, frames: tuple[str, ...], *, serving: bool) -> Outcome | None:
    """The verdict on the first error line of an engine that failed, or ``None`` where it says too little."""
    if serving and _ANY.match(error):
        functions = {frame.rpartition(":")[2] for frame in frames}
        if functions & _REQUEST_FRAMES or any(_REQUEST_FILES.match(frame) for frame in frames):
            return POISON
        return BUG_SERVING
    return BUG_STARTING if _BROKEN.match(error) else None
