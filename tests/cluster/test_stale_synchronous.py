"""`StaleSynchronous` on workers that take as long as the test says, on a clock that only they move."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from rlplace.cluster.cluster_evaluator import Job, Staleness, StaleSynchronous
from rlplace.errors import RunnerError
from rlplace.measure.measurement import Measurement
from rlplace.measure.problem import Plan
from rlplace.measure.timing.race import RaceProtocol

ROUND = RaceProtocol(max_rounds=3)
NEVER = math.inf


def plan(name: int) -> Plan:
    nothing = np.zeros(0, dtype=np.int32)
    return Plan(np.array([name], dtype=np.int32), nothing, nothing, np.zeros(1, dtype=np.int32))


def name(of: Plan) -> int:
    return int(of.devices[0])


def names(came: Sequence[tuple[Plan, Measurement]]) -> list[int]:
    return [name(one) for one, _ in came]


@dataclass
class FakeWorkers:
    """Workers, each with the seconds that it takes for a plan.

    Attributes:
        pace_s: seconds a plan, by worker; infinite for one that stands still.
        deadly: plans that end whoever measures them.
        begun: worker and plans of every job, in order.
        now_s: the clock.
    """

    pace_s: dict[str, float]
    deadly: tuple[int, ...] = ()
    begun: list[tuple[str, list[int]]] = field(default_factory=list)
    now_s: float = 0.0
    _jobs: dict[str, tuple[float, Job]] = field(default_factory=dict)

    def clock(self) -> float:
        return self.now_s

    @property
    def num_alive(self) -> int:
        return len(self.pace_s)

    def idle(self) -> list[str]:
        return [worker for worker in self.pace_s if worker not in self._jobs]

    def start(self, worker: str, job: Job) -> None:
        assert worker in self.idle()
        self.begun.append((worker, [name(one) for one in job.plans]))
        self._jobs[worker] = self.now_s + self.pace_s[worker] * len(job.plans), job

    def wait(self, timeout_s: float) -> list[Job]:
        assert timeout_s > 0
        end_s = min([end_s for end_s, _ in self._jobs.values()], default=NEVER)
        self.now_s = min(end_s, self.now_s + timeout_s)
        return [self._ended(worker) for worker, (end_s, _) in list(self._jobs.items()) if end_s <= self.now_s]

    def lose(self, worker: str) -> None:
        """Ends a worker when it is waited for next."""
        self._jobs[worker] = self.now_s, self._jobs[worker][1]
        self.pace_s[worker] = -1.0

    def _ended(self, worker: str) -> Job:
        _, job = self._jobs.pop(worker)
        if self.pace_s[worker] < 0 or any(name(one) in self.deadly for one in job.plans):
            del self.pace_s[worker]
            job.why = f"{worker} is gone"
            return job
        job.outcomes = [Measurement("ok", 1.0 + name(one)) for one in job.plans]
        return job


def made(workers: FakeWorkers, **facts: float) -> StaleSynchronous:
    return StaleSynchronous(workers, Staleness(**facts), clock=workers.clock)  # type: ignore[arg-type]


def test_a_batch_is_shared_out_and_comes_back_whole_and_in_order() -> None:
    workers = FakeWorkers({"a": 2.0, "b": 1.0})
    came = made(workers, bound=0).exchange([plan(k) for k in range(4)], ROUND)
    assert workers.begun == [("a", [0, 1]), ("b", [2, 3])]
    assert names(came) == [0, 1, 2, 3]
    assert [outcome.step_time_s for _, outcome in came] == [1.0, 2.0, 3.0, 4.0]
    assert workers.now_s == 4.0


def test_enough_results_are_enough_and_the_others_come_later() -> None:
    workers = FakeWorkers({"fast": 1.0, "slow": 100.0})
    pool = made(workers, bound=1, enough=0.5, grace=0.5)
    assert names(pool.exchange([plan(k) for k in range(4)], ROUND)) == [0, 1]
    assert workers.now_s == 3.0  # two plans, and half as long for the others
    assert pool.num_pending == 2
    assert names(pool.exchange([plan(4), plan(5)], ROUND)) == [
        2,
        3,
        4,
        5,
    ]  # the bound: of an earlier batch nothing is left


def test_those_who_are_nearly_done_are_waited_for() -> None:
    workers = FakeWorkers({"fast": 1.0, "slower": 1.4})
    assert names(made(workers).exchange([plan(k) for k in range(4)], ROUND)) == [0, 1, 2, 3]
    assert workers.now_s == 2.8


@pytest.mark.parametrize("bound", [0, 1, 2, 3])
def test_no_result_is_older_than_the_bound(bound: int) -> None:
    workers = FakeWorkers({"fast": 1.0, "slow": 10.0})
    pool = made(workers, bound=bound, slow_first_s=1e9, slow_least_s=1e9)
    seen: set[int] = set()
    for batch in range(12):
        seen |= set(names(pool.exchange([plan(2 * batch), plan(2 * batch + 1)], ROUND)))
        assert set(range(2 * (batch - bound + 1))) <= seen, (batch, seen)
    assert pool.num_pending == 0 or bound > 0


def test_everything_is_handed_out_once() -> None:
    workers = FakeWorkers({"a": 1.0, "b": 7.0, "c": 3.0})
    pool = made(workers, bound=2)
    seen = [name for batch in range(9) for name in names(pool.exchange([plan(3 * batch + k) for k in range(3)], ROUND))]
    seen += names(pool.exchange([], ROUND, is_all=True))
    assert sorted(seen) == list(range(27))
    assert pool.num_pending == 0
    assert pool.exchange([], ROUND) == []


def test_all_that_was_asked_for_can_be_waited_for_and_comes_last() -> None:
    workers = FakeWorkers({"fast": 1.0, "slow": 50.0})
    pool = made(workers)
    assert names(pool.exchange([plan(0), plan(1)], ROUND)) == [0]
    assert names(pool.exchange([plan(2), plan(3)], ROUND, is_all=True)) == [1, 2, 3]


def test_the_plans_of_a_lost_worker_are_given_to_others() -> None:
    workers = FakeWorkers({"a": 2.0, "b": 1.0, "c": 1.0})
    pool = made(workers, bound=0)
    start = workers.start

    def lose_it(worker: str, job: Job) -> None:
        start(worker, job)
        if worker == "a":
            workers.lose(worker)

    workers.start = lose_it  # type: ignore[method-assign]
    came = pool.exchange([plan(k) for k in range(6)], ROUND)
    assert names(came) == list(range(6))
    assert all(outcome.ok for _, outcome in came)
    assert workers.begun[0] == ("a", [0, 1])
    assert sorted(plans for _, plans in workers.begun[3:]) == [[0], [1]]  # one by one: nobody knows which is to blame


def test_a_plan_that_ends_everybody_is_an_error_and_the_others_are_measured() -> None:
    workers = FakeWorkers(dict.fromkeys("abcdef", 1.0), deadly=(3,))
    came = made(workers, bound=0).exchange([plan(k) for k in range(12)], ROUND)
    assert names(came) == list(range(12))
    assert [name(one) for one, outcome in came if not outcome.ok] == [3]
    assert came[3][1].status == "error"
    assert "is gone" in came[3][1].why
    assert len(workers.pace_s) == 3  # lost with a neighbour, then alone, then alone again


def test_nobody_left_is_an_error_that_says_so() -> None:
    workers = FakeWorkers({"a": 1.0}, deadly=(0,))
    with pytest.raises(RunnerError, match="no machine of the cluster is left"):
        made(workers).exchange([plan(0)], ROUND)


def test_a_worker_that_stands_still_has_its_plans_given_to_others_and_is_asked_no_more() -> None:
    workers = FakeWorkers({"still": NEVER, "b": 1.0})
    pool = made(workers, bound=0, slow_least_s=5.0, slow_factor=2.0)
    assert names(pool.exchange([plan(k) for k in range(4)], ROUND)) == [0, 1, 2, 3]
    assert workers.now_s == 7.0  # the limit of 5 s, and two plans
    workers.begun.clear()
    assert names(pool.exchange([plan(4), plan(5)], ROUND)) == [4, 5]
    assert {worker for worker, _ in workers.begun} == {"b"}


def test_the_first_answer_of_several_counts() -> None:
    workers = FakeWorkers({"slow": 9.0, "b": 1.0})
    pool = made(workers, bound=0, slow_least_s=5.0, slow_factor=2.0)
    assert names(pool.exchange([plan(0), plan(1)], ROUND)) == [0, 1]
    assert workers.now_s == 6.0
    assert names(pool.exchange([plan(2), plan(3)], ROUND)) == [2, 3]  # the late answer was for nobody
    assert pool.num_pending == 0


def test_the_same_plan_twice_is_measured_twice() -> None:
    twice = plan(0)
    assert names(made(FakeWorkers({"a": 1.0})).exchange([twice, twice], ROUND)) == [0, 0]
