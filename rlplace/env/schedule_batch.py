"""`SequentialBatch`: many episodes in step, each of which places one group after the other; arrays in, arrays out.

`ListSchedules`: list schedules from weights over named groupings, as actions of a policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue
from rlplace.graphs import Grouping
from rlplace.jit import Longs
from rlplace.measure import Problem
from rlplace.search.improve.starting_points import FIRST_WEIGHTS, GROUPINGS, Pair, Schedulers
from rlplace.search.schedule.list_schedulers import ESTIMATES, Estimator
from rlplace.search.schedule.partial_schedule import (
    DECISION_FEATURES,
    FEATURES,
    clear,
    decide,
    group_layout,
    new_schedules,
    next_groups,
    observe,
    schedule_bounds,
)


@dataclass(frozen=True, eq=False, slots=True)
class SequentialObservation:
    """The next decisions of B episodes. The next observation overwrites the arrays: copy them to keep them.

    Attributes:
        group: (B,) int64, the group to place now; -1 if none is left.
        features: (B, D, F) float32, of each device, by `DECISION_FEATURES`.
        mask: (B, D) bool, where the group may go; at least one device.
    """

    group: Longs
    features: NDArray[np.float32]
    mask: NDArray[np.bool_]


class SequentialBatch:
    """B episodes of one problem: every step places one group of each episode, and all end after G steps.

    The next group is the group of the first op (in the order of the problem) without a device. The partial schedule
    contains all ops before this op. With `order`, or with groups given to `step`, another group may come first. The
    schedule then waits, and its end result is the same.

    Attributes:
        problem: the problem to place.
        grouping: G groups.
        num_episodes: B.
        num_groups: G, steps of an episode.
        num_devices: D.
    """

    def __init__(
        self,
        problem: Problem,
        num_episodes: int,
        grouping: Grouping | None = None,
        order: NDArray[np.floating] | None = None,
        *,
        memory_mask: str = "resident",
    ) -> None:
        """Episodes at their start.

        Args:
            problem: the problem to place.
            num_episodes: B.
            grouping: the ops that are placed together; the problem's own groups by default.
            order: (G,) priorities of groups, higher first, ties by index.
            memory_mask: one of `MEMORY_MASKS`: the memory of a group that has to fit on a device.

        Raises:
            UnknownName: no mask has that name.
            InvalidValue: `num_episodes` is less than 1, or `order` has not one finite number a group.
        """
        if num_episodes < 1:
            raise InvalidValue("num_episodes", num_episodes, "at least 1", where="SequentialBatch")
        self.problem = problem
        self.grouping = problem.grouping if grouping is None else grouping
        self.num_episodes = num_episodes
        self.num_groups, self.num_devices = self.grouping.num_groups, problem.host.num_devices
        self._sequence = None if order is None else self._by_priority(order)
        self._layout = group_layout(problem, self.grouping)
        self._bounds = schedule_bounds(problem, self.grouping, self._layout, memory_mask)
        self._schedules = new_schedules(self._layout, self._bounds, num_episodes)
        self._episodes = np.arange(num_episodes, dtype=np.int64)
        self._group = np.zeros(num_episodes, dtype=np.int64)
        self._num_steps = 0
        shape = (num_episodes, self.num_devices)
        self._observation = SequentialObservation(
            group=self._group,
            features=np.zeros((*shape, len(DECISION_FEATURES)), dtype=np.float32),
            mask=np.zeros(shape, dtype=np.bool_),
        )
        self._turn()

    @property
    def placed(self) -> NDArray[np.int32]:
        """(B, G) int32 devices of groups, -1 where undecided; changes with every step."""
        return self._schedules.placed

    @property
    def num_steps(self) -> int:
        """Groups that are decided in every episode."""
        return self._num_steps

    @property
    def is_done(self) -> bool:
        """Whether every group is decided."""
        return self._num_steps == self.num_groups

    @property
    def partial_s(self) -> NDArray[np.float64]:
        """(B,) float64: the end of the ops that are scheduled so far; changes with every step."""
        return self._schedules.finish_s

    @property
    def bound_s(self) -> NDArray[np.float64]:
        """(B,) float64: a lower bound of the step time; equal to `partial_s` at the end. Changes with every step.

        It is the largest sum of an op's end and the least remaining time. Before the first step it is the longest path
        of least times. It never decreases.
        """
        return self._schedules.bound_s

    @property
    def least_s(self) -> float:
        """The value of `bound_s` before the first step: a lower bound for all placements."""
        return self._bounds.least_s

    def reset(self) -> None:
        """All episodes begin anew."""
        clear(self._bounds, self._schedules)
        self._num_steps = 0
        self._turn()

    def observe(self, groups: NDArray[np.integer] | None = None) -> SequentialObservation:
        """The next decision, and the features of each device for it.

        Args:
            groups: (B,) undecided groups to look at; those that are next by default.

        Raises:
            InvalidValue: wrong length, or a group that is decided or not there.
        """
        self._turn(groups)
        made = self._observation
        observe(self._layout, self._bounds, self._schedules, self._episodes, self._group, made.features, made.mask)
        return made

    def observe_all(self, episode: int) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """(G, D, F) float32 features and (G, D) bool masks of every group of one episode; zeros and False once decided.

        Args:
            episode: which of B.
        """
        shape = (self.num_groups, self.num_devices)
        features, mask = np.zeros((*shape, len(DECISION_FEATURES)), dtype=np.float32), np.zeros(shape, dtype=np.bool_)
        is_open = self.placed[episode] < 0
        groups = np.where(is_open, np.arange(self.num_groups), -1)
        episodes = np.full(self.num_groups, episode, dtype=np.int64)
        observe(self._layout, self._bounds, self._schedules, episodes, groups, features, mask)
        return features, mask & is_open[:, None]

    def step(self, devices: NDArray[np.integer], groups: NDArray[np.integer] | None = None) -> None:
        """Places one group of each episode, and schedules the ops that can run.

        Args:
            devices: (B,) device of each group, allowed or not.
            groups: (B,) undecided groups; those that are next by default.

        Raises:
            InvalidValue: wrong length, no integers, a device or a group that is not there, or none that is undecided.
        """
        if self.is_done:
            raise InvalidValue("step", self._num_steps + 1, f"at most {self.num_groups}, then reset", where="episode")
        self._turn(groups)
        decide(
            self._layout,
            self._bounds,
            self._schedules,
            self._group,
            self._in_range(devices, self.num_devices, "device"),
        )
        self._num_steps += 1

    def _turn(self, groups: NDArray[np.integer] | None = None) -> None:
        """Sets the groups that are next: `groups` (B,), or those by the order."""
        if groups is not None:
            found = self._in_range(groups, self.num_groups, "group")
            decided = self.placed[self._episodes, found] >= 0
            if decided.any():
                raise InvalidValue("group", int(found[decided.argmax()]), "one that is undecided", where="episode")
            self._group[:] = found
        elif self._sequence is None:
            next_groups(self._layout, self._schedules, self._group)
        else:
            is_open = self.placed[:, self._sequence] < 0
            self._group[:] = np.where(is_open.any(axis=1), self._sequence[is_open.argmax(axis=1)], -1)

    def _by_priority(self, order: NDArray[np.floating]) -> Longs:
        order = np.asarray(order, dtype=np.float64)
        if order.shape != (self.num_groups,) or not np.all(np.isfinite(order)):
            raise InvalidValue(
                "order", order, f"{self.num_groups} finite numbers, one a group", where="SequentialBatch"
            )
        return np.argsort(-order, kind="stable").astype(np.int64)

    def _in_range(self, values: NDArray[np.integer], count: int, one: str) -> Longs:
        found = np.asarray(values)
        if found.shape != (self.num_episodes,) or not np.issubdtype(found.dtype, np.integer):
            raise InvalidValue(
                f"{one}s",
                f"{found.dtype} {found.shape}",
                f"{self.num_episodes} integers, one an episode",
                where="episode",
            )
        if found.min() < 0 or found.max() >= count:
            raise InvalidValue(
                one, int(found.min() if found.min() < 0 else found.max()), f"0..{count - 1}", where="episode"
            )
        return found.astype(np.int64)


__all__ = ["DECISION_FEATURES", "ESTIMATES", "FEATURES", "FIRST_WEIGHTS", "GROUPINGS", "ListSchedules", "Pair"]


class ListSchedules:
    """A problem's list schedulers over the groupings of `GROUPINGS`, each laid out when it is first asked for.

    Args:
        problem: the problem to place.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.schedulers = Schedulers(problem)

    def place(self, pairs: Sequence[Pair]) -> NDArray[np.int32]:
        """(B, N) int32 devices of ops: for each pair of a grouping's name and weights (9,), its schedule."""
        placed = np.empty((len(pairs), self._problem.graph.num_ops), dtype=np.int32)
        for row, (name, weights) in enumerate(pairs):
            scheduler = self.schedulers[name]
            placed[row] = scheduler.grouping.expand(scheduler.place(np.array(weights)))[0]
        return placed

    def estimate(self, placements: NDArray[np.int32]) -> NDArray[np.float64]:
        """(B, 6) `ESTIMATES` of placements (B, N): nothing of it is simulated."""
        return self._estimator.of(placements)

    @cached_property
    def _estimator(self) -> Estimator:
        return Estimator.of_problem(self._problem)
