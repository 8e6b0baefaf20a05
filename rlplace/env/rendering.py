"""`LastPlacement`: the timeline of the placement that an env was given last, as a picture, as text or in a window."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import UnknownName
from rlplace.measure.problem import Problem
from rlplace.measure.timeline import Timeline

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
        from rlplace.report.timeline_frame import timeline_frame, timeline_text

        timeline = self._timeline()
        if self._mode == "human" and self._shows(timeline):
            return None
        drawn = timeline, self._problem.graph, self._problem.host, self._title
        if self._mode == "rgb_array":
            return timeline_frame(*drawn)
        if self._mode == "ansi":
            return timeline_text(*drawn)
        print(timeline_text(*drawn), flush=True)
        return None

    def close(self) -> None:
        """Closes the window, if there is one."""
        if self._window is not None:
            from matplotlib import pyplot

            pyplot.close(self._window)
            self._window = None

    def _timeline(self) -> Timeline:
        from rlplace.measure.simulate.simulator import Simulator

        if self._devices is None:
            return Timeline.empty(self._problem.graph.num_ops)
        simulator = Simulator(self._problem, threads=1)
        return simulator.timeline(simulator.plan(self._devices))

    def _shows(self, timeline: Timeline) -> bool:
        """Shows the chart in a window; False where matplotlib has no display for one."""
        from matplotlib import pyplot

        from rlplace.report.timeline_frame import timeline_frame

        if self._is_text:
            return False
        if self._window is None:
            self._window = pyplot.figure("rlplace")
        if self._window.canvas.required_interactive_framework is None:
            self.close()
            self._is_text = True
            return False
        frame = timeline_frame(timeline, self._problem.graph, self._problem.host, self._title)
        height, width, _ = frame.shape
        self._window.clear()
        self._window.set_size_inches(width / self._window.dpi, height / self._window.dpi)
        self._window.figimage(frame)
        pyplot.pause(1e-3)  # lets the window be drawn
        return True
