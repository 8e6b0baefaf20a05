"""`plan_pipeline`: how many stages and micro-batches a run's workload is best cut into, where, and in which order.

`boundaries`: the modules of a step that a stage of a pipeline may begin with.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.export import ExportedProgram

from rlplace.errors import InvalidValue, UserError
from rlplace.export.captured import CapturedRun
from rlplace.export.pipeline.stages import WholeStep, name_in_model, split_step
from rlplace.export.ranks import rank_devices
from rlplace.graphs.capturing.capture import as_call
from rlplace.graphs.grouping.groups import Grouping
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.micro.slices import plan_slices
from rlplace.graphs.opgraph import FORWARD, OpGraph
from rlplace.graphs.program import MicroBatches, Slicing
from rlplace.measure.costs.costs import CostSource, estimate_costs
from rlplace.measure.costs.profile import profile_costs
from rlplace.measure.hosts.host import Device, Host
from rlplace.measure.hosts.resolve import check_present
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.runs.judge import judge_twin
from rlplace.runs.micro_batches import CutOptions, read_asked
from rlplace.runs.prepared import candidates
from rlplace.runs.setup import capture_workload
from rlplace.say import say
from rlplace.search.parallel.bounded_stages import BoundedPipeline, Schedule, best_pipeline
from rlplace.search.parallel.step_roles import StepRoles, step_roles
from rlplace.workloads import Workload


@dataclass(frozen=True)
class Stage:
    """What one rank runs.

    Attributes:
        begin: path of the module that it begins with; empty for the first.
        device: of the host.
        place: what PyTorch calls it on the machine that it belongs to: `cpu`, or `cuda:N`.
        work_s: seconds of its ops, all micro-batches together.
    """

    begin: str
    device: Device
    place: str
    work_s: float


@dataclass(frozen=True)
class PipelinePlan:
    """A pipeline, and what is expected of it.

    Attributes:
        stages: in order, one a rank.
        schedule: the order of micro-batches.
        num_micro_batches: K.
        batch: samples of the whole batch.
        dims: of every input, then every target, the dimension of the batch; None for one that all micro-batches share.
        sums_losses: whether the losses of micro-batches are added; else they are averaged.
        why_loss: how that was judged, in words.
        is_loss_checked: whether it was.
        shared: parameters that several stages hold a copy of, whose gradients are added.
        source: who says what ops take.
        step_s: simulated step time.
        placement_s: simulated step time of the run's placement.
    """

    stages: tuple[Stage, ...]
    schedule: Schedule
    num_micro_batches: int
    batch: int
    dims: tuple[int | None, ...]
    sums_losses: bool
    why_loss: str
    is_loss_checked: bool
    shared: tuple[str, ...]
    source: CostSource
    step_s: float
    placement_s: float

    @property
    def ratio(self) -> float:
        """Step time over that of the run's placement."""
        return self.step_s / self.placement_s


