"""From the words of a command to a problem: its graph, costs and groups, and how its batch is cut.

`Steps` builds and captures a workload, `prepare` makes its problem, with the number of micro-batches that the user
asked for, or the best one where that is `auto`. `is_cut_faster`: whether micro-batches that were chosen by simulation
also pay on this machine, in one race.

`judge_twin`: how micro-batches make the loss of a workload that was built without values, found on a twin with values:
the small size of a named workload, a second call of a user's function.
"""

from __future__ import annotations

import contextlib
import functools
import math
import platform
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils import _pytree as pytree

from rlplace import __version__
from rlplace.errors import CaptureError, InvalidValue, RunnerError, UserError, refuse_if
from rlplace.graphs import Constraints, OpGraph, capture
from rlplace.graphs.capturing.capture import as_call, checked
from rlplace.graphs.capturing.refusals import has_values
from rlplace.graphs.capturing.trace import kept_traces
from rlplace.graphs.micro_batching.loss_verdict import judge_loss, unchecked
from rlplace.graphs.micro_batching.slices import BatchDims, plan_slices
from rlplace.graphs.program import LossVerdict, SplitPlan, SplitReport
from rlplace.locks import measuring_alone
from rlplace.measure import Costs, Host, Problem, RaceProtocol, Simulator
from rlplace.measure.costs.costs import estimate_costs
from rlplace.measure.hosts.resolve import check_present
from rlplace.measure.isolate.isolated_runner import make_runner, profile_isolated
from rlplace.measure.placement import PlacedSplit
from rlplace.measure.timing.verdict import judge
from rlplace.say import Say, counted, format_seconds, sayer
from rlplace.search import Budget, find
from rlplace.search.rules.baselines import best_gang, best_single, without_gangs
from rlplace.session.setup import AUTO, NO_SPLIT, WHOLE, CutOptions, ProblemOptions, number_only
from rlplace.workloads import CATALOG, Workload, WorkloadSpec, build, build_for, default_size


def capture_workload(
    workload: Workload,
    count: int = 1,
    asked: CutOptions = WHOLE,
    verdict: LossVerdict | None = None,
    split: SplitPlan | None = None,
) -> OpGraph:
    """The graph of a workload's step.

    Args:
        workload: the model to capture.
        count: micro-batches that its batch is cut into.
        asked: the user's dimensions and loss, over those that the workload declares.
        verdict: how its loss was judged elsewhere; None: it is judged here.
        split: which ops are split into shards; None: as asked.

    Raises:
        UserError: it cannot be captured, or its batch cannot be cut so, or it cannot be split so.
    """
    step = partial(
        capture,
        workload.model,
        workload.inputs,
        workload.loss_fn,
        workload.optimizer,
        targets=workload.targets,
        split=split or asked.plan,
    )
    if count == 1:
        return step()
    dims = workload.batch_dims if asked.batch_dims is None else asked.batch_dims
    loss = workload.loss if asked.loss == "auto" else asked.loss
    return check_exact(step(micro_batches=count, batch_dims=dims, loss=verdict or loss), asked)


def check_exact(graph: OpGraph, asked: CutOptions) -> OpGraph:
    """The graph, if its micro-batches make exactly the step of the whole batch, or if `exact` was not asked for.

    Raises:
        InvalidValue: they do not; says why.
    """
    micro = None if graph.program is None else graph.program.origin.micro
    if not asked.is_exact or micro is None or micro.equals_whole:
        return graph
    why = (
        "Batch norm takes the statistics of each micro-batch"
        if micro.verdict.normalises_batch
        else "Their losses are accumulated"
    )
    raise InvalidValue(
        "micro_batches",
        graph.num_micro_batches,
        "1 for exactly the step of the whole batch",
        hint=f"{why}: leave `--exact` out (in Python `exact=False`) to train as gradient accumulation does.",
    )


