"""`PlacementEnv`: the common part of the environments: a measurer, a reward, pictures, and a spec to make another env
from.

`OneShotEnv`: one action places all groups, and the episode is over; `PlacementVecEnv`: B of them, measured together.
`BatchedVecEnv`: the base of our Stable-Baselines3 `VecEnv`s. `check_actions`: actions of agents, checked for all envs.
`find_measurer`: the measurer of an env, from an object or from words.

Importing this module registers `rlplace/OneShot-v0`, which simulates, and `rlplace/OneShotMeasured-v0`, for a host that
runs the placements. `gymnasium.make("rlplace.env:rlplace/OneShot-v0", ...)` imports it first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv

from rlplace.env.problem_features import GraphObservation
from rlplace.env.rewards import Reward, Scores, make_scorer
from rlplace.errors import InvalidValue, UnknownName, refuse_if
from rlplace.measure import Host, HostRunner, Measurer, Problem, Simulator, Timeline, resolve_host
from rlplace.say import sayer

ActionSpace = spaces.Discrete | spaces.MultiDiscrete


def check_actions(actions: object, space: ActionSpace, where: str, num_envs: int | None = None) -> NDArray[np.int64]:
    """`actions` as int64: of the shape of `space`, or (num_envs, ...) with a leading axis of envs.

    Args:
        actions: the action of an agent.
        space: of one env; it counts from 0, and all its numbers have one limit.
        where: who was given them, for messages.
        num_envs: how many actions there are; None for one without an axis of envs.

    Raises:
        InvalidValue: another shape, no integers, or one out of range; says which.

    Example:
        >>> check_actions([1, 0], spaces.MultiDiscrete([2, 2]), "env").tolist()
        [1, 0]
    """
    shape = (() if num_envs is None else (num_envs,)) + (space.shape or ())
    limit = int(np.max(space.nvec if isinstance(space, spaces.MultiDiscrete) else space.n))
    expected = f"integers 0..{limit - 1} of shape {shape}"
    try:
        found = np.asarray(actions)
    except ValueError as error:  # rows of different lengths
        raise InvalidValue("action", actions, expected, where=where) from error
    refuse_if(found.shape != shape, "action", f"an array of shape {found.shape}", expected, where=where)
    refuse_if(not np.issubdtype(found.dtype, np.integer), "action", f"an array of {found.dtype}", expected, where=where)
    is_wrong = (found < 0) | (found >= limit)
    if np.any(is_wrong):
        raise InvalidValue("action", f"one with {int(found[is_wrong].flat[0])} in it", expected, where=where)
    return found.astype(np.int64)


RENDER_MODES = ("human", "rgb_array", "ansi")
FRAMES_PER_S = 4
"""How fast frames are to be played: a placement is a still."""


Observation = dict[str, Any]
Action = TypeVar("Action")
GIVEN = ("measurer", "problem", "workload", "host", "num_groups", "workload_seed")
"""An argument that says which problem is placed; a spec says it by the measurer alone."""


class PlacementEnv(gym.Env[Observation, Action], Generic[Action]):
    """An environment over the problem of a measurer; subclasses define a step, its spaces and its actions.

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
            found: the measurer of placements, and whether `close` closes it; see `find_measurer`.
            reward: `sqrt`, `log_speedup` or a reward object.
            baseline_s: the step time a named reward compares with; None is the best single device's, measured now.
            deterministic: whether the measurer gives a placement the same step time every time.
            render_mode: one of `RENDER_MODES`, or None.

        Raises:
            UnknownName: no reward or render mode has that name.
        """
        if render_mode is not None and render_mode not in RENDER_MODES:
            raise UnknownName("render_mode", render_mode, RENDER_MODES)
        measurer, self._is_owner = found
        self.render_mode = render_mode
        self.scorer = make_scorer(measurer, reward, baseline_s=baseline_s, deterministic=deterministic)
        self._placed: NDArray[np.int32] | None = None
        self._title = "Nothing placed yet"

    @property
    def problem(self) -> Problem:
        """The problem to place."""
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
            `human`, which prints the text of every placement as it comes; None without a render mode.
        """
        if self.render_mode is None:
            return None
        from rlplace.report.drawing import timeline_frame, timeline_text

        timeline = Timeline.empty(self.problem.graph.num_ops)  # before the first placement, and where it failed
        if self._placed is not None:
            simulator = Simulator(self.problem, threads=1)
            timeline = simulator.timeline(simulator.plan(self._placed))
        drawn = timeline, self.problem.graph, self.problem.host, self._title
        if self.render_mode == "rgb_array":
            return timeline_frame(*drawn)
        text = timeline_text(*drawn)
        if self.render_mode == "ansi":
            return text
        print(text, flush=True)
        return None

    def close(self) -> None:
        """Closes the measurer if the env made it."""
        close = getattr(self.scorer.measurer, "close", None)
        if self._is_owner and close is not None:
            close()
            self._is_owner = False

    def _ended(self, step_time_s: float, status: str, placement: NDArray[np.int32]) -> dict[str, Any]:
        """The info of a last step; the placement (N,) is drawn from now on, in mode `human` at once."""
        self._placed = placement if status == "ok" else None
        self._title = f"Last placement: {step_time_s * 1e3:.4g} ms" if status == "ok" else f"Last placement: {status}"
        if self.render_mode == "human":
            self.render()
        return {"step_time_s": step_time_s, "status": status, "placement": placement}


