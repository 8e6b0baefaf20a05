"""`Journal`: what a run keeps comes back as it was, and what does not belong to it is refused."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load, save
from search_problems import chain_problem

from rlplace.errors import FileProblem, RlplaceError
from rlplace.measure.host_model import LearnedHost, Posterior, Scales, prior_of
from rlplace.measure.measurement import Measurement
from rlplace.measure.plan import Plan
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.task import BestSoFar, Failure
from rlplace.session.calibrate import Known
from rlplace.session.folder import RunFolder
from rlplace.training.config import TrainConfig
from rlplace.training.resume.journal import EVERY_S, FILE, Journal, is_finished, mark_finished
from rlplace.training.resume.kept import RECORDS
from rlplace.training.resume.state import MethodState, Race, Unmeasured
from rlplace.training.table import Table

PROBLEM = chain_problem(5, 2)
CONFIG = TrainConfig(seed=3)
SIMULATOR = Simulator(PROBLEM, threads=1)


def plan(*devices: int) -> Plan:
    return SIMULATOR.plan(np.array(devices, dtype=np.int32))


PLANS = {one.fingerprint: one for one in (plan(0, 0, 0, 0, 0), plan(0, 1, 1, 1, 1), plan(1, 1, 0, 0, 0))}
FIRST, SECOND, THIRD = PLANS.values()
OK = Measurement("ok", 2.0, (1.5, 2.0, 2.5), (7, 9), "", 4.0)
BAD = Measurement("oom", math.inf, (), (7, 99), "too much")
STATE = MethodState(
    10.0,
    4.0,
    300,
    3,
    8.0,
    (BestSoFar(20, 1, 1.0, 6.0), BestSoFar(90, 3, 3.5, 4.0)),
    ({"loss": 0.5, "mean": math.nan},),
    ((3.5, 4.0),),
    (Race((FIRST, SECOND), (OK, BAD)), Race((SECOND,), (OK,), is_final=True)),
    SECOND,
    np.array([0, 0, 1, 1, 1], dtype=np.int32),
    Unmeasured(np.array([[1, 1, 1, 1, 1], [1, 0, 1, 0, 1]], dtype=np.int32), np.array([1.25, 2.5])),
    is_searched=True,
    failure=Failure("ValueError: no", "Traceback ..."),
)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run")


def again(run: RunFolder, config: TrainConfig = CONFIG, plan_of: Callable[[str], Plan | None] = PLANS.get) -> Journal:
    return Journal(run, PROBLEM, config, is_resumed=True, plan_of=plan_of)


def same(one: MethodState | None, other: MethodState) -> bool:
    """Whether they are equal, field by field."""
    if one is None or one.start is None or one.unmeasured is None or one.plan is None:
        return False
    races = [([p.fingerprint for p in race.plans], race.outcomes, race.is_final) for race in one.races]
    assert races == [([p.fingerprint for p in race.plans], race.outcomes, race.is_final) for race in other.races]
    assert other.plan is not None
    assert other.start is not None
    assert other.unmeasured is not None
    assert one.plan.fingerprint == other.plan.fingerprint
    assert np.array_equal(one.start, other.start)
    assert np.array_equal(one.unmeasured.devices, other.unmeasured.devices)
    assert np.array_equal(one.unmeasured.simulated_s, other.unmeasured.simulated_s)
    assert [best.seconds for best in one.history] == [best.seconds for best in other.history]
    assert str(one.learning) == str(other.learning)
    rest = {"races": (), "plan": None, "start": None, "unmeasured": None, "learning": ()}
    return dataclasses.replace(one, **rest) == dataclasses.replace(other, **rest) or str(
        dataclasses.replace(one, **rest)
    ) == str(dataclasses.replace(other, **rest))


def test_all_of_it_comes_back(run: RunFolder) -> None:
    learned = LearnedHost.of(Posterior.prior(Scales(PROBLEM, prior_of(PROBLEM))))
    table = Table(
        (
            {"method": "heft", "placement": True, "placements": 2, "history": [[1, 0, 0.5, 2.0]], "step_time_s": 2.0}
            | {"spread_s": 0.1, "samples": 3, "status": "ok"},
            {"method": "eager", "placement": False, "placements": 0, "history": [], "step_time_s": None}
            | {"spread_s": None, "status": "skipped", "why": "no values"},
        ),
        "heft",
        {"heft": FIRST},
    )
    journal = Journal(run, PROBLEM, CONFIG)
    assert not journal.is_resumed
    assert journal.known_hosts is None
    journal.keep_known_hosts((learned,))
    journal.keep_calibration(Known(PROBLEM, [FIRST, SECOND, FIRST], [OK, BAD, OK]))
    journal.keep("learned", STATE)
    journal.keep_table(table)
    found = again(run)
    assert found.is_resumed
    assert found.known_hosts == (learned,)
    calibrated = [(FIRST.fingerprint, OK), (SECOND.fingerprint, BAD), (FIRST.fingerprint, OK)]
    assert list(found.calibration) == calibrated
    assert same(found.of("learned", 10.0), STATE)
    assert found.of("portfolio", 10.0) is None
    ((name, (best, ratio)),) = found.bests().items()
    assert (best.fingerprint, name, ratio) == (SECOND.fingerprint, "learned", 0.5)
    told = found.table({"heft": FIRST})
    assert told is not None
    assert (told.rows, told.best) == (table.rows, table.best)
    assert found.table({"heft": SECOND}) is None
    assert not is_finished(run)
    mark_finished(run)
    assert is_finished(run)
    assert same(again(run).of("learned", 10.0), STATE)


def test_with_a_larger_budget_a_method_is_not_done_any_more(run: RunFolder) -> None:
    Journal(run, PROBLEM, CONFIG).keep("learned", dataclasses.replace(STATE, is_done=True))
    same_budget, larger = again(run).of("learned", 10.0), again(run).of("learned", 11.0)
    assert same_budget is not None
    assert same_budget.is_done
    assert larger is not None
    assert (larger.is_done, larger.is_searched, larger.seconds) == (False, False, 4.0)


def test_measurements_whose_plans_are_lost_are_left_out(run: RunFolder) -> None:
    Journal(run, PROBLEM, CONFIG).keep("learned", STATE)
    found = again(run, plan_of=lambda name: FIRST if name == FIRST.fingerprint else None).of("learned", 10.0)
    assert found is not None
    assert [[p.fingerprint for p in race.plans] for race in found.races] == [[FIRST.fingerprint]]
    assert found.plan is not None


def test_what_nothing_presses_for_is_due_now_and_then(run: RunFolder) -> None:
    now_s = [0.0]
    journal = Journal(run, PROBLEM, CONFIG, clock=lambda: now_s[0])
    assert not journal.is_due
    now_s[0] = EVERY_S
    assert journal.is_due
    journal.keep("learned", STATE)
    assert not journal.is_due
    assert not Journal(None, PROBLEM, CONFIG, clock=lambda: 1e9).is_due


def test_without_a_folder_nothing_is_kept() -> None:
    journal = Journal(None, PROBLEM, CONFIG)
    journal.keep("learned", STATE)
    assert journal.of("learned", 10.0) is None


@pytest.mark.parametrize("change", [{"seed": 4}, {"num_groups": 3}])
def test_the_progress_of_another_run_is_refused(change: dict[str, int], run: RunFolder) -> None:
    Journal(run, PROBLEM, CONFIG).keep("learned", STATE)
    with pytest.raises(FileProblem, match="another problem, or with other options"):
        again(run, dataclasses.replace(CONFIG, **change))
    again(run, dataclasses.replace(CONFIG, budget_s=900.0, isolated=False, store="off"))


def records(path: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads(load(path.read_bytes())[RECORDS].tobytes())
    return found


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("learned.plan.devices", np.array([0, 1, 1, 1, 7], dtype=np.int32)),
        ("learned.plan.devices", np.array([0, 1], dtype=np.int32)),
        ("learned.plan.devices", np.zeros((5, 5), dtype=np.int32)),
        ("learned.plan.sequence", np.array([5, 4, 3, 2, 1, 0], dtype=np.int32)),
        ("learned.plan.sequence", np.array([0, 0, 0, 0, 0, 0], dtype=np.int32)),
        ("learned.plan.sequence", np.array([-1, 1, 2, 3, 4, 5], dtype=np.int32)),
        ("learned.plan.transfer_tensor", np.array([4000], dtype=np.int32)),
        ("learned.plan.transfer_destination", np.zeros(3, dtype=np.int32)),
        ("learned.start", np.array([0.5], dtype=np.float64)),
        ("learned.start", np.zeros(3, dtype=np.uint8)),
        ("learned.candidates", np.zeros((2, 9), dtype=np.uint8)),
        ("learned.simulated_s", np.zeros(9)),
        (RECORDS, np.zeros(4)),
        (RECORDS, np.array([255, 254], dtype=np.uint8)),
        (RECORDS, np.frombuffer(b"[1]", dtype=np.uint8)),
        ("known_hosts", np.frombuffer(b"[[", dtype=np.uint8)),
        ("known_hosts", np.frombuffer(b'[{"host": 3}]', dtype=np.uint8)),
    ],
)
def test_arrays_of_strangers_are_looked_at(name: str, array: np.ndarray, run: RunFolder) -> None:
    Journal(run, PROBLEM, CONFIG).keep("learned", STATE)
    arrays = load(run.path(FILE).read_bytes())
    run.path(FILE).write_bytes(save({**arrays, name: array}))
    with pytest.raises(RlplaceError):
        again(run)


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"problem": 3},
        {"more": 1},
        {"methods": {"learned": {}}},
        {"methods": []},
        {"calibration": {"plans": ["a"], "outcomes": []}},
        {"table": {"plans": {}, "rows": [], "best": "none"}},
        {"is_finished": "yes"},
    ],
)
def test_records_of_strangers_are_looked_at(change: dict[str, object], run: RunFolder) -> None:
    Journal(run, PROBLEM, CONFIG).keep("learned", STATE)
    arrays, text = load(run.path(FILE).read_bytes()), json.dumps(records(run.path(FILE)) | change)
    arrays[RECORDS] = np.frombuffer(text.encode(), dtype=np.uint8)
    run.path(FILE).write_bytes(save(arrays))
    with pytest.raises(RlplaceError):
        again(run)


@pytest.mark.parametrize("data", [b"", b"x" * 100, b"\xff" * 8, (1 << 60).to_bytes(8, "little")])
def test_a_file_that_is_none_is_named(data: bytes, run: RunFolder) -> None:
    run.path(FILE).write_bytes(data)
    with pytest.raises(FileProblem, match=FILE):
        again(run)
