"""`pipeline`: a run's workload as a script of `torch.distributed.pipelining`, a process for each stage.

`plan_pipeline`: how many stages and micro-batches it is best cut into, where, and in which order.
"""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlplace import __version__
from rlplace.errors import InvalidValue, UserError
from rlplace.export.formats import (
    CapturedRun,
    Exported,
    ExportFormat,
    ExportRequest,
    in_docstring,
    rank_devices,
    trained_by,
)
from rlplace.export.stages import PARTS, WholeStep, name_in_model, split_step
from rlplace.graphs import FORWARD, Grouping, OpGraph
from rlplace.graphs.capturing.capture import as_call
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.micro_batching.slices import plan_slices
from rlplace.graphs.program import MicroBatches, Slicing
from rlplace.measure import Device, Host, Problem, Simulator
from rlplace.measure.costs.costs import Costs, CostSource, estimate_costs
from rlplace.measure.hosts.resolve import check_present
from rlplace.measure.profiling.profile import profile_costs
from rlplace.say import Say, say
from rlplace.search.parallel.layouts import StepRoles, step_roles
from rlplace.search.parallel.pipelines import BoundedPipeline, Schedule, best_pipeline
from rlplace.session.prepare import candidates, capture_workload, judge_twin
from rlplace.session.setup import WHOLE, CutOptions
from rlplace.workloads import Workload, WorkloadSpec


@dataclass(frozen=True)
class Stage:
    """The stage of one rank.

    Attributes:
        begin: path of the module that it begins with; empty for the first.
        device: of the host.
        place: PyTorch's name of it on its own machine: `cpu`, or `cuda:N`.
        work_s: seconds of its ops, all micro-batches together.
    """

    begin: str
    device: Device
    place: str
    work_s: float


@dataclass(frozen=True)
class PipelinePlan:
    """A pipeline, and its expected figures.

    Attributes:
        stages: in order, one a rank.
        schedule: the order of micro-batches.
        micro: the K micro-batches, and how their losses make that of the batch.
        shared: the stages of each parameter that several hold a copy of, whose gradients are added.
        source: the source of op times.
        step_s: simulated step time.
        placement_s: simulated step time of the run's placement; infinite without one.
    """

    stages: tuple[Stage, ...]
    schedule: Schedule
    micro: MicroBatches
    shared: dict[str, tuple[int, ...]]
    source: CostSource
    step_s: float
    placement_s: float = math.inf

    @property
    def num_micro_batches(self) -> int:
        """K."""
        return self.micro.slicing.num_micro_batches

    @property
    def ratio(self) -> float:
        """Step time over that of the run's placement."""
        return self.step_s / self.placement_s


def plan_pipeline(run: CapturedRun) -> PipelinePlan:
    """The pipeline of a run's workload, as `best_stages` finds it.

    Times of the ops of micro-batches are profiled, as for the run, on a host of this machine, and estimated on a
    simulated one.

    Raises:
        InvalidValue: as `best_stages`, or the host is not here.
    """
    host, session = run.host, run.request.session
    cost = partial(estimate_costs if host.is_simulated else profile_costs, host=host)
    seed, asked = session.request.workload_seed, session.cut[1]
    plan = best_stages(run.request.spec, run.workload, host, cost, asked=asked, seed=seed)
    placement_s = Simulator(run.problem(), threads=1).retime(run.request.placement.plan).step_time_s
    return replace(plan, placement_s=placement_s)


