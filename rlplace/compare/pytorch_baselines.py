"""PyTorch baselines, which place nothing: the rows set apart in the table, measured on a real host, or estimated.

Data parallelism as PyTorch has it: `ReplicaTeam` for real, `simulated_replicas` by ring all-reduce.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, TextIO

import torch
from torch.utils import _pytree as pytree

from rlplace import cuda
from rlplace.compare.comparison import Row
from rlplace.errors import InvalidValue, RlplaceError, RunnerError, UserError, refuse_if
from rlplace.graphs import BACKWARD, FORWARD, capture
from rlplace.graphs.capturing.capture import as_call
from rlplace.graphs.optimizers import resolve_optimizer, torch_optimizer
from rlplace.measure import Device, Problem, Simulator
from rlplace.measure.bounds import ring_all_reduce_s
from rlplace.measure.execute.device_threads import torch_device
from rlplace.measure.hosts.detect import nodes_host
from rlplace.measure.hosts.fresh_ranks import FreshRanks
from rlplace.measure.hosts.nodes import join
from rlplace.measure.timing.eager_step import EagerRecipe, Other, check_has_values
from rlplace.measure.timing.race import LOOKS_EVERY_S, Suspensions
from rlplace.say import counted
from rlplace.search import single
from rlplace.search.rules.baselines import plain_devices
from rlplace.workloads import CATALOG, Size, WorkloadSpec, build, parse_workload, without_memory

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
        say: told of long work.
    """
    with ExitStack() as stack:
        entries: list[Entry] = []
        for name in names:
            try:
                if problem.host.is_simulated:
                    entries.append((_simulated(problem, spec, name, default_size, seed), None))
                else:
                    timer = _timer(problem, spec, name, default_size, seed, say, stack)
                    entries.append((Row(name, 0, "ok", is_placement=False), timer))
            except Exception as error:
                if not (is_oom := cuda.is_out_of_memory(error)) and not isinstance(error, RlplaceError):
                    raise
                entries.append((Row(name, 0, "oom" if is_oom else "skipped", is_placement=False, why=str(error)), None))
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
) -> Other:
    """The timer of a baseline.

    Raises:
        RlplaceError: says why it cannot run.
    """
    if name in RECIPES:
        check_has_values(problem.graph)
        has_gpu = any(device.backend == "cuda" for device in problem.host.devices)
        refused = {("all-cores", True): "the host's devices are GPUs", ("cuda-graph", False): "the host has no GPU"}
        if (name, has_gpu) in refused:
            raise UserError(refused[name, has_gpu])
        return RECIPES[name]
    devices = replica_devices(problem)
    share = _share(spec, len(devices), default_size)
    if any(device.machine for device in devices):
        if len(devices) != join().num_ranks:
            raise UserError("replicas are on all devices of the host `nodes`, and this one has other devices")
        say(f"starting {len(devices)} data-parallel replicas on {counted(len(join().machines), 'machine')}")
        return stack.enter_context(closing(FarReplicas(share, default_size=default_size, seed=seed)))
    say(f"starting {len(devices)} data-parallel replicas")
    return stack.enter_context(closing(ReplicaTeam(share, devices, default_size=default_size, seed=seed)))


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
    if count < 2 or spec is None:
        raise UserError("there is one device for a replica" if count < 2 else "a graph alone has no batch to share out")
    return with_batch_share(spec, count, default_size)


def _simulated(problem: Problem, spec: WorkloadSpec | None, name: str, default_size: Size, seed: int) -> Row:
    """The row of a baseline on a simulated host.

    Raises:
        RlplaceError: says why it cannot be estimated.
    """
    if name != "ddp":
        raise UserError("the host is simulated: nothing runs on it; one device is the row `single`")
    share = _share(spec, len(replica_devices(problem)), default_size)
    return simulated_replicas(problem, share, default_size=default_size, seed=seed)


TIMEOUT_S = 300.0
"""For replicas to start, and for a step."""


