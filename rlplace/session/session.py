"""`Session`: a run as one object with one store on disk: the request, its problem, measurements, learned figures, each
method's result, the final table and the best placement.

The store is one SQLite file, `session.db` in the run folder, or in memory for a run without a folder. Its tables are
those of a store of measurements, and three more: `facts` (records as JSON), `arrays` (safetensors, and files that a
library reads), and `races` (the measurements of each method). Every other file of a run folder is an output.
"""

from __future__ import annotations

import dataclasses
import shlex
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from rlplace.errors import FileProblem, FingerprintMismatch, UserError, refuse_if
from rlplace.files import LARGEST_JSON_BYTES, MOST_GRAPH_VALUES, check_values, parse_json
from rlplace.graphs import OpGraph
from rlplace.measure import Costs, Host, Measurement, Placement, Plan, Problem
from rlplace.measure.explain.explanation import Explanation
from rlplace.measure.host_model import LearnedHost
from rlplace.measure.hosts.host_file import host_from_dict
from rlplace.measure.placement import PlacedSplit
from rlplace.records import read_record, to_json
from rlplace.search.task import Saveable
from rlplace.session.calibrate import Known
from rlplace.session.folder import SESSION, RunFolder
from rlplace.session.prepare import Prepared, Steps, split_words, verdict_of
from rlplace.session.session_records import (
    Arrays,
    Ending,
    FinalTable,
    MethodResult,
    ProblemFacts,
    Race,
    Request,
    Verdict,
    array_of,
    arrays_of,
    checked_plan,
    with_arrays,
)
from rlplace.session.setup import CutOptions, ProblemOptions
from rlplace.store import MeasurementStore
from rlplace.store.database import RUN, Database
from rlplace.store.rows import Outcome, decode_timeline, encode_timeline, unpacked
from rlplace.workloads import parse_kept_workload

EVERY_S = 5.0
"""So long at least between two writes of results that are still changing ..."""
SHARE = 0.05
"""... and as long as keeps their share of the time below this."""
CALIBRATION = ""
"""The method of the race that calibrates the simulator: none."""

_REPLACING = "INSERT INTO {} VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value"

T = TypeVar("T")


