"""The demonstration (``make demo``): the real daemon on the stand-in engine, through two failures, in under a minute.

``python -m supervisord_vllm.simulation.demo``. Everything but the card and the engine is real: the daemon, its store,
its signals, HTTP and the command line. It runs in a folder of its own and leaves nothing behind; status 0 if the story
came out as told, 1 if not.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MODEL = "Qwen/Qwen2.5-7B-Instruct"
NEIGHBOUR = "35.5GiB"
PATIENCE_S = 60.0
"""For each condition that the story waits for; all of them together take about 20 s."""

POLICY = """\
schema = 1
name = "demo"
state-dir = "{folder}/state"
runtime-dir = "{folder}/run"

[engine]
command = ["{python}", "-m", "supervisord_vllm.simulation", "serve"]
model = "{model}"
port = {port}
env = {{ SIMULATED_CARD = "{folder}/card.json", SIMULATED_FAULTS = "{faults}" }}

[levers]
gpu-memory-utilization = 0.90
max-model-len = 8192
max-num-seqs = 16

[[ladder]]
lever = "gpu-memory-utilization"
step = 0.05
min = 0.60

[memory]
source = "card:{folder}/card.json"

[gate]
window = "500ms"
patience = "2s"

[proof]
concurrency = 4
soak = "2s"

[http]
listen = "127.0.0.1:{http}"

