import numpy as np
import pytest
from fake_measurer import CountingMeasurer, TimingMeasurer, chain_problem
from stable_baselines3.common.vec_env import VecMonitor

from rlplace.env import OneShotEnv, PlacementVecEnv
from rlplace.errors import InvalidValue


def make(num_envs, measurer_class=TimingMeasurer, **options):
    measurer = measurer_class(chain_problem(3), wanted=[0, 1, 1], failing=[1, 1, 1])
    return PlacementVecEnv(measurer, num_envs, "sqrt", baseline_s=3.0, **options), measurer


def test_a_step_is_one_call_of_the_measurer():
    env, measurer = make(4)
    env.reset()
    observations, rewards, dones, infos = env.step(np.array([[0, 1, 1], [0, 0, 0], [0, 1, 1], [1, 0, 0]]))
    assert [batch.tolist() for batch in measurer.timed] == [[[0, 1, 1], [0, 0, 0], [1, 0, 0]]]
    assert rewards.tolist() == pytest.approx([-1.0, -(3**0.5), -1.0, -2.0])
    assert dones.all()
    assert [info["step_time_s"] for info in infos] == [1.0, 3.0, 1.0, 4.0]
    assert infos[3]["placement"].tolist() == [1, 0, 0]
    assert observations["graph"].tolist() == [0, 0, 0, 0]


def test_the_second_time_nothing_is_measured_unless_answers_vary():
    batch = np.array([[0, 1, 1], [0, 0, 0]])
    for deterministic, calls in ((True, 1), (False, 2)):
        env, measurer = make(2, deterministic=deterministic)
        env.step(batch)
        env.step(batch)
        assert len(measurer.timed) == calls


def test_it_agrees_with_the_single_env():
    env, measurer = make(8, CountingMeasurer)
    single = OneShotEnv(measurer, "sqrt", baseline_s=3.0)
    assert env.observation_space == single.observation_space
    assert env.action_space == single.action_space
    actions = np.array([single.action_space.sample() for _ in range(8)])
    single.reset()
    alone = [single.step(action) for action in actions]
    _, rewards, _, infos = env.step(actions)
    assert rewards.tolist() == pytest.approx([reward for _, reward, *_ in alone])
    assert [info["status"] for info in infos] == [info["status"] for *_, info in alone]


def test_episodes_are_reported_as_stable_baselines_expects():
    env, _ = make(2)
    _, _, _, infos = env.step(np.array([[0, 1, 1], [1, 1, 1]]))
    assert infos[0]["episode"]["r"] == pytest.approx(-1.0)
    assert infos[1]["episode"]["r"] == pytest.approx(-(30**0.5))
    assert env.last_scores.status == ("ok", "oom")


def test_wrappers_and_attributes_work():
    env, _ = make(3)
    wrapped = VecMonitor(env)
    wrapped.reset()
    wrapped.step(np.zeros((3, 3), dtype=np.int64))
    assert env.get_attr("num_envs") == [3, 3, 3]
    assert env.env_is_wrapped(VecMonitor, [0, 1]) == [False, False]
    env.set_attr("note", "seen")
    assert env.get_attr("note", 0) == ["seen"]
    env.close()


def test_bad_use_is_named():
    with pytest.raises(InvalidValue, match="num_envs"):
        make(0)
    env, _ = make(1)
    with pytest.raises(InvalidValue, match="step_async"):
        env.step_wait()
