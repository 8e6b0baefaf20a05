"""`PlacementEnv`: what the environments share: a measurer, a reward, pictures, and a spec to make another env from.

`check_actions`: actions of agents, checked for all envs. `LastPlacement`: the timeline of the last placement, as a
picture, as text or in a window. `find_measurer`: the measurer of an env, from an object or from words.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Generic, TypeVar

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from numpy.typing import NDArray

from rlplace.env.rewards import Reward, make_scorer
from rlplace.errors import InvalidValue, UnknownName
from rlplace.measure.hosts.host import Host
from rlplace.measure.measurement import Measurer
from rlplace.measure.plan import Timeline
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator

ActionSpace = spaces.Discrete | spaces.MultiDiscrete


def check_actions(actions: object, space: ActionSpace, where: str, num_envs: int | None = None) -> NDArray[np.int64]:
    """`actions` as int64: of the shape of `space`, or (num_envs, ...) with a leading axis of envs.

    Args:
        actions: what an agent chose.
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
    if found.shape != shape:
        raise InvalidValue("action", f"an array of shape {found.shape}", expected, where=where)
    if not np.issubdtype(found.dtype, np.integer):
        raise InvalidValue("action", f"an array of {found.dtype}", expected, where=where)
    is_wrong = (found < 0) | (found >= limit)
    if np.any(is_wrong):
        raise InvalidValue("action", f"one with {int(found[is_wrong].flat[0])} in it", expected, where=where)
    return found.astype(np.int64)


RENDER_MODES = ("human", "rgb_array", "ansi")
FRAMES_PER_S = 4
"""How fast frames are to be played: a placement is a still."""


class LastPlacement:
    """Draws the last placement of an env: the timeline that the simulator gives it, under what was measured.

    Before there is one, and where it failed, there is an empty timeline that says so.

    Args:
        problem: what is placed.
        mode: one of `RENDER_MODES`; None draws nothing.

    Raises:
        UnknownName: no such mode.
    """

    def __init__(self, problem: Problem, mode: str | None) -> None:
        if mode is not None and mode not in RENDER_MODES:
            raise UnknownName("render_mode", mode, RENDER_MODES)
        self._problem, self._mode = problem, mode
        self._devices: NDArray[np.int32] | None = None
        self._title = "Nothing placed yet"
        self._window: Any = None
        self._is_text = False

    def note(self, devices: NDArray[np.int32], status: str, step_time_s: float) -> None:
        """Draws this placement (N,) from now on; in mode `human` at once."""
        self._devices = devices if status == "ok" else None
        self._title = f"Last placement: {step_time_s * 1e3:.4g} ms" if status == "ok" else f"Last placement: {status}"
        if self._mode == "human":
            self.draw()

    def draw(self) -> NDArray[np.uint8] | str | None:
        """A picture (height, width, 3) or a text, as the mode asks; None where it is shown, or there is no mode."""
        if self._mode is None:
            return None
        from rlplace.report.drawing import timeline_frame, timeline_text

        drawn = self._timeline(), self._problem.graph, self._problem.host, self._title
        if self._mode == "rgb_array":
            return timeline_frame(*drawn)
        if self._mode == "ansi":
            return timeline_text(*drawn)
        if self._has_window():
            self._show(timeline_frame(*drawn))
        else:
            print(timeline_text(*drawn), flush=True)
        return None

    def close(self) -> None:
        """Closes the window, if there is one."""
        if self._window is not None:
            from matplotlib import pyplot

            pyplot.close(self._window)
            self._window = None

    def _timeline(self) -> Timeline:
        if self._devices is None:
            return Timeline.empty(self._problem.graph.num_ops)
        simulator = Simulator(self._problem, threads=1)
        return simulator.timeline(simulator.plan(self._devices))

    def _has_window(self) -> bool:
        """Opens the window; False where matplotlib has no display for one."""
        from matplotlib import pyplot

        if self._window is None and not self._is_text:
            self._window = pyplot.figure("rlplace")
            if self._window.canvas.required_interactive_framework is None:
                self.close()
                self._is_text = True
        return not self._is_text

    def _show(self, frame: NDArray[np.uint8]) -> None:
        from matplotlib import pyplot

        height, width, _ = frame.shape
        self._window.clear()
        self._window.set_size_inches(width / self._window.dpi, height / self._window.dpi)
        self._window.figimage(frame)
        pyplot.pause(1e-3)  # lets the window be drawn


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
    """What placements are measured with, and whether it was made here, so that the env has to close it.

    Args:
        measurer: what measures placements; or
        problem: what is placed; or
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
        hint = 'For example `workload="nmt@small", host="4xV100-pcie"`.'
        expected = "exactly one of measurer, problem and workload"
        raise InvalidValue("given", " and ".join(names) or "nothing to place", expected, where="environment", hint=hint)
    if isinstance(given["problem"], str):
        hint = f"For a problem made from words: `workload={problem!r}, host=...`."
        raise InvalidValue("problem", problem, "a `Problem`", where="environment", hint=hint)
    if measurer is not None:
        return (measurer.measurer if isinstance(measurer, SharedMeasurer) else measurer), False
    if problem is None:
        problem = _problem_of(str(workload), host, num_groups, workload_seed)
    simulator = Simulator(problem, threads=1)  # an env measures one placement at a time
    if not runs:
        return simulator, True
    from rlplace.measure.timing.host_runner import HostRunner

    return HostRunner(problem, simulator), True


def _problem_of(workload: str, host: str | Host, num_groups: int, workload_seed: int) -> Problem:
    """The step of a workload, profiled on a host of this machine, estimated (or as its file gives it) on another."""
    from rlplace.graphs.capturing.capture import capture
    from rlplace.graphs.formats import load_graph, load_times_s
    from rlplace.measure.costs.costs import Costs
    from rlplace.measure.hosts.resolve import check_present, resolve_host
    from rlplace.measure.isolate.isolated_runner import profile_isolated
    from rlplace.workloads import build_for, parse_workload

    spec, host = parse_workload(workload), resolve_host(host)
    check_present(host)
    if spec.is_file and not host.is_simulated:
        hint = "A graph file alone can be simulated, not measured: give a simulated host, or the model itself."
        raise InvalidValue("workload", workload, "a name or package.module:function", where="environment", hint=hint)
    if spec.is_file:
        graph, times_s = load_graph(spec.path), load_times_s(spec.path)
        if times_s is not None:
            return Problem.grouped(graph, host, Costs.given(times_s, host), num_groups)
    else:
        built = build_for(spec, host, workload_seed)
        graph = capture(built.model, built.inputs, built.loss_fn, built.optimizer, targets=built.targets)
    if host.is_simulated:
        return Problem.estimate(graph, host, num_groups=num_groups)
    return Problem.profile(
        graph,
        host,
        num_groups=num_groups,
        progress=False,
        profiler=lambda graph, host, say: profile_isolated(graph, host, on_progress=say),
    )
