"""`EagerRecipe`: plain PyTorch as a contender, made in the process that runs the race."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from rlplace import cuda
from rlplace.errors import RunnerError
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.hosts.host import Host
from rlplace.measure.run.crew.workers import Worker
from rlplace.measure.run.eager.eager_step import EagerStep
from rlplace.measure.run.race import Timer


class Recipe(ABC):
    """Makes a contender that is no plan, in the process that runs the race."""

    @abstractmethod
    def timer(self, graph: OpGraph, host: Host, widest: Worker | None) -> Timer:
        """What runs one step and gives its seconds.

        Args:
            graph: with its program and the model that was captured.
            host: of this machine.
            widest: the thread that has all cores, if there is one: a second team as wide would slow both.
        """


@dataclass(frozen=True)
class EagerRecipe(Recipe):
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

    def timer(self, graph: OpGraph, host: Host, widest: Worker | None) -> Timer:
        """What runs the step and gives its seconds; see `Recipe`.

        Raises:
            InvalidValue: the model was built from fake tensors.
            RunnerError: the step cannot be captured as a CUDA graph, or it failed while it was compiled.
        """
        if self.is_cuda_graph:
            return CudaGraphStep(graph, host)
        step = EagerStep(
            graph, host, num_threads=self.num_threads, transform=torch.compile if self.is_compiled else None
        )
        if step.is_widest:
            step.worker = widest
        if self.is_compiled:
            step()
        return step


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


Other = Timer | Recipe
"""What may run beside placements: a recipe, or a timer that runs in the process that asks."""
