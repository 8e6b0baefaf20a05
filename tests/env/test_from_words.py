"""What an env can be made from: a measurer, a problem, or words; and that Gymnasium finds it by name alone."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from fake_measurer import CountingMeasurer, chain_problem

from rlplace.env import OneShotEnv, SequentialEnv
from rlplace.errors import InvalidValue, UnknownName
from rlplace.measure import Simulator, resolve_host

WORDS = {"workload": "nmt@layers=1,units=16,batch=2,steps=2,vocab=20", "host": "2xK80", "num_groups": 8}


def test_a_problem_is_simulated() -> None:
    env = OneShotEnv(problem=chain_problem(3))
    assert isinstance(env.scorer.measurer, Simulator)
    assert env.action_space.nvec.tolist() == [2, 2, 2]


def test_a_workload_is_captured_for_its_host() -> None:
    env = SequentialEnv(**WORDS)  # type: ignore[arg-type]
    assert (env.problem.host.name, env.problem.costs.source) == ("2xK80", "estimated")
    assert 1 < env.problem.grouping.num_groups <= 8
    same = OneShotEnv(workload=str(WORDS["workload"]), host=resolve_host("2xK80"), num_groups=8)
    assert same.problem.graph.fingerprint == env.problem.graph.fingerprint


@pytest.mark.parametrize("given", [{}, {"problem": chain_problem(2), "workload": "nmt"}])
def test_one_thing_is_given(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue, match="exactly one of measurer, problem and workload"):
        OneShotEnv(**given)


def test_a_word_is_no_problem() -> None:
    with pytest.raises(InvalidValue, match="workload='nmt@small'"):
        OneShotEnv(problem="nmt@small")  # type: ignore[arg-type]


def test_words_are_checked() -> None:
    with pytest.raises(UnknownName, match="workload 'nnt'"):
        OneShotEnv(workload="nnt@small", host="2xK80")
    with pytest.raises(UnknownName, match="host '2xK81'"):
        OneShotEnv(workload="nmt@small", host="2xK81")


def test_a_simulated_host_cannot_run_placements() -> None:
    with pytest.raises(InvalidValue, match="a host of this machine"):
        gym.make("rlplace/OneShotMeasured-v0", problem=chain_problem(3))


@pytest.mark.parametrize(("is_given", "closed"), [(True, 0), (False, 1)])
def test_only_a_measurer_of_its_own_is_closed(is_given: bool, closed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Closing(CountingMeasurer):
        def __init__(self, *_: object) -> None:
            super().__init__(chain_problem(3), [0, 1, 1])
            self.closed = 0

        def close(self) -> None:
            self.closed += 1

    measurer = Closing()
    monkeypatch.setattr("rlplace.env.placement_env.HostRunner", lambda *_: measurer)
    given = {"measurer": measurer} if is_given else {"problem": measurer.problem}
    env = OneShotEnv(**given, deterministic=False)  # type: ignore[arg-type]
    assert env.scorer.measurer is measurer
    env.close()
    env.close()
    assert measurer.closed == closed


@pytest.mark.parametrize("name", ["OneShot", "Sequential"])
def test_a_spec_of_words_makes_another_env_on_the_same_measurer(name: str) -> None:
    env = gym.make(f"rlplace/{name}-v0", **WORDS)  # type: ignore[arg-type]
    assert env.spec is not None
    again = env.spec.make()
    assert again.unwrapped.scorer.measurer is env.unwrapped.scorer.measurer  # type: ignore[attr-defined]


PROGRAM = """
import gymnasium, sys
assert "rlplace" not in sys.modules
for name in ("OneShot-v0", "Sequential-v0"):
    env = gymnasium.make(f"rlplace.env:rlplace/{name}", workload="WORKLOAD", host="2xK80", num_groups=8)
    env.reset(seed=0)
    env.step(env.action_space.sample())
assert {f"rlplace/{name}Measured-v0" for name in ("OneShot", "Sequential")} <= set(gymnasium.registry)
print(env.spec.id)
"""


@pytest.mark.slow
def test_gymnasium_makes_an_env_of_strings_in_a_program_that_imports_nothing_of_ours() -> None:
    code = PROGRAM.replace("WORKLOAD", str(WORDS["workload"]))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout.strip() == "rlplace/Sequential-v0", done.stderr


def test_rewards_of_words_are_those_of_the_problem() -> None:
    env = OneShotEnv(**WORDS, reward="sqrt")  # type: ignore[arg-type]
    env.reset()
    action = np.zeros(env.problem.grouping.num_groups, dtype=np.int64)
    _, reward, _, _, info = env.step(action)
    wanted_s = Simulator(env.problem).step_times(env.problem.grouping.expand(action.astype(np.int32))[None])[0]
    assert info["step_time_s"] == wanted_s
    assert reward == pytest.approx(-np.sqrt(wanted_s))