class Steps:
    """The step of one workload, for every number of micro-batches: the model is built once, or the file read.

    Args:
        spec: the workload.
        host: decides the size of a name without one; a simulated one needs no memory for the model.
        seed: of the model's weights and inputs.
        asked: how the batch is to be cut.

    Raises:
        InvalidValue: the host is not simulated, and this machine lacks a device of it, or `spec` is a graph file.
        UserError: the workload cannot be built.
    """

    def __init__(self, spec: WorkloadSpec, host: Host, seed: int, asked: CutOptions = WHOLE) -> None:
        check_present(host)
        if spec.is_file and not host.is_simulated:
            raise only_simulated(spec)
        if spec.is_file and asked.is_auto:
            raise number_only(asked.count, "A file holds one batch, or a layer profile's grows with their number.")
        if spec.is_file and (asked.batch_dims is not None or asked.loss != "auto"):
            field, actual = ("loss", asked.loss) if asked.batch_dims is None else ("batch_dims", asked.batch_dims)
            raise InvalidValue(
                field,
                actual,
                f"none beside the file {spec.path}",
                where="micro-batches",
                hint="A file holds no tensors and no loss: the micro-batches of a layer profile are as its step is.",
            )
        check_no_split(spec, asked)
        self.spec, self.host, self.asked, self._seed = spec, host, asked, seed
        self._workload = None if spec.is_file else build_for(spec, host, seed)
        is_sized = spec.is_file or spec.is_function or spec.parts or spec.options or spec.size
        self._name = str(spec) if is_sized else f"{spec}@{default_size(host)}"
        self._named_verdict: LossVerdict | None = None
        self._graphs: dict[int, OpGraph] = {}

    def graph(self, count: int, split: SplitPlan | None = None) -> OpGraph:
        """The graph of the step cut into `count` micro-batches, captured when it is first asked for.

        With `split`, of a plan that was not asked for: a search tries many, whose shards are copies of parameters, so
        that it is captured anew, and not kept.

        Raises:
            UserError: it cannot be captured, cut or split so, or the file is malformed.
        """
        if split is not None and split != self.asked.plan:
            return self._make(count, split)
        if count not in self._graphs:
            self._graphs[count] = self._make(count, None)
        return self._graphs[count]

    @property
    def first_graph(self) -> OpGraph:
        """The graph of the number of micro-batches that is asked for, of the whole batch where that is `auto`."""
        return self.graph(1 if self.asked.count == "auto" else self.asked.count)

    def _make(self, count: int, split: SplitPlan | None) -> OpGraph:
        if self._workload is not None:
            verdict = self._named_verdict
            if verdict is None and count > 1:
                verdict = judge_twin(self.spec, self._workload, count, self.asked, self._seed)
                self._named_verdict = None if self.spec.is_function else verdict  # its twin has a batch of its own
            return replace(capture_workload(self._workload, count, self.asked, verdict, split), name=self._name)
        graph = replace(read_graph(self.spec, count), name=self._name)
        refuse_if(graph.num_ops == 0, "ops", 0, "a graph with an op at least", where=str(self.spec.path))
        return graph


def check_no_split(spec: WorkloadSpec, asked: CutOptions) -> None:
    """Refuses to split the ops of a graph file.

    Raises:
        InvalidValue: that was asked for.
    """
    refuse_if(
        spec.is_file and asked.split != NO_SPLIT,
        "split",
        asked.split,
        f"none beside the file {spec.path}",
        hint="A file holds ops without their program: split the step when it is captured, and save that.",
    )


def read_graph(spec: WorkloadSpec, count: int = 1, dims: Mapping[str, int] | None = None) -> OpGraph:
    """The graph in a workload's file; a layer profile is cut into `count` micro-batches.

    Raises:
        InvalidValue: a file of another format, and more than one micro-batch: it holds one step as it was captured.
        UserError: the file is malformed.
    """
    from rlplace.graphs import load_graph

    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # `judged` says its notes
        return load_graph(spec.path, dims=dims, micro_batches=count)


