"""The project stands alone: its tree names no folder of one machine, no package index and nothing outside the clone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
IGNORED = {
    ".git",
    ".venv",
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
    ".hypothesis",
    "__pycache__",
    "build",
    "dist",
}
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
LOCKS = [ROOT / "requirements" / f"dev-{version}.txt" for version in VERSIONS]

# Put together from parts, or this file would be its own first offender.
OUTSIDE = [
    ".." + "/shared",
    "/work" + "/",
    "/root" + "/",
    "/opt" + "/wheels",
    "/opt" + "/pypi",
    ".py" + "env/versions/",
    "/site-packages" + "/pip",
]
INDEX = re.compile(
    r"(?:files\.)?pythonhosted\.org|(?:test\.)?pypi" + r"\.org|registry\.npmjs|download\.pytorch\.org|anaconda\.org"
    r"|--(?:extra-)?index-url|--find-links[= ](?:/|~|\w+:)"
)


def tree() -> list[Path]:
    """Every file of the project: what git knows or would add; without git, everything but what tools leave."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=False,
    )
    if listed.returncode == 0:
        return [path for name in listed.stdout.split(b"\0") if name and (path := ROOT / os.fsdecode(name)).is_file()]
    found: list[Path] = []
    for folder, names, files in os.walk(ROOT):
        names[:] = [name for name in names if name not in IGNORED and not name.endswith(".egg-info")]
        found += [Path(folder) / name for name in files]
    return found


def texts() -> dict[str, str]:
    """The tree's text files by name; binary files (a NUL byte) are left out."""
    contents = {str(path.relative_to(ROOT)): path.read_bytes() for path in tree()}
    return {name: content.decode("utf-8", "replace") for name, content in contents.items() if b"\0" not in content}


@pytest.mark.parametrize("needle", OUTSIDE)
def test_the_tree_names_nothing_outside_itself(needle: str) -> None:
    # Public logs are other people's text, with their containers' paths; each is kept byte for byte.
    ours = {name: text for name, text in texts().items() if not name.startswith("tests/data/public/p")}
    assert not [name for name, text in ours.items() if needle in text]


def test_the_tree_names_no_package_index() -> None:
    assert not {name: found[0] for name, text in texts().items() if (found := INDEX.findall(text))}


def test_no_file_of_the_tree_lies_outside_it() -> None:
    links = [path for path in tree() if path.is_symlink()]
    assert not [path for path in links if not path.resolve().is_relative_to(ROOT)]


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.stem)
def test_a_lock_pins_everything_with_hashes_and_names_no_address(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    entries = [line for line in text.splitlines() if line and line[0] not in " #"]
    assert entries
    assert not [line for line in entries if not re.match(r"[a-z0-9._-]+==[^ ]+ (?:; .+ )?\\$", line)]
    assert text.count("--hash=sha256:") >= len(entries)
    assert "://" not in text
    assert not re.search(r"(?:^|\s)/\w", text), "a path of one machine"


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.stem)
def test_a_lock_has_all_that_pyproject_asks_for(path: Path) -> None:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wanted = [
        *project["project"]["dependencies"],
        *project["dependency-groups"]["dev"],
        *project["build-system"]["requires"],
    ]
    pinned = set(re.findall(r"^([a-z0-9._-]+)==", path.read_text(encoding="utf-8"), re.MULTILINE))
    below_311 = path.stem == "dev-3.10"
    for requirement in wanted:
        name, _, condition = requirement.partition(";")
        if condition and not below_311:
            assert "python_version < '3.11'" in condition, "teach this test the new marker"
            continue
        assert re.split(r"[<>=!~ \[]", name)[0].lower() in pinned


def test_every_real_test_is_marked_real() -> None:
    files = sorted((ROOT / "tests" / "real").glob("test_*.py"))
    assert files
    assert not [
        path.name for path in files if "\npytestmark = pytest.mark.real\n" not in path.read_text(encoding="utf-8")
    ]


def test_the_license_is_the_whole_apache_license() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_ci_is_executable_and_runs_both_suites() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    text = script.read_text(encoding="utf-8")
    assert "set -euo pipefail" in text
    assert "suites=(test test-real)" in text
