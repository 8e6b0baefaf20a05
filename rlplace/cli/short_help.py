"""`--help` shows everyday options, `--help-all` every one: which are left out, and how."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import tyro

RARE = frozenset(
    {
        *("exclude", "together", "gangs", "num_groups", "rule", "granularity", "acyclic"),
        *("batch_dims", "loss", "exact"),
        *("storing", "no_wait", "in_process", "cluster", "track", "objective", "true", "save"),
        *("guide", "simulate_share", "num_calibrated", "priors", "table_rounds", "learn", "agent"),
        *("num_drawn", "drawn_problems", "num_bases", "num_varied", "varied_problems", "num_components"),
    }
)
"""Parameters of commands, and fields of their groups of options, that `--help` leaves out."""
SUPPRESS: Any = tyro.conf.Suppress
MORE = "These are the everyday options; `--help-all` shows every one."


def shortened(command: Callable[..., Any]) -> Callable[..., Any]:
    """`command` without its rare options, for its help alone: nothing calls it; itself where it has none."""
    hints = get_type_hints(command, include_extras=True)
    types = {name: SUPPRESS[hint] if name in RARE else _short(hint) for name, hint in hints.items()}
    if types == hints:
        return command
    kept = [one.replace(annotation=types[name]) for name, one in inspect.signature(command).parameters.items()]

    def short(**_: Any) -> None:
        raise AssertionError("help ends before a command runs")

    summary, _, rest = inspect.getdoc(command).partition("\n")  # type: ignore[union-attr]  # every command has one
    short.__doc__ = f"{summary}\n\n{MORE}\n{rest}"
    short.__annotations__ = {one.name: one.annotation for one in kept}
    vars(short)["__signature__"] = inspect.Signature(kept)
    return short


def _short(hint: Any) -> Any:
    """A group of options without the rare ones; anything else as it is."""
    group, extras = (hint.__origin__, hint.__metadata__) if hasattr(hint, "__metadata__") else (hint, ())
    if not isinstance(group, type) or not dataclasses.is_dataclass(group):
        return hint
    hints = get_type_hints(group, include_extras=True)
    rare = [
        (one.name, SUPPRESS[hints[one.name]], dataclasses.field(default=one.default))
        for one in dataclasses.fields(group)
        if one.name in RARE
    ]
    if not rare:
        return hint
    short: Any = dataclasses.make_dataclass(group.__name__, rare, bases=(group,), frozen=True)
    short.__doc__ = group.__doc__
    return Annotated[short, *extras] if extras else short