def with_batch_share(spec: WorkloadSpec, count: int, default_size: Size) -> WorkloadSpec:
    """The workload with its batch divided by `count`.

    Raises:
        InvalidValue: it has no option `batch`, or one that cannot be divided.
    """
    batch = getattr(spec.config(default_size), "batch", None) if spec.name in CATALOG else None
    if not isinstance(batch, int):
        raise InvalidValue(
            "workload",
            str(spec),
            "one with an option `batch`, to share it out",
            where="ddp",
            hint="A function of yours or a graph file has none: leave `ddp` out of --methods.",
        )
    refuse_if(batch % count, "batch", batch, f"a multiple of {count}, one share a replica", where="ddp")
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


class ReplicaTeam:
    """A process a device with `DistributedDataParallel`, told step by step; calling it times one step of all.

    Args:
        share: the workload of one replica.
        devices: one a replica, all of one backend.
        default_size: of a workload named without one.
        seed: of the workload.

    Raises:
        RunnerError: a replica did not start.
    """

    def __init__(self, share: WorkloadSpec, devices: Sequence[Device], *, default_size: Size, seed: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="rlplace-replicas-")
        meeting = f"file://{self._folder.name}/meeting"
        pipes = [context.Pipe() for _ in devices]
        self._pipes = [here for here, _ in pipes]
        self._processes = [
            context.Process(
                target=_replica,
                args=(there, meeting, rank, len(devices), share, device, default_size, seed),
                name=f"rlplace replica {rank}",
                daemon=True,
            )
            for rank, (device, (_, there)) in enumerate(zip(devices, pipes, strict=True))
        ]
        with _path_without_current_folder():
            for process in self._processes:
                process.start()
        with ExitStack() as stack:
            stack.callback(self.close)
            self._collect()
            stack.pop_all()

    def __call__(self) -> float:
        """Seconds of one step of all replicas.

        Raises:
            RunnerError: a replica failed, or did not answer.
        """
        begin = time.perf_counter()
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send("step")
            except OSError as error:
                raise RunnerError(f"replica {rank} ended: {error}") from error
        self._collect()
        return time.perf_counter() - begin

    def close(self) -> None:
        """Ends the replicas."""
        for pipe in self._pipes:
            with suppress(OSError):  # it ended before
                pipe.send("stop")
        for process in self._processes:
            process.join(timeout=10.0)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()

    def _collect(self) -> None:
        deadline_s, suspensions = time.monotonic() + TIMEOUT_S, Suspensions()
        for rank, pipe in enumerate(self._pipes):
            try:
                while not pipe.poll(LOOKS_EVERY_S):
                    deadline_s += suspensions.look()
                    if time.monotonic() > deadline_s:
                        raise RunnerError(f"replica {rank} did not answer within {TIMEOUT_S:.0f} s")
                answer = pipe.recv()
            except (EOFError, OSError) as error:
                raise RunnerError(f"replica {rank} ended: {error or 'its process is gone'}") from error
            if answer != "done":
                raise RunnerError(f"replica {rank} failed: {answer}")


@contextmanager
def _path_without_current_folder() -> Iterator[None]:
    """While active, Python starts without looking for modules in the current folder, which may be a stranger's."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = before or "1"
    try:
        yield
    finally:
        if not before:
            del os.environ["PYTHONSAFEPATH"]


def _replica(
    pipe: Connection,
    meeting: str,
    rank: int,
    count: int,
    share: WorkloadSpec,
    device: Device,
    default_size: Size,
    seed: int,
) -> None:
    """A replica's process: builds its share, then steps whenever it is told."""
    import torch.distributed as dist

    try:
        _join_replicas(device, rank, count, init_method=meeting)
        step = _replica_step(share, device, default_size, seed)
        pipe.send("done")
        while pipe.recv() == "step":
            step()
            pipe.send("done")
        dist.destroy_process_group()
    except EOFError:  # the parent is gone
        return
    except Exception as error:  # whatever it is, the parent's row says so
        pipe.send(f"{type(error).__name__}: {error}")


def _join_replicas(device: Device, rank: int, count: int, *, interface: str = "lo", **meeting: Any) -> None:
    """Makes this process a replica: its cores or GPU, and the default group of `torch.distributed`."""
    import torch.distributed as dist

    if device.cores:
        os.sched_setaffinity(0, device.cores)
    torch.set_num_threads(max(len(device.cores), 1))
    if device.backend == "cuda":
        cuda.use(torch_device(device))  # else every replica's first allocations, and NCCL's, are on GPU 0
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    backend, timeout = "nccl" if device.backend == "cuda" else "gloo", timedelta(seconds=TIMEOUT_S)
    dist.init_process_group(backend, rank=rank, world_size=count, timeout=timeout, **meeting)