NUM_GROUPS = 256
"""Groups to aim at where a workload is named."""


class SharedMeasurer:
    """A measurer that copies of an env's spec share: it may hold threads, and a host cannot be copied."""

    def __init__(self, measurer: Measurer) -> None:
        self.measurer = measurer

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedMeasurer:
        return self


def find_measurer(
    measurer: Measurer | SharedMeasurer | None,
    problem: Problem | None,
    workload: str | None,
    host: str | Host,
    num_groups: int,
    workload_seed: int,
    *,
    runs: bool,
) -> tuple[Measurer, bool]:
    """The measurer of placements, and whether the env made it and has to close it.

    Args:
        measurer: measures placements; or
        problem: the problem to place; or
        workload: a WORKLOAD word, e.g. `nmt@small`, which is captured;
        host: a HOST word, e.g. `4xV100-pcie`, or a host, that goes with a workload.
        num_groups: groups to aim at, of a workload.
        workload_seed: of a workload's weights and inputs.
        runs: run placements on the problem's host, which is this machine; otherwise they are simulated.

    Raises:
        InvalidValue: not exactly one of measurer, problem and workload, or a host that cannot run anything.
        UserError: no such workload or host.
    """
    given: dict[str, object] = {"measurer": measurer, "problem": problem, "workload": workload}
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        raise InvalidValue(
            "given",
            " and ".join(names) or "nothing to place",
            "exactly one of measurer, problem and workload",
            where="environment",
            hint='For example `workload="nmt@small", host="4xV100-pcie"`.',
        )
    if isinstance(given["problem"], str):
        raise InvalidValue(
            "problem",
            problem,
            "a `Problem`",
            where="environment",
            hint=f"For a problem made from words: `workload={problem!r}, host=...`.",
        )
    if measurer is not None:
        return (measurer.measurer if isinstance(measurer, SharedMeasurer) else measurer), False
    if problem is None:
        problem = _problem_of(str(workload), host, num_groups, workload_seed)
    simulator = Simulator(problem, threads=1)  # an env measures one placement at a time
    return (HostRunner(problem, simulator) if runs else simulator), True


def _problem_of(workload: str, host: str | Host, num_groups: int, workload_seed: int) -> Problem:
    """The step of a workload, profiled on a host of this machine, estimated (or as its file gives it) on another."""
    from rlplace.session.prepare import Steps, make_problem
    from rlplace.workloads import parse_workload

    steps = Steps(parse_workload(workload), resolve_host(host), workload_seed)
    return make_problem(steps.first_graph, steps.host, num_groups, sayer(False), spec=steps.spec)


def action_space(problem: Problem) -> spaces.MultiDiscrete:
    """A device for each of G groups."""
    return spaces.MultiDiscrete(np.full(problem.grouping.num_groups, problem.host.num_devices))