def best_stages(
    spec: WorkloadSpec,
    workload: Workload,
    host: Host,
    cost: Callable[[OpGraph], Costs],
    *,
    asked: CutOptions = WHOLE,
    seed: int = 0,
    say: Say = say,
) -> PipelinePlan:
    """The pipeline with the shortest simulated step, for a number of micro-batches that is chosen with it.

    A stage begins where a module does that runs once.

    Args:
        spec: the workload.
        workload: as built.
        host: on whose devices the stages are.
        cost: gives the times of the ops of micro-batches.
        asked: the dimensions and the loss of micro-batches.
        seed: of the workload.
        say: told the step time for each number of micro-batches.

    Raises:
        InvalidValue: it is no training step with an optimizer, the host has one device or is not here, the batch or
            the loss cannot be cut, `torch.distributed.pipelining` cannot split the model, or nothing fits into memory.
    """
    # Numbers of micro-batches that cut the batch evenly, and modules that a stage may begin with.
    usable = _usable(workload, host)
    check_present(host)
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
            hint=_OF_THE_RUN,
        )
    assert workload.loss_fn is not None  # its devices are usable
    step = WholeStep(workload.model, workload.loss_fn, tuple(kwargs) or None, len(workload.targets))
    tensors = [*args, *kwargs.values(), *workload.targets]
    paths = boundaries(step, _first(tensors, whole, counts[0]))
    if not paths:
        raise InvalidValue(
            "model",
            type(workload.model).__name__,
            "one with modules that run once and not first, before which a stage may begin",
            where=WHERE,
            hint="A recurrent model that is unrolled runs the same modules at every step.",
        )
    # The best pipeline of each number by the simulator, then the best of these, once PyTorch has split a copy so.
    is_accumulated = "accumulated" in (asked.loss, workload.loss if asked.loss == "auto" else "")
    cut = CutOptions(counts[0], asked.batch_dims, "accumulated" if is_accumulated else "separate")
    candidates_by_s: dict[float, tuple[OpGraph, CostSource, list[str], BoundedPipeline]] = {}
    for count, graph in _graphs(spec, workload, counts, cut, seed):
        costs = cost(graph)
        problem = Problem(graph, host, costs, Grouping(np.arange(graph.num_ops, dtype=np.int32)))
        roles = step_roles(graph)
        kept, places = places_of(graph, roles, paths)
        words = "nothing that fits into memory"
        if kept and (found := best_pipeline(problem, places, list(usable), roles)) is not None:
            names = ", ".join(host.devices[device].name for device in found.devices)
            words = f"{found.step_s * 1e3:.4g} ms, {len(found.devices)} stages on {names}, {found.schedule}"
            chosen = [kept[index] for index in found.chosen]
            candidates_by_s.setdefault(found.step_s, (graph, costs.source, chosen, found))
        say(f"{count} micro-batches: {words}")
    if not candidates_by_s:
        raise InvalidValue(
            "stages", f"none, of {len(paths)} modules to cut at", "two or more that fit into memory", where=WHERE
        )
    graph, source, begins, found = candidates_by_s[min(candidates_by_s)]
    micro = require_program(graph).origin.micro
    assert micro is not None
    return PipelinePlan(
        stages=tuple(
            Stage(begin, host.devices[device], usable[device], work_s)
            for begin, device, work_s in zip(("", *begins), found.devices, found.work_s, strict=True)
        ),
        schedule=found.schedule,
        micro=micro,
        shared=check_split(step, _first(tensors, whole, graph.num_micro_batches), begins),
        source=source,
        step_s=found.step_s,
    )


def _usable(workload: Workload, host: Host) -> dict[int, str]:
    """Devices that a stage can have, with PyTorch's names of them."""
    trained_by(workload, WHERE)
    found = rank_devices(host, WHERE)
    if len(found) < 2:
        raise InvalidValue(
            "devices",
            ", ".join(host.devices[index].name for index in found),
            "two or more that are no gangs: each stage has a device and a process of its own",
            where=WHERE,
        )
    return found


