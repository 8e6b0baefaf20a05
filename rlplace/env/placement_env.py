"""`PlacementEnv`: what the environments share: a measurer, a reward, pictures, and a spec to make another env from."""

from __future__ import annotations

import dataclasses
from typing import Any, Generic, TypeVar

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from numpy.typing import NDArray

from rlplace.env.measurers import SharedMeasurer
from rlplace.env.rendering import FRAMES_PER_S, RENDER_MODES, LastPlacement
from rlplace.env.rewards import Reward
from rlplace.env.scoring import make_scorer
from rlplace.measure.measurement import Measurer
from rlplace.measure.problem import Problem

Observation = dict[str, Any]
Action = TypeVar("Action")
GIVEN = ("measurer", "problem", "workload", "host", "num_groups", "workload_seed")
"""What says which problem is placed; a spec says it by the measurer alone."""


class PlacementEnv(gym.Env[Observation, Action], Generic[Action]):
    """An environment over the problem of a measurer; what a step is, its spaces and its actions are for others to say.

    Attributes:
        scorer: measures and rewards placements.
    """

    metadata = {"render_modes": list(RENDER_MODES), "render_fps": FRAMES_PER_S}  # noqa: RUF012 - gymnasium's own declaration
    _spec: EnvSpec | None = None

    def __init__(
        self,
        found: tuple[Measurer, bool],
        reward: str | Reward,
        baseline_s: float | None,
        deterministic: bool,
        render_mode: str | None,
    ) -> None:
        """An env over the problem of a measurer.

        Args:
            found: what measures placements, and whether `close` closes it; see `find_measurer`.
            reward: `sqrt`, `log_speedup` or a reward object.
            baseline_s: the step time a named reward compares with; None is the best single device's, measured now.
            deterministic: whether the measurer gives a placement the same step time every time.
            render_mode: one of `RENDER_MODES`, or None.

        Raises:
            UnknownName: no reward or render mode has that name.
        """
        measurer, self._is_owner = found
        self.render_mode = render_mode
        self.scorer = make_scorer(measurer, reward, baseline_s=baseline_s, deterministic=deterministic)
        self._last = LastPlacement(self.problem, render_mode)

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
        if spec is not None:
            kept = {name: value for name, value in spec.kwargs.items() if name not in GIVEN}
            spec = dataclasses.replace(spec, kwargs={**kept, "measurer": SharedMeasurer(self.scorer.measurer)})
        self._spec = spec

    def render(self) -> NDArray[np.uint8] | str | None:
        """The timeline of the last placement that was measured, simulated, in the render mode.

        Returns:
            The picture, (height, width, 3), of the same size every time, for `rgb_array`; text for `ansi`. None for
            `human`, which shows every placement as it comes, in a window of matplotlib or, where there is no display,
            as text on stdout; None without a render mode.
        """
        return self._last.draw()

    def close(self) -> None:
        """Closes the window, and the measurer if the env made it."""
        self._last.close()
        close = getattr(self.scorer.measurer, "close", None)
        if self._is_owner and close is not None:
            close()
            self._is_owner = False

    def _ended(self, step_time_s: float, status: str, placement: NDArray[np.int32]) -> dict[str, Any]:
        """The info of a last step; the placement (N,) is what is drawn from now on."""
        self._last.note(placement, status, step_time_s)
        return {"step_time_s": step_time_s, "status": status, "placement": placement}
