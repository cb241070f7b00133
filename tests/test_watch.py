"""`status --watch` on real terminals: it shows what happens, survives the daemon, and leaves the terminal as it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer

from daemon_process import daemon, until
from supervisord_vllm.cli import status, watch
from supervisord_vllm.cli.daemon import DaemonError, NoDaemonError
from supervisord_vllm.cli.instance import find
from supervisord_vllm.cli.watch import Watching, shows_unicode
from terminal import Terminal
from test_status_cli import record
from test_view import SERIES
from test_view import status as status_now

PROGRAM = [sys.executable, "-m", "supervisord_vllm.cli.main"]


def test_it_follows_an_engine_through_its_death_and_a_daemon_through_its_absence() -> None:
    with daemon() as instance:
        instance.start()
        instance.reaches("serving")
        with Terminal([*PROGRAM, "status", "--watch", "--config", str(instance.policy)], (100, 40)) as terminal:
            first = terminal.shows(
                "t: serving, ready", "launch 1", "max_num_seqs", "of 139.8 GiB", "running", "none yet"
            )
            assert (terminal.screen.other, terminal.screen.cursor) == (True, False)
            assert first.splitlines()[0].endswith(" UTC")
            until(lambda: instance.complete()[0] == 200 or None, instance.told)
            os.kill(instance.status()["launch"]["pid"], signal.SIGKILL)
            text = terminal.shows("decision 1", "launch 2", "serving")
            assert "┃ launch 1" in text
            terminal.resize(64, 18)
            terminal.comes(lambda: 0 < len(terminal.screen.text().splitlines()) <= 18)
            assert max(map(len, terminal.shows("t: serving", "decision 1").splitlines())) <= 64
            terminal.resize(100, 40)
            assert instance.term() == 0
            terminal.shows("t: no daemon runs", "no daemon listens at", "trying again", "decision 1")
            instance.start()
            back = terminal.shows("t: serving, ready", "launch 3")
            assert "no daemon" not in back
            terminal.press("\x03")
            assert terminal.ended() == 0
            assert terminal.screen.was_other
            assert (terminal.screen.other, terminal.screen.cursor) == (False, True)
            assert "t: serving, ready" in terminal.screen.text()  # the last picture stays
            assert terminal.screen.unknown == []


@pytest.fixture
def away(tmp_path: Path) -> list[str]:
    """The command for an instance that has a history and no daemon."""
    return [*PROGRAM, "status", "--watch", "--state-dir", str(record(tmp_path / "qwen"))]


def test_a_signal_ends_it_as_expected_with_the_terminal_restored(away: list[str]) -> None:
    with Terminal(away, (80, 24)) as terminal:
        terminal.shows("qwen: no daemon runs", "It is unknown why.")
        assert not terminal.echoes  # an echoed ^C would fall into a control sequence
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.ended() == -signal.SIGTERM
        assert (terminal.screen.other, terminal.screen.cursor, terminal.echoes) == (False, True, True)


def test_ctrl_z_gives_the_terminal_back_and_fg_takes_it_again(away: list[str]) -> None:
    environ = {"PS1": "ready> ", "PROMPT_COMMAND": None}
    with Terminal(["bash", "--norc", "--noprofile", "-i"], (80, 24), environ) as terminal:
        terminal.shows("ready>")
        terminal.press(" ".join(away) + "\n")
        terminal.comes(lambda: terminal.screen.other and "no daemon runs" in terminal.screen.text())
        terminal.press("\x1a")
        terminal.comes(lambda: not terminal.screen.other and "Stopped" in terminal.screen.text())
        assert terminal.screen.cursor
        terminal.press("fg\n")
        terminal.comes(lambda: terminal.screen.other and "no daemon runs" in terminal.screen.text())
        terminal.press("\x03")
        terminal.comes(lambda: not terminal.screen.other)
        terminal.press("echo status $?\n")
        terminal.shows("status 0")
        terminal.press("exit\n")
        assert terminal.ended() == 0


def test_without_unicode_or_colour_it_is_ascii(away: list[str]) -> None:
    with Terminal(away, (60, 24), {"LC_ALL": "C", "NO_COLOR": "1"}) as terminal:
        text = terminal.shows("qwen: no daemon runs", "decision 1")
        assert text.isascii()
        terminal.press("\x03")
        assert terminal.ended() == 0


@pytest.mark.parametrize("term", ["dumb", ""])
def test_a_terminal_that_cannot_move_its_cursor_is_refused_in_one_line(away: list[str], term: str) -> None:
    with Terminal(away, (200, 24), {"TERM": term}) as terminal:
        assert terminal.ended() == 2
        (line,) = terminal.screen.text().splitlines()
        assert line.startswith("vllm-supervise: status --watch needs a terminal that can move its cursor")
        assert line.endswith("programs read status --json")


def test_no_terminal_is_refused_in_one_line(away: list[str]) -> None:
    ran = subprocess.run(away, capture_output=True, text=True, check=False, timeout=60)
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (2, "", 1)
    both = subprocess.run([*away, "--json"], capture_output=True, text=True, check=False, timeout=60)
    assert (both.returncode, both.stderr.count("\n")) == (2, 1)
    assert "exclude each other" in both.stderr


class Answers:
    """Stands for `cli.daemon.ask`: documents by target, or an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.documents: dict[str, Any] = {
            "/status": status_now(),
            "/series": SERIES,
            "/history": {"decisions": [{"number": number} for number in range(9)]},
        }
        self.error: Exception | None = None
        self.asked: list[str] = []
        monkeypatch.setattr(watch, "ask", self)

    def __call__(self, _path: Path, target: str, *, timeout: float) -> Any:  # noqa: ANN401 - any document
        assert timeout <= 5
        self.asked.append(target)
        if self.error is not None or target not in self.documents:
            raise self.error or DaemonError("the daemon answered 404")
        return self.documents[target]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    return Answers(monkeypatch)


