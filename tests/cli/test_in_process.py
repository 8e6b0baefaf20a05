"""`--in-process`: every command that measures hands it on; without it the default decides."""

from __future__ import annotations

from typing import Any

import pytest

from rlplace.cli.main import main

ASKED = pytest.mark.parametrize(("option", "isolated"), [([], None), (["--in-process"], False)])


class _Seen(Exception):
    pass


def _seeing(seen: list[Any], what: str) -> Any:
    def instead(*args: Any, **kwargs: Any) -> None:
        seen.append(kwargs["isolated"] if what == "keyword" else args[2].isolated)
        raise _Seen

    return instead


@ASKED
@pytest.mark.parametrize(
    ("command", "target", "what"),
    [
        ("measure", "rlplace.compare.simulated_and_measured.time_placement", "keyword"),
        ("fidelity", "rlplace.compare.simulated_and_measured.run_fidelity", "keyword"),
        ("advise", "rlplace.advice.advising.advise_workload", "keyword"),
        ("train", "rlplace.training.command.run_training", "config"),
        ("compare", "rlplace.compare.run_compare.run_compare", "config"),
    ],
)
def test_it_is_handed_on(
    command: str, target: str, what: str, option: list[str], isolated: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(target, _seeing(seen, what))
    with pytest.raises(_Seen):
        main([command, "nmt@small", "--host", "cores", *option])
    assert seen == [isolated]
