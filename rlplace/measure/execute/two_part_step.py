"""`TwoPartStep`: a placed step that runs its forward and its backward apart."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from rlplace.measure.execute.device_threads import Job
from rlplace.measure.execute.placed_step import PlacedStep

Kept = list[tuple[Any, ...]]
"""By device of this process, the tensors that a second part needs of its first; then what other processes need."""


class TwoPartStep(PlacedStep):
    """A step that stops where its second part begins; any number of first parts may wait for theirs.

    Unlike those of a whole step, its tensors are ordinary ones that autograd can hold, and its inputs are not copied:
    they are the caller's own where these are on the right device.

    Its `second` must be given: the items of the second part. The plan's sequence ends with them, and no other item
    reads their results.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._given: list[int] = []  # sources whose tensors were given
        self._dropped: list[int] = []  # steps whose second part will not run, as other ranks are still to be told

    def run_first(self, given: Mapping[int, torch.Tensor], number: int) -> tuple[list[torch.Tensor], Kept]:
        """Runs the first part.

        Args:
            given: inputs, by source op, each on its device and laid out as captured.
            number: of the step: random ops draw by it.

        Returns:
            The tensors of the result, and those that `run_second` needs.

        Raises:
            RunnerError: an op failed.
        """
        waiting = self._give(given)
        dropped = weakref.finalize(waiting, self._dropped.append, number)
        dropped.atexit = False
        try:
            self._run(self._parts(0), number)
            kept = [self._kept[device].pop() for device in self._crew.here]
            kept += [(waiting, dropped)] * (len(kept) < self._host.num_devices)
            return list(self._taken(0, len(self._program.result_refs))), kept
        finally:
            self.forget()

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
        stay: list[Any] = [self._give(given)]
        if len(kept) > len(self._crew.here):
            stay += kept.pop()
            stay[-1].detach()
        for device in reversed(self._crew.here):
            self._kept[device].append(kept.pop())
        try:
            self._run(self._parts(1), number)
            return list(self._taken(len(self._program.result_refs), len(self._code.results)))
        finally:
            self.forget()

    def run_part(self, part: int, number: int, kept: tuple[Any, ...] = ()) -> tuple[Any, ...]:
        try:
            return super().run_part(part, number, kept)
        finally:
            self.forget()

    def take(self, given: Mapping[int, torch.Tensor]) -> None:
        """Has the next part run with these tensors for sources, as far as their devices are of this process."""
        for op in (op for op in given if int(self.plan.devices[op]) in self._namespaces):
            self._namespaces[int(self.plan.devices[op])][f"t{int(self._graph.output_offsets[op])}"] = given[op]
            self._given.append(op)

    def forget(self) -> None:
        """Releases the tensors that were given, and those that a failed part left behind."""
        for op in self._given if self._namespaces else ():
            self._namespaces[int(self.plan.devices[op])].pop(f"t{int(self._graph.output_offsets[op])}", None)
        self._given.clear()
        for each in self._kept:
            each.clear()

    def drop_results(self, indices: Iterable[int]) -> None:
        """Releases results that were fetched."""
        for index in indices:
            self._results[index] = None

    def _parts(self, part: int) -> list[Job]:
        """The jobs of a part."""
        return [
            _ordinary(self._functions[device][part])
            if device in self._functions
            else self._crew.job(device, self._key, part)
            for device in range(self._host.num_devices)
        ]

    def _give(self, given: Mapping[int, torch.Tensor]) -> set[torch.Tensor]:
        """Gives tensors to the devices of their sources; those that other processes read stay with what is returned."""
        if not self.is_loaded:
            self.load()
        self.take(given)
        others = {op: self._residents.homed(tensor) for op, tensor in given.items() if op not in self._given}
        if others or self._dropped:
            self._crew.ask("give", self._key, others, [self._dropped.pop() for _ in range(len(self._dropped))])
        return set(others.values())

    def _taken(self, begin: int, end: int) -> Iterator[torch.Tensor]:
        self._fetch(range(begin, end))
        for index in range(begin, end):
            yield self._results[index]
            self._results[index] = None


def _ordinary(job: Job) -> Job:
    """The job without inference mode: its results may be kept for a backward. No op records anything by itself."""

    def ordinary(step: int) -> None:
        with torch.inference_mode(False), torch.no_grad(), torch._C._AutoDispatchBelowADInplaceOrView():
            job(step)

    return ordinary