def make_problem(
    graph: OpGraph,
    host: Host,
    num_groups: int,
    say: Say,
    *,
    spec: WorkloadSpec | None = None,
    count: int = 1,
    grouping: str = "heavy-edge",
    acyclic: bool = False,
    constraints: Constraints | None = None,
    isolated: bool | None = None,
    most_s: float = math.inf,
) -> Problem:
    """The problem: profiled on a host of this machine; on a simulated one estimated, or as the graph file gives it.

    A layer profile gives the times of `count` micro-batches. Profiled steps run in a worker process (`isolated`; see
    `profile_isolated`), for about `most_s`.

    Raises:
        RunnerError: a step that was profiled failed, or ended its worker.
    """
    if host.is_simulated:
        say(f"host {host.name} is simulated: every step time below is the simulator's, none is measured")
        costs = given_costs(spec, host, count) or estimate_costs(graph, host)
        if costs.source == "given":
            say("times of ops are those that the file gives, in seconds, the same on every device")
        problem = Problem.grouped(graph, host, costs, num_groups, grouping, acyclic=acyclic, constraints=constraints)
    else:
        problem = Problem.profile(
            graph,
            host,
            num_groups=num_groups,
            grouping=grouping,
            acyclic=acyclic,
            constraints=constraints,
            progress=say,
            profiler=lambda graph, host, say: profile_isolated(
                graph, host, most_s=most_s, on_progress=say, isolated=isolated
            ),
        )
    if problem.grouping.dropped:
        say(f"groups without cycles: not followed everywhere: {', '.join(problem.grouping.dropped)}")
    return problem


def given_costs(spec: WorkloadSpec | None, host: Host, count: int = 1) -> Costs | None:
    """The costs that a workload's graph file gives; None where it gives none, or the workload is no file.

    A layer profile gives those of `count` micro-batches.

    Raises:
        UserError: the file is malformed.
    """
    if spec is None or not spec.is_file:
        return None
    from rlplace.graphs.formats import load_times_s

    times_s = load_times_s(spec.path, micro_batches=count)
    return None if times_s is None else Costs.given(times_s, host)


def versions() -> dict[str, str]:
    """Versions that a result depends on."""
    return {"rlplace": __version__, "python": platform.python_version(), "torch": torch.__version__}


def only_simulated(spec: WorkloadSpec) -> InvalidValue:
    """The error where a graph file is to be run."""
    return InvalidValue(
        "workload",
        str(spec),
        "a name or package.module:function",
        hint="A graph file alone can be simulated, not measured; give --host a preset (`rlplace hosts` lists them), or "
        "the model that the graph was captured from.",
    )


_CUT = 2
"""Micro-batches of a twin: a loss that mixes samples shows it with two."""
_SMALLER = {"inception_v3": (("image_size", 75),)}
"""Options of twins whose `small` takes long in float64."""

MOST_BYTES = 256 * 10**6
"""Parameters, buffers and inputs of a user's function that is called again: larger ones are not."""


def judge_twin(spec: WorkloadSpec, built: Workload, count: int, asked: CutOptions, seed: int) -> LossVerdict | None:
    """How micro-batches make the loss of a workload that was built without values; None where it has values.

    Args:
        spec: a name, several as one, or a user's function.
        built: without values.
        count: micro-batches.
        asked: the user's dimensions and loss, over those that the workload declares.
        seed: of the twin's weights and inputs.

    Raises:
        UserError: the workload cannot be cut, or not so; or a package that it needs is not installed.
    """
    if has_values((*built.model.parameters(), *built.model.buffers(), *_tensors(built))):
        return None
    if spec.is_function:
        return _judge_function(spec, built, count, asked, seed)
    verdict = judge_workload(spec, asked=asked.loss, batch_dims=asked.batch_dims)
    return replace(verdict, why=f"{verdict.why}{' (found on its small size)' * verdict.is_checked}")


