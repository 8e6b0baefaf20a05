"""What envs draw: the timeline of the last placement, as a picture or as text."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from fake_measurer import CountingMeasurer, chain_problem
from gymnasium.utils.env_checker import check_env
from search_problems import tight_problem

from rlplace.env import OneShotEnv, SequentialEnv
from rlplace.env.placement_env import PlacementEnv
from rlplace.errors import UnknownName


def made(env_class: type[PlacementEnv], mode: str | None) -> PlacementEnv:  # type: ignore[type-arg]
    env = env_class(problem=chain_problem(3), render_mode=mode)  # type: ignore[call-arg]
    env.reset(seed=0)
    return env


def place(env: PlacementEnv, devices: list[int]) -> None:  # type: ignore[type-arg]
    env.reset(seed=0)
    if isinstance(env, OneShotEnv):
        env.step(np.array(devices))
        return
    for device in devices:
        env.step(np.int64(device))


@pytest.mark.parametrize("env_class", [OneShotEnv, SequentialEnv])
def test_a_picture_has_one_size_and_changes_with_the_placement(env_class: type[PlacementEnv]) -> None:  # type: ignore[type-arg]
    env = made(env_class, "rgb_array")
    frames = [env.render()]
    for devices in ([0, 0, 0], [0, 1, 0]):
        place(env, devices)
        frames.append(env.render())
    shapes = {frame.shape for frame in frames if isinstance(frame, np.ndarray)}
    assert len(shapes) == 1
    assert shapes.pop()[2] == 3
    assert not np.array_equal(frames[0], frames[1])
    assert not np.array_equal(frames[1], frames[2])
    env.reset(seed=0)
    assert np.array_equal(env.render(), frames[2])  # type: ignore[arg-type]  # until the next is placed


def test_text_shows_who_is_busy_when() -> None:
    env = made(OneShotEnv, "ansi")
    assert "Nothing placed yet" in str(env.render())
    place(env, [0, 0, 1])
    title, first, second, last = str(env.render()).splitlines()
    assert title.startswith("Last placement: ")
    assert first.index("#") < second.index("#")
    assert first.split("|")[1].rstrip(".").count(".") == 0
    assert last.endswith(", simulated")


def test_a_placement_that_failed_is_said_to_have() -> None:
    env = OneShotEnv(problem=tight_problem(2, 2), render_mode="ansi")
    env.reset(seed=0)
    env.step(np.zeros(2, dtype=np.int64))
    lines = str(env.render()).splitlines()
    assert lines[0] == "Last placement: oom"
    assert "#" not in "".join(lines)


def test_people_see_every_placement_as_it_comes(capsys: pytest.CaptureFixture[str]) -> None:
    env = made(OneShotEnv, "human")
    for devices in ([0, 0, 0], [0, 1, 0]):
        place(env, devices)
        said = capsys.readouterr().out
        assert said.startswith("Last placement: ")
    assert env.render() is None
    assert capsys.readouterr().out == said


@pytest.mark.parametrize("name", ["rlplace/OneShot-v0", "rlplace/Sequential-v0"])
def test_gymnasium_knows_the_modes(name: str) -> None:
    env = gym.make(name, measurer=CountingMeasurer(chain_problem(3), [0, 1, 1]))
    assert env.metadata["render_modes"] == ["human", "rgb_array", "ansi"]
    check_env(env.unwrapped)
    assert env.unwrapped.render() is None


def test_a_mistyped_mode_is_named() -> None:
    with pytest.raises(UnknownName, match="render_mode 'rgb'"):
        OneShotEnv(problem=chain_problem(3), render_mode="rgb")
