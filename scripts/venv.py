"""Make .venv: the locked dependencies of this Python, and this package in editable form.

Standard library only, Python 3.10 or later. Does nothing when the environment is already right: a stamp in it holds a
hash of the lock, pyproject.toml and the Python. Concurrent calls wait for each other. An environment that is half made
or of other pins is thrown away and made anew. Every foreseeable failure is one line that says what to install.

Usage: ``python3 scripts/venv.py``
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "made-from"
VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"
LOCK = ROOT / "requirements" / f"dev-{VERSION}.txt"


def fingerprint() -> str:
    """Hash of all that the environment depends on; the tree's own path too, since the install is editable."""
    parts = [sys.version, sys.base_prefix, str(ROOT), LOCK.read_text(), (ROOT / "pyproject.toml").read_text()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def run(what: str, *command: str) -> None:
    """Run one step; its own output tells the details of a failure, the last line says which step it was."""
    if subprocess.run(command, cwd=ROOT, check=False).returncode != 0:
        sys.exit(f"venv: {what} failed (see above)")


def make(wanted: str) -> None:
    """Make the environment from nothing."""
    try:
        import ensurepip  # noqa: F401 - only to see whether it is there
        import venv  # noqa: F401
    except ImportError:
        sys.exit(f"venv: this Python cannot make virtual environments; on Debian: apt install python{VERSION}-venv")
    if VENV.is_symlink():
        VENV.unlink()
    shutil.rmtree(VENV, ignore_errors=True)
    print(f"venv: making .venv with Python {VERSION} (a minute, once)", flush=True)
    run("python -m venv", sys.executable, "-m", "venv", str(VENV))
    pip = (str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "-qq")
    run("installing the locked dependencies", *pip, "--require-hashes", "-r", str(LOCK))
    run("installing this package", *pip, "--no-deps", "--no-build-isolation", "--editable", str(ROOT))
    STAMP.write_text(wanted)


def main() -> None:
    """Make sure that .venv is right."""
    if not LOCK.exists():
        have = ", ".join(sorted(path.stem[len("dev-") :] for path in LOCK.parent.glob("dev-*.txt")))
        sys.exit(f"venv: Python {VERSION} is not supported (there are locks for {have}); try: make PYTHON=python3.11")
    guard = os.open(ROOT, os.O_RDONLY)  # the folder itself is the lock, so that none lies about; held until the exit
    fcntl.flock(guard, fcntl.LOCK_EX)
    wanted = fingerprint()
    if not STAMP.exists() or STAMP.read_text() != wanted:
        make(wanted)


if __name__ == "__main__":
    main()
