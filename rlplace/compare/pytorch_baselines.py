"""PyTorch baselines, which place nothing: the rows set apart in the table, measured on a real host, or estimated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from rlplace import cuda
from rlplace.compare.replicas import ReplicaTeam, simulated_replicas, with_batch_share
from rlplace.compare.row import Row
from rlplace.errors import InvalidValue, RlplaceError
from rlplace.measure.execute.channels import torch_device
from rlplace.measure.hosts.host import Device
from rlplace.measure.problem import Problem
from rlplace.measure.timing.eager_step import EagerRecipe, Other, check_has_values
from rlplace.search.rules.baselines import plain_devices
from rlplace.workloads import Size, WorkloadSpec

BASELINES = {
    "eager": "plain PyTorch on one device (one core, or the first GPU)",
    "all-cores": "plain PyTorch with every core on every op",
    "torch-compile": "torch.compile on one device",
    "cuda-graph": "the whole step as one CUDA graph on one GPU",
    "ddp": "`DistributedDataParallel`: a replica on every device, each with its share of the batch",
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
) -> Iterator[list[Entry]]:
    """One row for each of `names`, with a recipe or a timer where it can run; replicas end when the context does.

    Args:
        problem: its graph with a program where the host is real.
        spec: the workload, to build replicas of; None has none.
        names: of `BASELINES`.
        default_size: of a workload named without one.
        seed: of the workload.
        say: told what takes long.
    """
    with ExitStack() as stack:
        entries: list[Entry] = []
        for name in names:
            if problem.host.is_simulated:
                entries.append((_simulated(problem, spec, name, default_size, seed), None))
                continue
            try:
                entries.append(
                    (
                        Row(name, 0, "ok", is_placement=False),
                        _timer(problem, spec, name, default_size, seed, say, stack),
                    )
                )
            except Exception as error:
                if cuda.is_out_of_memory(error):
                    entries.append((Row(name, 0, "oom", is_placement=False, why=str(error)), None))
                elif isinstance(error, RlplaceError | _CannotRun):
                    entries.append((Row(name, 0, "skipped", is_placement=False, why=str(error)), None))
                else:
                    raise
        yield entries


class _CannotRun(Exception):
    """Says why a row is skipped."""


def _timer(
    problem: Problem,
    spec: WorkloadSpec | None,
    name: str,
    default_size: Size,
    seed: int,
    say: Callable[[str], None],
    stack: ExitStack,
) -> Other:
    has_gpu = any(device.backend == "cuda" for device in problem.host.devices)
    if name != "ddp":
        check_has_values(problem.graph)
    if name == "eager":
        return EagerRecipe(num_threads=1)
    if name == "all-cores":
        if has_gpu:
            raise _CannotRun("the host's devices are GPUs")
        return EagerRecipe()
    if name == "torch-compile":
        return EagerRecipe(num_threads=1, is_compiled=True)
    if name == "cuda-graph":
        if not has_gpu:
            raise _CannotRun("the host has no GPU")
        return EagerRecipe(is_cuda_graph=True)
    devices = replica_devices(problem)
    share = _share(spec, len(devices), default_size)
    say(f"starting {len(devices)} data-parallel replicas")
    team = ReplicaTeam(share, devices, default_size=default_size, seed=seed)
    stack.callback(team.close)
    return team


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


def _share(spec: WorkloadSpec | None, count: int, default_size: Size) -> WorkloadSpec:
    if count < 2:
        raise _CannotRun("there is one device for a replica")
    if spec is None:
        raise _CannotRun("a graph alone has no batch to share out")
    try:
        return with_batch_share(spec, count, default_size)
    except InvalidValue as error:
        raise _CannotRun(str(error)) from error


def _simulated(problem: Problem, spec: WorkloadSpec | None, name: str, default_size: Size, seed: int) -> Row:
    if name != "ddp":
        why = "the host is simulated: nothing runs on it; one device is the row `single`"
        return Row(name, 0, "skipped", is_placement=False, why=why)
    try:
        share = _share(spec, len(replica_devices(problem)), default_size)
        return simulated_replicas(problem, share, default_size=default_size, seed=seed)
    except (_CannotRun, RlplaceError) as error:
        return Row(name, 0, "skipped", is_placement=False, why=str(error))