[log]
format = "json"
engine-output = false
"""

FAULTS = f"await-neighbour launch=1 bytes={NEIGHBOUR}; oom at=running after-requests=8 launch=2"


class StoryError(Exception):
    """The story did not come out as told."""


def say(text: str) -> None:
    """One paragraph of the narrator."""
    print(f"\n\033[1m{textwrap.fill(text, 100)}\033[0m" if sys.stdout.isatty() else f"\n{textwrap.fill(text, 100)}")


class Demo:
    """One run of the story, in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port, self.http = _free_port(), _free_port()
        self.policy = folder / "demo.toml"
        self.decisions: list[str] = []
        self.began = time.monotonic()
        self.daemon: subprocess.Popen[str] | None = None
        self.neighbour: subprocess.Popen[bytes] | None = None
        self.reader: threading.Thread | None = None

    def tell(self) -> None:
        """The whole story; raises `StoryError` where it leaves its course."""
        text = POLICY.format(
            folder=self.folder, python=sys.executable, model=MODEL, port=self.port, http=self.http, faults=FAULTS
        )
        self.policy.write_text(text, encoding="utf-8")
        say(
            "A card of 139.8 GiB. The policy asks for utilization 0.900 and lets it move down to 0.600. While the first"
            f" launch starts, after the gate looked, a neighbour takes {NEIGHBOUR}."
        )
        self._start()
        self._until("the engine serves at what fits", lambda: self._state() == ("serving", 2))
        say("It serves beside the neighbour. A request, answered by the engine itself:")
        print(f"  “{self._chat('Are you there?')}”")
        say("Now load, and the engine runs out of memory while serving. Real vLLM then exits with status 0.")
        with ThreadPoolExecutor(4) as clients:
            failed = sum(not ok for ok in clients.map(self._completes, range(12)))
        print(f"  12 requests under load: {12 - failed} answered, {failed} lost with the engine")
        self._until("the engine is back", lambda: self._state() == ("serving", 3))
        print(f"  and again: “{self._chat('And now?')}”")
        say("What an operator sees, `vllm-supervise status`:")
        print(textwrap.indent(self._verb("status"), "  "))
        say("`vllm-supervise stop`, then the daemon's own end:")
        print(textwrap.indent(self._verb("stop", "--reason", "the demo is over"), "  "))
        self._until("the engine is gone", lambda: self._state()[0] == "stopped")
        assert self.daemon is not None
        self.daemon.send_signal(signal.SIGTERM)
        status = self.daemon.wait(PATIENCE_S)
        self._join()
        if status != 0:
            raise StoryError(f"the daemon ended with status {status}")
        told = ("0.900 → 0.741", "0.741 → 0.691")
        if any(not any(move in sentence for sentence in self.decisions) for move in told):
            raise StoryError(f"other decisions than {told}: {self.decisions}")

    def close(self) -> None:
        """End whatever this run started and still lives."""
        for process in (self.daemon, self.neighbour):
            if process is not None and process.poll() is None:
                process.terminate()
                try:
                    process.wait(PATIENCE_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        self._join()

    # --- the parts ---

    def _start(self) -> None:
        environment = {**os.environ, "SIMULATED_CARD": str(self.folder / "card.json")}
        card = str(self.folder / "card.json")
        words = ["--card", card, "--bytes", NEIGHBOUR, "--when", "launch=1", "--name", "train.py"]
        self.neighbour = subprocess.Popen(
            [sys.executable, "-m", "supervisord_vllm.simulation.neighbour", *words],
            env=environment,
            stdout=subprocess.DEVNULL,
        )
        self.daemon = subprocess.Popen(
            [sys.executable, "-m", "supervisord_vllm.cli.main", "--config", str(self.policy)],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        self.reader = threading.Thread(target=self._follow, args=(self.daemon,), daemon=True)
        self.reader.start()

    def _follow(self, daemon: subprocess.Popen[str]) -> None:
        """The daemon's own events, as they come."""
        assert daemon.stderr is not None
        for line in daemon.stderr:
            try:
                event: dict[str, Any] = json.loads(line)
            except ValueError:
                print(f"  {line.rstrip()}")
                continue
            at = f"{time.monotonic() - self.began:5.1f} s"
            text = str(event.get("event"))
            if "decision" in event and "kind" in event:
                self.decisions.append(text)
                body = textwrap.fill(text, 88, initial_indent="", subsequent_indent=" " * 12)
                print(f"  {at}  » {body}")
            elif "→" in text:
                launch = event.get("launch")
                print(f"  {at}  {text}" + (f" (launch {launch})" if launch else ""))

    def _join(self) -> None:
        if self.reader is not None:
            self.reader.join(5)

    def _state(self) -> tuple[str, int | None]:
        try:
            status = json.loads(self._get(f"http://127.0.0.1:{self.http}/api/v1/status"))
        except OSError:
            return "unreachable", None
        launch = status["launch"]
        return status["state"], launch["number"] if launch else None

    def _until(self, what: str, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            if self.daemon is not None and self.daemon.poll() is not None:
                raise StoryError(f"the daemon ended with status {self.daemon.returncode} before {what}")
            if time.monotonic() > deadline:
                raise StoryError(f"not within {PATIENCE_S:.0f} s: {what}")
            time.sleep(0.1)

    def _chat(self, question: str) -> str:
        body = {"model": MODEL, "max_tokens": 12, "messages": [{"role": "user", "content": question}]}
        answer = json.loads(self._post("/v1/chat/completions", body))
        return str(answer["choices"][0]["message"]["content"]).strip()

    def _completes(self, number: int) -> bool:
        try:
            self._post("/v1/completions", {"model": MODEL, "prompt": f"count to {number}", "max_tokens": 8})
        except OSError:
            return False
        return True

    def _post(self, path: str, body: object) -> bytes:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        return self._get(request)

    def _get(self, request: str | urllib.request.Request) -> bytes:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=20) as response:
            answer: bytes = response.read()
            return answer

    def _verb(self, *words: str) -> str:
        command = [sys.executable, "-m", "supervisord_vllm.cli.main", *words, "--config", str(self.policy)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode != 0:
            raise StoryError(f"`vllm-supervise {words[0]}` ended with status {ran.returncode}: {ran.stderr.strip()}")
        return ran.stdout.rstrip()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def main() -> int:
    """Run the story; returns the exit status."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    folder = Path(tempfile.mkdtemp(prefix="vs-demo-"))
    demo = Demo(folder)
    try:
        demo.tell()
    except (StoryError, OSError) as error:
        print(f"\nThe demonstration failed: {error}", file=sys.stderr)
        print(f"Its folder is kept: {folder}", file=sys.stderr)
        demo.close()
        return 1
    demo.close()
    shutil.rmtree(folder)
    say(f"Done in {time.monotonic() - demo.began:.0f} s. Nothing was left behind.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
