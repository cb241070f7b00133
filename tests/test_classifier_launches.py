"""Several launches in one file; and blocks of lines, which must read as single lines do."""

from __future__ import annotations

import io
import random

import pytest

from labelled import CAPTURES, CORPUS, raw_lines
from supervisord_vllm.core.diagnosis import Kind
from supervisord_vllm.engine.classifier import Classifier
from supervisord_vllm.engine.launches import MAX_EARLIER, Launches, read
from supervisord_vllm.engine.lines import LIMIT
from supervisord_vllm.engine.logfile import blocks, bounded_lines

H200 = CAPTURES / "h200-vllm-0.26.0"
ORDER = ["05-no-cache-blocks", "04-cotenant-free-below-util", "08-runtime-oom", "01-seed-cold", "06-len-over-kv"]
KINDS = [Kind.KV_NO_BLOCKS, Kind.GPU_BUSY_FOREIGN, Kind.OOM_RUNTIME, Kind.NONE, Kind.KV_LEN_TOO_LONG]


def lines_of(name: str) -> list[bytes]:
    return [line for line in raw_lines(H200 / f"{name}.log") if line]


def test_the_last_launch_counts_and_the_earlier_ones_are_listed() -> None:
    everything = [line for name in ORDER for line in lines_of(name)]
    launches = read(everything)
    assert launches.verdict().kind is KINDS[-1]
    assert [launch.verdict.kind for launch in launches.earlier] == KINDS[:-1]
    ends = [0]
    for launch in launches.earlier:
        assert launch.first == ends[-1] + 1
        ends.append(launch.last)
    logo = 2  # the lines of the logo above the version are still counted to the launch before
    assert ends[-1] - logo + len(lines_of(ORDER[-1])) == len(everything)


def test_evidence_is_numbered_in_the_file_not_in_the_launch() -> None:
    before = lines_of("08-runtime-oom")
    alone = read(lines_of("06-len-over-kv")).verdict().evidence[0].line
    assert read([*before, *lines_of("06-len-over-kv")]).verdict().evidence[0].line == len(before) + alone


def test_a_launch_whose_beginning_is_missing_is_one_too() -> None:
    half = lines_of("08-runtime-oom")[60:]
    launches = read([*half, *lines_of("01-seed-cold")])
    assert [launch.verdict.kind for launch in launches.earlier] == [Kind.OOM_RUNTIME]
    assert launches.verdict().kind is Kind.NONE


def test_the_engines_after_an_exit_in_a_journal_are_another_launch() -> None:
    def journal(text: str, unit: str = "vllm[8707]") -> str:
        return f"Jan 01 18:30:11 host {unit}: {text}"

    failed = "(EngineCore pid=2) ERROR 12-01 01:00:00 [core.py:1] EngineCore failed to start."
    cause = "(EngineCore pid=2) ERROR 12-01 01:00:00 [core.py:1] ValueError: No available memory for the cache blocks."
    exited = journal("vllm.service: Main process exited, code=exited, status=1/FAILURE", "systemd[1]")
    again = journal("vllm.service: Scheduled restart job, restart counter is at 1.", "systemd[1]")
    lines = [
        journal(failed),
        journal(cause),
        exited,
        again,
        journal("(EngineCore pid=9) INFO 12-01 01:01:00 [c.py:1] x"),
    ]
    launches = read(lines)
    assert [launch.verdict.kind for launch in launches.earlier] == [Kind.KV_NO_BLOCKS]
    assert (launches.earlier[0].first, launches.earlier[0].last) == (1, 4)
    assert launches.verdict().kind is Kind.NONE


def test_an_exit_at_the_end_does_not_begin_an_empty_launch() -> None:
    launches = read(
        [*lines_of("05-no-cache-blocks"), b"vllm-1 exited with code 1", b"", b"# nvidia-smi", b"No devices"]
    )
    assert (launches.earlier, launches.verdict().kind) == ((), Kind.KV_NO_BLOCKS)


