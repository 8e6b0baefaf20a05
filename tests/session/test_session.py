"""`Session`: what a run keeps comes back as it was, and what does not belong to it is refused."""

from __future__ import annotations

import dataclasses
import math
import sqlite3
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_files import change
from safetensors.numpy import load, save
from search_problems import chain_problem

from rlplace.errors import FileProblem, RlplaceError
from rlplace.measure.host_model import HostModel, LearnedHost, Posterior, Scales, TracedPrior, prior_of
from rlplace.measure.measurement import Measurement
from rlplace.measure.placement import Placement
from rlplace.measure.problem import Plan
from rlplace.measure.simulate.simulator import Simulator
from rlplace.records import to_json
from rlplace.search.task import BestSoFar, Failure
from rlplace.session.calibrate import Known
from rlplace.session.folder import RunFolder
from rlplace.session.prepare import Prepared
from rlplace.session.session import EVERY_S, Session
from rlplace.session.session_records import Ending, FinalTable, MethodResult, Race, Request, Row, Unmeasured
from rlplace.session.setup import WHOLE, CutOptions
from rlplace.training.config import TrainConfig
from rlplace.training.phases import signature_of

PROBLEM = chain_problem(5, 2)
SIMULATOR = Simulator(PROBLEM, threads=1)


def plan(*devices: int) -> Plan:
    return SIMULATOR.plan(np.array(devices, dtype=np.int32))


PLANS = {one.fingerprint: one for one in (plan(0, 0, 0, 0, 0), plan(0, 1, 1, 1, 1), plan(1, 1, 0, 0, 0))}
FIRST, SECOND, THIRD = PLANS.values()
OK = Measurement("ok", 2.0, (1.5, 2.0, 2.5), (7, 9), "", 4.0)
BAD = Measurement("oom", math.inf, (), (7, 99), "too much")
RESULT = MethodResult(
    plan=SECOND,
    num_scored=300,
    num_measured=3,
    seconds=4.0,
    single_s=8.0,
    history=(BestSoFar(20, 1, 1.0, 6.0), BestSoFar(90, 3, 3.5, 4.0)),
    learning=({"loss": 0.5, "mean": math.nan},),
    tried=((3.5, 4.0),),
    failure=Failure("ValueError: no", "Traceback ..."),
    budget=10.0,
    is_searched=True,
    races=(Race((FIRST, SECOND), (OK, BAD)), Race((SECOND,), (OK,), is_final=True)),
    start=np.array([0, 0, 1, 1, 1], dtype=np.int32),
    unmeasured=Unmeasured(np.array([[1, 1, 1, 1, 1], [1, 0, 1, 0, 1]], dtype=np.int32), np.array([1.25, 2.5])),
)
ROWS = (
    {"method": "heft", "placement": True, "placements": 2, "history": [[1, 0, 0.5, 2.0]], "step_time_s": 2.0}
    | {"spread_s": 0.1, "samples": 3, "status": "ok"},
    {"method": "eager", "placement": False, "placements": 0, "history": [], "step_time_s": None}
    | {"spread_s": None, "status": "skipped", "why": "no values"},
)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run")


def again(run: RunFolder) -> Session:
    """The session as another process finds it, with results."""
    session = Session.read(run.root)
    session.load_results(PROBLEM)
    return session


def same(one: MethodResult | None, other: MethodResult) -> bool:
    """Whether they are equal, field by field."""
    assert one is not None
    for each in (one, other):
        assert each.plan is not None
        assert each.start is not None
        assert each.unmeasured is not None
    races = [([p.fingerprint for p in race.plans], race.outcomes, race.is_final) for race in one.races]
    assert races == [([p.fingerprint for p in race.plans], race.outcomes, race.is_final) for race in other.races]
    apart = ("plan", "start", "unmeasured", "races")
    arrays = [
        (
            each.plan and each.plan.fingerprint,
            each.start is not None and each.start.tolist(),
            each.unmeasured and (each.unmeasured.devices.tolist(), each.unmeasured.simulated_s.tolist()),
        )
        for each in (one, other)
    ]
    plain = [str({k: v for k, v in vars(each).items() if k not in apart}) for each in (one, other)]
    return arrays[0] == arrays[1] and plain[0] == plain[1]


