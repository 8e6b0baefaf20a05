import numpy as np
import pytest
from fake_measurer import CountingMeasurer, TimingMeasurer, chain_problem

from rlplace.env import OneShotEnv, Scorer, SequentialEnv, SqrtReward, single_device_s
from rlplace.errors import InvalidValue, UnknownName


@pytest.fixture(params=[CountingMeasurer, TimingMeasurer])
def measurer(request):
    return request.param(chain_problem(3), wanted=[0, 1, 1], failing=[1, 1, 1])


def calls_of(measurer):
    return [len(batch) for batch in getattr(measurer, "timed", measurer.batches)]


def test_scores_keep_the_order_of_the_batch(measurer):
    scores = Scorer(measurer, SqrtReward(1.0), deterministic=True).score(np.array([[0, 0, 0], [0, 1, 1], [1, 0, 0]]))
    assert scores.step_time_s.tolist() == [3.0, 1.0, 4.0]
    assert scores.reward.tolist() == pytest.approx([-(3**0.5), -1.0, -2.0])
    assert scores.status == ("ok", "ok", "ok")


def test_a_failure_is_infinite_with_its_status_and_a_finite_reward(measurer):
    scores = Scorer(measurer, SqrtReward(0.9), deterministic=True).score(np.array([[1, 1, 1], [0, 1, 1]]))
    assert scores.step_time_s.tolist() == [np.inf, 1.0]
    assert scores.status == ("oom", "ok")
    assert scores.reward.tolist() == pytest.approx([-3.0, -1.0])


def test_equal_placements_of_a_batch_are_measured_once(measurer):
    scorer = Scorer(measurer, SqrtReward(1.0), deterministic=False)
    scores = scorer.score(np.array([[0, 0, 0], [0, 1, 1], [0, 0, 0]]))
    assert scores.step_time_s.tolist() == [3.0, 1.0, 3.0]
    assert calls_of(measurer) == [2]


@pytest.mark.parametrize(("deterministic", "calls"), [(True, [2]), (False, [2, 2])])
def test_known_placements_are_measured_again_only_where_answers_vary(measurer, deterministic, calls):
    scorer = Scorer(measurer, SqrtReward(1.0), deterministic=deterministic)
    batch = np.array([[0, 0, 0], [0, 1, 1]])
    first, second = scorer.score(batch), scorer.score(batch)
    assert first.step_time_s.tolist() == second.step_time_s.tolist()
    assert calls_of(measurer) == calls


def test_groups_are_expanded_to_ops(measurer):
    scores = Scorer(measurer, SqrtReward(1.0), deterministic=True).score(np.array([[0, 1, 0]]))
    assert scores.placements.tolist() == [[0, 1, 0]]
    assert scores.placements.dtype == np.int32


def test_the_baseline_is_the_best_single_device(measurer):
    assert single_device_s(measurer) == 3.0


def test_the_baseline_is_the_mean_cost_where_no_device_runs_it_alone():
    class Failing(CountingMeasurer):
        def measure(self, placements):
            self.failing = placements[0]
            return [self._measure(self.failing) for _ in placements]

    assert single_device_s(Failing(chain_problem(5), wanted=[0] * 5)) == 5.0


def test_a_mistyped_reward_is_refused_before_anything_is_measured(measurer):
    from rlplace.env.rewards import make_scorer

    with pytest.raises(UnknownName):
        make_scorer(measurer, "sqr", deterministic=True)
    assert measurer.batches == []


@pytest.mark.parametrize("env", [OneShotEnv, SequentialEnv])
def test_an_env_of_a_problem_asks_for_a_measurer(env):
    with pytest.raises(InvalidValue, match=r"measurer is 'Problem'.*Simulator\(problem\)"):
        env(chain_problem(3))
