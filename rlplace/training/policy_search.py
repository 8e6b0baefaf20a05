"""The method `policy`: a policy that imitates good starts, learns from simulated placements, then measured ones."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from rlplace.env.rewards import Scorer, make_reward
from rlplace.measure.timing.threads import one_thread_here
from rlplace.policy.base import Policy
from rlplace.policy.learn.state import LearnerFile
from rlplace.policy.options import LearnConfig
from rlplace.policy.policies import checked_learner, checked_policy
from rlplace.search.groupings import majority_devices
from rlplace.search.improve.anneal import anneal_finer
from rlplace.search.improve.portfolio import tuned_start
from rlplace.search.improve.starting_points import best_start_with_greedy, try_all
from rlplace.search.task import Measuring, Simulating, Task

MOST_IDLE = 8
"""Rounds without a new placement after which the policy is taken to be sure of itself."""


@one_thread_here()  # ops are tiny: a team of threads slows them down, and must not decide what is found
def solve(
    task: Task,
    config: LearnConfig | None = None,
    start: NDArray[np.int32] | None = None,
    learner_file: LearnerFile | None = None,
) -> Policy:
    """Places by a policy and by search that learn from each other; returns the policy.

    The policy imitates what the portfolio's cheap part finds (heuristics, tuned list schedules), samples for a share of
    the budget and learns from every sample; annealing goes on from the start that it imitated and, where it branches
    (graphs whose ops repeat), from the best sample too, and the policy learns what came of it, as in expert iteration
    (Anthony et al. 2017, arXiv:1705.08439). Where the task has a host, the policy goes on there: it proposes placements
    to be measured and learns from their measured step times.

    Args:
        task: scores and counts.
        config: which policy, which learner, and their options.
        start: (N,) a placement to start from besides those of the portfolio.
        learner_file: keeps the learner's state, and gives it back; nobody by default.
    """
    config = config or LearnConfig()
    recipe, agent = config.recipe, PolicySearch(task, config, learner_file)
    begin, begin_s, others = None, math.inf, []
    if recipe.init == "starts":
        known = [] if start is None else [(start, float(task.score(start)[0]))]
        found, found_s, leaders = best_start_with_greedy(task)
        found, found_s = min([(found, found_s), *known], key=lambda one: one[1])
        begin, begin_s = tuned_start(task, found, found_s, leaders, until=1.0)
        others = [(found, found_s)]
        agent.imitate(begin)
        if try_all(task, share=0.5) and task.best_devices is not None:  # few enough: nothing is left to be found
            if config.imitate:
                agent.imitate(task.best_devices)
            agent.measure()
            return agent.policy
    agent.learn(until=task.spent + recipe.share * (1.0 - task.spent))
    if task.best_devices is not None:
        if begin is None:
            begin, begin_s = task.best_devices, task.best_s
        elif task.best_s < begin_s:  # a branch starts from it; others keep the symmetry that samples break
            others = [*others, (task.best_devices, task.best_s)]
    if begin is not None and recipe.share < 1.0:
        anneal_finer(task, begin, begin_s, others=others, until=1.0 - agent.imitation_share)
        if config.imitate and task.best_devices is not None:
            agent.imitate(task.best_devices)
    agent.measure()
    return agent.policy


class PolicySearch:
    """A policy and its learner at work on a task.

    Simulated and measured rewards take one way, through `Scorer`s over the task's scoring and over its host.

    Args:
        task: scores, measures and counts.
        config: which policy, which learner, and their options.
        learner_file: keeps the learner's state, and gives it back; nobody by default.
    """

    def __init__(self, task: Task, config: LearnConfig, learner_file: LearnerFile | None = None) -> None:
        seed = int(task.generator.integers(2**31))
        self._task, self._config, self._recipe, problem = task, config, config.recipe, task.problem
        self._policy = checked_policy(problem, config, seed)
        self.policy = self._policy.policy
        self._learner, self._file = checked_learner(self.policy, config, seed), learner_file
        if learner_file is not None:
            learner_file.restore(self._learner.learner)
        self._baseline_s = float(problem.costs.op_time_s.mean(axis=1).sum()) or 1.0
        reward = make_reward(self._recipe.reward, self._baseline_s)
        self._scorer = Scorer(Simulating(task), reward, deterministic=True)
        self._imitation_s, self._none = 0.0, np.zeros((0, problem.graph.num_ops), dtype=np.int32)
        self._host_scorer = None
        if task.host is not None:
            self._host_scorer = Scorer(Measuring(task), reward, deterministic=False, reference_s=self._baseline_s)

    @property
    def imitation_share(self) -> float:
        """Share of a budget of seconds that teaching the policy a placement takes; 0 under one of evaluations."""
        if math.isfinite(self._task.budget.evaluations):
            return 0.0
        return min(self._imitation_s / self._task.budget.seconds, 0.2)

    def imitate(self, devices: NDArray[np.int32]) -> None:
        """Teaches the policy a placement of ops, (N,)."""
        before_s = self._task.elapsed_s
        self._learner.imitate(majority_devices(self._task.problem, devices))
        self._policy.check_guess()
        self._imitation_s = self._task.elapsed_s - before_s

    def learn(self, *, until: float) -> None:
        """Samples, scores and updates until a share of the budget is spent, or nothing new comes up any more.

        A task that has seen no placement yet gets a batch however little time there is.
        """
        task, idle, begin = self._task, 0, self._task.spent
        while idle < MOST_IDLE and (not task.evaluations or (task.spent < until and not task.is_spent)):
            before = task.evaluations
            rows = self._policy.sample(int(min(self._recipe.num_samples, task.evaluations_left)))
            scores = self._scorer.score(rows)
            progress = (task.spent - begin) / max(until - begin, 1e-12)
            ran = np.isfinite(scores.step_time_s)
            figures = self._learner.update(rows, scores.reward, progress=min(progress, 1.0), ran=ran)
            self._tell(figures, simulated_mean_s=_mean(scores.step_time_s))
            idle = idle + 1 if task.evaluations == before else 0
        self._policy.check_guess()

    def measure(self) -> None:
        """Has placements measured and learns from them, until the task's measurements or its host's time end.

        Half of a batch are the best simulated ones that were never run, half the policy proposes, the best of several
        samples by simulation. Where samples are not screened, a batch is samples as they come.
        """
        task, grouping = self._task, self._task.problem.grouping
        if self._host_scorer is None or task.host is None or not task.measurements_left:
            return
        self._learner.forget()
        has_choice = bool((task.problem.group_allowed.sum(axis=1) > 1).any())
        while (count := min(self._config.num_measured, task.measurements_left)) > 0:
            others = self._none
            if self._recipe.screened > 1:
                others = task.host.promising(count - count // 2).reshape(-1, self._none.shape[1])
            proposed = grouping.expand(self._propose(count - len(others)))
            batch = np.concatenate((others, proposed))
            scores = self._host_scorer.score_placements(batch)
            rows = np.stack([majority_devices(task.problem, devices) for devices in scores.placements])
            figures = self._learner.update(rows, scores.reward, progress=1.0, ran=np.isfinite(scores.step_time_s))
            self._tell(figures, measured_vs_single=_mean(scores.step_time_s[len(others) :]) / self._baseline_s)
            if not has_choice:  # one device, or pins for every group: once is enough
                break

    def _tell(self, figures: Mapping[str, float], **more: float) -> None:
        """Tells what an update came to, and what was spent by then; keeps what was learned, if it is time."""
        task = self._task
        spent = {"placements": task.evaluations, "measured": task.measurements, "seconds": task.elapsed_s}
        task.tell({**figures, **more, **spent})
        if self._file is not None:
            self._file.keep(self._learner.learner)

    def _propose(self, count: int) -> NDArray[np.int32]:
        """(<= count, G): samples of the policy, or of its mode and several for each the best by simulation."""
        if self._recipe.screened == 1:
            return self._policy.sample(count)
        rows = np.concatenate((self._policy.mode()[None], self._policy.sample(max(count, 1) * self._recipe.screened)))
        rows = rows[np.sort(np.unique(rows, axis=0, return_index=True)[1])]  # in the order of the draws
        simulated_s = self._task.timer.step_times(self._task.problem.grouping.expand(rows))
        self._task.count(len(rows))  # not `score`: a budget that search has spent must not leave samples unscreened
        return rows[np.argsort(simulated_s, kind="stable")[:count]]


def _mean(step_time_s: NDArray[np.float64]) -> float:
    """Mean of those that are finite; NaN where none is."""
    finite = step_time_s[np.isfinite(step_time_s)]
    return float(finite.mean()) if len(finite) else math.nan