def test_a_prompt_that_names_a_version_begins_no_launch() -> None:
    said = b"(APIServer pid=1) INFO 12-01 01:00:00 [logger.py:41] Received request c: prompt: 'vLLM server version 0.1'"
    launches = read([*lines_of("08-runtime-oom")[:-20], said])
    assert launches.earlier == ()


def test_a_file_of_endless_restarts_stays_bounded() -> None:
    one = [
        b"vLLM API server version 0.9.0",
        b"ValueError: No available memory for the cache blocks.",
        b"child exited: code=1",
    ]
    launches = Launches()
    for _ in range(MAX_EARLIER + 50):
        for line in one:
            launches.feed(line)
    assert len(launches.earlier) == MAX_EARLIER


def test_blocks_of_lines_are_read_like_single_lines() -> None:
    """The fast path may change no verdict, no number and no line number; whatever the size of the chunks."""
    for path in [*sorted(H200.glob("*.log")), *sorted(CORPUS.glob("*.log"))]:
        lines = list(raw_lines(path))
        slow = Launches()
        for line in lines:
            slow.current.look(line) if slow.current.phase is not None else slow.current.feed(line)
        fast = Launches()
        for block in blocks(io.BytesIO(b"\n".join(lines))):
            fast.feed_block(block)
        if not fast.earlier:
            assert fast.verdict() == slow.verdict(), path
            assert fast.current.ledger == slow.current.ledger


LOAD = (
    b"INFO 12-01 01:00:00 [loggers.py:271] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: "
    b"0.0 tokens/s, Running: %d reqs, Waiting: 3 reqs, GPU KV cache usage: 8.2%%, Prefix cache hit rate: 0%%"
)


def serving_log(count: int, seed: int) -> list[bytes]:
    """Access lines, load lines, requests, and now and then something that counts."""
    chance = random.Random(seed)
    sorts = [
        b'INFO:     127.0.0.1:%d - "POST /v1/chat/completions HTTP/1.1" 200 OK',
        b'(APIServer pid=1) INFO:     127.0.0.1:%d - "GET /health HTTP/1.1" 200 OK',
        b"(APIServer pid=1) INFO 12-01 01:00:00 [logger.py:41] Received request cmpl-%d: prompt: 'hello'",
        LOAD,
        b"(EngineCore pid=2) INFO 12-01 01:00:00 [core.py:1] something %d",
        b"WARNING 12-01 01:00:00 [x.py:1] something %d",
        b"\x1b[1;36m(APIServer pid=1)\x1b[0;0m INFO 12-01 01:00:00 [x.py:1] something %d",
        b"not a record %d\r",
    ]
    lines = [b"(APIServer pid=1) INFO:     Application startup complete."]
    return lines + [chance.choice(sorts) % chance.randint(1, 60000) for _ in range(count)]


@pytest.mark.parametrize("seed", range(3))
def test_runs_of_ordinary_lines_are_counted_and_their_load_lines_kept(seed: int) -> None:
    lines = serving_log(3000, seed)
    slow, fast = Classifier(kernel_lines=True), Launches()
    for line in lines:
        slow.feed(line)
    fast.feed_block(b"\n".join(lines) + b"\n")
    assert fast.current.line == slow.line == len(lines)
    assert [number for number, _ in fast.current._loads] == [number for number, _ in slow._loads]
    assert fast.verdict() == slow.verdict()


def test_overlong_lines_are_cut_wherever_the_chunks_end() -> None:
    data = b"a\n" + b"x" * (20 * LIMIT) + b"\nb\n\nend"
    assert [len(line) for line in bounded_lines(io.BytesIO(data))] == [1, LIMIT, 1, 0, 3]
    assert sum(len(block) for block in blocks(io.BytesIO(b"y" * (40 * LIMIT)))) <= 2 * LIMIT
    assert b"".join(blocks(io.BytesIO(data))).endswith(b"\nb\n\nend\n")
