"""`PolicyGuide`: a policy that guides a search and is taught by it; and the method `guided`, `portfolio` with one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from rlplace.measure.problem import Problem
from rlplace.measure.timing.threads import one_thread_here
from rlplace.policy.base import Policy
from rlplace.policy.learn.state import LearnerFile
from rlplace.policy.options import LearnConfig
from rlplace.policy.policies import checked_learner, checked_policy
from rlplace.search.groupings import majority_devices
from rlplace.search.guide import ListSchedule
from rlplace.search.methods import METHODS
from rlplace.search.task import Task

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
def solve(
    task: Task,
    config: LearnConfig | None = None,
    start: NDArray[np.int32] | None = None,
    learner_file: LearnerFile | None = None,
) -> Policy:
    """Places by `portfolio`, with placements and moves that a policy suggests; returns the policy.

    Args:
        task: scores and counts.
        config: which policy, how it is taught, and how far it is followed.
        start: (N,) a placement to start from besides those of `portfolio` and of the policy.
        learner_file: keeps the state of its learner, and gives it back; nobody by default.
    """
    config = config or LearnConfig()
    guide = PolicyGuide(task.problem, config, seed=int(task.generator.integers(2**31)), learner_file=learner_file)
    METHODS[SEARCH].run(task, start=start, guide=guide)
    if task.best_devices is not None:
        guide.imitate(task.best_devices)
    return guide.policy


class PolicyGuide:
    """A policy as a `Guide` of searches: it suggests what it samples, and imitates what they go on from.

    A suggested move takes a stretch of groups, in the order in which they first run, from a sample to the placement at
    hand: of those in which the sample differs from what the policy holds for best, so that it is a flip that the policy
    thinks possible, and no way back to where it stands. As in path relinking (Glover, Laguna and Martí 2000), the
    stretch may be all of them or a single group.

    Attributes:
        policy: suggests.

    Args:
        problem: what is placed; a search may score it under other costs.
        config: which policy and learner, whether it imitates, and how far it is followed.
        seed: of every draw.
        learner_file: keeps the state of its learner, and gives it back; nobody by default.
    """

    def __init__(
        self, problem: Problem, config: LearnConfig, *, seed: int, learner_file: LearnerFile | None = None
    ) -> None:
        self._problem, self._config = problem, config
        self._policy = checked_policy(problem, config, seed)
        self.policy = self._policy.policy
        self._learner, self._file = checked_learner(self.policy, config, seed) if config.imitate else None, learner_file
        if self._learner is not None and learner_file is not None:
            learner_file.restore(self._learner.learner)
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
            InvalidValue: the policy gave what is no placement of the problem.
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
        if self._file is not None:
            self._file.keep(self._learner.learner)

    def _move(self, devices: NDArray[np.int32]) -> None:
        """Changes `devices` (N,) in place."""
        if not len(self._drawn):
            self._drawn = self._problem.grouping.expand(self._policy.sample(SAMPLES))
        sample, self._drawn = self._drawn[0], self._drawn[1:]
        differs = sample != devices
        if self._mode is not None:
            differs &= sample != self._mode
        op_group, num_groups = self._problem.grouping.op_group, self._problem.grouping.num_groups
        groups = np.unique(op_group[differs])
        if not len(groups):
            return
        first = groups[self._generator.integers(len(groups))]
        # short stretches as often as long ones
        reach = int((num_groups / LONGEST + 1.0) ** self._generator.random()) - 1
        taken = differs & (np.abs(op_group - first) <= reach)
        devices[taken] = sample[taken]

    @property
    def _none(self) -> NDArray[np.int32]:
        return np.zeros((0, self._problem.graph.num_ops), dtype=np.int32)
