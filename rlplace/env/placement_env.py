"""`PlacementEnv`: what the environments share: a measurer, a reward, and a spec that another env can be made from."""

from __future__ import annotations

import dataclasses
from typing import Any, Generic, TypeVar

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from rlplace.env.rewards import Reward
from rlplace.env.scoring import make_scorer
from rlplace.errors import InvalidValue
from rlplace.measure.measurement import Measurer
from rlplace.measure.problem import Problem

Observation = dict[str, Any]
Action = TypeVar("Action")


class SharedMeasurer:
    """A measurer that copies of an env's spec share: it may hold threads, and a host cannot be copied."""

    def __init__(self, measurer: Measurer) -> None:
        self.measurer = measurer

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedMeasurer:
        return self


class PlacementEnv(gym.Env[Observation, Action], Generic[Action]):
    """An environment over the problem of a measurer; what a step is, its spaces and its actions are for others to say.

    Attributes:
        scorer: measures and rewards placements.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - gymnasium's own declaration
    _spec: EnvSpec | None = None

    def __init__(
        self,
        measurer: Measurer | SharedMeasurer,
        reward: str | Reward,
        baseline_s: float | None,
        deterministic: bool,
        render_mode: str | None,
    ) -> None:
        """An env over the problem of `measurer`.

        Args:
            measurer: what measures placements.
            reward: `sqrt`, `log_speedup` or a reward object.
            baseline_s: the step time a named reward compares with; None is the best single device's, measured now.
            deterministic: whether the measurer gives a placement the same step time every time.
            render_mode: None; there is nothing to see.

        Raises:
            UnknownName: no reward has that name.
            InvalidValue: `render_mode` is not None.
        """
        if render_mode is not None:
            raise InvalidValue("render_mode", render_mode, "None", where=type(self).__name__)
        if isinstance(measurer, SharedMeasurer):
            measurer = measurer.measurer
        self.render_mode = render_mode
        self.scorer = make_scorer(measurer, reward, baseline_s=baseline_s, deterministic=deterministic)

    @property
    def problem(self) -> Problem:
        """What is placed."""
        return self.scorer.problem

    @property
    def spec(self) -> EnvSpec | None:
        """How `gymnasium.make` made this env, and can make another on the same measurer."""
        return self._spec

    @spec.setter
    def spec(self, spec: EnvSpec | None) -> None:
        if spec is not None and "measurer" in spec.kwargs:
            spec = dataclasses.replace(spec, kwargs={**spec.kwargs, "measurer": SharedMeasurer(self.scorer.measurer)})
        self._spec = spec
