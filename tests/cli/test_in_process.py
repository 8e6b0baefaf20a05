"""`--in-process`: every command that measures hands it on; without it the default decides."""

from __future__ import annotations

from typing import Any

import pytest

from rlplace.cli.main import main

ASKED = pytest.mark.parametrize(("option", "isolated"), [([], None), (["--in-process"], False)])


class _Seen(Exception):
    pass


def _seeing(seen: list[Any]) -> Any:
    def instead(*args: Any, **kwargs: Any) -> None:
        seen.append(args[0].isolated)
        raise _Seen

    return instead


@ASKED
@pytest.mark.parametrize(
    ("command", "target"),
    [
        ("measure", "rlplace.compare.simulated_and_measured.time_placement"),
        ("fidelity", "rlplace.compare.simulated_and_measured.run_fidelity"),
        ("advise", "rlplace.advice.advising.advise_workload"),
        ("train", "rlplace.training.train_and_resume.run_training"),
        ("compare", "rlplace.compare.run_compare.run_compare"),
    ],
)
def test_it_is_handed_on(
    command: str, target: str, option: list[str], isolated: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(target, _seeing(seen))
    with pytest.raises(_Seen):
        main([command, "nmt@small", "--host", "cores", *option])
    assert seen == [isolated]
