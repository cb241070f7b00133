"""What a line of output tells the daemon at once, before any verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from supervisord_vllm.core.diagnosis import Number

if TYPE_CHECKING:
    from supervisord_vllm.core.facts import Phase


@dataclass(frozen=True, slots=True)
class PhaseEvent:
    """The start entered a new phase; phases only go forward."""

    phase: Phase


@dataclass(frozen=True, slots=True)
class LedgerEvent:
    """A line printed numbers of the memory account or of the effective configuration, under their canonical names."""

    numbers: Mapping[str, Number]


@dataclass(frozen=True, slots=True)
class FatalEvent:
    """An engine process says, tagged with its name, that it is dying or did not start."""

    text: str


Event = PhaseEvent | LedgerEvent | FatalEvent