def watching(tmp_path: Path) -> Watching:
    return Watching(lambda: find(state_dir=tmp_path / "qwen"))


def test_it_asks_little(tmp_path: Path, answers: Answers) -> None:
    view = watching(tmp_path)
    for second in range(0, 20, 2):
        view.look(1000.0 + second)
    assert answers.asked.count("/status") == 10
    assert answers.asked.count("/series") == 4  # pages come every 5 s
    assert answers.asked.count("/history") == 1
    answers.documents["/status"] = status_now(decision={"number": 4, "outcome": None})
    view.look(1020.0)
    assert answers.asked.count("/history") == 2
    assert [one["number"] for one in view.scene(1020.0).decisions] == [6, 7, 8]


def test_a_silent_daemon_is_said_and_its_last_word_is_dated(tmp_path: Path, answers: Answers) -> None:
    view = watching(tmp_path)
    view.look(1000.0)
    answers.error = DaemonError("the daemon at /run/x does not answer within 3 s")
    view.look(1010.0)
    scene = view.scene(1010.0)
    assert scene.trouble == "the daemon at /run/x does not answer within 3 s; what is shown is of 00:16:40 UTC"
    assert scene.status["state"] == "serving"
    assert not view.refused
    answers.error = None
    view.look(1012.0)
    assert view.scene(1012.0).trouble == ""


def test_a_daemon_that_refuses_at_once_is_an_error(
    tmp_path: Path, answers: Answers, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers.error = DaemonError("control socket /run/x: permission denied")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with pytest.raises(typer.Exit) as error:
        status.status(watch=True, state_dir=tmp_path / "qwen")
    assert error.value.exit_code == 3
    assert capsys.readouterr().err == "vllm-supervise: control socket /run/x: permission denied\n"


def test_an_absent_daemon_leaves_what_was_and_no_claim_about_now(tmp_path: Path, answers: Answers) -> None:
    view = watching(tmp_path)
    view.look(1000.0)
    answers.error = NoDaemonError("no daemon listens")
    view.look(1010.0)
    scene = view.scene(1010.0)
    assert (scene.status["state"], scene.status["ready"], scene.status["load"]) == ("no-daemon", False, None)
    assert "since 00:16:40 UTC; trying again every 2 s" in scene.trouble
    assert scene.timeline.at


def test_an_older_daemon_without_a_series_is_shown_without_one(tmp_path: Path, answers: Answers) -> None:
    del answers.documents["/series"]
    view = watching(tmp_path)
    view.look(time.time())
    assert view.scene(0.0).trouble == ""
    assert not view.scene(0.0).timeline.at


def test_unicode_is_used_where_the_locale_and_the_console_have_it() -> None:
    class Out:
        encoding = "utf-8"

    out: Any = Out()
    assert shows_unicode(out, {"LANG": "de_DE.UTF-8", "TERM": "xterm"})
    assert shows_unicode(out, {})
    assert not shows_unicode(out, {"LC_ALL": "C", "LANG": "de_DE.UTF-8"})
    assert not shows_unicode(out, {"LANG": "C.UTF-8", "TERM": "linux"})
    out.encoding = "iso-8859-1"
    assert not shows_unicode(out, {"LANG": "C.UTF-8"})


def test_the_plain_status_does_not_import_rich(tmp_path: Path) -> None:
    state_dir = record(tmp_path / "qwen")
    program = (
        "import sys, typer; from pathlib import Path; before = set(sys.modules)\n"  # an old typer imports rich itself
        "from supervisord_vllm.cli.status import status\n"
        "status(state_dir=Path(sys.argv[1]))\n"
        "print([name for name in set(sys.modules) - before if name.split('.')[0] == 'rich' or name.endswith('watch')])"
    )
    ran = subprocess.run([sys.executable, "-c", program, str(state_dir)], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"
