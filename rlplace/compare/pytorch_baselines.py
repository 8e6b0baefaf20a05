"""PyTorch baselines, which place nothing: the rows set apart in the table, measured on a real host, or estimated.

Data parallelism and pipelines as PyTorch has them: for real in processes of their own (`Replicas`), in the best of a
few variants; `simulated_replicas` by ring all-reduce.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import combinations
from typing import Any

import torch

from rlplace import cuda
from rlplace.compare.comparison import Row
from rlplace.compare.replicas import FarReplicas, Replicas, ReplicaTeam
from rlplace.errors import InvalidValue, RlplaceError, UserError, refuse_if
from rlplace.graphs import BACKWARD, FORWARD, capture
from rlplace.measure import Device, Problem, Simulator
from rlplace.measure.bounds import ring_all_reduce_s
from rlplace.measure.execute.device_threads import torch_device
from rlplace.measure.hosts.nodes import join
from rlplace.measure.isolate.isolated_runner import profile_isolated
from rlplace.measure.timing.eager_step import EagerRecipe, Other, check_has_values
from rlplace.say import counted
from rlplace.search import single
from rlplace.search.rules.baselines import plain_devices
from rlplace.session.setup import WHOLE, CutOptions
from rlplace.workloads import CATALOG, Size, WorkloadSpec, build, without_memory

BASELINES = {
    "eager": "plain PyTorch on one device (one core, or the first GPU)",
    "all-cores": "plain PyTorch with every core on every op",
    "torch-compile": "torch.compile on one device",
    "cuda-graph": "the whole step as one CUDA graph on one GPU",
    "ddp": "`DistributedDataParallel`: a replica on every device, each with its share of the batch",
    "ddp-bf16-gradients": "`ddp` whose gradients are rounded to bf16 before they are added: another arithmetic",
    "fsdp2": "`fully_shard`: `ddp` with a shard of parameters, gradients and optimizer on every device",
    "torch-pipeline": "`torch.distributed.pipelining`: a stage on each device, in the split that rlplace finds",
}
"""Rows that are no placement, by name."""

Entry = tuple[Row, Other | None]


@contextmanager
def pytorch_baselines(
    problem: Problem,
    spec: WorkloadSpec | None,
    names: tuple[str, ...],
    *,
    default_size: Size,
    seed: int,
    say: Callable[[str], None],
    asked: CutOptions = WHOLE,
) -> Iterator[list[Entry]]:
    """One row for each of `names`, with a recipe or a timer where it can run; replicas end when the context does.

    Args:
        problem: its graph with a program where the host is real.
        spec: the workload, to build replicas of; None has none.
        names: of `BASELINES`.
        default_size: of a workload named without one.
        seed: of the workload.
        say: told of long work.
        asked: how the user has the batch cut, which pipelines follow.
    """
    with ExitStack() as stack:
        entries: list[Entry] = []
        for name in names:
            try:
                if problem.host.is_simulated:
                    entries.append((_simulated(problem, spec, name, default_size, seed), None))
                else:
                    timer = _timer(problem, spec, name, default_size, seed, say, stack, asked)
                    note = NOTES.get(name, "") + getattr(timer, "note", "")
                    entries.append((Row(name, 0, "ok", is_placement=False, why=note), timer))
            except Exception as error:
                if not (is_oom := cuda.is_out_of_memory(error)) and not isinstance(error, RlplaceError):
                    raise
                why, *_ = str(error).splitlines() or [""]
                entries.append((Row(name, 0, "oom" if is_oom else "skipped", is_placement=False, why=why), None))
        yield entries


RECIPES = {
    "eager": EagerRecipe(num_threads=1),
    "all-cores": EagerRecipe(),
    "torch-compile": EagerRecipe(num_threads=1, is_compiled=True),
    "cuda-graph": EagerRecipe(is_cuda_graph=True),
}
"""How plain PyTorch runs on this machine, by name of a baseline."""


def _timer(
    problem: Problem,
    spec: WorkloadSpec | None,
    name: str,
    default_size: Size,
    seed: int,
    say: Callable[[str], None],
    stack: ExitStack,
    asked: CutOptions,
) -> Other:
    """The timer of a baseline."""
    if name in RECIPES:
        check_has_values(problem.graph)
        has_gpu = any(device.backend == "cuda" for device in problem.host.devices)
        refused = {("all-cores", True): "the host's devices are GPUs", ("cuda-graph", False): "the host has no GPU"}
        if (name, has_gpu) in refused:
            raise UserError(refused[name, has_gpu])
        return RECIPES[name]
    devices = replica_devices(problem)
    share = _share(spec, len(devices), default_size, name)
    machines = {device.machine for device in devices if device.machine}
    if machines and len(devices) != join().num_ranks:
        raise UserError("replicas are on all devices of the host `nodes`, and this one has other devices")
    replicas = Replicas("fsdp2" if name == "fsdp2" else "ddp", {}, default_size, seed)
    if name == "torch-pipeline":
        replicas, devices = _pipeline(problem, share, default_size, seed, say, asked)
    else:
        for count, part in _parts(share, problem.graph.num_micro_batches, default_size).items():
            words = f", no_sync over {count} micro-batches" if count > 1 else ""
            options = {"workload": str(part), "num_accumulated": count}
            replicas.variants.update({label + words: each | options for label, each in VARIANTS[name].items()})
    where = f" on {counted(len(machines), 'machine')}" if machines else ""
    say(f"starting {len(devices)} processes of {name}{where}, {counted(len(replicas.variants), 'variant')} to try")
    started = FarReplicas(replicas) if machines else ReplicaTeam(replicas, devices)
    return stack.enter_context(closing(started))


VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    **{
        name: {f"buckets of {mb:g} MB": {"bucket_mb": mb, "in_bf16": in_bf16} for mb in (1.0, 5.0, 25.0, 100.0)}
        for name, in_bf16 in (("ddp", False), ("ddp-bf16-gradients", True))
    },
    "fsdp2": {
        "sharded as a whole": {"by_block": False, "keeps": True},
        "sharded by block": {"by_block": True, "keeps": False},
        "sharded by block, parameters kept until the backward": {"by_block": True, "keeps": True},
    },
}
"""Options of replicas by row, the best of which is raced."""
NOTES = {"ddp-bf16-gradients": "another arithmetic, gradients are rounded to bf16; "}


def _pipeline(
    problem: Problem,
    spec: WorkloadSpec,
    default_size: Size,
    seed: int,
    say: Callable[[str], None],
    asked: CutOptions,
) -> tuple[Replicas, list[Device]]:
    """The pipeline with the shortest simulated step, and the devices of its stages."""
    from rlplace.export.pipeline import SCHEDULES, best_stages

    work = build(spec, default_size=default_size, seed=seed)
    cost = lambda graph: profile_isolated(graph, problem.host)  # noqa: E731
    plan = best_stages(spec, work, problem.host, cost, asked=asked, seed=seed, say=say)
    check_groups(plan.shared)
    options = {
        "workload": str(spec),
        "num_stages": len(plan.stages),
        "begins": [stage.begin for stage in plan.stages[1:]],
        "schedule": SCHEDULES[plan.schedule],
        "num_micro_batches": plan.num_micro_batches,
        "dims": list(plan.micro.slicing.dims),
        "averages": plan.micro.weights[0] != 1.0,
    }
    begins = ", ".join(stage.begin.removeprefix("model.") for stage in plan.stages[1:])
    words = f"{len(plan.stages)} stages, cut before {begins}, {plan.num_micro_batches} micro-batches, {plan.schedule}"
    devices = [stage.device for stage in plan.stages]
    return Replicas("pipeline", {words: options}, default_size, seed, [device.name for device in devices]), devices


def check_groups(shared: Mapping[str, Sequence[int]]) -> None:
    """Raises a UserError if stages share parameters in groups that overlap: PyTorch numbers a group by each process."""
    for (one, stages), (other, others) in combinations(shared.items(), 2):
        if set(stages) != set(others) and set(stages) & set(others):
            raise UserError(
                f"stages {stages} share {one}, stages {others} share {other}: only some are the same, and PyTorch "
                "cannot add the gradients of both. `rlplace export --format pipeline` makes a script that can."
            )


def replica_devices(problem: Problem) -> list[Device]:
    """The devices that get a replica each: the GPUs where there are any, the first part of each where they have parts.

    Without GPUs the cores, never a gang.
    """
    devices = [problem.host.devices[index] for index in plain_devices(problem)]
    firsts: dict[torch.device, Device] = {}
    for device in devices:
        if device.backend == "cuda":
            firsts.setdefault(torch_device(device), device)
    return list(firsts.values()) or devices


def _share(spec: WorkloadSpec | None, count: int, default_size: Size, name: str) -> WorkloadSpec:
    if count < 2 or spec is None:
        raise UserError("there is one device for a replica" if count < 2 else "a graph alone has no batch to share out")
    return spec if name == "torch-pipeline" else with_batch_share(spec, count, default_size, name)


def _simulated(problem: Problem, spec: WorkloadSpec | None, name: str, default_size: Size, seed: int) -> Row:
    """The row of a baseline on a simulated host."""
    if name != "ddp":
        raise UserError("the host is simulated: nothing runs on it; one device is the row `single`")
    share = _share(spec, len(replica_devices(problem)), default_size, name)
    return simulated_replicas(problem, share, default_size=default_size, seed=seed)


def _parts(share: WorkloadSpec, count: int, default_size: Size) -> dict[int, WorkloadSpec]:
    """A replica's share, and one of the `count` micro-batches that it is cut into, or of the most that are equal."""
    for most in range(count, 1, -1):
        with suppress(InvalidValue):
            return {1: share, most: with_batch_share(share, most, default_size)}
    return {1: share}