def test_all_of_it_comes_back(run: RunFolder) -> None:
    learned = LearnedHost.of(Posterior.prior(Scales(PROBLEM, prior_of(PROBLEM))))
    request = Request("nmt", "cores", "ab" * 8, "small", asked=CutOptions(4, {"x": 0, "mask": None}, "joined"))
    table = FinalTable(tuple(Row.of(row) for row in ROWS), "heft", {"heft": FIRST.fingerprint})
    with Session.open(run) as session:
        assert (session.known_hosts, session.table, session.has_ended) == (None, None, False)
        session.keep(request=request, config=TrainConfig(seed=3), table=table)
        session.keep_problem(Prepared(PROBLEM, WHOLE, 7, np.array([0, 1, 0, 1, 0], dtype=np.int32), 0.75))
        session.keep_known_hosts((learned,))
        session.keep_calibration(Known(PROBLEM, [FIRST, SECOND, FIRST], [OK, BAD, OK]))
        session.keep_result("learned", RESULT)
        session.keep_placement(Placement.of(PROBLEM, SECOND, "learned"))
        session.keep(ending=Ending(True, 5.0, {"search_s": 1.0}, {"search_s": 2.0}))
        session.keep_timeline('{"traceEvents": []}')
        session.keep_files({"policy.json": b"{}"})
    found = again(run)
    assert (found.request, found.fact("config", TrainConfig)) == (request, TrainConfig(seed=3))
    assert (found.facts.num_ops, found.facts.evaluations, found.host) == (5, 7, PROBLEM.host)
    assert found.facts.whole_s == 0.75
    assert (found.costs.op_time_s == PROBLEM.costs.op_time_s).all()
    assert found.known_hosts == (learned,)
    known = found.calibration(PROBLEM)
    assert [one.fingerprint for one in known.plans] == [one.fingerprint for one in (FIRST, SECOND, FIRST)]
    assert known.outcomes == [OK, BAD, OK]
    assert same(found.of("learned", 10.0), RESULT)
    assert found.of("portfolio", 10.0) is None
    ((name, (best, ratio)),) = found.bests().items()
    assert (best.fingerprint, name, ratio) == (SECOND.fingerprint, "learned", 0.5)
    assert found.table == table
    assert tuple(row.to_dict() for row in table.rows) == ROWS
    assert found.best_placement().plan.fingerprint == SECOND.fingerprint
    assert found.ending == Ending(True, 5.0, {"search_s": 1.0}, {"search_s": 2.0})
    assert found.timeline == {"traceEvents": []}
    assert (found.file("policy.json"), found.file("policy.safetensors")) == (b"{}", None)
    assert not found.has_ended


def test_a_session_in_memory_is_the_same() -> None:
    with Session.in_memory() as session:
        session.keep_result("learned", RESULT)
        session.load_results(PROBLEM)
        assert same(session.of("learned", 10.0), RESULT)


def test_a_race_is_kept_once_and_what_follows_beside_it(run: RunFolder) -> None:
    with Session.open(run) as session:
        session.keep_result("learned", dataclasses.replace(RESULT, races=RESULT.races[:1]))
        session.keep_result("learned", RESULT)
    with Session.open(run) as session:
        session.load_results(PROBLEM)
        more = (*RESULT.races, Race((THIRD,), (OK,)))
        session.keep_result("learned", dataclasses.replace(RESULT, races=more))
    found = again(run).of("learned", 10.0)
    assert found is not None
    assert [len(race.plans) for race in found.races] == [2, 1, 1]


def test_with_a_larger_budget_a_method_is_not_done_any_more(run: RunFolder) -> None:
    with Session.open(run) as session:
        session.keep_result("learned", dataclasses.replace(RESULT, is_done=True))
    same_budget, larger = again(run).of("learned", 10.0), again(run).of("learned", 11.0)
    assert same_budget is not None
    assert same_budget.is_done
    assert larger is not None
    assert (larger.is_done, larger.is_searched, larger.seconds) == (False, False, 4.0)


def test_measurements_whose_plans_are_lost_are_left_out(run: RunFolder) -> None:
    with Session.open(run) as session:
        session.keep_result("learned", RESULT)
    execute(run, "DELETE FROM plans WHERE fingerprint = ?", SECOND.fingerprint)
    found = again(run).of("learned", 10.0)
    assert found is not None
    assert [[p.fingerprint for p in race.plans] for race in found.races] == [[FIRST.fingerprint]]
    assert found.plan is not None


TRACED = [
    dataclasses.replace(OK, timeline=dataclasses.replace(SIMULATOR.timeline(one), source="measured", traced_op_s=2e-6))
    for one in PLANS.values()
]