class OneShotEnv(PlacementEnv[NDArray[np.int64]]):
    """Places all G groups of a problem at once, as in Mirhoseini et al. 2017.

    | space | |
    |---|---|
    | action | `MultiDiscrete`, (G,): the device of each group |
    | observation | `Dict`: `graph`, the index of the graph; or its features, see `GraphObservation` |
    | reward | of the step time, once |

    The info of a step has `step_time_s` (infinite if the placement failed), `status` and `placement`, (N,) int32. Some
    devices may be forbidden for a group (`action_masks`). An action with a forbidden device fails.
    """

    action_space: spaces.MultiDiscrete

    def __init__(
        self,
        measurer: Measurer | SharedMeasurer | None = None,
        reward: str | Reward = "log_speedup",
        baseline_s: float | None = None,
        deterministic: bool = True,
        render_mode: str | None = None,
        *,
        problem: Problem | None = None,
        workload: str | None = None,
        host: str | Host = "auto",
        num_groups: int = NUM_GROUPS,
        workload_seed: int = 0,
        observation: str = "index",
    ) -> None:
        """An env over the problem of `measurer`, over `problem`, or over `workload` on `host`.

        Args:
            measurer: measures placements. By default they are simulated or, if not `deterministic`, run on the
                problem's host.
            reward: `sqrt`, `log_speedup` or a reward object.
            baseline_s: step time of the baseline for a named reward; by default that of the best single device,
                measured now.
            deterministic: whether the measurer gives a placement the same step time every time.
            render_mode: `human`, `rgb_array` or `ansi`; None draws nothing.
            problem: the problem to place, instead of `measurer`.
            workload: a WORKLOAD word (`nmt@small`), instead of either.
            host: a HOST word (`4xV100-pcie`) or a host, for a workload.
            num_groups: groups to aim at, for a workload.
            workload_seed: of a workload's weights and inputs.
            observation: `index` or `graph`, see `GraphObservation`.

        Raises:
            UnknownName: no reward, render mode or observation has that name.
            InvalidValue: not exactly one of `measurer`, `problem` and `workload`.
            UserError: no such workload or host.
        """
        found = find_measurer(measurer, problem, workload, host, num_groups, workload_seed, runs=not deterministic)
        super().__init__(found, reward, baseline_s, deterministic, render_mode)
        self._observation = GraphObservation(self.problem, observation)
        self.observation_space = self._observation.space
        self.action_space = action_space(self.problem)

    def action_masks(self) -> NDArray[np.bool_]:
        """(G * D,) bool: whether each group may be on each device, for the maskable algorithms of sb3-contrib."""
        return self.problem.group_allowed.reshape(-1)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """The observation and an empty info; `seed` and `options` have no effect, because the environment is not
        random."""
        super().reset(seed=seed, options=options)
        return self._observation.one(), {}

    def step(self, action: NDArray[np.int64]) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Measures the placement `action`, (G,), and ends the episode.

        Raises:
            InvalidValue: not (G,) integers that name devices, or a reward of the user's that is not finite.
        """
        scores = self.scorer.score(check_actions(action, self.action_space, "OneShotEnv")[None])
        info = self._ended(float(scores.step_time_s[0]), scores.status[0], scores.placements[0])
        return self._observation.one(), float(scores.reward[0]), True, False, info


gym.register("rlplace/OneShot-v0", entry_point="rlplace.env.placement_env:OneShotEnv", kwargs={"deterministic": True})
gym.register(
    "rlplace/OneShotMeasured-v0",
    entry_point="rlplace.env.placement_env:OneShotEnv",
    kwargs={"deterministic": False},
    nondeterministic=True,
)


Indices = int | Iterable[int] | None


class BatchedVecEnv(VecEnv):
    """A `VecEnv` of `num_envs` envs over one problem, whose placements are measured in one batched call.

    Attributes:
        scorer: measures and rewards placements.
        last_scores: outcomes of the last placements that were measured; None before there are any.
    """

    def __init__(
        self,
        measurer: Measurer,
        num_envs: int,
        reward: str | Reward,
        observation_space: spaces.Space[Any],
        action_space: ActionSpace,
        *,
        baseline_s: float | None,
        deterministic: bool,
    ) -> None:
        """Envs over the problem of `measurer`.

        Args:
            measurer: measures placements.
            num_envs: how many, B.
            reward: `sqrt`, `log_speedup` or a reward object.
            observation_space: of each env.
            action_space: of each env.
            baseline_s: the step time a named reward compares with; None is the best single device's, measured now.
            deterministic: whether the measurer gives a placement the same step time every time.

        Raises:
            UnknownName: no reward has that name.
            InvalidValue: `num_envs` is less than 1.
        """
        refuse_if(num_envs < 1, "num_envs", num_envs, "at least 1", where=type(self).__name__)
        self.scorer = make_scorer(measurer, reward, baseline_s=baseline_s, deterministic=deterministic)
        self.render_mode: str | None = None
        self.last_scores: Scores | None = None
        self._actions: NDArray[np.int64] | None = None
        self._action_space = action_space
        super().__init__(num_envs, observation_space, action_space)

    def step_async(self, actions: NDArray[np.int64]) -> None:
        """Takes the actions, one an env, that the next `step_wait` carries out.

        Raises:
            InvalidValue: another number of them, or one that is not in the action space.
        """
        self._actions = check_actions(actions, self._action_space, type(self).__name__, self.num_envs)

    def take_actions(self) -> NDArray[np.int64]:
        """The actions of `step_async`, once.

        Raises:
            InvalidValue: there are none.
        """
        if self._actions is None:
            raise InvalidValue("actions", None, "actions given to step_async first", where=type(self).__name__)
        actions, self._actions = self._actions, None
        return actions

    def measured(
        self, group_devices: NDArray[np.integer], length: int, last: dict[str, Any]
    ) -> tuple[Scores, list[dict[str, Any]]]:
        """Outcomes of placements (B, G), and the infos of the last step of their episodes.

        Args:
            group_devices: devices of groups.
            length: steps of an episode.
            last: the observation after the last step.
        """
        scores = self.last_scores = self.scorer.score(group_devices)
        columns = scores.step_time_s.tolist(), scores.status, scores.placements, scores.reward.tolist()
        infos = [
            {
                "step_time_s": step_time_s,
                "status": status,
                "placement": placement,
                "episode": {"r": reward, "l": length},
                "terminal_observation": last,
            }
            for step_time_s, status, placement, reward in zip(*columns, strict=True)
        ]
        return scores, infos

    def close(self) -> None:
        """Nothing to close: the measurer belongs to the caller."""

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        """The attribute, once for each env asked for."""
        return [getattr(self, attr_name)] * len(list(self._get_indices(indices)))

    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:
        """Sets the attribute, which all envs share."""
        setattr(self, attr_name, value)

    def env_method(self, method_name: str, *args: Any, indices: Indices = None, **kwargs: Any) -> list[Any]:
        """The method's result for each env asked for."""
        return [getattr(self, method_name)(*args, **kwargs) for _ in self._get_indices(indices)]

    def env_is_wrapped(
        self, wrapper_class: type[gym.Wrapper[Any, Any, Any, Any]], indices: Indices = None
    ) -> list[bool]:
        """False for each env asked for: there are no wrappers."""
        return [False] * len(list(self._get_indices(indices)))

    def get_images(self) -> Sequence[NDArray[np.uint8] | None]:
        """None for each env: there is nothing to see."""
        return [None] * self.num_envs