def with_batch_share(spec: WorkloadSpec, count: int, default_size: Size, name: str = "ddp") -> WorkloadSpec:
    """The workload with its batch divided by `count`, for the row `name`.

    Raises:
        InvalidValue: it has no option `batch`, or one that cannot be divided.
    """
    batch = getattr(spec.config(default_size), "batch", None) if spec.name in CATALOG else None
    if not isinstance(batch, int):
        raise InvalidValue(
            "workload",
            str(spec),
            "one with an option `batch`, to share it out",
            where=name,
            hint=f"A function of yours or a graph file has none: leave `{name}` out of --methods.",
        )
    refuse_if(batch % count, "batch", batch, f"a multiple of {count}, one share a replica", where=name)
    options = dict(spec.options) | {"batch": batch // count}
    return dataclasses.replace(spec, options=tuple(options.items()), size=spec.size or default_size)


def simulated_replicas(problem: Problem, share: WorkloadSpec, *, default_size: Size, seed: int) -> Row:
    """The step of a replica on every device and a ring all-reduce of the gradients, which overlaps all of the backward.

    Args:
        problem: on a simulated host.
        share: the workload of one replica.
        default_size: of a workload named without one.
        seed: of the workload.
    """
    begin = time.monotonic()
    with without_memory():
        work = build(share, default_size=default_size, seed=seed)
        graph = capture(work.model, work.inputs, work.loss_fn, work.optimizer, targets=work.targets)
    replica = Problem.estimate(graph, problem.host, num_groups=1)
    simulator = Simulator(replica)
    devices = plain_devices(problem)
    all_reduce_s = ring_all_reduce_s(problem.host, devices, float(graph.gradient_bytes.sum()))
    slowest_s, peaks = 0.0, [0] * problem.host.num_devices
    for device in devices:
        plan, outcome = simulator.plan_and_time(single(replica, device))
        peaks[device] = outcome.peak_bytes[device]
        if not outcome.ok:
            return Row("ddp", 0, "oom", peak_bytes=tuple(peaks), why=outcome.why, is_placement=False)
        ends_s = simulator.timeline(plan).op_end_s
        forward_s = float(ends_s[graph.phases == FORWARD].max(initial=0.0))
        backward_s = float(ends_s[graph.phases <= BACKWARD].max(initial=0.0)) - forward_s
        update_s = outcome.step_time_s - forward_s - backward_s
        slowest_s = max(slowest_s, forward_s + max(backward_s, all_reduce_s) + update_s)
    return Row(
        "ddp",
        0,
        "ok",
        slowest_s,
        1,
        time.monotonic() - begin,
        tuple(peaks),
        "ring all-reduce behind the backward",
        is_placement=False,
    )
