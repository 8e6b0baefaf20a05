"""The files of a finished run, made up: two devices, eight ops a module, whatever names are asked for."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from stored import SESSION

from rlplace.files import write_json_atomic
from rlplace.measure.host_model import LearnedHost, Prior
from rlplace.measure.host_model.learned_host import LearnedFactor
from rlplace.report.html.run_data import RunData
from rlplace.search.task import BestSoFar
from rlplace.session.folder import SESSION as SESSION_FILE
from rlplace.session.folder import RunFolder
from rlplace.session.session import Session
from rlplace.session.session_records import Ending, FinalTable, MethodResult, ProblemFacts, Request, Row

PHASES = ("forward", "backward", "update")
HOSTILE = (
    "<script>document.title='broken'</script>",
    "</script><script>document.title='broken'</script>",
    '"><img src=x onerror="document.title=\'broken\'">',
    "javascript:document.title='broken'",
    '<a href="https://example.com/x">link</a>',
    "%{hovertext} ${title} $title {0}",
    "<!--<script>",
    "&lt;b&gt; \u202e\u2028\x00\x1b[31m",
    "__proto__",
    "@ink",
    "a" * 5000,
)
"""Names that would break a page which trusts them."""


def trace_of(names: Sequence[str], modules: Sequence[str], devices: Sequence[str]) -> dict[str, Any]:
    """A Chrome trace in which each op takes 1 ms on the next device, and each second one is sent to the other."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "measured"}}]
    rows = [*devices, "->".join(devices[:2])] if len(devices) > 1 else [*devices]
    events += [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 100 + row, "args": {"name": name}}
        for row, name in enumerate(rows)
    ]
    for index, (name, module) in enumerate(zip(names, modules, strict=True)):
        slice_of = {"ph": "X", "pid": 1, "ts": 1000.0 * index, "dur": 1000.0, "name": name}
        facts = {"target": "aten.op.default", "module": module, "bytes": 1024}
        phase = PHASES[min(3 * index // len(names), 2)]
        events.append({**slice_of, "cat": phase, "tid": 100 + index % len(devices), "args": facts})
        if index % 2 == 0 and len(devices) > 1:
            ends = {"from": devices[0], "to": devices[1], "tensor": index}
            at = {"ts": 1000.0 * index + 1000.0, "dur": 250.0, "tid": 100 + len(devices), "cat": "transfer"}
            events.append({**slice_of, **at, "args": {**facts, **ends}})
    for device in devices:
        events += [
            {"ph": "C", "name": f"memory {device}", "pid": 1, "ts": 500.0 * k, "args": {"bytes": 1 << (20 + k % 5)}}
            for k in range(2 * len(names))
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {}}


def explanation_of(names: Sequence[str], devices: Sequence[str]) -> dict[str, Any]:
    """An explanation as `explanation.json` has it."""
    first, second = names[0], names[1 % len(names)]
    return {
        "schema": 1, "graph_fingerprint": "f", "host": devices[0], "method": "portfolio", "kind": "measured",
        "step_time_s": 0.02, "explained_s": 0.021, "bound_s": 0.01, "bound": "load", "num_ops": 24,
        "num_micro_batches": 1, "num_transfers": 12, "transfer_bytes": 12288,
        "devices": [
            {"name": name, "kind": "cpu-core", "num_ops": 12, "busy_s": 0.012, "transfer_s": 0.003, "idle_s": 0.006,
             "sent_bytes": 1024, "received_bytes": 0, "peak_bytes": 1 << 24, "capacity_bytes": 1 << 30}
            for name in devices
        ],
        "path": {
            "parts": [{"kind": "wait", "start_s": 0.0, "end_s": 0.021, "device": devices[0], "name": first,
                       "module": second, "phase": "forward"}],
            "op_s": 0.018, "transfer_s": 0.002, "wait_s": 0.001,
            "modules": [{"module": name, "phase": "forward", "seconds": 0.001, "num_ops": 2} for name in names[:20]],
            "routes": [{"source": devices[0], "destination": devices[-1], "seconds": 0.002, "num_transfers": 3,
                        "num_bytes": 300}],
        },
        "cuts": [{"op": first, "module": second, "what": "activation", "reader": second, "reader_module": first,
                  "num_readers": 3, "source": devices[0], "destination": devices[-1], "num_bytes": 4096,
                  "start_s": 0.001, "seconds": 0.0005, "is_critical": True}],
        "memory": [],
        "alternatives": [
            {"name": "one device", "step_time_s": 0.03, "kind": "measured", "note": first},
            {"name": "data parallel", "step_time_s": None, "kind": "estimated", "note": "it does not fit"},
        ],
        "advice": {"rule": "place", "sentence": f"Keep this placement, {first}."},
    }  # fmt: skip


def rows_of(others: Sequence[str] = ()) -> list[dict[str, Any]]:
    """A table: a search ahead of heuristics, plain PyTorch, a row that failed, and one more for each of `others`."""
    timed = [("single", 0.030), ("heft", 0.024), ("learned", 0.021), ("portfolio", 0.020)]
    rows = [
        {"method": method, "placement": True, "placements": 7, "step_time_s": step_s, "spread_s": 0.001,
         "samples": 25, "status": "ok", "history": [], "measured": 5 if method in ("learned", "portfolio") else None}
        for method, step_s in timed
    ]  # fmt: skip
    rows.append({"method": "blocks", "step_time_s": None, "status": "oom", "why": "cpu:0 is full"})
    rows += [{"method": name, "step_time_s": 0.04, "status": "ok", "why": name} for name in others]
    rows.append({"method": "eager", "placement": False, "placements": 0, "step_time_s": 0.025, "status": "ok"})
    return rows


SEARCH: dict[str, Any] = {
    "num_scored": 900, "num_measured": 5, "seconds": 12.0, "single_s": 0.03,
    "history": (BestSoFar(10, 1, 2.0, 0.025), BestSoFar(400, 4, 9.0, 0.020)),
    "tried": ((0.020, 0.021), (0.022, 0.024), (0.019, 0.020), (0.030, 0.027)),
}  # fmt: skip
VERDICT = {"kind": "separate", "is_checked": True, "why": "checked"}


def host_of(devices: Sequence[str]) -> dict[str, Any]:
    """A host of such devices, as host files have it."""
    facts = [{"name": name, "kind": "cpu-core", "backend": "cpu", "memory_bytes": 1 << 30, "memory_pool": "ram"}
             for name in devices]  # fmt: skip
    links = [{"name": f"link {k}", "bandwidth_bytes_per_s": 1e9} for k in range(len(devices) ** 2)]
    pairs = [(one, other) for one in devices for other in devices if one != other]
    routes = [{"source": one, "destination": other, "links": [f"link {k}"]} for k, (one, other) in enumerate(pairs)]
    return {"name": "cores", "devices": facts, "links": links[: len(pairs)], "routes": routes}


def learned_of(name: str) -> LearnedHost:
    """What was learned of a host: one op type is slow."""
    factor = LearnedFactor("op type", name, 0.2, 0.05, 0.5)
    return LearnedHost("cores", "12345678abcdef00", "profiled", Prior(), (factor,), (f"{name} is slow",))


def result_session(
    folder: Path,
    rows: Sequence[Mapping[str, Any]],
    best: str,
    *,
    names: Sequence[str] = ("op",),
    modules: Sequence[str] = ("",),
    devices: Sequence[str] = ("cpu:0", "cpu:1"),
    workload: str = "inception_v3@small",
) -> Session:
    """The session of a run in a folder, made up: its request, problem, table and searches."""
    with closing(RunFolder.create(folder)) as run:
        session = Session.open(run)
    train = {"budget_s": 60.0, "seed": 3, "search": {"method": "learned"}, "learn": {"policy": "placer"}}
    facts = ProblemFacts(
        "0" * 16, 30, 1, None, "rank", "profiled", "none", (), 0, tuple(names), tuple(modules),
    )  # fmt: skip
    session.keep(
        request=Request(workload, "auto", "0" * 16, "small", versions={"torch": "2"}),
        config=json.dumps(train),
        problem=facts,
        host=json.dumps(host_of(devices)),
        table=FinalTable(tuple(Row.of({"history": (), **row}) for row in rows), best, {}),
        ending=Ending(True, 1.8e9, {"search_s": 60.0, "calibration_s": 0.0}, {"search_s": 75.0}),
        **{f"method/{name}": MethodResult(**SEARCH) for name in ("learned", "portfolio")},
    )
    return session


def write_run(
    folder: Path,
    *,
    workload: str = "inception_v3@small",
    names: Sequence[str] = tuple(f"op_{k}" for k in range(24)),
    modules: Sequence[str] = tuple(f"part{k % 6}.layer{k % 2}.conv" for k in range(24)),
    devices: Sequence[str] = ("cpu:0", "cpu:1"),
    others: Sequence[str] = (),
) -> Path:
    """Writes a run with everything in it, and returns where."""
    words = {"names": names, "modules": modules, "devices": devices, "workload": workload}
    with result_session(folder, rows_of(others), "portfolio", **words) as session:  # type: ignore[arg-type]
        session.keep_timeline(json.dumps(trace_of(names, modules, devices)))
        session.keep(explanation=json.dumps(explanation_of(names, devices)), has_ended=True)
        store = session.measurements
        store.add_learned(SESSION, "12345678abcdef00", learned_of(names[0]))
    for name in ("config.json", "result.json"):
        write_json_atomic(folder / name, {"schema": 1})
    return folder


def retable(folder: Path, rows: Sequence[Mapping[str, Any]] | None = None, best: str | None = None) -> None:
    """Gives a run's session other rows, or another best."""
    with Session.open(RunFolder(folder)) as session:
        table = session.table
        assert table is not None
        made = table.rows if rows is None else tuple(Row.of({"history": (), **row}) for row in rows)
        session.keep(table=FinalTable(made, table.best if best is None else best, {}))


def change(folder: Path, name: str, /, **fields: object) -> None:
    """Sets fields of one of the records of a run's session."""
    with sqlite3.connect(folder / SESSION_FILE) as database:
        (text,) = database.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        changed = json.dumps(json.loads(text) | fields)
        database.execute("UPDATE facts SET value = ? WHERE name = ?", (changed, name))
    database.close()


def forget(folder: Path, name: str) -> None:
    """Removes one of the records of a run's session."""
    with sqlite3.connect(folder / SESSION_FILE) as database:
        database.execute("DELETE FROM facts WHERE name = ?", (name,))
    database.close()


def forget_files(folder: Path) -> None:
    """Removes the arrays and files of a run's session, its timeline among them."""
    with sqlite3.connect(folder / SESSION_FILE) as database:
        database.execute("DELETE FROM arrays")
    database.close()


def data_of(config: Mapping[str, Any], result: Mapping[str, Any], **parts: Any) -> RunData:
    """What a report shows, of rows as `result.json` has them."""
    rows = tuple(Row.of({"history": (), **row}) for row in result["rows"])
    told = result.get("durations", {})
    return RunData(
        config,
        rows,
        result.get("best", {}).get("method", ""),
        Ending(result.get("measured", False), result.get("time", 0.0), told.get("expected", {}), told.get("taken", {})),
        **parts,
    )


def run_data(folder: Path) -> RunData:
    """What a report shows of the run in a folder."""
    with Session.read(folder) as session:
        return RunData.of(session)


def hostile_run(folder: Path) -> Path:
    """A run in which everything that can have a name has a hostile one."""
    names = [HOSTILE[k % len(HOSTILE)] for k in range(24)]
    return write_run(
        folder,
        workload=HOSTILE[0],
        names=names,
        modules=[f"{name}.{names[(k + 1) % 24]}" for k, name in enumerate(names)],
        devices=(HOSTILE[2], HOSTILE[4]),
        others=HOSTILE,
    )
