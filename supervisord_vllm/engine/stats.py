"""What vLLM's ten-second load line shows when nothing failed: a queue that does not move, or too much of it.

Only the last `WINDOW` lines count (ten minutes at the default interval); they are kept as they came and read when a
verdict is asked for. A verdict from these lines never changes a configuration: the metrics, not the log, are what
pressure and hangs are judged by while an engine runs.
"""

from __future__ import annotations

from collections import deque

from supervisord_vllm.core.diagnosis import Action, Evidence, Kind, Number
from supervisord_vllm.engine.signature import Outcome

WINDOW = 60
STALLED_LINES = 3
"""Lines in a row without a token although requests run or wait; one or two can be a long prefill."""
FULL_PERCENT = 95.0
QUEUE_FACTOR = 2
"""A queue this many times longer than what runs is one that the engine does not keep up with."""
OVERLOADED_LINES = 2
OVERLOADED_SHARE = 0.25

HUNG = Outcome(
    id="load-stalled",
    kind=Kind.ENGINE_HUNG,
    action=Action.KILL_TREE_RESTART,
    summary=("No token came out while {running} requests ran and {waiting} waited: the engine hangs.",),
    advice=("End the whole process tree (EngineCore survives its server) and start again with the same flags.",),
    confidence=0.7,
)
KV_BOUND = Outcome(
    id="load-kv-bound",
    kind=Kind.OVERLOAD,
    action=Action.OBSERVE,
    summary=("The KV cache was full ({kv_usage:.0%}) while requests waited: more load than it holds.",),
    advice=(
        "Fewer --max-num-seqs, or more KV cache (--gpu-memory-utilization up, fp8), help latency; it is no failure.",
    ),
    confidence=0.7,
)
SLOT_BOUND = Outcome(
    id="load-slot-bound",
    kind=Kind.OVERLOAD,
    action=Action.OBSERVE,
    summary=("{waiting} requests waited while {running} ran and the KV cache had room ({kv_usage:.0%} used).",),
    advice=("Raise --max-num-seqs if the KV cache has room, or add engines; it is no failure.",),
    confidence=0.7,
)

Verdict = tuple[Outcome, dict[str, Number], Evidence]


class Load:
    """Collects load lines: the numbers that each printed, and the line as evidence."""

    def __init__(self) -> None:
        self._lines: deque[tuple[str, dict[str, Number], Evidence]] = deque(maxlen=WINDOW)
        self._stalled = 0

    def feed(self, printed: dict[str, Number], evidence: Evidence) -> None:
        """Note one line: prompt_tps, generation_tps, running, waiting, kv_usage_pct, preemptions."""
        numbers = {name: value for name, value in printed.items() if name != "kv_usage_pct"}
        usage = _float(printed, "kv_usage_pct") / 100
        numbers["kv_usage"] = round(usage, 4)
        running, waiting = _float(numbers, "running"), _float(numbers, "waiting")
        moving = _float(numbers, "prompt_tps") > 0 or _float(numbers, "generation_tps") > 0
        self._stalled = 0 if moving or running + waiting == 0 else self._stalled + 1
        shape = ""
        if waiting > 0 and moving:
            if 100 * usage >= FULL_PERCENT:
                shape = KV_BOUND.id
            elif running > 0 and waiting >= QUEUE_FACTOR * running:
                shape = SLOT_BOUND.id
        self._lines.append((shape, numbers, evidence))

    @property
    def last(self) -> dict[str, Number]:
        """The numbers of the last load line, empty where there was none."""
        return dict(self._lines[-1][1]) if self._lines else {}

    @property
    def stalled(self) -> int:
        """How many of the last lines in a row showed requests and no token."""
        return self._stalled

    def judge(self) -> Verdict | None:
        """The verdict on the load, with the numbers of the line that shows it best, or ``None``."""
        if self._stalled >= STALLED_LINES:
            return HUNG, self._lines[-1][1], self._lines[-1][2]
        for outcome in (KV_BOUND, SLOT_BOUND):
            bound = [(numbers, evidence) for shape, numbers, evidence in self._lines if shape == outcome.id]
            if len(bound) >= max(OVERLOADED_LINES, OVERLOADED_SHARE * len(self._lines)):
                return outcome, *bound[0]
        return None


def _float(numbers: dict[str, Number], name: str) -> float:
    value = numbers.get(name, 0)
    return float(value) if isinstance(value, (int, float)) else 0.0