class Session(Database):
    """A run, with its store.

    Attributes:
        path: of the store, for messages.
        measurements: of the run.

    Args:
        connection: to the store.
        path: see there.
        clock: seconds that never go back.
    """

    SCHEMAS = (RUN,)

    def __init__(
        self, connection: sqlite3.Connection, path: Path, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(connection, path)
        self.measurements, self._clock = MeasurementStore(connection, path), clock
        self._results: dict[str, MethodResult] = {}
        self._num_races: dict[str, int] = {}
        self._next_s = clock() + EVERY_S

    @classmethod
    def open(cls, run: RunFolder) -> Session:
        """The session of a run folder that is this process's, for writing; made where there is none.

        Raises:
            FileProblem: it cannot be written, or is no session of a run.
        """
        return cls.at(run.path(SESSION), is_writable=True)

    @classmethod
    def read(cls, folder: Path) -> Session:
        """The session of a run folder as it is now, which cannot be changed: safe for folders of strangers.

        Raises:
            FileProblem: there is no run, or its session cannot be read.
        """
        return cls.at(RunFolder.open(folder).path(SESSION), is_writable=False)

    # facts and arrays by name

    def fact(self, name: str, kind: type[T]) -> T | None:
        """The record under a name; None where there is none.

        Raises:
            InvalidValue, UnknownName: it is malformed.
        """
        text = self._text(name)
        return None if text is None else read_record(kind, text.encode("utf-8"), self._where(name))

    def plain(self, name: str) -> Any:
        """The object of the JSON under a name; None where there is none.

        Raises:
            FileProblem: it is no JSON.
        """
        text = self._text(name)
        return None if text is None else parse_json(text, self._where(name), most_values=MOST_GRAPH_VALUES)

    def keep(self, **facts: object) -> None:
        """Keeps records, each under its name, all or none.

        Raises:
            FileProblem: the store cannot be written, as for everything here that keeps something.
        """
        with self._writing() as execute:
            for name, value in facts.items():
                execute(_REPLACING.format("facts"), (name, value if isinstance(value, str) else to_json(value)))

    def file(self, name: str) -> bytes | None:
        """The bytes of a file that the session keeps, such as the weights of a policy."""
        data = self._value("arrays", f"file/{name}")
        return None if data is None else bytes(data)

    def keep_files(self, files: Mapping[str, bytes]) -> None:
        """Keeps files, all or none."""
        with self._writing() as execute:
            for name, data in files.items():
                execute(_REPLACING.format("arrays"), (f"file/{name}", data))

    # what was asked, and the problem

    @property
    def request(self) -> Request:
        """The request.

        Raises:
            FileProblem: the run was stopped before it was kept.
        """
        return self.required("request", Request)

    @property
    def facts(self) -> ProblemFacts:
        """Of the problem.

        Raises:
            FileProblem: the run was stopped before it had one.
        """
        return self.required("problem", ProblemFacts)

    def has(self, name: str) -> bool:
        """Whether there is a record under a name: `request`, `problem`, `table`, ..."""
        return self._text(name) is not None

    @property
    def host(self) -> Host:
        """Of the problem, with the figures that were measured.

        Raises:
            FileProblem: as `facts`.
        """
        return host_from_dict(self._kept("host", self.plain("host")), self._where("host"))

    @property
    def cut(self) -> tuple[int, CutOptions]:
        """The number of micro-batches of the step, and the options that cut it so again."""
        facts = self.facts
        verdict = None if facts.verdict is None else facts.verdict.kind
        return self.request.asked.again(facts.num_micro_batches, verdict, facts.split)

    @property
    def micro_batches(self) -> dict[str, Any]:
        """Micro-batches, as `--json` says them."""
        facts = self.facts
        return (
            self.request.asked.to_dict()
            | split_words(facts.split)
            | {
                "count": facts.num_micro_batches,
                "verdict": None if facts.verdict is None else dataclasses.asdict(facts.verdict),
                "op_order": facts.op_order,
                "evaluations": facts.evaluations,
            }
        )

    def keep_problem(self, prepared: Prepared) -> None:
        """Keeps a problem, and how its batch came to be cut."""
        problem, graph = prepared.problem, prepared.problem.graph
        verdict = verdict_of(graph)
        facts = ProblemFacts(
            graph.fingerprint,
            graph.num_edges,
            graph.num_micro_batches,
            None if verdict is None else Verdict(**verdict),
            problem.op_order,  # type: ignore[arg-type]  # checked by the record
            problem.costs.source,
            problem.grouping.rule,
            problem.grouping.dropped,
            prepared.evaluations,
            tuple(graph.names),
            tuple(graph.modules),
            PlacedSplit.of(graph),
            prepared.whole_s,
        )
        arrays: dict[str, NDArray[Any] | None] = {
            "op_time_s": problem.costs.op_time_s,
            "op_group": problem.grouping.op_group,
            "workspace_bytes": problem.costs.workspace_bytes,
            "allowed": None if problem.allowed is None else problem.group_allowed,
            "start": prepared.start,
        }
        with self._writing():
            self._keep_arrays("problem", {name: array for name, array in arrays.items() if array is not None})
            self.keep(problem=facts, host=to_json(problem.host.to_dict(), dict[str, Any]))

    @property
    def costs(self) -> Costs:
        """(N, D) of the problem.

        Raises:
            FileProblem: as `facts`.
            InvalidValue: they are not of the problem's ops and devices.
        """
        shape = self.facts.num_ops, self.host.num_devices
        times_s = self._kept("op_time_s", self._problem_array("op_time_s", np.float64, *shape))
        return Costs(times_s, self.facts.cost_source, self._problem_array("workspace_bytes", np.int64, *shape))

    @property
    def op_group(self) -> NDArray[np.int32]:
        """(N,) group of each op."""
        return self._kept("op_group", self._problem_array("op_group", np.int32, self.facts.num_ops))

    @property
    def allowed(self) -> NDArray[np.bool_] | None:
        """(N, D) devices where each op may run; None where each may run everywhere."""
        op_group = self.op_group
        shape = int(op_group.max(initial=-1)) + 1, self.host.num_devices
        allowed = self._problem_array("allowed", np.bool_, *shape)
        return None if allowed is None else allowed[op_group]

    def prepared(self, steps: Steps, config: ProblemOptions) -> Prepared:
        """The problem as it was profiled, of a step that is captured anew.

        Args:
            steps: of the workload.
            config: how ops are grouped, and where they may run.

        Raises:
            FileProblem: the run had no problem yet, or its groups are others now.
            FingerprintMismatch: the workload's graph, or the host, is another by now.
            InvalidValue: an array does not fit the problem.
        """
        facts, host = self.facts, self.host
        graph = steps.graph(facts.num_micro_batches, None if facts.split is None else facts.split.plan)
        self.require_graph(graph)
        if host.fingerprint != steps.host.fingerprint:
            raise FingerprintMismatch("host", host.fingerprint, steps.host.fingerprint)
        problem = Problem.grouped(
            graph,
            host,
            self.costs,
            config.num_groups,
            config.grouping,
            acyclic=config.acyclic,
            constraints=config.constraints,
        )
        if not np.array_equal(problem.grouping.op_group, self.op_group):
            raise FileProblem(self.path, "its groups are not those that its costs give now: start the run again.")
        problem = dataclasses.replace(problem, op_order=facts.op_order)
        start = self._problem_array("start", np.int32, graph.num_ops)
        start = None if start is None else problem.check_placement(start)
        return Prepared(problem, steps.asked, facts.evaluations, start, facts.whole_s)

    def require_graph(self, graph: OpGraph) -> None:
        """Checks that `graph` is the run's step.

        Raises:
            FingerprintMismatch: it is another.
        """
        if graph.fingerprint != self.facts.graph_fingerprint:
            error = FingerprintMismatch("graph", self.facts.graph_fingerprint[:40], graph.fingerprint)
            error.add_note("The model, PyTorch or rlplace is another since the run: train again.")
            raise error

    # what was measured and learned

    @property
    def known_hosts(self) -> tuple[LearnedHost, ...] | None:
        """The knowledge of the host when the run began; None before that was kept."""
        count = self.fact("known_hosts", int)
        places = range(count or 0)
        return None if count is None else tuple(self.required(f"known_host/{k}", LearnedHost) for k in places)

    def keep_known_hosts(self, known: tuple[LearnedHost, ...]) -> None:
        """Keeps the knowledge of the host: it must be the same when the run goes on."""
        named = {f"known_host/{place}": learned for place, learned in enumerate(known)}
        self.keep(**named, known_hosts=len(known))

    def calibration(self, problem: Problem) -> Known:
        """The measurements of calibration, in order; empty where it was not.

        Raises:
            FileProblem, InvalidValue, UnknownName: they are malformed.
        """
        races = list(self._races(CALIBRATION, problem))
        plans = [plan for race in races for plan in race.plans]
        return Known(problem, plans, [one for race in races for one in race.outcomes])

    def keep_calibration(self, known: Known) -> None:
        """Keeps the measurements of calibration."""
        with self._writing() as execute:
            execute(
                "DELETE FROM arrays WHERE name IN (SELECT 'race/' || id FROM races WHERE method = ?)", (CALIBRATION,)
            )
            execute("DELETE FROM races WHERE method = ?", (CALIBRATION,))
            self._keep_race(CALIBRATION, Race(tuple(known.plans), tuple(known.outcomes)))

    @property
    def learned(self) -> LearnedHost | None:
        """The host model that the run learned; None where it learned nothing."""
        return next(iter(self.measurements.learned_hosts()), None)

    # results of methods

    def begin(self, signature: str, *, is_resumed: bool) -> None:
        """Makes this the session of a problem and configuration, which `signature` stands for.

        Args:
            signature: 16 hex digits.
            is_resumed: go on from earlier results; otherwise they are deleted.

        Raises:
            FileProblem: the earlier results are of another problem or configuration.
        """
        before = self.fact("signature", str)
        if is_resumed and before is not None and before != signature:
            raise FileProblem(
                self.path,
                "the results of another problem, or with other options, than those that it is to go on with: start "
                "the run again in another folder.",
            )
        with self._writing() as execute:
            if before is not None and not is_resumed:
                execute("DELETE FROM facts WHERE name NOT IN ('request', 'config', 'problem', 'host')")
                execute("DELETE FROM arrays WHERE name != 'problem'")
                execute("DELETE FROM races")
            self.keep(signature=to_json(signature))

    def load_results(self, problem: Problem) -> None:
        """Reads the methods' earlier results; `results` knows it then with plans and races.

        Raises:
            FileProblem, InvalidValue, UnknownName: it is malformed, or does not fit the problem.
        """
        for name, result in self.results().items():
            where, races = self._where(name), list(self._races(name, problem))
            self._num_races[name], arrays = len(races), self._arrays(f"method/{name}")
            self._results[name] = with_arrays(result, arrays, [race for race in races if race.plans], problem, where)

    def results(self) -> dict[str, MethodResult]:
        """The methods' results by name, without plans and races."""
        apart: dict[str, Any] = {"plan": None, "learned": None, "races": (), "start": None, "unmeasured": None}
        # in the order in which they were first kept
        statement = "SELECT substr(name, 8) FROM facts WHERE name GLOB 'method/*' ORDER BY rowid"
        return {
            name: dataclasses.replace(self.required(f"method/{name}", MethodResult), **apart)
            for (name,) in self._selected(statement)
        }

    def of(self, method: str, budget: float) -> MethodResult | None:
        """The result of a method so far; None where it has not begun. With a larger budget it is not done any more."""
        result = self._results.get(method)
        is_extended = result is not None and result.budget < budget
        return dataclasses.replace(result, is_searched=False, is_done=False) if result and is_extended else result

    def spent_s(self, *, in_turn: bool) -> float:
        """Seconds that the methods have searched, one after another or side by side."""
        seconds = [result.seconds for result in self._results.values()]
        return sum(seconds) if in_turn else max(seconds, default=0.0)

    def bests(self) -> dict[str, tuple[Plan, float]]:
        """The best plan of each method so far, and its step time over the reference's: only ratios compare."""
        return {name: (one.plan, one.best_ratio) for name, one in self._results.items() if one.plan is not None}

    @property
    def is_due(self) -> bool:
        """Whether it is time to keep results that are still changing."""
        return self._clock() >= self._next_s

    def keep_result(self, method: str, result: MethodResult) -> None:
        """Keeps the result of a method so far; races that were kept before are not written again."""
        begin_s = self._clock()
        with self._writing():
            for race in result.races[self._num_races.get(method, 0) :]:
                self._keep_race(method, race)
            self._keep_arrays(f"method/{method}", arrays_of(result))
            self.keep(**{f"method/{method}": result})
        self._num_races[method] = max(len(result.races), self._num_races.get(method, 0))
        self._results[method] = result
        end_s = self._clock()
        self._next_s = end_s + max(EVERY_S, (end_s - begin_s) / SHARE)

    # the best placement, the table, the end

    @property
    def placement(self) -> Placement | None:
        """The best placement so far; None before the first.

        Raises:
            InvalidValue, UnknownName: it is malformed.
        """
        data = self.plain("placement")
        return None if data is None else Placement.from_dict(data, self._where("placement"))

    def best_placement(self) -> Placement:
        """As `placement`, checked against the problem.

        Raises:
            FileProblem: there is none yet.
            FingerprintMismatch: it is of another graph or host.
            InvalidValue: it has more or fewer ops or devices than the problem.
        """
        facts, host = self.facts, self.host
        placement = self._kept("placement", self.placement)
        for kind, actual, wanted in (
            ("graph", placement.graph_fingerprint, facts.graph_fingerprint),
            ("host", placement.host_fingerprint, host.fingerprint),
        ):
            if actual != wanted:
                raise FingerprintMismatch(kind, actual, wanted)
        refuse_if(
            len(placement.devices) != facts.num_ops or len(placement.device_names) != host.num_devices,
            "op_device",
            f"{len(placement.devices)} ops on {len(placement.device_names)} devices",
            f"{facts.num_ops} ops on {host.num_devices} devices, as in its problem",
            where=self._where("placement"),
        )
        return placement

    def keep_placement(self, placement: Placement) -> None:
        """Keeps the best placement so far."""
        self.keep(placement=to_json(placement.to_dict(), dict[str, Any]))

    @property
    def table(self) -> FinalTable | None:
        """The final table; None before it was made."""
        return self.fact("table", FinalTable)

    @property
    def ending(self) -> Ending | None:
        """When and how the table was made; None before that."""
        return self.fact("ending", Ending)

    @property
    def explanation(self) -> Explanation | None:
        """Where the time of the best placement's step goes; None where the run did not come so far."""
        data = self.plain("explanation")
        return None if data is None else Explanation.from_dict(data, self._where("explanation"))

    @property
    def timeline(self) -> Any:
        """One step of the best placement as a Chrome trace; None where the run did not come so far.

        Raises:
            FileProblem: it is malformed.
        """
        data = self.file("timeline.json")
        if data is None:
            return None
        where = self._where("timeline")
        try:
            text = unpacked(data, "timeline", LARGEST_JSON_BYTES, 1, where).decode("utf-8")
        except UnicodeDecodeError as error:
            raise FileProblem(where, f"no compressed JSON: {error}.") from error
        return parse_json(text, where, most_values=MOST_GRAPH_VALUES)

    def keep_timeline(self, text: str) -> None:
        """Keeps a step of the best placement, a Chrome trace as JSON."""
        self.keep_files({"timeline.json": zlib.compress(text.encode("utf-8"), 1)})

    @property
    def has_ended(self) -> bool:
        """Whether the run has come to its end."""
        return self.fact("has_ended", bool) is True

    # below the names

    def _where(self, name: str) -> str:
        return f"{self.path}: {name}"

    def _kept(self, name: str, found: T | None) -> T:
        """The content that was found under a name."""
        if found is None:
            raise FileProblem(
                self.path,
                f"this run has no {name}: it stopped before that was kept. Run it to the end: "
                f"`rlplace train --resume {self.path.parent}`, on the host that it had.",
            )
        return found

    def required(self, name: str, kind: type[T]) -> T:
        """As `fact`, of a record without which nothing goes on.

        Raises:
            FileProblem: the run was stopped before it was kept.
            InvalidValue, UnknownName: it is malformed.
        """
        return self._kept(name, self.fact(name, kind))

    def _value(self, table: str, name: str) -> Any:
        """Of a row of `facts` or `arrays`; None where there is none."""
        return next(
            (row["value"] for row in self._selected(f"SELECT value FROM {table} WHERE name = ?", (name,))), None
        )

    def _text(self, name: str) -> str | None:
        text = self._value("facts", name)
        if text is not None:
            check_values(text, self._where(name), MOST_GRAPH_VALUES)
        return None if text is None else str(text)

    def _problem_array(self, name: str, kind: type[np.generic], *shape: int) -> NDArray[Any] | None:
        """An array of the problem; None where it has none of this name."""
        arrays = self._arrays("problem")
        return array_of(arrays, name, kind, shape, self._where("problem")) if name in arrays else None

    def _arrays(self, name: str) -> dict[str, NDArray[Any]]:
        data = self._value("arrays", name)
        try:
            return {} if data is None else load(bytes(data))
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise FileProblem(self._where(name), f"no arrays: {error}.") from error

    def _keep_arrays(self, name: str, arrays: Arrays) -> None:
        data = save({each: np.ascontiguousarray(array) for each, array in arrays.items()})
        self._connection.execute(_REPLACING.format("arrays"), (name, data))

    def raced(self, method: str) -> Iterator[tuple[int, bool, tuple[str, ...], tuple[Outcome, ...]]]:
        """Number of each race of a method, whether it was the last, fingerprints of its plans and their outcomes."""
        statement = "SELECT id, is_final, plans, outcomes FROM races WHERE method = ? ORDER BY id"
        for number, is_final, *texts in self._selected(statement, (method,)):
            where = self._where(f"race {number}")
            plans = read_record(tuple[str, ...], str(texts[0]), where)
            outcomes = read_record(tuple[Outcome, ...], str(texts[1]), where)
            refuse_if(
                len(plans) != len(outcomes),
                "outcomes",
                f"{len(outcomes)} of them",
                f"{len(plans)}, one a plan",
                where=where,
            )
            yield number, bool(is_final), plans, outcomes

    def _races(self, method: str, problem: Problem) -> Iterator[Race]:
        """Races of a method, without plans that are not known any more or do not fit the problem."""
        where = self._where(method)
        for number, is_final, plans, outcomes in self.raced(method):
            found, timelines = list[tuple[Plan, Measurement]](), self._arrays(f"race/{number}")
            for place, (name, outcome) in enumerate(zip(plans, outcomes, strict=True)):
                packed = timelines.get(str(place))
                with suppress(UserError):
                    plan = checked_plan(problem, self.measurements.plan(name), where)
                    timeline = None if packed is None else decode_timeline(packed.tobytes(), plan, problem, where)
                    found.append((plan, dataclasses.replace(outcome.measurement, timeline=timeline)))
            yield Race(tuple(plan for plan, _ in found), tuple(outcome for _, outcome in found), is_final)

    def _keep_race(self, method: str, race: Race) -> None:
        for plan in race.plans:
            self.measurements.add_plan(plan)
        plans = to_json(tuple(plan.fingerprint for plan in race.plans))
        outcomes = to_json(tuple(map(Outcome.of_measurement, race.outcomes)), tuple[Outcome, ...])
        number = self._connection.execute(
            "INSERT INTO races (method, is_final, plans, outcomes) VALUES (?, ?, ?, ?)",
            (method, race.is_final, plans, outcomes),
        ).lastrowid
        timelines = {
            str(place): np.frombuffer(encode_timeline(outcome.timeline), dtype=np.uint8)
            for place, outcome in enumerate(race.outcomes)
            if outcome.timeline is not None
        }
        if timelines:
            self._keep_arrays(f"race/{number}", timelines)


class MethodKeeper:
    """A session, for one method of a run.

    Args:
        session: of the run.
        method: its name.
        keep_learned: keeps the learned policy or host model.
    """

    def __init__(self, session: Session, method: str, keep_learned: Callable[[Saveable], None]) -> None:
        self._session, self._method, self._keep_learned = session, method, keep_learned

    @property
    def is_due(self) -> bool:
        """Whether it is time to keep a result that is still changing."""
        return self._session.is_due

    def keep(self, result: MethodResult) -> None:
        """Keeps the method's result so far, and its policy or host model.

        Raises:
            FileProblem: the store cannot be written.
        """
        if result.learned is not None:
            self._keep_learned(result.learned)
        self._session.keep_result(self._method, result)


def read_explanation(folder: Path) -> Explanation:
    """The explanation that a run left in its folder; needs neither its model nor its host.

    Raises:
        FileProblem: no such run, or one without an explanation.
        InvalidValue, UnknownName: a malformed file.
    """
    with Session.read(folder) as session:
        explanation, request = session.explanation, session.fact("request", Request)
    if explanation is None:
        own = [] if request is None else _named_again(request.workload)
        command = shlex.join(["rlplace", "train", *own, "--resume", str(folder)])
        raise FileProblem(
            folder, f"this run has no explanation: it stopped before its end. Go on with it: `{command}`."
        )
    return explanation


def _named_again(kept: str) -> list[str]:
    """The word that names a run's workload again where it goes on, unless the run folder is believed."""
    try:
        parse_kept_workload(kept, None, where="", command="")
    except UserError:
        return [kept]
    return []
