"""docs/custom-loops.md: its programs are run in order, are short, and do what the page says of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlplace.measure import Simulator, resolve_host
from rlplace.measure.hosts.host_file import load_host
from rlplace.policy import POLICIES, Policy
from rlplace.registry import Registry
from rlplace.search.methods import METHODS

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "custom-loops.md").read_text(encoding="utf-8")
PROGRAMS = dict(re.findall(r"^## (.+?)\n.*?```python\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE))
MOST_LINES = 40
"""Of a program's code; blank lines do not count."""


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What the programs of the page define, all run in their order, in an empty folder."""
    registries: tuple[Registry[Any], ...] = (POLICIES, METHODS)
    before = [set(registry) for registry in registries]
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("page"))
        for block in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL):
            exec(compile(block, "custom-loops.md", "exec"), found)
        found["hosts"] = [load_host(path) for path in ("desk.yaml", "short.yaml")]
    yield found
    for registry, known in zip(registries, before, strict=True):
        for name in set(registry) - known:
            registry.unregister(name)


def test_there_are_six_programs_and_all_are_short() -> None:
    assert list(PROGRAMS) == ["A training loop", "A reward", "A policy", "A search method", "A host", "A graph"]
    for name, code in PROGRAMS.items():
        lines = [line for line in code.splitlines() if line.strip()]
        assert len(lines) <= MOST_LINES, name
        assert max(map(len, lines)) <= 120, name


@pytest.mark.slow
def test_the_loop_learns_to_beat_one_gpu(names: dict[str, Any]) -> None:
    assert names["best_s"] < names["single_s"]
    learned = names["learned"]
    assert float(Simulator(names["problem"]).step_times(learned.devices[None])[0]) == names["best_s"]
    assert names["mean"] > -0.05


def test_the_reward_pays_for_time_and_for_free_devices(names: dict[str, Any]) -> None:
    assert names["paid"] == pytest.approx(1.3)
    own = names["own_reward"]
    step_s = own.deadline_s * np.array([0.5, 1.25, 3.0, np.inf])
    assert own(step_s).tolist() == pytest.approx([1.0, 0.5, -1.0, -1.0])


def test_the_policy_is_one_and_finds_something(names: dict[str, Any]) -> None:
    assert isinstance(names["found"].learned, Policy)
    assert names["found"].evaluations == 800
    assert names["found"].step_time_s < names["single_s"]


def test_the_method_is_in_the_table_beside_others(names: dict[str, Any]) -> None:
    times_s = {row.method: row.value_s for row in names["table"].rows}
    assert set(times_s) >= {"mingle", "anneal", "single"}
    assert times_s["mingle"] < times_s["single"]


def test_the_host_is_the_same_from_python_and_from_either_file(names: dict[str, Any]) -> None:
    full, short = names["hosts"]
    assert full == names["desk"]
    assert [device.name for device in short.devices] == names["names"]
    assert short.devices == full.devices
    times_s = [
        Simulator(type(names["problem"]).estimate(names["graph"], host, num_groups=24)).step_times(
            np.tile(np.arange(3, dtype=np.int32)[:, None], names["graph"].num_ops)
        )
        for host in (full, short)
    ]
    assert np.array_equal(*times_s)
    assert times_s[0][2] > times_s[0][0]  # the slow card is slower


def test_the_graph_is_placed_over_its_branches(names: dict[str, Any]) -> None:
    assert names["own_graph"].num_ops == 13
    assert len(np.unique(names["best"].devices)) > 1
    assert 3e-3 < names["best"].step_time_s < 12e-3
    assert resolve_host("4xK80").num_devices == names["num_devices"]
