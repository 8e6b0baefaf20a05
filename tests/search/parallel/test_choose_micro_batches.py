"""The race for the number of micro-batches and the order of ops, on steps whose answer is known."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from micro_batched import cut_graph, layered_step, step_problem
from random_problems import plain_host

from rlplace.errors import CaptureError, InvalidValue
from rlplace.graphs.grouping.groups import Grouping
from rlplace.measure.costs.costs import Costs
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.methods import METHODS
from rlplace.search.parallel.choose_micro_batches import SHARE, choose
from rlplace.search.task import Budget, Task

FAST = 1e12


def problem_of(count: int, *, launch_s: float = 0.0, num_devices: int = 2, layers: int = 4) -> Problem:
    """Layers whose time is that of the batch, cut in `count`, and a part that every op takes however small it is."""
    whole = layered_step(layers)
    problem = step_problem(cut_graph(whole, count) if count > 1 else whole, plain_host(num_devices, FAST))
    time_s = problem.costs.op_time_s
    return dataclasses.replace(problem, costs=Costs(np.where(time_s > 0, time_s / count + launch_s, 0.0), "estimated"))


def problems(counts: tuple[int, ...], **facts: float) -> dict[int, Callable[[], Problem]]:
    return {count: lambda count=count: problem_of(count, **facts) for count in counts}  # type: ignore[misc]


def test_cutting_pays_where_ops_are_long() -> None:
    heard: list[str] = []
    chosen = choose(problems((1, 2)), evaluations=1000, say=heard.append)
    assert chosen.num_micro_batches == 2
    assert chosen.spent <= SHARE * 1000
    assert chosen.step_time_s == pytest.approx(6.0)  # twelve seconds of work, half of it on each device
    assert chosen.devices is not None
    timer = Simulator(chosen.problem, threads=1)
    assert timer.step_times(chosen.devices[None])[0] == chosen.step_time_s
    assert any("the whole batch at once" in line for line in heard)
    assert heard[-1].startswith("chosen: 2 micro-batches")


def test_cutting_does_not_pay_where_every_op_takes_as_long() -> None:
    assert choose(problems((1, 2, 4), launch_s=10.0), evaluations=1000).num_micro_batches == 1


def test_more_micro_batches_fill_a_pipeline_until_launches_cost_more() -> None:
    """Parameters are pinned, two layers a device, and so is all that belongs to them: only pipelines are left."""

    def pipeline(count: int) -> Problem:
        problem = problem_of(count, launch_s=0.02)
        layer = np.array([int(path[1:]) if path else 0 for path in problem.graph.modules])
        allowed = np.stack((layer < 2, layer >= 2), axis=1) | (np.array(problem.graph.modules) == "")[:, None]
        return dataclasses.replace(problem, allowed=allowed)

    chosen = choose({count: lambda count=count: pipeline(count) for count in (1, 2, 4, 8)}, evaluations=2000)  # type: ignore[misc]
    assert chosen.num_micro_batches in (4, 8)
    assert chosen.op_order != "rank"


def test_one_that_fits_only_backward_first_is_found() -> None:
    graph = cut_graph(layered_step(4, layer_bytes=1, activation_bytes=400), 4)
    host = plain_host(1, FAST)
    roomy = step_problem(graph, host)
    peaks = {
        order: Simulator(dataclasses.replace(roomy, op_order=order), threads=1)
        .measure(np.zeros((1, graph.num_ops), np.int32))[0]
        .peak_bytes[0]
        for order in ("rank", "tilt", "backward-first")
    }
    assert peaks["backward-first"] < min(peaks["rank"], peaks["tilt"])
    room = peaks["backward-first"]
    tight = dataclasses.replace(host, devices=tuple(dataclasses.replace(d, memory_bytes=room) for d in host.devices))
    problem = step_problem(graph, tight)
    task = Task(problem, Simulator(problem, threads=1), Budget(50))
    METHODS["portfolio"].run(task)
    assert task.best_devices is None
    chosen = choose({4: lambda: problem}, evaluations=300)
    assert chosen.op_order == "backward-first"
    assert chosen.devices is not None


def test_where_nothing_fits_what_is_nearest_to_it_goes_on() -> None:
    """Parameters are what is too much: sums of gradients of more micro-batches need more, not less."""
    whole = layered_step(4, layer_bytes=400, activation_bytes=1)
    host = plain_host(2, FAST)
    tight = dataclasses.replace(host, devices=tuple(dataclasses.replace(d, memory_bytes=100) for d in host.devices))
    made = {count: step_problem(cut_graph(whole, count) if count > 1 else whole, tight) for count in (1, 2, 4)}
    heard: list[str] = []
    chosen = choose({count: lambda count=count: made[count] for count in made}, evaluations=90, say=heard.append)  # type: ignore[misc]
    assert chosen.devices is None
    assert (chosen.num_micro_batches, chosen.op_order) == (1, "rank")
    assert chosen.spent <= 0.3 * 90 + len(made) * 2
    held = step_problem(cut_graph(layered_step(4, layer_bytes=1, activation_bytes=400), 4), tight)
    lean = {1: lambda: step_problem(layered_step(4, layer_bytes=1, activation_bytes=400), tight), 4: lambda: held}
    assert choose(lean, evaluations=90).num_micro_batches == 4


def test_what_cannot_be_cut_is_left_out_and_said() -> None:
    def refused() -> Problem:
        raise CaptureError("the batch has 3 samples, 4 micro-batches were asked for")

    heard: list[str] = []
    chosen = choose(problems((1, 2)) | {4: refused}, evaluations=500, say=heard.append)
    assert chosen.num_micro_batches == 2
    assert "4 micro-batches: left out (the batch has 3 samples, 4 micro-batches were asked for)" in heard
    choose(problems((1, 2)) | {4: refused, 8: refused}, evaluations=500, say=heard.append)
    assert "4 and 8 micro-batches: left out (the batch has 3 samples, 4 micro-batches were asked for)" in heard
    with pytest.raises(CaptureError, match="3 samples"):
        choose({4: refused}, evaluations=500)


def test_one_candidate_needs_no_race() -> None:
    chosen = choose(problems((1,)), evaluations=500)
    assert (chosen.num_micro_batches, chosen.op_order, chosen.spent) == (1, "rank", 0)


def test_nothing_to_choose_from_is_refused() -> None:
    with pytest.raises(InvalidValue, match="problems"):
        choose({}, evaluations=500)
    with pytest.raises(InvalidValue, match="evaluations"):
        choose(problems((1,)), evaluations=0)


def test_the_same_seed_chooses_the_same() -> None:
    one, other = (choose(problems((1, 2)), evaluations=600, seed=3) for _ in range(2))
    assert (one.num_micro_batches, one.op_order, one.step_time_s) == (
        other.num_micro_batches,
        other.op_order,
        other.step_time_s,
    )
    assert np.array_equal(one.devices, other.devices)


def test_a_group_of_everything_is_no_bar() -> None:
    """Layouts are over ops: groups too coarse for them change nothing of what the race finds."""
    coarse = [dataclasses.replace(problem_of(2), grouping=Grouping(np.zeros(len(problem_of(2).graph.names), np.int32)))]
    assert choose({2: lambda: coarse[0]}, evaluations=600).step_time_s < 12.0


def test_larger_numbers_are_left_out_once_two_are_slower() -> None:
    heard: list[str] = []
    made: list[int] = []

    def make(count: int) -> Problem:
        made.append(count)
        return problem_of(count, launch_s=1.0)

    chosen = choose({k: lambda k=k: make(k) for k in (1, 2, 4, 8, 16)}, evaluations=900, say=heard.append)  # type: ignore[misc]
    assert chosen.num_micro_batches in (1, 2)
    assert made == [1, 2, 4, 8][: len(made)]
    assert any("left out (fewer are faster)" in line for line in heard)


def test_a_fixed_number_says_what_is_raced_and_each_order_once() -> None:
    heard: list[str] = []
    chosen = choose(problems((2,)), evaluations=1000, say=heard.append)
    assert heard[0] == "racing orders of ops: at most 300 evaluations"
    assert [line.split(":")[0] for line in heard[1:-1]] == [
        f"2 micro-batches, order {order}" for order in ("tilt", "rank", "backward-first")
    ]
    assert all("6000 ms after" in line for line in heard[1:-1])
    assert heard[-1] == f"chosen: 2 micro-batches, order {chosen.op_order}, 6000 ms ({chosen.spent} evaluations in all)"


@pytest.mark.parametrize(
    ("step_s", "words"), [(2.7134e-3, "2.713 ms"), (0.24267, "242.7 ms"), (12.3456, "12346 ms"), (2.7e-5, "0.02700 ms")]
)
def test_step_times_of_contenders_have_four_digits(step_s: float, words: str) -> None:
    facts = problem_of(1, num_devices=1)
    scale = step_s / float(facts.costs.op_time_s.sum())
    heard: list[str] = []
    costs = Costs(facts.costs.op_time_s * scale, "estimated")
    twice = {count: lambda: dataclasses.replace(facts, costs=costs) for count in (1, 2)}
    choose(twice, evaluations=100, say=heard.append)
    assert f"chosen: the whole batch at once, {words} (" in heard[-1]


def test_what_none_can_be_made_of_is_an_error_and_nothing_else() -> None:
    def refused() -> Problem:
        raise CaptureError("the batch cannot be cut")

    heard: list[str] = []
    with pytest.raises(CaptureError, match="cannot be cut"):
        choose({2: refused, 4: refused}, evaluations=500, say=heard.append)
    assert heard == []


def test_numbers_between_powers_of_two_are_tried_beside_the_best() -> None:
    """Three devices and three micro-batches: a third each. Two leave a device idle, four give one twice as much."""
    made: list[int] = []

    def make(count: int) -> Problem:
        made.append(count)
        return problem_of(count, num_devices=3, layers=1, launch_s=0.01)

    chosen = choose({k: lambda k=k: make(k) for k in (1, 2, 3, 4, 6, 8, 12, 16)}, evaluations=2000)  # type: ignore[misc]
    assert chosen.num_micro_batches == 3
    assert made[:3] == [1, 2, 4]
    assert 3 in made
    assert 12 not in made


@pytest.mark.parametrize("counts", [(1, 3, 6), (3, 4, 6), (3,), (1, 2, 3)])
def test_numbers_that_no_powers_of_two_enclose_are_all_tried(counts: tuple[int, ...]) -> None:
    made: list[int] = []

    def make(count: int) -> Problem:
        made.append(count)
        return problem_of(count, num_devices=3)

    choose({k: lambda k=k: make(k) for k in counts}, evaluations=1000)  # type: ignore[misc]
    assert made == list(counts)


def test_where_no_power_of_two_can_be_made_what_lies_between_is_tried() -> None:
    def refused() -> Problem:
        raise CaptureError("the batch has 3 samples")

    offered = {1: refused, 2: refused, 4: refused} | problems((3,))
    assert choose(offered, evaluations=500).num_micro_batches == 3
