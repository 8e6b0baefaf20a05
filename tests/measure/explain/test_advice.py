"""Advice: every rule on an explanation where it is right, in their order, and where it has nothing to say.

What shows that a machine did something else while a step was measured.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from micrographs import op_graph
from random_problems import plain_host

from rlplace.graphs.grouping.groups import Grouping
from rlplace.measure.costs.costs import Costs
from rlplace.measure.explain.explain_step import (
    DATA_PARALLEL,
    EAGER,
    ONE_DEVICE,
    RULES,
    advise_on,
    disturbance_of,
    explain,
)
from rlplace.measure.explain.explanation import (
    SCHEMA,
    Advice,
    Alternative,
    CriticalPath,
    DeviceShare,
    Explanation,
    ModuleShare,
    PathPart,
    RouteShare,
)
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator

GIB = 1 << 30


def device(name: str, busy_s: float, *, peak: float = 0.5, members: tuple[str, ...] = ()) -> DeviceShare:
    peak_bytes = int(peak * 16 * GIB)
    return DeviceShare(
        name, "gpu", 10, busy_s, 0.0, 1.0 - busy_s, 0, 0, peak_bytes, 16 * GIB, memory_pool="", members=members
    )


def path(op_s: float, transfer_s: float = 0.0, wait_s: float = 0.0) -> CriticalPath:
    routes = (
        RouteShare("gpu:1", "gpu:0", transfer_s * 0.6, 3, 30),
        RouteShare("gpu:0", "gpu:1", transfer_s * 0.4, 1, 9),
    )
    modules = (ModuleShare("decoder.attention", "backward", 0.6 * op_s, 40), ModuleShare("", "forward", 0.4 * op_s, 9))
    sent = (
        PathPart("transfer", 0.0, 0.1, "gpu:1", "op", "m", "backward", "gpu:0", num_bytes=9, what="gradient"),
        PathPart("transfer", 0.1, 0.3, "gpu:0", "op", "m", "forward", "gpu:1", num_bytes=9, what="activation"),
        PathPart("transfer", 0.3, 0.9, "gpu:2", "op", "m", "forward", "gpu:1", num_bytes=9, what="parameter"),
    )
    return CriticalPath(sent if transfer_s else (), op_s, transfer_s, wait_s, modules, routes if transfer_s else ())


PLAIN = Explanation(
    schema=SCHEMA,
    graph_fingerprint="0" * 16,
    host="host",
    method="learned",
    kind="simulated",
    step_time_s=1.0,
    explained_s=1.0,
    bound_s=0.5,
    bound="total work",
    num_ops=20,
    num_micro_batches=1,
    num_transfers=4,
    transfer_bytes=39,
    devices=(device("gpu:0", 0.8), device("gpu:1", 0.7)),
    path=path(1.0),
    cuts=(),
    memory=(),
    alternatives=(Alternative(ONE_DEVICE, 1.5, "simulated"), Alternative(EAGER, None, "simulated", "simulated host")),
    advice=Advice("keep", ""),
)


def beside(*others: Alternative) -> Explanation:
    return replace(PLAIN, alternatives=others)


CASES = {
    "data-parallel": (
        beside(Alternative(DATA_PARALLEL, 0.6, "estimated")),
        "Cut the batch (`--micro-batches auto`): data parallelism is estimated at 600 ms a step, this placement takes "
        "1,000 ms.",
    ),
    "use-eager": (
        beside(Alternative(EAGER, 0.8, "measured"), Alternative(ONE_DEVICE, 0.9, "measured")),
        "Use eager: it is faster (800 ms a step, 1,000 ms as placed).",
    ),
    "one-device": (
        beside(Alternative(ONE_DEVICE, 1.02, "measured")),
        "One device is as good (1,020 ms a step, 1,000 ms as placed): export nothing.",
    ),
    "memory": (
        replace(PLAIN, devices=(device("gpu:0", 0.8, peak=0.97), device("gpu:1", 0.7))),
        "gpu:0 is full to 97 %: leave room before you train for long, with a smaller batch or micro-batches "
        "(`--micro-batches auto`).",
    ),
    "near-bound": (
        replace(PLAIN, bound_s=0.962),
        "Keep this placement: it is within 4 % of the bound (total work).",
    ),
    "transfers": (
        replace(PLAIN, path=path(0.69, 0.31)),
        "Copies of activations between gpu:0 and gpu:1 take 31 % of the step: a coarser grouping "
        "(fewer `--groups`) or micro-batches (`--micro-batches auto`) may help.",
    ),
    "waits": (
        replace(PLAIN, path=path(0.6, 0.05, 0.35)),
        "Launches and other waits of the host take 35 % of the step: its ops are short, and a larger batch may help "
        "more than another placement.",
    ),
    "chain": (
        replace(PLAIN, devices=(device("gpu:0", 0.8), device("gpu:1", 0.2)), path=path(0.9, 0.1), num_micro_batches=4),
        "One chain of ops is 90 % of the step, most of it in the backward of decoder.attention (54 %), and devices are "
        "idle for 50 % of it: another number of micro-batches than 4, or a split of its ops (`--split auto`), may give "
        "them work.",
    ),
    "keep": (
        PLAIN,
        "Keep this placement: it takes 67 % of one device's step; none can take less than 50 % of its own step time.",
    ),
}


@pytest.mark.parametrize("rule", CASES)
def test_each_rule_speaks_where_it_is_right(rule: str) -> None:
    explanation, sentence = CASES[rule]
    assert advise_on(explanation) == Advice(rule, sentence)


def test_every_rule_has_a_case_and_they_are_asked_in_order() -> None:
    assert [*RULES, "keep"] == list(CASES)
    everything = replace(
        PLAIN,
        bound_s=1.0,
        devices=(device("gpu:0", 0.8, peak=0.97), device("gpu:1", 0.1)),
        path=path(0.5, 0.25, 0.25),
        alternatives=(
            Alternative(EAGER, 1.0, "measured"),
            Alternative(ONE_DEVICE, 1.0, "measured"),
            Alternative(DATA_PARALLEL, 0.5, "estimated"),
        ),
    )
    assert advise_on(everything).rule == "data-parallel"
    cut = replace(everything, num_micro_batches=2)
    assert advise_on(cut).rule == "use-eager"
    assert "as fast" in advise_on(cut).sentence
    without_eager = replace(cut, alternatives=cut.alternatives[1:])
    assert advise_on(without_eager).rule == "one-device"
    alone = replace(cut, alternatives=cut.alternatives[2:])
    assert advise_on(alone).rule == "memory"
    roomy = replace(alone, devices=PLAIN.devices)
    assert advise_on(roomy).rule == "near-bound"
    assert advise_on(replace(roomy, bound_s=0.5)).rule == "transfers"


@pytest.mark.parametrize(("bound_s", "is_near"), [(0.94, False), (0.96, True), (1.04, True), (1.1, False)])
def test_a_step_far_below_the_bound_is_not_near_it(bound_s: float, is_near: bool) -> None:
    """The bound's costs are wrong there."""
    assert (advise_on(replace(PLAIN, bound_s=bound_s)).rule == "near-bound") == is_near