def _replica_step(
    share: WorkloadSpec,
    device: Device,
    default_size: Size,
    seed: int,
    *,
    bucket_mb: float | None = None,
    num_accumulated: int = 1,
) -> Callable[[], None]:
    """A step of one replica.

    Args:
        share: its workload.
        device: where.
        default_size: of a workload named without one.
        seed: of the workload.
        bucket_mb: of the gradients that are reduced together; by default PyTorch's.
        num_accumulated: forwards and backwards, the last of which alone reduces gradients (`no_sync`).
    """
    from torch.nn.parallel import DistributedDataParallel

    place, is_cuda = torch_device(device), device.backend == "cuda"
    work = build(share, default_size=default_size, seed=seed)
    inputs, targets = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(place), (work.inputs, work.targets))
    args, kwargs = as_call(inputs)
    model: Any = work.model.to(place)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    is_training = work.loss_fn is not None and bool(parameters)
    if is_training:
        model = DistributedDataParallel(model, device_ids=[place.index] if is_cuda else None, bucket_cap_mb=bucket_mb)
    spec = resolve_optimizer(work.optimizer)
    optimizer = torch_optimizer(spec, parameters) if spec is not None else None

    def step() -> None:
        if optimizer is not None:
            optimizer.zero_grad()
        for k in range(num_accumulated):
            is_last = k == num_accumulated - 1 or not is_training
            with nullcontext() if is_last else model.no_sync(), torch.set_grad_enabled(is_training):
                output = model(*args, **kwargs)
                if is_training and work.loss_fn is not None:
                    work.loss_fn(output, *targets).backward()  # type: ignore[no-untyped-call]
        if optimizer is not None:
            optimizer.step()
        if is_cuda:
            cuda.await_all(place)

    return step


class FarReplicas:
    """`ReplicaTeam` on the ranks of torchrun; calling it gives the seconds from a barrier to the last replica's end.

    Args:
        share: the workload of one replica.
        default_size: of a workload named without one.
        seed: of the workload.
        options: `bucket_mb` and `num_accumulated` of a replica's step.

    Raises:
        RunnerError: a replica did not start.
    """

    def __init__(self, share: WorkloadSpec, *, default_size: Size, seed: int, **options: Any) -> None:
        given = {"share": str(share), "default_size": default_size, "seed": seed, **options}
        self._ranks = FreshRanks(join(), "replicas", given)
        with ExitStack() as stack:
            stack.callback(self.close)
            self._ranks.answer(TIMEOUT_S)
            stack.pop_all()

    def __call__(self) -> float:
        """Seconds of one step of all replicas.

        Raises:
            RunnerError: a replica failed, or did not answer.
        """
        self._ranks.tell("step")
        return float(self._ranks.answer(TIMEOUT_S))

    def close(self) -> None:
        """Ends the replicas."""
        self._ranks.close()


def replica_main(answers: TextIO, *, share: str, default_size: Size, seed: int, **options: Any) -> None:
    """The process of one of `FarReplicas`: rank 0 answers each line on stdin with the seconds of a step."""
    import torch.distributed as dist

    nodes = join()
    device = nodes_host(nodes.facts).devices[nodes.rank]
    _join_replicas(device, nodes.rank, nodes.num_ranks, interface=nodes.interface, store=nodes.store)
    step = _replica_step(parse_workload(share), device, default_size, seed, **options)
    word = torch.zeros(1, device=torch_device(device))
    dist.barrier()
    if nodes.rank == 0:
        print(0.0, file=answers, flush=True)
    while True:
        is_over = nodes.rank == 0 and not sys.stdin.readline()
        dist.broadcast(word.fill_(float(is_over)), 0)
        if word.item():
            break
        dist.barrier()
        begin = time.perf_counter()
        step()
        dist.barrier()
        if nodes.rank == 0:
            print(time.perf_counter() - begin, file=answers, flush=True)
    dist.destroy_process_group()