def _first(tensors: Sequence[torch.Tensor], whole: Slicing, count: int) -> list[torch.Tensor]:
    """The first of `count` micro-batches."""
    return Slicing(whole.dims, (whole.batch // count,) * count).cut(tensors, 0)


def _graphs(
    spec: WorkloadSpec, workload: Workload, counts: Sequence[int], cut: CutOptions, seed: int
) -> Iterator[tuple[int, OpGraph]]:
    """The step for each number of micro-batches."""
    try:
        verdict = judge_twin(spec, workload, counts[0], cut, seed)
        for count in counts:
            yield count, capture_workload(workload, count, cut, verdict)
    except UserError as error:
        raise InvalidValue(
            "loss",
            "not made of those of micro-batches",
            "the loss of each, averaged or added",
            where=WHERE,
            hint=f"{error} {_OF_THE_RUN}",
        ) from error


WHERE = "export pipeline"
_OF_THE_RUN = (
    "An export has no options for this: it cuts the batch as its run does, so export one of `rlplace train WORKLOAD "
    "--micro-batches K` with `--batch-dims` (where the batch is not the first dimension) or `--loss accumulated`."
)
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
    try:
        with warnings.catch_warnings(action="ignore"):
            program = torch.export.export(copy.deepcopy(step), tuple(tensors))
    except Exception as error:  # of the user's model, traced
        raise _refused(step, "trace it", error) from error
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    calls = [
        (place, path.partition("@")[0], "@" in key or "@" in path)
        for place, node in enumerate(nodes)
        for key, (path, _) in node.meta.get("nn_module_stack", {}).items()
    ]
    first = {path: place for place, path, _ in reversed(calls)}
    once = first.keys() & dict(step.named_modules()).keys() - {path for _, path, is_again in calls if is_again}
    inner_first = sorted(sorted(once), key=lambda path: path.count("."), reverse=True)
    outermost = {first[path]: path for path in inner_first if first[path] > 0 and path.startswith(MODEL)}
    return [outermost[place] for place in sorted(outermost)]


def places_of(graph: OpGraph, step: StepRoles, paths: Sequence[str]) -> tuple[list[str], NDArray[np.int64]]:
    """The modules that begin at a place of the step's chain of their own, and those places, both ascending.

    Args:
        graph: of the same model, cut into micro-batches.
        step: its roles.
        paths: of modules, as `boundaries` gives them.
    """
    is_link = (step.follows >= 0) & ~graph.is_source & (graph.phases == FORWARD)
    ops = sorted(np.flatnonzero(is_link).tolist(), key=step.op_position.__getitem__, reverse=True)
    chains = [(graph.modules[op].split("."), int(step.op_position[op])) for op in ops]
    begin = {MODEL + ".".join(words[:end]): place for words, place in chains for end in range(1, len(words) + 1)}
    kept: dict[int, str] = {}
    for path in paths:
        if (place := begin.get(path, 0)) > max(kept, default=0):
            kept[place] = path
    return list(kept.values()), np.array(list(kept), dtype=np.int64)


def check_split(step: WholeStep, tensors: Sequence[torch.Tensor], begins: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """The stages of each parameter that several hold, once `torch.distributed.pipelining` has split a copy of the step.

    Args:
        step: to be split.
        tensors: of one micro-batch.
        begins: the modules that its stages begin with.

    Raises:
        InvalidValue: it cannot be split so; says why.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            pipe, shared = split_step(copy.deepcopy(step), tensors, begins)
    except Exception as error:  # of the tracer, which may raise anything
        raise _refused(
            step, f"split it before {', '.join(path.removeprefix(MODEL) for path in begins)}", error
        ) from error
    if pipe.num_stages != len(begins) + 1:
        raise InvalidValue(
            "stages", pipe.num_stages, f"{len(begins) + 1}: every module runs once and in turn", where=WHERE
        )
    return dict(sorted((name_in_model(next(iter(names.values()))), tuple(names)) for names in shared))


def _refused(step: WholeStep, what: str, error: Exception) -> InvalidValue:
    cause = error.__cause__ or error
    said, *_ = str(cause).strip().splitlines() or [""]
    return InvalidValue(
        "model",
        type(step.model).__name__,
        "one that `torch.export` can trace and cut at modules",
        where=WHERE,
        hint=f"It cannot {what}: {type(cause).__name__}: {said}",
    )


SCHEDULES = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}
"""Classes of `torch.distributed.pipelining` by the order of micro-batches."""

OPTIMIZERS = dict.fromkeys(("sgd", "momentum"), ("SGD", ("lr", "momentum", "weight_decay"))) | {
    "adam": ("Adam", ("lr", "betas", "eps", "weight_decay")),
    "adamw": ("AdamW", ("lr", "betas", "eps", "weight_decay")),
}
"""Classes of `torch.optim`, and the options that a script gives them, by rlplace's names."""

_TEMPLATE = '''"""Trains {workload} in {num_stages} stages, {num_micro_batches} micro-batches (rlplace {version}).

    torchrun --nproc-per-node {num_stages} pipeline.py --steps 10 --save trained

{expected}
"""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # this file's folder: no module that lies there is imported, it may be a stranger's

import argparse
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import fx, nn
from torch.distributed.pipelining import Pipe, {schedule}, pipe_split, pipeline
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate

from rlplace.workloads import build, parse_workload

BEGINS = {begins}  # the module that each stage but the first begins with
DEVICES = {devices}  # of each stage
CORES = {cores}  # of the CPU, that the process of each stage is kept on; empty for any
MICRO_BATCHES = {num_micro_batches}
DIMS = {dims}  # the dimension of the batch of each input, then each target; None where micro-batches share it


{stages}

def main(steps: int, save: Path | None) -> None:
    """Trains for a number of steps; every stage then writes its part of the model's `state_dict`."""
    dist.init_process_group(dist.get_default_backend_for_device(DEVICES[0]))
    rank = dist.get_rank()
    if dist.get_world_size() != len(DEVICES):
        raise SystemExit(f"start {{len(DEVICES)}} processes, one for each stage, not {{dist.get_world_size()}}")
    device = torch.device(DEVICES[rank])
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
    if CORES[rank]:
        os.sched_setaffinity(0, CORES[rank])
        torch.set_num_threads(len(CORES[rank]))

    workload = build(parse_workload("{workload}"), default_size="{size}", seed={seed})
    # One batch of {batch} samples, inputs before targets: put your own batches of that shape here.
    inputs = workload.inputs.values() if isinstance(workload.inputs, dict) else workload.inputs
    batch = [*inputs, *workload.targets]
    names = tuple(workload.inputs) if isinstance(workload.inputs, dict) else None
    whole = WholeStep(workload.model, workload.loss_fn, names, len(workload.targets))
    module, run = stage_step(
        whole,
        batch,
        BEGINS,
        rank,
        device,
        schedule={schedule},
        num_micro_batches=MICRO_BATCHES,
        dims=DIMS,
        averages={averages},
    )
    optimizer = torch.optim.{optimizer}(module.parameters(), {options})
    for number in range(steps):
        optimizer.zero_grad()
        losses = run(batch)
        optimizer.step()
        if losses:
            print(number, float(torch.stack(losses).detach().{reduce}()), flush=True)
    if save is not None:
        save.mkdir(parents=True, exist_ok=True)
        own = {{name_in_model(name): each for name, each in (*module.named_parameters(), *module.named_buffers())}}
        names: list[list[str]] = [[] for _ in DEVICES]
        dist.all_gather_object(names, list(own))
        whole_state = workload.model.state_dict(keep_vars=True)  # as at first; a weight of two names is one tensor
        held = {{id(whole_state[name]) for each in names for name in each if name in whole_state}}
        if rank == 0:  # also what no stage reads
            own |= {{name: each for name, each in whole_state.items() if id(each) not in held}}
        state = {{name: each.detach().cpu().clone() for name, each in own.items() if name in whole_state}}
        save_file({{name: each.contiguous() for name, each in state.items()}}, save / f"stage{{rank}}.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--save", type=Path, help="a folder for the model's state, a file for each stage")
    options = parser.parse_args()
    main(options.steps, options.save)
'''


def pipeline_script(request: ExportRequest) -> Exported:
    """The text of `pipeline.py` for a run, with its expected figures.

    Raises:
        UserError: the run lacks a file or is malformed, its workload cannot be built, or it makes no pipeline.
    """
    run = CapturedRun.of(request)
    plan = plan_pipeline(run)
    if request.session.allowed is not None:
        say("the run's pins, exclusions and what is together are not followed by stages")
    command = f"torchrun --nproc-per-node {len(plan.stages)} {request.run.root / PIPELINE.file}"
    say("\n".join((*said(plan), f"run it with {command}")))
    return Exported(text_of(run, plan), figures(plan))


def text_of(run: CapturedRun, plan: PipelinePlan) -> str:
    """The script that runs a plan.

    Args:
        run: whose workload it is of.
        plan: of its pipeline.
    """
    spec = trained_by(run.workload, WHERE)
    optimizer, names = OPTIMIZERS[spec.name]
    sums_losses = plan.micro.weights[0] == 1.0
    return _TEMPLATE.format(
        workload=run.request.spec,
        version=__version__,
        num_stages=len(plan.stages),
        num_micro_batches=plan.num_micro_batches,
        expected=in_docstring("\n".join(said(plan))),
        schedule=SCHEDULES[plan.schedule],
        begins=tuple(stage.begin for stage in plan.stages[1:]),
        devices=tuple(stage.place for stage in plan.stages),
        cores=tuple(stage.device.cores if stage.device.backend == "cpu" else () for stage in plan.stages),
        dims=plan.micro.slicing.dims,
        stages="\n\n".join(inspect.getsource(each) for each in PARTS),
        size=run.request.session.request.default_size,
        seed=run.request.session.request.workload_seed,
        batch=plan.micro.slicing.batch,
        optimizer=optimizer,
        options=", ".join(f"{name}={getattr(spec, name)}" for name in names),
        averages=not sums_losses,
        reduce="sum" if sums_losses else "mean",
    )


def said(plan: PipelinePlan) -> list[str]:
    """The description of a plan for people, in lines."""
    begins = ", ".join(stage.begin.removeprefix("model.") for stage in plan.stages[1:])
    work = ", ".join(f"{stage.device.name} {stage.work_s * 1e3:.4g} ms" for stage in plan.stages)
    verdict, warning = plan.micro.verdict, ""
    if not verdict.is_checked:
        warning = f"warning: the loss of micro-batches was not checked ({verdict.why})"
    elif "accumulation" in verdict.why:
        warning = f"warning: another step than that of the whole batch: {verdict.why}"
    copied = f"several stages hold a copy of {', '.join(plan.shared)}; their gradients are added each step"
    lines = (
        f"{len(plan.stages)} stages, cut before {begins}; work of each ({plan.source}): {work}",
        f"{plan.num_micro_batches} micro-batches, {SCHEDULES[plan.schedule]}: {plan.step_s * 1e3:.4g} ms a step by the "
        f"simulator, {plan.ratio:.3g} of the run's placement of ops ({plan.placement_s * 1e3:.4g} ms)",
        warning,
        copied if plan.shared else "",
    )
    return [line for line in lines if line]


def figures(plan: PipelinePlan) -> dict[str, Any]:
    """The plan as `--json` says it."""
    return {
        "schedule": plan.schedule,
        "num_micro_batches": plan.num_micro_batches,
        "stages": [
            {"begin": stage.begin.removeprefix("model."), "device": stage.device.name, "work_s": stage.work_s}
            for stage in plan.stages
        ],
        "shared_parameters": list(plan.shared),
        "loss": {"is_checked": plan.micro.verdict.is_checked, "why": plan.micro.verdict.why},
        "costs": plan.source,
        "step_s": plan.step_s,
        "placement_step_s": plan.placement_s,
        "ratio": plan.ratio,
    }


PIPELINE = ExportFormat("pipeline.py", "a pipeline of torch.distributed.pipelining, for torchrun", pipeline_script)
