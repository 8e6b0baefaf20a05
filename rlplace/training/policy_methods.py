"""The methods that search with a policy: `policy`, `schedule` and `guided`.

`PolicySearch`: a policy and its learner at work on a task. `PolicyGuide`: a policy that guides a search and is taught
by it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from rlplace.env import Scorer, make_reward
from rlplace.env.sequential import ListSchedules
from rlplace.measure import Problem
from rlplace.measure.timing.threads import one_thread_here
from rlplace.policy import LearnConfig, Policy
from rlplace.policy.base import pretrained_path
from rlplace.policy.learn.learners import LearnerFile
from rlplace.policy.policies import checked_learner, checked_policy
from rlplace.policy.schedule import propose
from rlplace.policy.schedule_network import KIND, load_network
from rlplace.search import METHODS, Task
from rlplace.search.groupings import majority_devices
from rlplace.search.improve.anneal import anneal_finer
from rlplace.search.improve.portfolio import tuned_start, vary
from rlplace.search.improve.starting_points import best_start_with_greedy, check_budget, score_weights, try_all
from rlplace.search.parallel.hybrid import parallel_starts
from rlplace.search.task import ListSchedule, Simulating

DEFAULT = LearnConfig()
MOST_IDLE = 8
"""Rounds without a new placement after which the policy is taken to be sure of itself."""


@one_thread_here()  # ops are tiny: a team of threads slows them down, and must not decide what is found
def search_by_policy(
    task: Task,
    config: LearnConfig = DEFAULT,
    start: NDArray[np.int32] | None = None,
    learner_file: LearnerFile | None = None,
) -> Policy:
    """Places by a policy and by search that learn from each other; returns the policy.

    The policy imitates the best of the portfolio's cheap part (heuristics, tuned list schedules), samples for a share
    of the budget and learns from every sample; annealing goes on from the start that it imitated and, where it branches
    (graphs whose ops repeat), from the best sample too, and the policy imitates the result, as in expert iteration
    (Anthony et al. 2017, arXiv:1705.08439). Where the task has a host, the policy goes on there: it proposes placements
    to be measured and learns from their measured step times.

    Args:
        task: scores and counts.
        config: which policy, which learner, and their options.
        start: (N,) a placement to start from besides those of the portfolio.
        learner_file: stores the learner's state and loads it again; none by default.
    """
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
            others.append((task.best_devices, task.best_s))
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
        learner_file: stores the learner's state and loads it again; none by default.
    """

    def __init__(self, task: Task, config: LearnConfig, learner_file: LearnerFile | None = None) -> None:
        seed = int(task.generator.integers(2**31))
        self._task, self._config, self._recipe, problem = task, config, config.recipe, task.problem
        self._policy = checked_policy(problem, config, seed)
        self.policy = self._policy.policy
        self._learner = checked_learner(self.policy, config, seed, learner_file)
        self._baseline_s = float(problem.costs.op_time_s.mean(axis=1).sum()) or 1.0
        reward = make_reward(self._recipe.reward, self._baseline_s)
        self._scorer = Scorer(Simulating(task), reward, deterministic=True)
        self._imitation_s = 0.0
        self._host_scorer = Scorer(task, reward, deterministic=False, reference_s=self._baseline_s)

    @property
    def imitation_share(self) -> float:
        """Share of a budget of seconds that teaching the policy a placement takes; 0 under one of evaluations."""
        budget = self._task.budget
        return min(self._imitation_s / budget.seconds, 0.2) if math.isinf(budget.evaluations) else 0.0

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
        if task.host is None or not task.measurements_left:
            return
        self._learner.forget()
        has_choice = bool((task.problem.group_allowed.sum(axis=1) > 1).any())
        while (count := min(self._config.num_measured, task.measurements_left)) > 0:
            others = np.zeros((0, task.problem.graph.num_ops), dtype=np.int32)
            if self._recipe.screened > 1:
                others = task.host.promising(count - count // 2).reshape(-1, others.shape[1])
            batch = np.concatenate((others, grouping.expand(self._propose(count - len(others)))))
            scores = self._host_scorer.score_placements(batch)
            rows = np.stack([majority_devices(task.problem, devices) for devices in scores.placements])
            figures = self._learner.update(rows, scores.reward, progress=1.0, ran=np.isfinite(scores.step_time_s))
            self._tell(figures, measured_vs_single=_mean(scores.step_time_s[len(others) :]) / self._baseline_s)
            if not has_choice:  # one device, or pins for every group: once is enough
                break

    def _tell(self, figures: Mapping[str, float], **more: float) -> None:
        """Tells the figures of an update and the budget spent by then; keeps the learner's state, if it is time."""
        task = self._task
        spent = {"placements": task.evaluations, "measured": task.measurements, "seconds": task.elapsed_s}
        task.tell({**figures, **more, **spent})
        self._learner.keep()

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


GUESSES = 16
"""Guesses that come before anything else ..."""
GUESSES_SHARE = 0.25
"""... or this share of the budget, where that is more ..."""
MOST_GUESSES = 64
"""... but no more than these."""


@one_thread_here()  # ops are tiny: a team of threads slows them down, and must not decide what is found
def search_zero_shot(
    task: Task, config: LearnConfig = DEFAULT, learner_file: LearnerFile | None = None
) -> Policy | None:
    """Places zero-shot, as far as the budget goes; returns the policy where it came to learn.

    First come guesses that ask the simulator nothing (`propose`), the best first; with a budget of `GUESSES` there is
    nothing else. In a step that is cut into micro-batches, layouts by stages and replicas, which no list schedule
    finds, come after the first guess. Then the weights of the best guesses are varied, and last the policy learns on
    the problem from its samples, beginning with the best placement so far.

    Args:
        task: scores and counts.
        config: how the policy learns; which one is not its to say.
        learner_file: stores the state of its learner and loads it again; none by default.

    Raises:
        InvalidValue: the task's budget is infinite.
    """
    check_budget(task)
    network, schedules = load_network(pretrained_path(KIND)), ListSchedules(task.problem)
    evaluations = task.budget.evaluations
    count = MOST_GUESSES if math.isinf(evaluations) else min(max(GUESSES, GUESSES_SHARE * evaluations), evaluations)
    guesses = propose(task.problem, network, int(min(count, MOST_GUESSES)), schedules=schedules)
    pairs = [(schedules[name], np.array(weights)) for name, weights in guesses.pairs]
    seen: set[bytes] = set()
    leaders = score_weights(task, pairs[:1], seen, until=1.0)
    parallel_starts(task)
    leaders = sorted([*leaders, *score_weights(task, pairs[1:], seen, until=1.0)], key=lambda one: one.loss)
    vary(task, leaders, until=1.0)
    if task.is_spent or task.best_devices is None:
        return None
    search = PolicySearch(task, dataclasses.replace(config, policy=KIND), learner_file)
    search.imitate(task.best_devices)
    search.learn(until=1.0)
    return search.policy


SEARCH = "portfolio"
UNTAUGHT = ("starts", "none")
"""Values of `init` with which a policy knows nothing before a search has told it."""
SAMPLES = 64
"""Placements that are drawn from the policy at once, each for one move."""
LONGEST = 16
"""Part of the groups, one in so many, that a move reaches at most to either side of the one that it begins at."""


@runtime_checkable
class Scheduling(Protocol):
    """A policy that knows list schedules of a problem before it has seen a step time of it."""

    def schedules(self, count: int) -> Sequence[ListSchedule]:
        """At most `count` names of groupings with weights of the list scheduler, the best guess first."""


@one_thread_here()  # as of `policy`: a team of threads slows tiny ops down, and must not decide what is found
def search_guided(
    task: Task,
    config: LearnConfig = DEFAULT,
    start: NDArray[np.int32] | None = None,
    learner_file: LearnerFile | None = None,
) -> Policy:
    """Places by `portfolio`, with placements and moves that a policy suggests; returns the policy.

    Args:
        task: scores and counts.
        config: which policy, how it is taught, and how far it is followed.
        start: (N,) a placement to start from besides those of `portfolio` and of the policy.
        learner_file: stores the state of its learner and loads it again; none by default.
    """
    guide = PolicyGuide(task.problem, config, seed=int(task.generator.integers(2**31)), learner_file=learner_file)
    METHODS[SEARCH].run(task, start=start, guide=guide)
    if task.best_devices is not None:
        guide.imitate(task.best_devices)
    return guide.policy


class PolicyGuide:
    """A policy as a `Guide` of searches: it suggests its samples, and imitates the placements that they go on from.

    A suggested move takes a stretch of groups, in the order in which they first run, from a sample to the placement at
    hand: of those in which the sample differs from the policy's mode: a flip to which the policy gives some
        probability, and not one back to its mode. As in path relinking (Glover, Laguna and Martí 2000), the
    stretch may be all of them or a single group.

    Attributes:
        policy: suggests.

    Args:
        problem: the problem to place; a search may score it under other costs.
        config: which policy and learner, whether it imitates, and how far it is followed.
        seed: of every draw.
        learner_file: stores the state of its learner and loads it again; none by default.
    """

    def __init__(
        self, problem: Problem, config: LearnConfig, *, seed: int, learner_file: LearnerFile | None = None
    ) -> None:
        self._problem, self._config = problem, config
        self._policy = checked_policy(problem, config, seed)
        self.policy = self._policy.policy
        self._learner = checked_learner(self.policy, config, seed, learner_file) if config.imitate else None
        self._generator = np.random.default_rng(seed)
        self._taught: NDArray[np.int32] | None = None
        self._mode: NDArray[np.int32] | None = None
        self._drawn = self._none

    @property
    def start_share(self) -> float:
        """Share of a search's evaluations for placements to start from."""
        return self._config.guided.starts

    @property
    def move_share(self) -> float:
        """Share of annealing's moves that are suggested."""
        return self._config.guided.moves

    def schedules(self, count: int) -> Sequence[ListSchedule]:
        """At most `count` list schedules that the policy guesses; none from one that knows nothing of them."""
        return self.policy.schedules(count) if isinstance(self.policy, Scheduling) else ()

    def starts(self, count: int) -> NDArray[np.int32]:
        """(<= count, N) placements that the policy guesses; none from one that was taught nothing, or has `schedules`.

        Raises:
            InvalidValue: the policy returned no placement of the problem.
        """
        if isinstance(self.policy, Scheduling) or (self._config.recipe.init in UNTAUGHT and self._mode is None):
            return self._none
        groups = np.concatenate((self._policy.mode()[None], self._policy.sample(count)))
        return self._problem.grouping.expand(groups)[:count]

    def moves(self, devices: NDArray[np.int32], count: int) -> NDArray[np.int32]:
        """(count, N) placements, each `devices` (N,) with a stretch of groups as a sample of the policy has it.

        Raises:
            InvalidValue: as `starts`.
        """
        moved = np.repeat(np.asarray(devices, dtype=np.int32)[None], count, axis=0)
        for row in moved:
            self._move(row)
        return moved

    def imitate(self, devices: NDArray[np.int32]) -> None:
        """Teaches the policy a placement of ops (N,), unless it is the last one that it was taught.

        Raises:
            InvalidValue: the policy has no log-probability any more.
        """
        if self._learner is None or (self._taught is not None and np.array_equal(devices, self._taught)):
            return
        self._taught = np.array(devices, dtype=np.int32)
        self._learner.imitate(majority_devices(self._problem, self._taught))
        self._policy.check_guess()
        self._mode, self._drawn = self._problem.grouping.expand(self._policy.mode()), self._none
        self._learner.keep()

    def _move(self, devices: NDArray[np.int32]) -> None:
        """Changes `devices` (N,) in place."""
        if not len(self._drawn):
            self._drawn = self._problem.grouping.expand(self._policy.sample(SAMPLES))
        sample, self._drawn = self._drawn[0], self._drawn[1:]
        differs = sample != devices
        if self._mode is not None:
            differs &= sample != self._mode
        grouping = self._problem.grouping
        groups = np.unique(grouping.op_group[differs])
        if not len(groups):
            return
        first = groups[self._generator.integers(len(groups))]
        # short stretches as often as long ones
        reach = int((grouping.num_groups / LONGEST + 1.0) ** self._generator.random()) - 1
        taken = differs & (np.abs(grouping.op_group - first) <= reach)
        devices[taken] = sample[taken]

    @property
    def _none(self) -> NDArray[np.int32]:
        return np.zeros((0, self._problem.graph.num_ops), dtype=np.int32)
