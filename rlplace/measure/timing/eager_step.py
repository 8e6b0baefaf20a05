"""Plain PyTorch, timed: the same step without a placement.

`EagerRecipe` is plain PyTorch as a contender, made in the process that runs the race. `run_in_micro_batches` runs the
step eagerly, one slice of the batch after another.
"""

from __future__ import annotations

import copy
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from rlplace import cuda
from rlplace.errors import FileProblem, InvalidValue, RunnerError
from rlplace.files import cache_folder
from rlplace.graphs import OpGraph
from rlplace.graphs.capturing.portable import uncompiled
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.micro_batching.slices import run_in_micro_batches
from rlplace.graphs.optimizers import torch_optimizer
from rlplace.graphs.program import loss_of
from rlplace.measure.execute.device_threads import Worker
from rlplace.measure.hosts.host import Host
from rlplace.measure.timing.race import Timer
from rlplace.measure.timing.threads import intra_op_threads, usable_cores

MAKING_S = 900.0
"""The time limit of compiling a model, or of another way of making a contender; plain PyTorch's own steps have it
too."""
LONGEST_S = 600.0
"""How long a step on another thread may take."""


def check_has_values(graph: OpGraph) -> None:
    """Refuses a graph whose model cannot be run as it is.

    Raises:
        InvalidValue: the model was built from fake tensors and has no values, or the graph has no program.
    """
    if any(isinstance(p, FakeTensor) for p in require_program(graph).origin.model.parameters()):
        raise InvalidValue("model", "fake tensors", "a model with values", where="eager")


class EagerStep:
    """The captured model's own step, eagerly, with every core on every op (or on the first GPU).

    The optimizer is PyTorch's with its fused kernels, the same ones that a placed step updates with. It works on a copy
    of the model, on the thread that calls it or on a gang's: GNU OpenMP stops spinning between ops once a process has
    more threads in teams than cores, and a team of its own would make eager look half as fast as it is.

    Args:
        graph: with its program.
        host: tells whether there are GPUs.
        num_threads: intra-op threads; all cores by default.
        worker: the thread to run on, if it has these cores; by default the one that calls.
        transform: a transform of the model before it runs, e.g. `torch.compile`.
        is_capturable: whether `as_cuda_graph` is going to be asked for.
        in_micro_batches: whether a step that is cut along its batch runs slice after slice, as gradients accumulate; by
            default the whole batch runs at once, as plain PyTorch would.

    Attributes:
        place: where it runs.
        begin: as of `run_in_micro_batches`.

    Raises:
        InvalidValue: the model was built from fake tensors and has no values to run with.
    """

    def __init__(
        self,
        graph: OpGraph,
        host: Host,
        *,
        num_threads: int | None = None,
        worker: Worker | None = None,
        transform: Callable[[torch.nn.Module], Any] | None = None,
        is_capturable: bool = False,
        in_micro_batches: bool = False,
    ) -> None:
        origin = require_program(graph).origin
        optimizer = require_program(graph).optimizer
        check_has_values(graph)
        has_gpus = any(device.backend == "cuda" for device in host.devices)
        self.place = place = torch.device("cuda", 0) if has_gpus else torch.device("cpu")
        self._num_threads = num_threads or len(usable_cores())
        self.worker = worker
        self._is_cuda = has_gpus
        self._model = copy.deepcopy(origin.model).to(place)
        self._args, self._kwargs, self._targets = pytree.tree_map_only(
            torch.Tensor,
            lambda tensor: tensor.detach().clone().to(place),
            (origin.args, origin.kwargs, origin.targets),
        )
        self._loss_fn, self._autocast = origin.loss_fn, origin.autocast
        self._micro = origin.micro if in_micro_batches else None
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        self._optimizer = (
            None if optimizer is None else torch_optimizer(optimizer, parameters, is_capturable=is_capturable)
        )
        self._as_written = uncompiled if transform is None else nullcontext
        self._run: Any = self._model if transform is None else transform(self._model)
        self.loss: Any = None
        self.begin: Callable[[int], object] = int

    @property
    def is_widest(self) -> bool:
        """Whether it uses every core."""
        return not self._is_cuda and self._num_threads == len(usable_cores())

    @property
    def has_team(self) -> bool:
        """Whether it runs with a team of threads."""
        return not self._is_cuda and self._num_threads > 1

    def __call__(self) -> float:
        """Seconds of one eager step.

        Raises:
            RunnerError: the step failed, or the other thread is still busy with one that came too late.
            TimeoutError: it did not end within ten minutes on another thread.
        """
        with self._as_written():  # for all threads; what it takes is no part of the step
            return self._here() if self.worker is None else self._on_worker(self.worker)

    def _here(self) -> float:
        with intra_op_threads(self._num_threads):
            try:
                begin = time.perf_counter()
                self._step()
                return time.perf_counter() - begin
            except (RuntimeError, TypeError, ValueError) as error:
                raise RunnerError(f"the eager step failed: {error}{cuda.advice(error)}") from error

    def _on_worker(self, worker: Worker) -> float:
        def job(_: int) -> None:
            with torch.inference_mode(False), torch.enable_grad():
                self._step()

        errors: list[BaseException] = []
        begin = time.perf_counter()
        worker.start(job, 0, errors.append)
        if not worker.wait(LONGEST_S):
            raise TimeoutError(f"the eager step did not end within {LONGEST_S:g} s")
        seconds = time.perf_counter() - begin
        if errors:
            raise RunnerError(f"the eager step failed: {errors[0]}{cuda.advice(errors[0])}") from errors[0]
        return seconds

    def as_cuda_graph(self) -> Callable[[], None]:
        """The whole step, captured once; replaying it is a step, for as long as this object lives.

        The graph holds addresses of this step's parameters, gradients and optimizer state, not the tensors themselves.

        Raises:
            RuntimeError: the step does something that a CUDA graph cannot hold.
        """
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This instance was constructed with capturable")  # of steps to warm up
            with self._as_written():
                return cuda.capture_graph(lambda: self._step(is_synchronised=False), self.place)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The copy's parameters and buffers, by every dotted name that they have."""
        held = (self._model.named_parameters, self._model.named_buffers)
        return {name: tensor for named in held for name, tensor in named(remove_duplicate=False)}

    def _step(self, *, is_synchronised: bool = True) -> None:
        if self._optimizer is not None:
            self._optimizer.zero_grad()
        casting = nullcontext() if self._autocast is None else torch.autocast(self.place.type, dtype=self._autocast)
        with torch.set_grad_enabled(self._loss_fn is not None), casting:
            if self._micro is not None:
                returned = run_in_micro_batches(
                    self._run, (self._args, self._kwargs), self._loss_fn, self._targets, self._micro, self.begin
                )
            else:
                returned = self._run(*self._args, **self._kwargs)
                if self._loss_fn is not None:
                    returned = self._loss_fn(returned, *self._targets)
                    loss_of(returned).backward()
        if self._optimizer is not None:
            # a mode for what the model makes, such as float64 for float32, is none for step counters: CUDA's fused
            # kernels read float32
            with torch._C.DisableTorchFunction():
                self._optimizer.step()
        self.loss = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, returned)
        if self._is_cuda and is_synchronised:
            cuda.await_all(self.place)


