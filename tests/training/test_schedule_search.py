"""The method `schedule`: guesses first, then variations, then learning; never past its budget."""

from __future__ import annotations

import numpy as np
import pytest
from micro_batched import cut_graph, layered_step, step_problem
from random_problems import plain_host
from search_problems import Counting, brute_force_s, fork_problem

from rlplace.errors import InvalidValue
from rlplace.policy.base import pretrained_path
from rlplace.policy.schedule import propose
from rlplace.policy.schedule_network import load_network
from rlplace.search.parallel.hybrid import parallel_starts
from rlplace.search.task import Budget, Task
from rlplace.training.method_choice import METHODS, SCHEDULE
from rlplace.training.policy_methods import search_zero_shot


def test_one_evaluation_is_the_first_guess() -> None:
    problem = fork_problem(3, num_devices=3)
    timer = Counting(problem)
    task = Task(problem, timer, Budget(evaluations=1))
    search_zero_shot(task)
    guess = propose(problem, load_network(pretrained_path("schedule")), 1).devices[0]
    assert timer.count == task.evaluations == 1
    assert task.best_devices is not None
    assert task.best_devices.tolist() == guess.tolist()


@pytest.mark.parametrize("evaluations", [5, 40])
def test_a_budget_is_kept_and_every_seed_guesses_the_same(evaluations: int) -> None:
    problem = fork_problem(5, num_devices=3)
    tasks = [Task(problem, Counting(problem), Budget(evaluations=evaluations), seed=seed) for seed in (0, 1)]
    for task in tasks:
        search_zero_shot(task)
        assert task.evaluations <= evaluations
    assert tasks[0].best_s == tasks[1].best_s


def test_it_learns_a_small_problem_to_its_optimum() -> None:
    problem = fork_problem(1)
    task = Task(problem, Counting(problem), Budget(evaluations=1500))
    policy = search_zero_shot(task)
    assert policy is not None
    assert task.best_s == pytest.approx(brute_force_s(problem))


def test_a_step_cut_into_micro_batches_gets_layouts_too() -> None:
    """Stages of a pipeline, which the first guess is not."""
    problem = step_problem(cut_graph(layered_step(4), 4), plain_host(2))
    timer = Counting(problem)
    task = Task(problem, timer, Budget(evaluations=16))
    search_zero_shot(task)
    assert task.evaluations <= 16
    layouts = Task(problem, Counting(problem), Budget(evaluations=8))
    best_layout_s = min(step_s for _, step_s in parallel_starts(layouts))
    assert task.best_s <= best_layout_s


def test_an_endless_budget_is_refused() -> None:
    problem = fork_problem(1)
    with pytest.raises(InvalidValue, match="budget"):
        METHODS[SCHEDULE].run(Task(problem, Counting(problem), Budget()))
    assert np.isinf(Budget().evaluations)
