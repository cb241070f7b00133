"""Lines on their way out: no waiting for the reader, losses counted and said, nothing secret, nothing that steers."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog

from supervisord_vllm import log
from supervisord_vllm.log import LINES, LONGEST_LINE, EngineOutput


class Reader:
    """Reads a pipe to its end on a thread, from when it is told to."""

    def __init__(self) -> None:
        self.read_end, self.write_end = os.pipe()
        self._parts: list[bytes] = []
        self._thread = threading.Thread(target=self._read, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def text(self) -> str:
        os.close(self.write_end)
        self._thread.join(30)
        assert not self._thread.is_alive()
        os.close(self.read_end)
        return b"".join(self._parts).decode()

    def _read(self) -> None:
        while chunk := os.read(self.read_end, 1 << 16):
            self._parts.append(chunk)


@pytest.fixture(autouse=True)
def restore() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    root.handlers[:], root.level = handlers, level


def hide(text: str) -> str:
    return text.replace("hf_secret", "***")


def engine_lines(lines: list[str | bytes], clean: Callable[[str], str] = hide) -> list[str]:
    reader = Reader()
    reader.start()
    output = EngineOutput(clean, reader.write_end)
    for line in lines:
        output.line(line)
    assert output.close(30)
    assert output.dropped == 0
    return reader.text().split("\n")[:-1]


def test_engine_lines_are_verbatim_but_for_secrets_and_control_characters() -> None:
    lines: list[str | bytes] = [
        "INFO \t 12-01 [core.py:1] Über 100 %\n",
        b"caf\xc3\xa9 \xff broken\r\n",
        "token hf_secret",
        "\x1b[31mhf_\x1b[0msecret in colours",
        "bell \x07 and \x9b2J",
        "",
    ]
    assert engine_lines(lines) == [
        "INFO \t 12-01 [core.py:1] Über 100 %",
        "café \\xff broken",
        "token ***",
        "*** in colours",
        "bell \\x07 and ",
        "",
    ]


def test_a_line_of_any_length_is_cut_and_no_half_secret_remains() -> None:
    line = "x" * (LONGEST_LINE - 4) + "hf_secret" + "x" * 10_000_000
    (written,) = engine_lines([line])
    assert len(written) == LONGEST_LINE
    assert "hf_" not in written


def test_a_blocked_reader_costs_lines_never_time_and_is_told() -> None:
    reader = Reader()
    fcntl.fcntl(reader.write_end, fcntl.F_SETPIPE_SZ, 4096)
    output = EngineOutput(hide, reader.write_end)
    begun = time.monotonic()
    for number in range(LINES + 2000):
        output.line(f"line {number:06d} {'x' * 80}")
    assert time.monotonic() - begun < 20  # nobody has read a byte
    dropped = output.dropped
    assert dropped >= 1900
    assert not output.close(0.05)  # and closing does not wait for it either
    reader.start()
    assert output.close(30)
    lines = reader.text().split("\n")[:-1]
    told = [line for line in lines if line.startswith("vllm-supervise: ")]
    assert sum(int(line.split()[1]) for line in told) == dropped
    assert len(lines) - len(told) + dropped == LINES + 2000


def test_a_closed_reader_costs_only_the_lines() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    output = EngineOutput(hide, write_end)
    for number in range(10):
        output.line(f"line {number}")
    assert output.close(30)
    os.close(write_end)
    assert output.dropped >= 10


def test_a_stream_that_somebody_made_non_blocking_loses_nothing() -> None:
    reader = Reader()
    os.set_blocking(reader.write_end, False)
    output = EngineOutput(hide, reader.write_end)
    for number in range(3000):
        output.line(f"{number} {'x' * 100}")
    reader.start()
    assert output.close(30)
    assert output.dropped == 0
    assert len(reader.text().split("\n")) == 3001


def events(report: Callable[[], None], **options: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    reader = Reader()
    reader.start()
    configured = log.configure(descriptor=reader.write_end, clean=hide, **options)
    report()
    assert configured.close(30)
    return [json.loads(line) for line in reader.text().splitlines()]


def test_events_are_json_lines_off_a_terminal_without_secrets() -> None:
    def report() -> None:
        structlog.get_logger().info("launch", number=3, argv=["vllm", "--api-key=hf_secret"], note="\x1b]0;title\x07ok")
        structlog.get_logger().debug("too fine")

    (event,) = events(report)
    assert event["event"] == "launch"
    assert event["number"] == 3
    assert event["level"] == "info"
    assert event["argv"] == ["vllm", "--api-key=***"]
    assert event["note"] == "ok"
    assert event["timestamp"].endswith("Z")


def test_an_exception_keeps_its_traceback_and_loses_its_secrets() -> None:
    def report() -> None:
        try:
            raise ValueError("bad hf_secret")
        except ValueError:
            structlog.get_logger().exception("failed")

    (event,) = events(report)
    assert "ValueError: bad ***" in event["exception"]
    assert "\n" in event["exception"]


def test_warnings_of_libraries_are_events_too() -> None:
    def report() -> None:
        logging.getLogger("aiohttp.server").error("Unhandled %s", "hf_secret")
        logging.getLogger("aiohttp.access").info("GET /")
        logging.getLogger("odd").warning("%d", "no number")

    unhandled, odd = events(report)
    assert (unhandled["event"], unhandled["logger"], unhandled["level"]) == ("Unhandled ***", "aiohttp.server", "error")
    assert odd["event"] == "%d"


def test_the_console_form_is_for_people() -> None:
    reader = Reader()
    reader.start()
    configured = log.configure(form="console", descriptor=reader.write_end)
    structlog.get_logger().warning("port taken", port=9620)
    assert configured.close(30)
    text = reader.text()
    assert "port taken" in text
    assert "9620" in text
    assert not text.startswith("{")
