"""Processes of plain PyTorch that train one workload together: replicas, or the stages of a pipeline.

`ReplicaTeam` has them on this machine, `FarReplicas` on the ranks of torchrun. Both run `Replicas`: what the processes
do, in several variants, of which they take the quickest.
"""

from __future__ import annotations

import gc
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, TextIO

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rlplace import cuda
from rlplace.errors import RunnerError
from rlplace.graphs.capturing.capture import as_call
from rlplace.graphs.optimizers import resolve_optimizer, torch_optimizer
from rlplace.measure import Device
from rlplace.measure.execute.device_threads import torch_device
from rlplace.measure.hosts.detect import nodes_host
from rlplace.measure.hosts.fresh_ranks import FreshRanks
from rlplace.measure.hosts.nodes import join
from rlplace.measure.isolate.lifeline import end_with
from rlplace.measure.timing.race import LOOKS_EVERY_S, Suspensions
from rlplace.process_settings import close_own, keep_from_children
from rlplace.workloads import Size, Workload, build, parse_workload

TIMEOUT_S = 300.0
"""For replicas to start with one variant, and for a step."""
TRIAL_ROUNDS, TRIAL_S = 7, 10.0
"""Steps of a trial of a variant, fewer where they would take longer."""
Step = Callable[[], Tensor | None]
"""Of one process; the loss where it has one."""


@dataclass(frozen=True)
class Replicas:
    """What processes do together.

    Attributes:
        kind: a name in `KINDS`.
        variants: the workload of one process and the options of its kind, by what the variant is called.
        default_size: of a workload named without one.
        seed: of the workload.
        stages: of a pipeline, names of the devices in the order of its stages.
    """

    kind: str
    variants: dict[str, dict[str, Any]]
    default_size: Size = "small"
    seed: int = 0
    stages: Sequence[str] = ()

    def quickest(self, device: Device) -> tuple[str, Step]:
        """The name of the variant with the shortest step, the same in all processes, which call this together.

        Raises:
            Exception: PyTorch refuses all of them.
        """
        if len(self.variants) == 1:
            (name,) = self.variants
            return name, self._step(name, device)
        times_s, refused = dict.fromkeys(self.variants, math.inf), None
        for name in self.variants:
            try:
                times_s[name] = _trial_s(partial(self._step, name, device), torch_device(device))
            except Exception as error:  # of PyTorch, in all processes alike
                if cuda.is_out_of_memory(error):  # perhaps in this process alone: the others wait in it
                    raise
                refused = error.with_traceback(None)  # its frames hold the model
            gc.collect()  # the hooks of its reducer go
        best = min(times_s, key=times_s.__getitem__)
        if refused is not None and math.isinf(times_s[best]):
            raise refused
        return best, self._step(best, device)

    def _step(self, name: str, device: Device) -> Step:
        options = dict(self.variants[name])
        work = build(parse_workload(options.pop("workload")), default_size=self.default_size, seed=self.seed)
        return KINDS[self.kind](work, device, **options)


def _trial_s(make: Callable[[], Step], place: torch.device) -> float:
    """The median of a few steps, of the slowest process."""
    import torch.distributed as dist

    def slowest(seconds: float) -> float:
        word = torch.tensor([seconds], dtype=torch.float64, device=place)
        dist.all_reduce(word, dist.ReduceOp.MAX)
        return word.item()

    def timed() -> float:
        dist.barrier()
        begin = time.perf_counter()
        step()
        return time.perf_counter() - begin

    step = make()
    timed()
    rounds = int(min(max(TRIAL_S / slowest(timed()), 1.0), TRIAL_ROUNDS))
    return slowest(median(timed() for _ in range(rounds)))


Synced = Callable[[bool], AbstractContextManager[None]]
"""Around a forward and backward: whether gradients are added over all processes there."""


def ddp(model: nn.Module, place: torch.device, *, bucket_mb: float | None, in_bf16: bool) -> tuple[nn.Module, Synced]:
    """`DistributedDataParallel` with buckets of a size, whose gradients may be rounded to bf16 on the way."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
    from torch.nn.parallel import DistributedDataParallel

    devices = [place.index] if place.type == "cuda" else None
    wrapped = DistributedDataParallel(model, device_ids=devices, bucket_cap_mb=bucket_mb)
    if in_bf16:
        # under its own name PyTorch allows it for NCCL alone
        wrapped.register_comm_hook(None, lambda group, bucket: bf16_compress_hook(group, bucket))
    return wrapped, lambda is_last: nullcontext() if is_last else wrapped.no_sync()


def fsdp2(model: nn.Module, place: torch.device, *, by_block: bool, keeps: bool) -> tuple[nn.Module, Synced]:
    """`fully_shard` of the whole model, or of each block of its `ModuleList`s too.

    Args:
        model: becomes sharded.
        place: of this process.
        by_block: whether the blocks are sharded on their own.
        keeps: whether the parameters of a block stay from forward to backward, and over micro-batches.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    shard = partial(fully_shard, mesh=init_device_mesh(place.type, (dist.get_world_size(),)))
    for block in _blocks(model) if by_block else ():
        shard(block, reshard_after_forward=not keeps)
    sharded: Any = shard(model)

    @contextmanager
    def synced(is_last: bool) -> Iterator[None]:
        sharded.set_requires_gradient_sync(is_last)
        sharded.set_reshard_after_backward(is_last or not keeps)
        yield

    return sharded, synced