def plan_pipeline(run: CapturedRun) -> PipelinePlan:
    """The pipeline with the shortest simulated step; says on stderr what each number of micro-batches comes to.

    A stage begins where a module does that runs once. What ops of micro-batches take is profiled, as for the run, on a
    host of this machine, and estimated on a simulated one.

    Raises:
        InvalidValue: it is no training step with an optimizer, the host has one device or is not here, the batch or
            the loss cannot be cut, `torch.distributed.pipelining` cannot split the model, or nothing fits into memory.
    """
    workload, host = run.workload, run.host
    usable = _usable(workload, host)
    check_present(host)
    asked = read_asked(run.request.config.get("micro_batches"))[1]
    dims = workload.batch_dims if asked.batch_dims is None else asked.batch_dims
    args, kwargs = as_call(workload.inputs)
    whole = plan_slices(workload.model, args, kwargs, workload.loss_fn, workload.targets, 1, dims)
    counts = [count for count in candidates(host) if count > 1 and whole.batch % count == 0]
    if not counts or all(dim is None for dim in whole.dims):
        raise InvalidValue(
            "batch",
            whole.batch if counts else f"of {whole.batch}, or none at all",
            f"one that is cut into equal micro-batches, e.g. {', '.join(map(str, candidates(host)[1:]))}",
            where=WHERE,
        )
    step = whole_step(workload)
    tensors = _tensors(workload)
    paths = boundaries(step, _first(tensors, whole, counts[0]))
    if not paths:
        hint = "A recurrent model that is unrolled runs the same modules at every step."
        expected = "one with modules that run once and not first, before which a stage may begin"
        raise InvalidValue("model", type(workload.model).__name__, expected, where=WHERE, hint=hint)
    is_accumulated = "accumulated" in (asked.loss, workload.loss if asked.loss == "auto" else "")
    cut = CutOptions(counts[0], asked.batch_dims, "accumulated" if is_accumulated else "separate")
    best: tuple[int, MicroBatches, list[str], Problem, BoundedPipeline] | None = None
    for count, graph in _graphs(run, counts, cut):
        problem = _problem(graph, host)
        roles = step_roles(graph)
        kept, places = places_of(graph, roles, paths)
        found = best_pipeline(problem, places, list(usable), roles) if kept else None
        _say(count, found, host)
        if found is not None and (best is None or found.step_s < best[-1].step_s):
            micro = require_program(graph).origin.micro
            assert micro is not None
            best = count, micro, [kept[index] for index in found.chosen], problem, found
    if best is None:
        actual = f"none, of {len(paths)} modules to cut at"
        raise InvalidValue("stages", actual, "two or more that fit into memory", where=WHERE)
    count, micro, begins, problem, found = best
    shared = check_split(step, _first(tensors, whole, count), begins)
    return PipelinePlan(
        stages=tuple(
            Stage(begin, host.devices[device], usable[device], work_s)
            for begin, device, work_s in zip(("", *begins), found.devices, found.work_s, strict=True)
        ),
        schedule=found.schedule,
        num_micro_batches=count,
        batch=whole.batch,
        dims=whole.dims,
        sums_losses=micro.weights[0] == 1.0,
        why_loss=micro.why,
        is_loss_checked=micro.is_checked,
        shared=shared,
        source=problem.costs.source,
        step_s=found.step_s,
        placement_s=Simulator(run.problem(), threads=1).retime(run.request.placement.plan).step_time_s,
    )


def whole_step(workload: Workload) -> WholeStep:
    """The workload's model with its loss, which must be there."""
    assert workload.loss_fn is not None
    names = tuple(workload.inputs) if isinstance(workload.inputs, dict) else None
    return WholeStep(workload.model, workload.loss_fn, names, len(workload.targets))


def _usable(workload: Workload, host: Host) -> dict[int, str]:
    """Devices that a stage can have, with what PyTorch calls them."""
    if workload.loss_fn is None or workload.optimizer is None:
        actual = "an inference" if workload.loss_fn is None else "a step without an optimizer"
        raise InvalidValue("workload", actual, "a training step with an optimizer", where=WHERE)
    found = rank_devices(host, WHERE)
    if len(found) < 2:
        names = ", ".join(host.devices[index].name for index in found)
        expected = "two or more that are no gangs: each stage has a device and a process of its own"
        raise InvalidValue("devices", names, expected, where=WHERE)
    return found


def _tensors(workload: Workload) -> list[torch.Tensor]:
    inputs = workload.inputs.values() if isinstance(workload.inputs, dict) else workload.inputs
    return [*inputs, *workload.targets]


