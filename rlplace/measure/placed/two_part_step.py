"""`TwoPartStep`: a forward and its backward as two runs, with whatever the caller does between them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.hosts.host import Host
from rlplace.measure.placed.placed_step import PlacedStep
from rlplace.measure.placed.residents import Residents
from rlplace.measure.placed.workers import Crew, Job
from rlplace.measure.plan import Plan

Kept = list[tuple[Any, ...]]
"""By device: the tensors that a second part needs of its first."""
DEADLINE_S = 600.0
"""Seconds that a part may take."""


class TwoPartStep(PlacedStep):
    """A step that stops where its second part begins; any number of first parts may wait for theirs.

    Unlike those of a whole step, its tensors are ordinary ones that autograd can hold, and its inputs are not copied:
    they are the caller's own where these are on the right device.

    Args:
        graph: with its program.
        host: of this machine.
        plan: made for both; its sequence ends with the items of `second`.
        residents: where parameters and buffers are kept.
        crew: the host's threads.
        seed: of random ops.
        second: items of the second part: no other item reads what they make.
    """

    def __init__(
        self,
        graph: OpGraph,
        host: Host,
        plan: Plan,
        residents: Residents,
        crew: Crew,
        *,
        seed: int = 0,
        second: Collection[int],
    ) -> None:
        super().__init__(graph, host, plan, residents, crew, seed=seed, second=second)
        self._num_first = len(self._program.result_refs)
        self._first_jobs: list[Job] = []
        self._second_jobs: list[Job] = []

    def load(self) -> None:
        super().load()
        self._first_jobs = [_ordinary(job) for job in self._jobs]
        self._second_jobs = [_ordinary(names["second"]) for names in self._namespaces]

    def run_first(self, given: Mapping[int, torch.Tensor], number: int) -> tuple[list[torch.Tensor], Kept]:
        """Runs the first part.

        Args:
            given: inputs, by source op, each on its device and laid out as captured.
            number: of the step: random ops draw by it.

        Returns:
            The tensors of the result, and what `run_second` needs.

        Raises:
            RunnerError: an op failed.
        """
        self._give(given)
        try:
            self._run(self._first_jobs, number, DEADLINE_S)
            kept = [each.pop() for each in self._kept]
            return list(self._taken(0, self._num_first)), kept
        finally:
            self._forget(given)

    def run_second(self, given: Mapping[int, torch.Tensor], kept: Kept, number: int) -> list[torch.Tensor]:
        """Runs the second part.

        Args:
            given: gradients of outputs, by source op, each on its device and laid out as captured.
            kept: of the first part; it is emptied, so that tensors are freed on the way.
            number: that the first part ran with.

        Returns:
            Gradients of parameters, then of inputs, as the program lists them.

        Raises:
            RunnerError: an op failed.
        """
        self._give(given)
        for own in reversed(self._kept):
            own.append(kept.pop())
        try:
            self._run(self._second_jobs, number, DEADLINE_S)
            return list(self._taken(self._num_first, self._code.num_results))
        finally:
            self._forget(given)

    def _give(self, given: Mapping[int, torch.Tensor]) -> None:
        if not self.is_loaded:
            self.load()
        for op, tensor in given.items():
            name = f"t{int(self._graph.output_offsets[op])}"
            self._namespaces[int(self.plan.devices[op])][name] = tensor

    def _forget(self, given: Mapping[int, torch.Tensor]) -> None:
        """Lets go of what was given, and of what a failed part left behind."""
        for op in given:
            name = f"t{int(self._graph.output_offsets[op])}"
            if self._namespaces:
                self._namespaces[int(self.plan.devices[op])].pop(name, None)
        for each in self._kept:
            each.clear()

    def _taken(self, begin: int, end: int) -> Iterator[torch.Tensor]:
        for index in range(begin, end):
            yield self._results[index]
            self._results[index] = None


def _ordinary(job: Job) -> Job:
    """The job without inference mode: what it makes may be kept for a backward. No op records anything by itself."""

    def ordinary(step: int) -> None:
        with torch.inference_mode(False), torch.no_grad(), torch._C._AutoDispatchBelowADInplaceOrView():
            job(step)

    return ordinary