def _blocks(module: nn.Module, *, is_listed: bool = False) -> Iterator[nn.Module]:
    """The outermost modules in a list that have parameters and run themselves."""
    if is_listed and not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        if next(module.parameters(), None) is not None:
            yield module
        return
    for child in module.children():
        yield from _blocks(child, is_listed=is_listed or isinstance(module, nn.ModuleList))


def replica_step(
    work: Workload,
    device: Device,
    wrap: Callable[..., tuple[nn.Module, Synced]] = ddp,
    *,
    num_accumulated: int = 1,
    **options: Any,
) -> Step:
    """A step of one replica.

    Args:
        work: its share of the workload, a micro-batch of it where several are accumulated.
        device: where.
        wrap: gives the model that has parameters in common with the others.
        num_accumulated: forwards and backwards, the last of which alone adds gradients over all replicas.
        options: of `wrap`.
    """
    place, is_cuda = torch_device(device), device.backend == "cuda"
    inputs, targets = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(place), (work.inputs, work.targets))
    args, kwargs = as_call(inputs)
    model: Any = work.model.to(place)
    synced: Synced = lambda is_last: nullcontext()  # noqa: E731
    is_training = work.loss_fn is not None and any(each.requires_grad for each in model.parameters())
    if is_training:
        model, synced = wrap(model, place, **options)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    spec = resolve_optimizer(work.optimizer)
    optimizer = torch_optimizer(spec, parameters, is_sharded=wrap is fsdp2) if spec is not None else None

    def step() -> Tensor | None:
        loss: Tensor | None = None
        if optimizer is not None:
            optimizer.zero_grad()
        for k in range(num_accumulated):
            with synced(k == num_accumulated - 1), torch.set_grad_enabled(is_training):
                output = model(*args, **kwargs)
                if is_training and work.loss_fn is not None:
                    loss = work.loss_fn(output, *targets)
                    (loss / num_accumulated).backward()  # type: ignore[no-untyped-call]
        if optimizer is not None:
            optimizer.step()
        if is_cuda:
            cuda.await_all(place)
        return None if loss is None else loss.detach()

    return step


def pipeline_step(
    work: Workload, device: Device, *, num_stages: int, schedule: str, averages: bool, **options: Any
) -> Step:
    """A step of one stage of a pipeline; of a process without a stage, nothing.

    Args:
        work: the whole workload.
        device: of the stage.
        num_stages: on the first ranks.
        schedule: the name of a class of `torch.distributed.pipelining`.
        averages: whether losses of micro-batches are averaged, not added.
        options: of `stage_step`.
    """
    import torch.distributed as dist
    from torch.distributed import pipelining

    from rlplace.export.stages import WholeStep, stage_step

    place, rank = torch_device(device), dist.get_rank()
    if rank >= num_stages:
        return lambda: None
    group = dist.new_group(range(num_stages), use_local_synchronization=True)
    args, kwargs = as_call(work.inputs)
    assert work.loss_fn is not None  # it was planned
    whole = WholeStep(work.model, work.loss_fn, tuple(kwargs) or None, len(work.targets))
    batch = [*args, *kwargs.values(), *work.targets]
    with warnings.catch_warnings(action="ignore"):  # of the tracer
        options |= {"schedule": getattr(pipelining, schedule), "averages": averages, "group": group}
        module, run = stage_step(whole, batch, index=rank, device=place, **options)
    spec = resolve_optimizer(work.optimizer)
    assert spec is not None
    optimizer = torch_optimizer(spec, list(module.parameters()))
    batch = [tensor.to(place) for tensor in batch]  # the tracer wants them beside the model

    def step() -> Tensor | None:
        optimizer.zero_grad()
        losses = run(batch)
        optimizer.step()
        if place.type == "cuda":
            cuda.await_all(place)
        return (torch.stack(losses).mean() if averages else torch.stack(losses).sum()).detach() if losses else None

    return step


KINDS: dict[str, Callable[..., Step]] = {
    "ddp": partial(replica_step, wrap=ddp),
    "fsdp2": partial(replica_step, wrap=fsdp2),
    "pipeline": pipeline_step,
}
"""What one process does, by kind."""


