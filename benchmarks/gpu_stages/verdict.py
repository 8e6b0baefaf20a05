"""What a stage says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Verdict:
    """What a stage found."""

    status: Literal["ok", "failed", "skipped"]
    line: str
    """In one line."""
    figures: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(is_ok: bool, line: str, **figures: Any) -> Verdict:
        return Verdict("ok" if is_ok else "failed", line, figures)
