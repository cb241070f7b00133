"""Write one lock file with hashes per supported Python: requirements/dev-X.Y.txt.

Each lock holds the project's dependencies, the tools of the dependency group ``dev`` and the build requirements,
resolved by pip-compile under that very Python in a throw-away virtual environment. Locks carry no index address and no
path of this machine. Needs Python 3.11 or later itself, every supported Python on PATH or under pyenv, and an index.

Usage: ``python3 scripts/lock.py [X.Y ...]`` (default: all). Kept pins are not upgraded; delete a lock to resolve anew.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
FLAGS = (
    "--quiet",
    "--generate-hashes",
    "--no-emit-index-url",
    "--no-emit-find-links",
    "--no-emit-trusted-host",
    "--no-emit-options",
    "--allow-unsafe",
    "--strip-extras",
    "--resolver=backtracking",
)


def interpreter(version: str) -> str:
    """The path of a working Python of this version; exits with one line where there is none."""
    candidates = [shutil.which(f"python{version}")]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates += [str(path) for path in sorted(pyenv.glob(f"{version}.*/bin/python{version}"), reverse=True)]
    for path in candidates:
        if path and subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
            return path
    sys.exit(f"lock: no python{version} on PATH or under pyenv; install it, or name the versions to lock")


def wanted() -> str:
    """Everything that a lock resolves, one requirement a line."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    lines = [
        *project["project"]["dependencies"],
        *project["dependency-groups"]["dev"],
        *project["build-system"]["requires"],
    ]
    return "\n".join(lines) + "\n"


def lock(version: str) -> Path:
    """Resolve for one Python and put the result in place."""
    target = ROOT / "requirements" / f"dev-{version}.txt"
    with tempfile.TemporaryDirectory(prefix="lock-") as scratch:
        work = Path(scratch)
        subprocess.run([interpreter(version), "-m", "venv", str(work / "venv")], check=True)
        bin_ = work / "venv" / "bin"
        subprocess.run([str(bin_ / "pip"), "install", "-qq", "pip-tools"], check=True)
        (work / "dev.in").write_text(wanted(), encoding="utf-8")
        if target.exists():
            shutil.copy(target, work / target.name)
        environment = {**os.environ, "CUSTOM_COMPILE_COMMAND": "make lock"}
        compile_ = [str(bin_ / "pip-compile"), *FLAGS, f"--output-file={target.name}", "dev.in"]
        subprocess.run(compile_, check=True, cwd=work, env=environment)
        shutil.copy(work / target.name, target)
    return target


if __name__ == "__main__":
    for each in sys.argv[1:] or VERSIONS:
        print(lock(each).relative_to(ROOT))