def test_an_even_split_is_compared_with_eager_too() -> None:
    split, single = Alternative(DATA_PARALLEL, 0.6, "estimated"), Alternative(ONE_DEVICE, 1.0, "measured")
    assert advise_on(beside(single, split)).rule == "data-parallel"  # as `rlplace advise` has it
    assert advise_on(beside(single, split, Alternative(EAGER, 0.62, "measured"))).rule == "use-eager"


def test_a_gang_that_runs_nothing_makes_no_device_idle() -> None:
    gang = device("both", 0.0, members=("gpu:0", "gpu:1"))
    explanation = replace(PLAIN, devices=(*PLAIN.devices, gang), path=path(0.9, 0.1))
    assert advise_on(explanation).rule == "keep"


def test_a_step_that_takes_no_time_is_kept() -> None:
    nothing = replace(PLAIN, step_time_s=0.0, explained_s=0.0, bound_s=0.0, alternatives=(), path=path(0.0))
    assert advise_on(nothing) == Advice("keep", "Keep this placement: the step takes no time.")


def test_without_one_device_the_bound_alone_is_told() -> None:
    forced = beside(Alternative(ONE_DEVICE, None, "simulated", "does not fit"))
    assert advise_on(forced).sentence == "Keep this placement: none can take less than 50 % of its own step time."


def measured(step_time_s: float, spread_s: float, *others: Alternative) -> Explanation:
    """A step of 4 s, as if it had been measured."""
    graph, host = op_graph([[], [0], [1], [2]]), plain_host(2)
    problem = Problem(graph, host, Costs(np.ones((4, 2)), "estimated"), Grouping(np.arange(4)))
    simulator = Simulator(problem, threads=1)
    plan = simulator.plan(np.zeros(4, dtype=np.int32))
    timeline = replace(simulator.timeline(plan), source="measured")
    return explain(problem, plan, timeline, step_time_s=step_time_s, spread_s=spread_s, alternatives=others)


@pytest.mark.parametrize(
    ("step_time_s", "spread_s", "words"),
    [
        (4.0, 0.3, ""),
        (4.0, 1.0, "its steps scatter by ± 25 % around their median."),
        (3.3, 0.0, ""),
        (2.5, 0.0, "the step that is explained took 160 % of the median."),
        (8.0, 0.1, "the step that is explained took 50 % of the median."),
        (8.0, 4.0, "scatter by ± 50 % around their median; the step that is explained took 50 % of the median."),
    ],
)
def test_steps_that_scatter_and_an_unusual_one_are_signs(step_time_s: float, spread_s: float, words: str) -> None:
    said = disturbance_of(measured(step_time_s, spread_s))
    assert words in said
    assert bool(said) == bool(words)
    assert measured(step_time_s, spread_s).disturbed == said


def test_what_lies_within_the_scatter_tells_nothing() -> None:
    others = Alternative("one device", 4.5, "measured"), Alternative("eager", 6.0, "measured")
    said = disturbance_of(measured(4.0, 1.0, *others, Alternative("data parallel", 4.1, "estimated")))
    assert "the difference to one device is within that, and tells nothing" in said
    assert disturbance_of(measured(4.0, 0.3, *others)) == ""


def test_a_simulated_step_is_never_disturbed() -> None:
    assert disturbance_of(replace(measured(4.0, 3.0), kind="simulated")) == ""