def _first(tensors: Sequence[torch.Tensor], whole: Slicing, count: int) -> list[torch.Tensor]:
    """The first of `count` micro-batches."""
    return Slicing(whole.dims, (whole.batch // count,) * count).cut(tensors, 0)


def _graphs(run: CapturedRun, counts: Sequence[int], cut: CutOptions) -> Iterator[tuple[int, OpGraph]]:
    """The step for each number of micro-batches."""
    spec, seed = run.request.spec, run.request.workload_seed
    try:
        verdict = judge_twin(spec, run.workload, counts[0], cut, seed)
        for count in counts:
            yield count, capture_workload(run.workload, count, cut, verdict)
    except UserError as error:
        hint = f"{error} A run of `rlplace train ... --micro-batches K --loss accumulated` asks for accumulation."
        raise InvalidValue(
            "loss", "not made of those of micro-batches", "the loss of each, averaged or added", where=WHERE, hint=hint
        ) from error


def _problem(graph: OpGraph, host: Host) -> Problem:
    costs = estimate_costs(graph, host) if host.is_simulated else profile_costs(graph, host)
    return Problem(graph, host, costs, Grouping(np.arange(graph.num_ops, dtype=np.int32)))


def _say(count: int, found: BoundedPipeline | None, host: Host) -> None:
    words = "nothing that fits into memory"
    if found is not None:
        names = ", ".join(host.devices[device].name for device in found.devices)
        words = f"{found.step_s * 1e3:.4g} ms, {len(found.devices)} stages on {names}, {found.schedule}"
    say(f"{count} micro-batches: {words}")


WHERE = "export pipeline"
MODEL = "model."
"""How paths of the model's modules begin in a `WholeStep`."""


def boundaries(step: WholeStep, tensors: Sequence[torch.Tensor]) -> list[str]:
    """Paths of the modules that run exactly once and not first, in order of their first op.

    Of modules that begin with the same op it is the outermost.

    Args:
        step: a copy of it is traced with `torch.export`.
        tensors: of one micro-batch.

    Raises:
        InvalidValue: it cannot be traced; says why.
    """
    nodes = [node for node in _exported(step, tensors).graph.nodes if node.op == "call_function"]
    first: dict[str, int] = {}
    repeated: set[str] = set()
    for place, node in enumerate(nodes):
        for key, (path, _) in node.meta.get("nn_module_stack", {}).items():
            first.setdefault(path.partition("@")[0], place)
            if "@" in key or "@" in path:
                repeated.add(path.partition("@")[0])
    known = dict(step.named_modules())
    outermost: dict[int, str] = {}
    for path, place in sorted(first.items(), key=lambda item: item[0].count(".")):
        if place > 0 and path.startswith(MODEL) and path in known and path not in repeated:
            outermost.setdefault(place, path)
    return [outermost[place] for place in sorted(outermost)]


def places_of(graph: OpGraph, step: StepRoles, paths: Sequence[str]) -> tuple[list[str], NDArray[np.int64]]:
    """The modules that begin at a place of the step's chain of their own, and those places, both ascending.

    Args:
        graph: of the same model, cut into micro-batches.
        step: its roles.
        paths: of modules, as `boundaries` gives them.
    """
    is_link = (step.follows >= 0) & ~graph.is_source & (graph.phases == FORWARD)
    begin: dict[str, int] = {}
    for op in np.flatnonzero(is_link).tolist():
        words = graph.modules[op].split(".")
        for end in range(1, len(words) + 1):
            path, place = MODEL + ".".join(words[:end]), int(step.op_position[op])
            begin[path] = min(begin.get(path, place), place)
    kept: list[str] = []
    places: list[int] = []
    for path in paths:
        place = begin.get(path, 0)
        if place > (places[-1] if places else 0):
            kept.append(path)
            places.append(place)
    return kept, np.array(places, dtype=np.int64)


def check_split(step: WholeStep, tensors: Sequence[torch.Tensor], begins: Sequence[str]) -> tuple[str, ...]:
    """Parameters that several stages hold a copy of, once `torch.distributed.pipelining` has split a copy of the step.

    Args:
        step: to be split.
        tensors: of one micro-batch.
        begins: the modules that its stages begin with.

    Raises:
        InvalidValue: it cannot be split so; says why.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pipe, shared = split_step(copy.deepcopy(step), tensors, begins)
    except Exception as error:  # of the tracer, which may raise anything
        raise _refused(step, "split it before " + ", ".join(_in_model(begins)), error) from error
    if pipe.num_stages != len(begins) + 1:
        raise InvalidValue(
            "stages", pipe.num_stages, f"{len(begins) + 1}: every module runs once and in turn", where=WHERE
        )
    return tuple(sorted(name_in_model(next(iter(names.values()))) for names in shared))


def _exported(step: WholeStep, tensors: Sequence[torch.Tensor]) -> ExportedProgram:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.export(copy.deepcopy(step), tuple(tensors))
    except Exception as error:  # of the user's model, traced
        raise _refused(step, "trace it", error) from error


def _refused(step: WholeStep, what: str, error: Exception) -> InvalidValue:
    cause = error.__cause__ or error
    said = str(cause).strip().splitlines() or [""]
    return InvalidValue(
        "model",
        type(step.model).__name__,
        "one that `torch.export` can trace and cut at modules",
        where=WHERE,
        hint=f"It cannot {what}: {type(cause).__name__}: {said[0]}",
    )


def _in_model(paths: Sequence[str]) -> list[str]:
    return [path.removeprefix(MODEL) for path in paths]
