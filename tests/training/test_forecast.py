"""What a run is expected to take: of parts that grow with what is asked for."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from search_problems import chain_problem
from torch import nn

from rlplace.graphs import capture
from rlplace.measure import Host
from rlplace.training import SearchConfig, TrainConfig
from rlplace.training.forecast import (
    COMPILING_S,
    HEURISTICS_S,
    LOAD_S_PER_OP,
    Durations,
    afterwards,
    ahead,
    forecast,
    one_device_step_s,
    searching_within,
    within,
)

PROBLEM = chain_problem(5, 2)
HERE = dataclasses.replace(
    PROBLEM.host, devices=tuple(dataclasses.replace(device, backend="cpu") for device in PROBLEM.host.devices)
)
CONFIG = TrainConfig(budget_s=60.0, is_traced=False, search=SearchConfig(num_calibrated=12, table_rounds=25))


def test_a_simulated_run_is_its_search() -> None:
    expected = forecast(PROBLEM.graph, PROBLEM.host, CONFIG, 2.0, num_rows=9)
    assert expected == Durations(heuristics_s=HEURISTICS_S, search_s=60.0)
    first = forecast(PROBLEM.graph, PROBLEM.host, CONFIG, 2.0, num_rows=9, is_compiled=False)
    assert first == Durations(heuristics_s=COMPILING_S, search_s=60.0)


def test_each_part_is_the_steps_that_it_runs() -> None:
    load_s = 5 * LOAD_S_PER_OP
    expected = forecast(PROBLEM.graph, HERE, CONFIG, 2.0, num_rows=9, is_profiled=False)
    assert expected.profiling_s == pytest.approx(15 * 2.0 + load_s)
    assert expected.calibration_s == pytest.approx(12 * (6 * 2.0 + load_s))
    assert expected.search_s == 60.0
    # the table, and ten rounds of three steps in as long as the search takes
    assert expected.table_s == pytest.approx(9 * (27 * 2.0 + load_s) + 3 * (11 * 2.0 + load_s))
    assert forecast(PROBLEM.graph, HERE, CONFIG, 2.0, num_rows=9).profiling_s == 0.0


@pytest.mark.parametrize(
    ("count", "is_traced", "placements"),
    [(None, True, 4), (None, False, 12), (0, False, 0), (0, True, 0), (8, True, 8)],
)
def test_fewer_traced_placements_do_and_their_code_is_made_twice(
    count: int | None, is_traced: bool, placements: int
) -> None:
    config = dataclasses.replace(CONFIG, is_traced=is_traced, search=SearchConfig(num_calibrated=count))
    expected = forecast(PROBLEM.graph, HERE, config, 2.0, num_rows=9)
    assert expected.calibration_s == pytest.approx(placements * (12.0 + (1 + is_traced) * 5 * LOAD_S_PER_OP))


@pytest.mark.parametrize("total_s", [40.0, 90.0, 400.0])
def test_all_of_a_run_fits_into_its_limit(total_s: float) -> None:
    asked = dataclasses.replace(CONFIG, budget_s=3.0, total_s=total_s)
    known = {"num_rows": 10, "is_profiled": False}
    before = forecast(PROBLEM.graph, HERE, dataclasses.replace(asked, total_s=None), 1.0, **known)  # type: ignore[arg-type]
    fitted, expected = within(PROBLEM.graph, HERE, asked, 1.0, **known)  # type: ignore[arg-type]
    assert expected.total_s <= 1.2 * total_s  # with steps of a second, a verdict alone takes half of 40 s
    assert expected.calibration_s < before.calibration_s or total_s == 400.0
    assert expected.search_s == fitted.budget_s <= 3.0
    assert before.total_s > 350.0


def test_with_a_limit_the_search_has_what_the_others_leave() -> None:
    short, expected = within(
        PROBLEM.graph, HERE, dataclasses.replace(CONFIG, budget_s=999.0, total_s=60.0), 0.01, num_rows=10
    )
    assert 30.0 < short.budget_s < 60.0
    assert expected.total_s == pytest.approx(60.0)
    assert within(PROBLEM.graph, HERE, CONFIG, 0.01, num_rows=10)[0] is CONFIG


def test_what_an_interrupted_run_spent_on_its_search_is_not_taken_from_the_limit_again() -> None:
    config = dataclasses.replace(CONFIG, budget_s=100.0, total_s=60.0)
    assert searching_within(config, 45.0).budget_s == 45.0
    assert searching_within(config, 45.0, 30.0).budget_s == 75.0
    assert searching_within(config, -1.0, 30.0).budget_s == pytest.approx(36.0)
    assert searching_within(config, 45.0, 99.0).budget_s == 100.0


def test_people_are_told_before_and_after() -> None:
    expected = Durations(profiling_s=5.0, calibration_s=14.0, search_s=150.0, table_s=31.0)
    config = TrainConfig(budget_s=150.0)
    assert ahead(expected, ("learned", "portfolio"), config, is_simulated=False, whole="in all") == (
        "about 3:20 in all, `budget` of the search 2:30: profiling 0:05, calibration 0:14, search 2:30, table 0:31; "
        "learned and portfolio search in turn"
    )
    search = Durations(search_s=60.0)
    limited = ahead(
        expected, ("learned",), dataclasses.replace(config, total_s=200.0), is_simulated=False, whole="in all"
    )
    assert limited.startswith("about 3:20 in all, within a `total` of 3:20: ")
    first = ahead(expected, ("learned",), config, is_simulated=False, whole="in all", is_compiled=False)
    assert first.endswith("; learned searches; kernels are compiled first, once")
    both = ahead(search, ("policy", "portfolio"), config, is_simulated=True, whole="from here")
    assert both.endswith(" search side by side")
    assert ahead(search, ("portfolio",), config, is_simulated=True, whole="from here").endswith(
        "search 1:00; portfolio searches"
    )
    assert afterwards(search, expected) == "took 1:00: search 1:00 (expected: about 3:20)"


def test_an_eager_step_tells_the_time_of_one() -> None:
    graph, host = capture(nn.Linear(4, 4), torch.ones(2, 4), lambda y: y.sum(), "sgd"), Host.detect("cores")
    step_s = one_device_step_s(graph, host)
    assert step_s is not None
    assert step_s > 0


def test_without_values_nobody_can_tell() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model, x = nn.Linear(4, 4), torch.ones(2, 4)
    assert one_device_step_s(capture(model, x), Host.detect("cores")) is None