class ReplicaTeam:
    """A process a device, told step by step; calling it times one step of all.

    Args:
        replicas: what they do.
        devices: one a replica, all of one backend.

    Attributes:
        note: the variant that they took.

    Raises:
        RunnerError: a replica did not start.
    """

    def __init__(self, replicas: Replicas, devices: Sequence[Device]) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="rlplace-replicas-")
        meeting = f"file://{self._folder.name}/meeting"
        pipes = [context.Pipe() for _ in devices]
        self._pipes = [here for here, _ in pipes]
        alive, lifeline = os.pipe()
        self._lifeline = keep_from_children(lifeline)
        with Connection(alive, writable=False) as life, _path_without_current_folder():
            self._processes = [
                context.Process(
                    target=_replica,
                    args=(life, there, meeting, rank, len(devices), device, replicas),
                    name=f"rlplace replica {rank}",
                    daemon=True,
                )
                for rank, (device, (_, there)) in enumerate(zip(devices, pipes, strict=True))
            ]
            for process in self._processes:
                process.start()
        with ExitStack() as stack:
            stack.callback(self.close)
            self.note = self._collect(TIMEOUT_S * len(replicas.variants))
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
        self._collect(TIMEOUT_S)
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
        close_own(self._lifeline)
        self._folder.cleanup()

    def _collect(self, within_s: float) -> str:
        """What all of them say."""
        deadline_s, suspensions, said = time.monotonic() + within_s, Suspensions(), ""
        for rank, pipe in enumerate(self._pipes):
            try:
                while not pipe.poll(LOOKS_EVERY_S):
                    deadline_s += suspensions.look()
                    if time.monotonic() > deadline_s:
                        raise RunnerError(f"replica {rank} did not answer within {within_s:.0f} s")
                failed, said = pipe.recv()
            except (EOFError, OSError) as error:
                raise RunnerError(f"replica {rank} ended: {error or 'its process is gone'}") from error
            if failed:
                raise RunnerError(f"replica {rank} failed: {said}")
        return str(said)


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
    life: Connection, pipe: Connection, meeting: str, rank: int, count: int, device: Device, replicas: Replicas
) -> None:
    """A replica's process: makes its part, then steps whenever it is told; it ends with the one that started it."""
    import torch.distributed as dist

    end_with(life.fileno())
    try:
        join_replicas(device, rank, count, init_method=meeting)
        name, step = replicas.quickest(device)
        pipe.send((False, name))
        while pipe.recv() == "step":
            step()
            pipe.send((False, name))
        dist.destroy_process_group()
    except EOFError:  # the parent is gone
        return
    except Exception as error:  # whatever it is, the parent's row says so
        pipe.send((True, in_a_line(error)))


def in_a_line(error: Exception) -> str:
    """Kind and first line of an error."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def join_replicas(device: Device, rank: int, count: int, *, interface: str = "lo", **meeting: Any) -> None:
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


class FarReplicas:
    """`ReplicaTeam` on the ranks of torchrun; calling it gives the seconds from a barrier to the last replica's end.

    Args:
        replicas: what they do.

    Attributes:
        note: the variant that they took.

    Raises:
        RunnerError: a replica did not start.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._ranks = FreshRanks(join(), "replicas", asdict(replicas))
        with ExitStack() as stack:
            stack.callback(self.close)
            self.note = str(self._ranks.answer(TIMEOUT_S * len(replicas.variants)))
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


IDLE = timedelta(days=30)
"""For the next word of rank 0, which searches meanwhile."""


def replica_main(answers: TextIO, **options: Any) -> None:
    """The process of one of `FarReplicas`: rank 0 answers each line on stdin with the seconds of a step."""
    import torch.distributed as dist

    replicas, nodes = Replicas(**options), join()
    devices = nodes_host(nodes.facts).devices
    names = [device.name for device in devices]
    order = [names.index(name) for name in replicas.stages]  # stages are the first ranks of the group
    order += [rank for rank in range(nodes.num_ranks) if rank not in order]
    device, first = devices[nodes.rank], order.index(0)
    join_replicas(device, order.index(nodes.rank), len(order), interface=nodes.interface, store=nodes.store)
    idle, word = dist.new_group(backend="gloo", timeout=IDLE), torch.zeros(1)
    name, step = replicas.quickest(device)
    dist.barrier()
    if nodes.rank == 0:
        print(json.dumps(name), file=answers, flush=True)
    while True:
        is_over = nodes.rank == 0 and not sys.stdin.readline()
        dist.broadcast(word.fill_(float(is_over)), first, group=idle)
        if word.item():
            break
        dist.barrier()
        begin = time.perf_counter()
        step()
        dist.barrier()
        if nodes.rank == 0:
            print(time.perf_counter() - begin, file=answers, flush=True)
    dist.destroy_process_group()