class PlacementVecEnv(BatchedVecEnv):
    """A Stable-Baselines3 `VecEnv` for one problem, with `num_envs` one-shot episodes per step.

    Spaces, rewards and infos are those of `OneShotEnv`; every step ends every episode. The placements of a step are
    measured in one call. Equal placements are measured once. With a deterministic measurer, known placements are not
    measured again.
    """

    def __init__(
        self,
        measurer: Measurer,
        num_envs: int,
        reward: str | Reward = "log_speedup",
        *,
        baseline_s: float | None = None,
        deterministic: bool = True,
        observation: str = "index",
    ) -> None:
        """Envs over the problem of `measurer`.

        Args:
            measurer: measures placements.
            num_envs: placements per step, B.
            reward: `sqrt`, `log_speedup` or a reward object.
            baseline_s: step time of the baseline for a named reward; by default that of the best single device,
                measured now.
            deterministic: whether the measurer gives a placement the same step time every time.
            observation: `index` or `graph`, see `GraphObservation`.

        Raises:
            UnknownName: no reward or observation has that name.
            InvalidValue: `num_envs` is less than 1.
        """
        self._observation = GraphObservation(measurer.problem, observation)
        spaces = self._observation.space, action_space(measurer.problem)
        super().__init__(measurer, num_envs, reward, *spaces, baseline_s=baseline_s, deterministic=deterministic)

    def reset(self) -> dict[str, NDArray[Any]]:
        """The observations of `num_envs` new episodes."""
        self._reset_seeds()
        self._reset_options()
        return self._observation.batch(self.num_envs)

    def step_wait(self) -> tuple[dict[str, NDArray[Any]], NDArray[np.float32], NDArray[np.bool_], list[dict[str, Any]]]:
        """Measures the placements (B, G); observations of the next episodes, and rewards, ends and infos of these."""
        scores, infos = self.measured(self.take_actions(), 1, self._observation.one())
        observations, dones = self._observation.batch(self.num_envs), np.ones(self.num_envs, dtype=np.bool_)
        return observations, scores.reward.astype(np.float32), dones, infos

    def action_masks(self) -> NDArray[np.bool_]:
        """(G * D,) bool: whether each group may be on each device; the same in every env."""
        return self.scorer.problem.group_allowed.reshape(-1)