def _judge_function(spec: WorkloadSpec, built: Workload, count: int, asked: CutOptions, seed: int) -> LossVerdict:
    """Calls the function again, this time with memory for its tensors, where these are small."""
    held = (*built.model.parameters(), *built.model.buffers(), *_tensors(built))
    num_bytes, twin, why = sum(tensor.nbytes for tensor in held), built, ""
    if asked.loss == "accumulated":
        pass  # nothing is to be checked
    elif num_bytes > MOST_BYTES:
        why = f"its parameters and inputs take {num_bytes / 1e6:,.0f} MB"
    else:
        try:
            twin = build(spec, seed=seed)
        except UserError as error:
            why = f"called once more, {error}"
    return _judge(twin, count, asked.batch_dims, asked.loss, why)


def _judge(workload: Workload, count: int, dims: BatchDims | None, asked: str, why: str = "") -> LossVerdict:
    """How `count` micro-batches make the loss of a workload; not checked where `why` says the reason."""
    args, kwargs = as_call(workload.inputs)
    given = (workload.model, args, kwargs, workload.loss_fn, workload.targets)
    slicing = plan_slices(*given, count, dims)
    if why:
        return unchecked(workload.model, workload.loss_fn, asked, why)
    verdict = judge_loss(*given, slicing, asked=asked)
    if verdict.is_checked:  # and the whole step of the twin is compared with plain PyTorch
        capture(
            workload.model,
            workload.inputs,
            workload.loss_fn,
            targets=workload.targets,
            micro_batches=count,
            batch_dims=dims,
            loss=verdict,
        )
    return verdict


def _tensors(workload: Workload) -> list[torch.Tensor]:
    return [*pytree.tree_leaves(workload.inputs), *workload.targets]


def judge_workload(spec: WorkloadSpec, *, asked: str = "auto", batch_dims: BatchDims | None = None) -> LossVerdict:
    """How micro-batches make the loss of a workload, whose own size is too large to compute or has no values.

    Its twin `@small` is computed: the same code, with four samples.

    Args:
        spec: a named workload, or several as one.
        asked: the kind of loss that is wanted; `auto` is the workload's own.
        batch_dims: as in `capture`; None is the workload's own.

    Raises:
        UserError: the workload cannot be cut, or not so; or a package that it needs is not installed.
    """
    workload = build(_twin(spec))
    dims = workload.batch_dims if batch_dims is None else batch_dims
    return _judge(workload, _CUT, dims, workload.loss if asked == "auto" else asked)


def _twin(spec: WorkloadSpec) -> WorkloadSpec:
    if spec.is_multi:
        return replace(spec, parts=tuple(replace(part, spec=_twin(part.spec)) for part in spec.parts))
    options = tuple((field.name, 2 * _CUT) for field in fields(CATALOG[spec.name].config) if field.name == "batch")
    return WorkloadSpec(spec.name, (*options, *_SMALLER.get(spec.name, ())), "small")


