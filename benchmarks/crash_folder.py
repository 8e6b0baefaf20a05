"""The contents of a run folder, each file read by its own reader; `crash.py` compares them before and after a kill."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from safetensors.numpy import load as load_tensors

from rlplace.files import PARTIAL_ENDING, read_json
from rlplace.locks import LOCK_FILE
from rlplace.measure import Plan, Problem, Simulator, load_placement, resolve_host
from rlplace.measure.explain.explanation import load_explanation
from rlplace.measure.host_model import load_learned_host
from rlplace.session.folder import SESSION
from rlplace.session.prepare import Steps
from rlplace.session.session import CALIBRATION, Session
from rlplace.session.setup import WHOLE
from rlplace.training import TrainConfig
from rlplace.workloads import parse_workload

PLACEMENT, RESULT = "placement.json", "result.json"
FLEETING = ("durations", "time", "seconds")
"""Fields of a result that differ from run to run."""
_PNG = b"\x89PNG\r\n\x1a\n", b"IEND\xaeB`\x82"


@dataclass(frozen=True)
class Found:
    """The contents of a folder.

    Attributes:
        corrupt: the error of each file that cannot be read.
        rows: every measurement of its session, as text.
        best: of the session's placement: the simulated step time, or where it was measured the ratio to the reference
            placement; infinite where there is none.
    """

    corrupt: tuple[str, ...] = ()
    rows: frozenset[str] = field(default_factory=frozenset)
    best: float = math.inf


def simulator_of(workload: str, host: str) -> Simulator | None:
    """The simulator of a run's problem; None where step times are measured."""
    found = resolve_host(host)
    if not found.is_simulated:
        return None
    return Simulator(Problem.estimate(Steps(parse_workload(workload), found, 0, WHOLE).graph(1), found), threads=1)


def look(folder: Path, simulator: Simulator | None) -> Found:
    """Reads everything in a run folder.

    Args:
        folder: of the run; it may not be there yet.
        simulator: of its problem; None where it is measured.
    """
    corrupt, rows, plan = [], list[dict[str, Any]](), None
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.name == LOCK_FILE or path.name.endswith((PARTIAL_ENDING, "-wal", "-shm", "-journal")):
            continue
        reader = READERS.get(path.name) or READERS.get(path.suffix)
        try:
            if reader is None:
                raise ValueError("nobody reads this file")
            found = reader(path)
        except Exception as error:  # whatever it is, the file cannot be read
            corrupt.append(f"{path.name}: {type(error).__name__}: {error}")
            continue
        if path.name == SESSION:
            rows, plan = found
    best = math.inf if plan is None else _best(plan, simulator, rows)
    return Found(tuple(corrupt), frozenset(json.dumps(row, sort_keys=True) for row in rows), best)


def answer(folder: Path) -> dict[str, Any]:
    """The placement and the results of a run, without the fields that differ from run to run."""
    found = {PLACEMENT: read_json(folder / PLACEMENT), RESULT: _lasting(read_json(folder / RESULT))}
    with Session.read(folder) as session:
        placement, table = session.placement, session.table
    kept = [placement and placement.to_dict(), table and _lasting([row.to_dict() for row in table.rows])]
    return found | {SESSION: kept}


def final_ratio(folder: Path) -> float:
    """The step time of the best placement over that of the best single device, in the final table."""
    result = read_json(folder / RESULT)
    (single_s,) = (row["step_time_s"] for row in result["rows"] if row["method"] == "single")
    return float(result["best"]["step_time_s"]) / float(single_s)


def _lasting(data: Any) -> Any:
    if isinstance(data, dict):
        kept = {name: _lasting(value) for name, value in data.items() if name not in FLEETING}
        if "history" in kept:  # evaluations, measurements, seconds, step time
            kept["history"] = [[*row[:2], *row[3:]] for row in kept["history"]]
        return kept
    return [_lasting(item) for item in data] if isinstance(data, list) else data


def _best(plan: Plan, simulator: Simulator | None, rows: list[dict[str, Any]]) -> float:
    if simulator is not None:
        return simulator.retime(plan).step_time_s
    return median([row["ratio"] for row in rows if row["plan"] == plan.fingerprint and row["ratio"]] or [math.inf])


def _read_session(path: Path) -> tuple[list[dict[str, Any]], Plan | None]:
    """The measurements and the best plan of a run, everything else of its session read as well."""
    with Session.read(path.parent) as session:
        store = session.measurements
        rows = [row.to_dict() for row in store.measurements()]
        for plan in {str(row["plan"]) for row in rows}:
            store.plan(plan)
        store.learned_hosts()
        if session.has("request"):  # a run may be killed before it has anything
            _ = session.request, session.fact("config", TrainConfig)
        if session.has("problem"):
            _ = session.facts, session.host, session.costs, session.op_group, session.allowed
        _ = session.known_hosts, session.table, session.ending, session.explanation
        _ = session.timeline, session.has_ended
        for method in (CALIBRATION, *session.results()):
            for _, _, plans, _ in session.raced(method):
                for plan in plans:
                    store.plan(plan)
        placement = session.placement
    return rows, None if placement is None else placement.plan


def _read_png(path: Path) -> None:
    content = path.read_bytes()
    if not (content.startswith(_PNG[0]) and content.endswith(_PNG[1])):
        raise ValueError("not a whole picture")


def _read_page(path: Path) -> None:
    if not path.read_text(encoding="utf-8").rstrip().endswith("</html>"):
        raise ValueError("not a whole page")


READERS: dict[str, Callable[[Path], Any]] = {
    PLACEMENT: load_placement,
    SESSION: _read_session,
    "explanation.json": load_explanation,
    "host_model.json": load_learned_host,
    ".json": read_json,
    ".safetensors": lambda path: load_tensors(path.read_bytes()),
    ".png": _read_png,
    ".html": _read_page,
    ".csv": lambda path: path.read_text(encoding="utf-8"),
    ".py": lambda path: ast.parse(path.read_text(encoding="utf-8")),
}
"""The reader of a file, by its name or its ending."""
