"""`policy`: a method like any other, that never ends behind its start and learns from the host."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from fake_measurer import CountingMeasurer, TimingMeasurer, chain_problem
from numpy.typing import NDArray
from search_problems import fork_problem, tight_problem

from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.policy import LearnConfig, PlacerPolicy, Seq2SeqConfig
from rlplace.search.improve.portfolio import tuned_start
from rlplace.search.improve.starting_points import best_start_with_greedy
from rlplace.search.methods import find
from rlplace.search.task import Budget, Task
from rlplace.training.method_choice import METHODS
from rlplace.training.policy_methods import search_by_policy

PROBLEMS = [fork_problem(0), fork_problem(1, 3), tight_problem(6, 2)]


def test_the_face_registers_it_and_search_knows_no_policy() -> None:
    assert METHODS["policy"].home == "rlplace.training.policy_methods:search_by_policy"


@pytest.mark.slow
@pytest.mark.parametrize("init", ["starts", "none"])
@pytest.mark.parametrize("share", [0.1, 1.0])
def test_a_seed_and_a_number_of_evaluations_find_the_same_to_the_bit(init: str, share: float) -> None:
    problem = PROBLEMS[0]
    config = LearnConfig(init=init, share=share, num_samples=16)

    def run() -> tuple[NDArray[np.int32], float, int]:
        found = find(problem, "policy", Simulator(problem), Budget(evaluations=300), seed=3, config=config)
        assert found.devices is not None
        return found.devices, found.step_time_s, found.evaluations

    first, again = run(), run()
    assert np.array_equal(first[0], again[0])
    assert first[1:] == again[1:]
    assert first[2] <= 300


@pytest.mark.slow
@pytest.mark.parametrize("problem", PROBLEMS)
def test_it_never_ends_behind_its_start(problem: Problem) -> None:
    task = Task(problem, Simulator(problem), Budget(evaluations=200))
    start, start_s, leaders = best_start_with_greedy(task)
    _, tuned_s = tuned_start(task, start, start_s, leaders, until=1.0)
    found = find(problem, "policy", Simulator(problem), Budget(evaluations=200))
    assert found.step_time_s <= tuned_s


def test_a_policy_alone_learns_the_best_placement_from_scratch() -> None:
    measurer = TimingMeasurer(chain_problem(6), wanted=[0, 1, 1, 0, 0, 1])
    task = Task(measurer.problem, measurer, Budget(evaluations=64), seed=0)
    policy = search_by_policy(task, LearnConfig(init="none", share=1.0, num_samples=16))
    assert isinstance(policy, PlacerPolicy)
    assert task.best_s == 1.0
    assert len(measurer.timed) <= 64


def test_a_policy_that_is_sure_of_itself_ends_the_search() -> None:
    """Two groups have four placements: once all are known, nothing new is scored, however large the budget."""
    measurer = TimingMeasurer(chain_problem(2), wanted=[0, 1])
    task = Task(measurer.problem, measurer, Budget(evaluations=10_000), seed=0)
    search_by_policy(task, LearnConfig(init="none", share=1.0))
    assert (task.best_s, task.evaluations) == (1.0, 4)


def test_where_all_placements_were_tried_nothing_is_annealed() -> None:
    measurer = TimingMeasurer(chain_problem(2), wanted=[0, 1])
    task = Task(measurer.problem, measurer, Budget(evaluations=10_000), seed=0)
    policy = search_by_policy(task, LearnConfig())
    assert task.best_s == 1.0
    assert policy.mode().tolist() == [0, 1]  # it was taught all the same
    assert task.evaluations < 1_000  # list schedules are tuned first


class Host(CountingMeasurer):
    """A host that wants all ops on device 1; always open, and with nothing else to run."""

    seconds_left = float("inf")

    def promising(self, count: int) -> NDArray[np.int32]:
        return np.zeros((0, 4), dtype=np.int32)


class ClosingHost(Host):
    """A host that closes once it was asked, before the second batch, whether it is open."""

    asked = 0

    @property
    def seconds_left(self) -> float:  # type: ignore[override]
        self.asked += 1
        return 3.5 - self.asked  # at first, and before each of two batches, some


class Indifferent:
    """A simulator that cannot tell placements apart."""

    def step_times(self, placements: NDArray[np.int32]) -> NDArray[np.float64]:
        return np.ones(len(placements))


@pytest.mark.slow
def test_measured_step_times_teach_what_the_simulator_does_not_know() -> None:
    host = Host(chain_problem(4), wanted=[1, 1, 1, 1])
    task = Task(host.problem, Indifferent(), Budget(evaluations=64, measurements=150), host=host, seed=0)
    policy = search_by_policy(task, LearnConfig(num_samples=8, num_measured=6))
    assert task.measurements == 150
    assert policy.mode().tolist() == [1, 1, 1, 1]
    assert all(len(batch) <= 6 for batch in host.batches)


def test_a_host_that_closes_while_a_batch_is_made_still_runs_it() -> None:
    host = ClosingHost(chain_problem(4), wanted=[1, 1, 1, 1])
    task = Task(host.problem, Indifferent(), Budget(evaluations=16, measurements=150), host=host, seed=0)
    search_by_policy(task, LearnConfig(num_samples=8, num_measured=6))
    assert (len(host.batches), host.asked) == (2, 4)


def test_a_policy_alone_proposes_something_however_little_time_there_is() -> None:
    problem = fork_problem(0)
    config = LearnConfig(init="none", share=1.0)
    assert find(problem, "policy", Simulator(problem), Budget(seconds=1e-9), config=config).devices is not None


def test_it_learns_with_one_thread_whatever_the_caller_has() -> None:
    threads: set[int] = set()

    class Watching(Indifferent):
        def step_times(self, placements: NDArray[np.int32]) -> NDArray[np.float64]:
            threads.add(torch.get_num_threads())
            return super().step_times(placements)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        find(fork_problem(0), "policy", Watching(), Budget(evaluations=30))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert threads == {1}


def test_it_leaves_the_generators_of_others_alone() -> None:
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    problem = fork_problem(0)
    find(problem, "policy", Simulator(problem), Budget(evaluations=60))
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


def test_what_search_left_over_is_measured_and_learned_from_too() -> None:
    host = Host(chain_problem(4), wanted=[1, 0, 1, 0])
    asked: list[int] = []
    host.promising = lambda count: (asked.append(count), np.array([[1, 0, 1, 0]], dtype=np.int32))[1]  # type: ignore[method-assign]
    task = Task(host.problem, Indifferent(), Budget(evaluations=32, measurements=60), host=host, seed=0)
    policy = search_by_policy(task, LearnConfig(num_samples=8, num_measured=6))
    assert asked[0] == 3  # half of a batch
    assert policy.mode().tolist() == [1, 0, 1, 0]


def test_a_placement_without_a_choice_is_measured_once() -> None:
    problem = chain_problem(4)
    pinned = replace(problem, allowed=np.array([[False, True]] * 4))
    host = Host(pinned, wanted=[1, 1, 1, 1])
    task = Task(pinned, Indifferent(), Budget(evaluations=32, measurements=60), host=host, seed=0)
    search_by_policy(task, LearnConfig(num_samples=8, num_measured=6))
    assert [batch.tolist() for batch in host.batches] == [[[1, 1, 1, 1]]]


@pytest.mark.slow
def test_samples_that_are_not_screened_are_measured_as_they_come() -> None:
    """As in the 2017 paper: what is measured is what the policy drew, and all of it teaches."""
    host = Host(chain_problem(4), wanted=[1, 1, 1, 1])
    asked: list[int] = []
    host.promising = lambda count: (asked.append(count), np.zeros((0, 4), dtype=np.int32))[1]  # type: ignore[method-assign]
    told: list[Mapping[str, float]] = []
    task = Task(host.problem, Indifferent(), Budget(evaluations=16, measurements=240), host=host, seed=0)
    task.tell = told.append  # type: ignore[method-assign, assignment]
    seq2seq = Seq2SeqConfig(hidden=16, type_embedding=4, device_embedding=4, attention=4)
    policy = search_by_policy(task, LearnConfig(policy="seq2seq", seq2seq=seq2seq, num_samples=8, num_measured=6))
    assert asked == []
    assert policy.mode().tolist() == [1, 1, 1, 1]
    curve = [figures["measured_vs_single"] for figures in told if "measured_vs_single" in figures]
    drawn = [(batch, ratio) for batch, ratio in zip(host.batches, curve, strict=True) if len(batch) == 6]
    baseline_s = 4.0
    for batch, ratio in drawn:  # in the others some placements came twice
        assert ratio == pytest.approx(np.mean(1.0 + (batch != 1).sum(axis=1)) / baseline_s)
    assert drawn
    assert np.mean(curve[-5:]) < np.mean(curve[:5]) - 0.1
    assert [figures["measured"] for figures in told][-1] == 240


def test_learners_that_ask_are_told_which_placements_ran() -> None:
    problem = tight_problem(6, 2)
    told: list[Mapping[str, float]] = []
    task = Task(problem, Simulator(problem), Budget(evaluations=64), seed=0)
    task.tell = told.append  # type: ignore[method-assign, assignment]
    search_by_policy(task, LearnConfig(learner="reinforce", init="none", share=1.0, num_samples=32))
    assert 0.0 < told[0]["failed"] < 1.0
    assert told[0]["simulated_mean_s"] < float("inf")
