"""The two halves stay apart: the core decides without touching the world, the simulation knows nothing of the core."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "supervisord_vllm"
CORE = "supervisord_vllm.core"

# Clock, randomness, files, processes, network and threads: what a decision must not depend on.
# fmt: off
IMPURE = frozenset(
    {
        "asyncio", "concurrent", "contextvars", "ctypes", "datetime", "fcntl", "fileinput", "glob", "http",
        "importlib", "io", "locale", "logging", "mmap", "multiprocessing", "os", "pathlib", "platform",
        "random", "resource", "secrets", "select", "selectors", "shelve", "shutil", "signal", "socket",
        "sqlite3", "ssl", "subprocess", "sys", "tempfile", "threading", "time", "urllib", "uuid", "zoneinfo",
    }
)
# fmt: on
IMPURE_CALLS = frozenset({"open", "input", "print", "eval", "exec", "__import__", "id", "hash"})


def imports(path: Path) -> Iterator[str]:
    """Full names of the modules that a file imports anywhere in it; a relative import is made absolute."""
    package = (PACKAGE.name, *path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            # `from package import name` may import a module or a value: both readings are yielded.
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def modules(folder: str) -> list[Path]:
    found = sorted((PACKAGE / folder).rglob("*.py"))
    assert found, f"no modules in {folder}"
    return found


def label(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("path", modules("core"), ids=label)
def test_the_core_imports_only_the_standard_library_and_itself(path: Path) -> None:
    for name in imports(path):
        top = name.partition(".")[0]
        ours = name == CORE or name.startswith(f"{CORE}.")
        assert ours or top in sys.stdlib_module_names, f"core imports {name}"


@pytest.mark.parametrize("path", modules("core"), ids=label)
def test_the_core_has_no_clock_no_randomness_and_no_io(path: Path) -> None:
    assert not {name.partition(".")[0] for name in imports(path)} & IMPURE
    called = {
        node.func.id
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    allowed = {"hash"} if path.name == "levers.py" else set()  # __hash__ of a vector; never a value of a decision
    assert not (called & IMPURE_CALLS) - allowed


@pytest.mark.parametrize("path", modules("simulation"), ids=label)
def test_the_simulation_never_imports_the_core(path: Path) -> None:
    assert not [name for name in imports(path) if name == CORE or name.startswith(f"{CORE}.")]


def loaded_by(statement: str) -> set[str]:
    """Names of the modules that a fresh interpreter has loaded after one statement."""
    code = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_the_core_loads_nothing_but_the_standard_library() -> None:
    names = ", ".join(f"{CORE}.{path.stem}" for path in modules("core") if path.stem != "__init__")
    foreign = {name.partition(".")[0] for name in loaded_by(f"import {names}")} - set(sys.stdlib_module_names)
    assert foreign - {name for name in foreign if name.startswith("_")} == {PACKAGE.name}


def test_importing_the_simulation_does_not_load_the_core() -> None:
    names = [
        "supervisord_vllm.simulation." + ".".join(path.relative_to(PACKAGE / "simulation").with_suffix("").parts)
        for path in modules("simulation")
        if path.stem not in {"__init__", "__main__"}
    ]
    loaded = loaded_by("\n".join(f"import {name}" for name in ["supervisord_vllm.simulation", *names]))
    assert not {name for name in loaded if name.startswith(CORE)}


def test_the_command_line_starts_with_typer_and_the_standard_library_only() -> None:
    loaded = loaded_by("import supervisord_vllm.cli.main")
    assert "typer" in loaded
    heavy = {"aiohttp", "pydantic", "structlog", "pynvml", "prometheus_client", "psutil", "asyncio", "sqlite3"}
    assert not loaded & heavy
    ours = {
        name for name in loaded if name.startswith("supervisord_vllm.") and not name.startswith("supervisord_vllm.cli")
    }
    assert not ours, "verbs import what they need when they run"