EVALUATIONS = 10_000
"""Of the search that a choice is made for: it takes its share of them."""
LEAST_TO_CHOOSE = 1000
"""Evaluations of a search that micro-batches and orders of ops are chosen for, at least: few would choose blindly."""
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of micro-batches that `auto` may stand for."""
MANY_DEVICES = 16
"""From so many devices on, a search tries as many micro-batches; on fewer, up to eight."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """A problem, and how its batch came to be cut.

    Attributes:
        problem: of the step that was chosen, with its order of ops.
        asked: by the user.
        evaluations: placements that were simulated to choose.
        start: (N,) int32, the best placement of it found on the way, where a search may go on from; None without one.
        whole_s: where a split was chosen, the shortest step that was simulated without one, in seconds; else None.
    """

    problem: Problem
    asked: CutOptions
    evaluations: int = 0
    start: NDArray[np.int32] | None = field(default=None, repr=False)
    whole_s: float | None = None

    @property
    def cut(self) -> tuple[int, CutOptions]:
        """The number of micro-batches of the step, and the options that cut and split it so again."""
        verdict = verdict_of(self.problem.graph) or {}
        graph = self.problem.graph
        return self.asked.again(graph.num_micro_batches, verdict.get("kind"), PlacedSplit.of(graph))

    def describe(self) -> dict[str, Any]:
        """The content of `problem.json`."""
        problem, graph, seen = self.problem, self.problem.graph, self.problem.costs.workspace_bytes
        return {
            "schema": 1,
            "graph": {
                "fingerprint": graph.fingerprint,
                "num_ops": graph.num_ops,
                "num_edges": graph.num_edges,
                "num_micro_batches": graph.num_micro_batches,
                "names": list(graph.names),
                "modules": list(graph.modules),
            },
            "op_order": problem.op_order,
            "host_fingerprint": problem.host.fingerprint,
            "host": problem.host.to_dict(),
            "costs": {
                "source": problem.costs.source,
                "op_time_s": problem.costs.op_time_s.tolist(),
                "workspace_bytes": None if seen is None else seen.tolist(),
            },
            "grouping": {
                "rule": problem.grouping.rule,
                "dropped": list(problem.grouping.dropped),
                "op_group": problem.grouping.op_group.tolist(),
            },
            "allowed": None if problem.allowed is None else problem.group_allowed.tolist(),
            "evaluations": self.evaluations,
            "start": None if self.start is None else self.start.tolist(),
        }

    def to_dict(self) -> dict[str, Any]:
        """Micro-batches, as `--json` says and a run keeps them."""
        return describe_cut(self.problem.graph, self.asked) | {
            "op_order": self.problem.op_order,
            "evaluations": self.evaluations,
        }


def prepare(
    steps: Steps,
    say: Say,
    options: ProblemOptions,
    *,
    evaluations: float | None = None,
    most_s: float = math.inf,
) -> Prepared:
    """The problem of a step, cut as its `asked` says; says how the loss was judged, and which number was chosen.

    Args:
        steps: of the workload.
        say: told of long work.
        options: how groups are made, and steps are profiled; the seed is of the searches that choose.
        evaluations: of the search that follows; the choice takes a share of them. `EVALUATIONS` where None.
        most_s: seconds for profiling, all numbers of micro-batches together.

    Raises:
        UserError: the step cannot be captured, or its batch cannot be cut so.
    """
    host, made, deadline_s = steps.host, list[int](), time.monotonic() + most_s

    def problem_of(count: int, split: SplitPlan | None = None) -> Problem:
        graph = steps.graph(count, split)
        each = "" if count == 1 else f", {count} micro-batches"
        each += "" if split is None else f", {split.num_shards} shards"
        say(f"{steps.spec}{each}: {graph.num_ops} ops, {graph.num_edges} edges on {host.name}")
        made.append(count)
        return make_problem(
            graph,
            host,
            options.num_groups,
            sayer(False) if host.is_simulated and len(made) > 1 else say,  # what it says of the host is said once
            spec=steps.spec,
            count=count,
            grouping=options.grouping,
            acyclic=options.acyclic,
            constraints=options.constraints,
            isolated=options.isolated,
            most_s=max(deadline_s - time.monotonic(), 0.0),
        )

    return chosen_problem(
        steps.asked, host, problem_of, seed=options.seed, evaluations=evaluations, say=say, isolated=options.isolated
    )


def chosen_problem(
    asked: CutOptions,
    host: Host,
    problem_of: Callable[..., Problem],
    *,
    seed: int,
    evaluations: float | None = None,
    say: Say = lambda line: None,
    isolated: bool | None = None,
) -> Prepared:
    """The problem of the number of micro-batches that is asked for, and the result of the choice.

    Where the batch is cut, the order of ops is chosen too, by simulation, as the number is. On this machine a batch is
    cut or split under `auto` only if that is also measured faster.

    Args:
        asked: by the user.
        host: where.
        problem_of: the problem of a number of micro-batches, and of a plan where a split is to be chosen.
        seed: of the searches that choose.
        evaluations: as of `prepare`.
        say: told the result, and how the loss was judged; no messages by default.
        isolated: whether the measurements for the choice run in worker processes; see `Evaluator`.

    Raises:
        UserError: the batch cannot be cut as asked.
    """
    if asked.count == 1 and asked.split != AUTO:
        problem = problem_of(1)
        for line in judged(problem.graph):
            say(line)
        return Prepared(problem, asked)
    from rlplace.search.parallel.choose_micro_batches import choose

    counts = candidates(host) if asked.count == "auto" else (asked.count,)
    kept = functools.cache(problem_of)
    if asked.is_auto and (asked.batch_dims is not None or asked.loss != "auto"):
        try:  # what the user says of the cut and is wrong must not be left out as what is slow is
            kept(counts[1])
        except InvalidValue as error:
            if error.field != "micro_batches":  # more of them than samples, or not exact
                raise
        except CaptureError:
            if asked.loss != "auto":
                raise
    if asked.count != "auto":
        kept(counts[0])  # compared with plain PyTorch; what is tried below is not
    with kept_traces():
        chosen = choose(
            {count: partial(kept, count) for count in counts},
            evaluations=evaluations or EVALUATIONS,
            seed=seed,
            say=say,
            split=problem_of if asked.split == AUTO else None,
            by_size=host.is_simulated,
        )
    problem, start = chosen.problem, chosen.devices
    is_plain = chosen.split is None and (chosen.num_micro_batches == 1 or 1 not in counts)
    if not is_plain and chosen.devices is not None and not host.is_simulated:
        rival = kept(1) if 1 in counts else chosen.unsplit or kept(counts[0])
        with measuring_alone(host, say=say):
            is_faster = is_cut_faster(problem, chosen.devices, rival, seed=seed, say=say, isolated=isolated)
        if not is_faster:
            problem, start = rival, None
    if problem.graph.program is not None:
        checked(problem.graph)
    for line in judged(problem.graph):
        say(line)
    is_split = problem is chosen.problem and chosen.split is not None and math.isfinite(chosen.unsplit_s)
    return Prepared(problem, asked, chosen.spent, start, chosen.unsplit_s if is_split else None)


def candidates(host: Host) -> tuple[int, ...]:
    """The numbers of micro-batches that a search for `auto` tries on a host."""
    return tuple(count for count in COUNTS if count <= (16 if host.num_devices >= MANY_DEVICES else 8))


def describe_cut(graph: OpGraph, asked: CutOptions) -> dict[str, Any]:
    """How the batch is cut and ops are split, as `--json` says it: the request, K, and how the loss was judged."""
    return (
        asked.to_dict()
        | split_words(PlacedSplit.of(graph))
        | {"count": graph.num_micro_batches, "verdict": verdict_of(graph)}
    )


def split_words(split: PlacedSplit | None) -> dict[str, str]:
    """How ops are split, in the words of the command line."""
    return {} if split is None else {"split": split.classes, "split_parts": split.parts}


def judged(graph: OpGraph) -> list[str]:
    """Lines for people on a step: what its file leaves open; how its loss was judged, what became of the split."""
    verdict, lines = verdict_of(graph), [f"warning: {note}" for note in graph.notes]
    if verdict is not None:
        warning = "" if verdict["is_checked"] else "warning: "
        lines.append(f"{warning}{graph.num_micro_batches} micro-batches, loss {verdict['kind']}: {verdict['why']}")
    report, words = None if graph.program is None else graph.program.split, PlacedSplit.of(graph)
    if report is not None:
        lines.append(f"{words}: {counted(len(report.parameters), 'parameter')}{_gathered(report)}")
        if report.random:
            name, target, module = report.random[0]
            lines.append(
                f"warning: {counted(len(report.random), 'random op')} (first {name}, {target} in "
                f"{module or 'the root'}) draw for each shard apart, other numbers than in the step that is not split"
            )
    return lines


def _gathered(report: SplitReport) -> str:
    """How much of a split step runs whole though it reads shards, and its largest op."""
    if not report.gathered:
        return ""
    name, target, module, _ = max(report.gathered, key=lambda each: each[3])
    where = f"{name}, {target} in {module or 'the root'}"
    return f"; {report.gathered_share:.1%} of the FLOPs run whole on what shards make (most of them {where})"


def verdict_of(graph: OpGraph) -> dict[str, Any] | None:
    """How the loss of a step that is cut was judged; None where the batch is whole, or the graph came from a file."""
    micro = None if graph.program is None else graph.program.origin.micro
    return (
        None
        if micro is None
        else {"kind": micro.verdict.kind, "is_checked": micro.verdict.is_checked, "why": micro.verdict.why}
    )


RACE = RaceProtocol(max_rounds=15, min_rounds=15, hopeless=math.inf)
COMPARED_EVALUATIONS = 1000
"""Placements that are simulated to find a rival for the race of the whole batch, or a placement without gangs."""


def is_cut_faster(
    cut: Problem,
    devices: NDArray[np.int32],
    whole: Problem,
    *,
    seed: int,
    say: Callable[[str], None],
    isolated: bool | None = None,
) -> bool:
    """Whether a placement of the step in micro-batches, or shards, is measured faster than a searched one without.

    A profile does not know how devices slow each other down, which favours placements that keep all of them busy. So
    the simulator's choice is raced before it is taken, also against everything on one device and on one gang. With
    gangs, both steps are also searched without. Where the cut step is not clearly faster than each of the others, the
    step stays whole.

    Args:
        cut: in micro-batches or shards, on a host of this machine.
        devices: (N,) of its best placement.
        whole: the same step and host, its batch not cut, or its ops not split.
        seed: of the search for that.
        say: told both step times.
        isolated: whether they run in worker processes, one for each of the two steps; see `Evaluator`.
    """

    def found(problem: Problem | None, simulator: Simulator) -> NDArray[np.int32] | None:
        budget = Budget(evaluations=COMPARED_EVALUATIONS)
        return None if problem is None else find(problem, "portfolio", simulator, budget, seed=seed).devices

    first, planner = Simulator(cut), Simulator(whole)
    rival = found(whole, planner)
    if rival is None:
        return True
    ours = devices, found(without_gangs(cut), first)
    rivals = rival, found(without_gangs(whole), planner), best_single(whole, planner), best_gang(whole, planner)
    counts = (cut.graph.num_micro_batches, "micro-batches"), (cut.graph.num_shards, "shards")
    what = " and ".join(f"{count} {things}" for count, things in counts if count > 1)
    is_uncut = whole.graph.num_micro_batches == 1 < cut.graph.num_micro_batches
    options: dict[str, Any] = {"reference": None, "seed": seed, "isolated": isolated}
    with (
        contextlib.closing(make_runner(cut, first, **options)) as runner,
        contextlib.closing(make_runner(whole, planner, **options)) as other,
    ):
        try:
            plans = [first.plan(each) for each in ours if each is not None]
            others = [other.timer(planner.plan(each)) for each in rivals if each is not None]
            outcomes = runner.measure_plans(plans, protocol=RACE, others=others)
        except (RunnerError, TimeoutError, MemoryError) as error:
            say(f"{what} are not raced: {error}")
            return False
    outcome = min(outcomes[: len(plans)], key=lambda each: each.step_time_s)
    if not outcome.ok:
        return False
    beside = {str(k): each.samples_s for k, each in enumerate(outcomes[len(plans) :]) if each.ok}
    verdict = judge(outcome.samples_s, beside, candidates=len(plans))
    say(
        f"measured: {format_seconds(outcome.step_time_s)} in {what}, "
        f"{format_seconds(min(each.step_time_s for each in outcomes[len(plans) :]))} "
        f"{'with the whole batch' if is_uncut else 'without shards'}: {verdict.outcome}"
    )
    return verdict.is_worth_it or not beside