def seconds_of(outcome: Measurement) -> list[np.ndarray]:
    timeline = outcome.timeline
    assert timeline is not None
    ops, transfers = timeline.op_end_s - timeline.op_start_s, timeline.transfer_end_s - timeline.transfer_start_s
    return [timeline.op_start_s, ops, timeline.transfer_start_s, transfers]


def test_timelines_come_back_with_their_races(run: RunFolder) -> None:
    result = dataclasses.replace(RESULT, races=(Race((FIRST, SECOND, THIRD), (TRACED[0], OK, TRACED[2])),))
    with Session.open(run) as session:
        session.keep_calibration(Known(PROBLEM, [FIRST], [TRACED[0]]))
        session.keep_result("learned", result)
        session.keep_calibration(Known(PROBLEM, [SECOND, THIRD], [TRACED[1], OK]))  # takes the place of the first
    with again(run) as found:
        known = found.calibration(PROBLEM)
        assert known.outcomes[1].timeline is None
        (race,) = found._results["learned"].races
        assert race.outcomes[1].timeline is None
    for kept, given in (
        (known.outcomes[0], TRACED[1]),
        (race.outcomes[0], TRACED[0]),
        (race.outcomes[2], TRACED[2]),
    ):
        for one, other in zip(seconds_of(kept), seconds_of(given), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)
        assert kept.timeline is not None
        assert given.timeline is not None
        for name in ("op_device", "transfer_tensor", "transfer_source", "transfer_destination"):
            assert getattr(kept.timeline, name).tolist() == getattr(given.timeline, name).tolist()
        assert kept.timeline.source == "measured"
        assert kept.timeline.traced_op_s == pytest.approx(2e-6)