@dataclass(frozen=True)
class EagerRecipe:
    """How the captured model's own step is to run beside placements: a few words that travel, no tensors.

    The step is made where and when the race begins, so its copy of the model, its threads and its GPU memory are those
    of the process that measures.
    """

    num_threads: int | None = None
    """Intra-op threads; all cores by default."""
    is_compiled: bool = False
    """Whether `torch.compile` compiles the model; that is done before the race."""
    is_cuda_graph: bool = False
    """Whether the whole step is captured as one CUDA graph and replayed."""
    making_s: float = MAKING_S
    """Seconds that a worker may take to make it, e.g. to compile; if that is not enough, it is a `timeout`."""

    def timer(self, graph: OpGraph, host: Host, widest: Worker | None) -> Timer:
        """A function that runs the step and returns its seconds, in the process that runs the race.

        Args:
            graph: with its program and the model that was captured.
            host: of this machine.
            widest: the thread that has all cores, if there is one: a second team as wide would slow both.

        Raises:
            InvalidValue: the model was built from fake tensors.
            RunnerError: the step cannot be captured as a CUDA graph, or it failed while it was compiled.
        """
        if self.is_cuda_graph:
            return CudaGraphStep(graph, host)
        if self.is_compiled:
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", _own_folder())  # its default in /tmp is anybody's to make
        step = EagerStep(
            graph, host, num_threads=self.num_threads, transform=torch.compile if self.is_compiled else None
        )
        if step.is_widest:
            step.worker = widest
        if self.is_compiled:
            step()
        return step


def _own_folder() -> str:
    """A folder for compiled code that only this user writes to; a new one where the user has no cache folder."""
    try:
        folder = cache_folder() / "torchinductor"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except (FileProblem, OSError):
        return tempfile.mkdtemp(prefix="torchinductor-")
    return str(folder)


class CudaGraphStep:
    """The eager step captured once as a CUDA graph and replayed.

    Raises:
        RunnerError: it does something that a CUDA graph cannot hold.
    """

    def __init__(self, graph: OpGraph, host: Host) -> None:
        self._step = EagerStep(graph, host, is_capturable=True)  # the graph writes into its tensors
        try:
            self._replay = self._step.as_cuda_graph()
        except RuntimeError as error:
            raise RunnerError(f"cannot be captured as a CUDA graph: {error}") from error

    def __call__(self) -> float:
        """Seconds of one replay, until its last kernel is done."""
        begin = time.perf_counter()
        self._replay()
        cuda.await_all(self._step.place)
        return time.perf_counter() - begin


Other = Timer | EagerRecipe
"""Contenders that may run beside placements: a recipe, or a timer that runs in the process that asks."""