def test_the_host_model_learns_the_same_from_races_that_were_kept(run: RunFolder) -> None:
    with Session.open(run) as session:
        session.keep_calibration(Known(PROBLEM, list(PLANS.values()), TRACED))
    kept = again(run).calibration(PROBLEM)
    fits, before = [], Scales(PROBLEM, prior_of(PROBLEM), None, TracedPrior())
    for plans, outcomes in ((list(PLANS.values()), TRACED), (kept.plans, kept.outcomes)):
        model = HostModel(before)
        model.learn(plans, outcomes)
        fits.append(model.fit())
    np.testing.assert_allclose(fits[1].mean, fits[0].mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(fits[1].deviation, fits[0].deviation, rtol=1e-5)
    assert (fits[0].deviation < 0.9 * Posterior.prior(before).deviation).any()


@pytest.mark.parametrize(
    "data", [b"no zlib", zlib.compress(b"0" * 12), zlib.compress(b"0" * (1 << 24)), zlib.compress(b"0" * 40)[:-3]]
)
def test_a_plan_with_a_malformed_timeline_is_left_out(data: bytes, run: RunFolder) -> None:
    with Session.open(run) as session:
        session.keep_calibration(Known(PROBLEM, [FIRST, SECOND], [TRACED[0], OK]))
        session._keep_arrays("race/1", {"0": np.frombuffer(data, dtype=np.uint8)})
    assert [one.fingerprint for one in again(run).calibration(PROBLEM).plans] == [SECOND.fingerprint]


def test_what_still_changes_is_due_now_and_then() -> None:
    now_s = [0.0]
    memory = Session.in_memory()
    session = Session(memory._connection, Path("session"), clock=lambda: now_s[0])
    assert not session.is_due
    now_s[0] = EVERY_S
    assert session.is_due
    session.keep_result("learned", RESULT)
    assert not session.is_due


@pytest.mark.parametrize("change", [{"seed": 4}, {"num_groups": 3}])
def test_the_results_of_another_run_are_refused(change: dict[str, Any], run: RunFolder) -> None:
    config = TrainConfig(seed=3)
    with Session.open(run) as session:
        session.begin(signature_of(PROBLEM, config), is_resumed=False)
        session.keep_result("learned", RESULT)
        with pytest.raises(FileProblem, match="another problem, or with other options"):
            session.begin(signature_of(PROBLEM, dataclasses.replace(config, **change)), is_resumed=True)
        other = dataclasses.replace(config, budget_s=900.0, isolated=False, store="off")
        session.begin(signature_of(PROBLEM, other), is_resumed=True)
        assert session.results()
        session.begin(signature_of(PROBLEM, other), is_resumed=False)
        assert not session.results()


def test_a_failure_keeps_nothing_of_a_write(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    with Session.open(run) as session:
        session.keep_result("learned", RESULT)
        better = dataclasses.replace(RESULT, num_scored=900, races=(*RESULT.races, Race((THIRD,), (OK,))))
        monkeypatch.setattr(session, "keep", lambda **_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            session.keep_result("learned", better)
    assert same(again(run).of("learned", 10.0), RESULT)


def execute(run: RunFolder, statement: str, *values: object) -> None:
    with sqlite3.connect(run.root / "session.db") as database:
        database.execute(statement, values)
    database.close()


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("plan.devices", np.array([0, 1, 1, 1, 7], dtype=np.int32)),
        ("plan.devices", np.array([0, 1], dtype=np.int32)),
        ("plan.devices", np.zeros((5, 5), dtype=np.int32)),
        ("plan.sequence", np.array([5, 4, 3, 2, 1, 0], dtype=np.int32)),
        ("plan.sequence", np.array([0, 0, 0, 0, 0, 0], dtype=np.int32)),
        ("plan.sequence", np.array([-1, 1, 2, 3, 4, 5], dtype=np.int32)),
        ("plan.transfer_tensor", np.array([4000], dtype=np.int32)),
        ("plan.transfer_destination", np.zeros(3, dtype=np.int32)),
        ("start", np.array([0.5], dtype=np.float64)),
        ("start", np.zeros(3, dtype=np.uint8)),
        ("candidates", np.zeros((2, 9), dtype=np.uint8)),
        ("simulated_s", np.zeros(9)),
    ],
)
def test_arrays_of_strangers_are_looked_at(name: str, array: np.ndarray, run: RunFolder) -> None:
    with Session.open(run) as session:
        session.keep_result("learned", RESULT)
        arrays = session._arrays("method/learned")
    execute(run, "UPDATE arrays SET value = ?", save({**arrays, name: array}))
    with pytest.raises(RlplaceError):
        again(run)
    assert load(save(arrays))


@pytest.mark.parametrize("data", [b"", b"x" * 100, b"\xff" * 8, (1 << 60).to_bytes(8, "little")])
def test_bytes_that_are_no_arrays_are_named(data: bytes, run: RunFolder) -> None:
    with Session.open(run) as session:
        session.keep_result("learned", RESULT)
    execute(run, "UPDATE arrays SET value = ?", data)
    with pytest.raises(FileProblem, match=r"session\.db: method/learned"):
        again(run)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_scored": -1},
        {"num_scored": 1.5},
        {"more": 1},
        {"history": [[1, 2, 3, 4]]},
        {"history": [{"evaluations": 1, "measurements": 0, "seconds": "x", "best_s": 1.0}]},
        {"tried": [[1.0]]},
        {"failure": "none"},
        {"is_done": "yes"},
    ],
)
def test_records_of_strangers_are_looked_at(changes: dict[str, object], run: RunFolder) -> None:
    with Session.open(run) as session:
        session.keep_result("learned", RESULT)
    change(run.root, "method/learned", **changes)
    with pytest.raises(RlplaceError, match=r"method/learned|method result"):
        again(run)


@pytest.mark.parametrize(
    ("column", "text"),
    [("plans", "[]"), ("plans", "[1]"), ("outcomes", "[{}]"), ("outcomes", '[{"status": "ok"}, {"status": "oom"}]')],
)
def test_races_of_strangers_are_looked_at(column: str, text: str, run: RunFolder) -> None:
    with Session.open(run) as session:
        session.keep_result("learned", RESULT)
    execute(run, f"UPDATE races SET {column} = ?", text)
    with pytest.raises(RlplaceError, match="race"):
        again(run)


def test_what_a_record_brings_that_is_kept_apart_does_not_count(run: RunFolder) -> None:
    with Session.open(run) as session:
        session.keep_result("learned", MethodResult())
    change(run.root, "method/learned", plan=3, learned={"save": 1}, races=[4])
    found = again(run).of("learned", 0.0)
    assert found is not None
    assert (found.plan, found.learned, found.races) == (None, None, ())


def test_text_is_no_record_of_another_kind(run: RunFolder) -> None:
    with Session.open(run) as session:
        session.keep(signature=to_json("ab"))
        assert session.fact("signature", str) == "ab"
        session._connection.execute("DELETE FROM facts WHERE name = 'signature'")
        assert session.fact("signature", str) is None
