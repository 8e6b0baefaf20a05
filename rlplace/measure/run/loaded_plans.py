"""`LoadedPlans`: many plans take turns on a host whose memory need not hold them all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from rlplace import cuda
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.hosts.host import Host
from rlplace.measure.run.placed.allocated import resident_bytes
from rlplace.measure.run.placed.placed_step import PlacedStep
from rlplace.measure.run.placed.residents import Resident, Residents


class LoadedPlans:
    """Loads a plan before it runs, and unloads others where it would not fit beside them.

    A memory (a device's own, or a pool) holds the residents of every loaded plan, and what the one that runs allocates
    on top: its simulated peak without residents. Where that is more than the capacity, residents that no loaded plan
    needs are dropped; if that does not do, plans are unloaded, the least recently run first, as far as this helps. A
    plan that does not fit alone is loaded all the same: whether it runs out of memory shows when it runs.

    Args:
        graph: with its program.
        host: its capacities.
        residents: shared by the plans.
    """

    def __init__(self, graph: OpGraph, host: Host, residents: Residents) -> None:
        self._graph, self._host, self._residents = graph, host, residents
        self._accounts = [device.memory_pool or residents.home(d) for d, device in enumerate(host.devices)]
        self._account_of = {residents.home(d): account for d, account in enumerate(self._accounts)}
        self._granularity = {
            residents.home(d): device.memory_granularity_bytes for d, device in enumerate(host.devices)
        }
        self._capacity = _capacities(host, self._accounts)
        self._gpus = {residents.home(d) for d, device in enumerate(host.devices) if device.backend == "cuda"}
        self._steps: dict[PlacedStep, bool] = {}  # the least recently run first; whether its memory is still warm
        self._fitting: set[PlacedStep] = set()  # loaded plans that were found to fit beside the others

    def prepare(self, step: PlacedStep, peak_bytes: Sequence[int]) -> bool:
        """Whether `step`, which is loaded now, should run once untimed: it ran before and has lost what it had then.

        Args:
            step: runs next.
            peak_bytes: (D,) its simulated peaks; empty where nobody knows them.

        Raises:
            Exception: what a device says that has no memory for it.
        """
        if step not in self._fitting or not step.is_loaded:
            self._make_room(step, self._running_bytes(step, peak_bytes))
        was_there, is_warm = step in self._steps, self._steps.pop(step, True) and step.is_loaded
        self._steps[step] = True
        if not step.is_loaded:
            self._fitting.clear()
            step.load()
        self._fitting.add(step)
        return was_there and not is_warm

    def leave_alone(self, step: PlacedStep | None) -> bool:
        """Unloads all plans but `step` if residents of theirs are on a GPU, whose memory is given back then."""
        needed = frozenset() if step is None else step.needs
        if not any(home in self._gpus for _, home in self._residents.made - needed):
            return False
        for other in self._steps:
            if other is not step:
                other.unload()
        return self._keep(needed)

    def forget(self, step: PlacedStep) -> None:
        """Unloads a plan that does not run again; its residents stay until their memory is needed."""
        self._fitting.discard(step)
        self._steps.pop(step, None)
        step.unload()

    def forget_all(self) -> None:
        """Unloads every plan; residents stay until their memory is needed."""
        for step in list(self._steps):
            self.forget(step)

    def _make_room(self, step: PlacedStep, running: dict[str, int]) -> None:
        if not self._overfull(self._residents.made | step.needs, running):
            return
        loaded = [each for each in self._steps if each is not step and each.is_loaded]
        while over := self._overfull(_union(step, loaded), running):
            helps = (
                each for each in loaded if any(self._account_of[home] in over for _, home in each.needs - step.needs)
            )
            oldest = next(helps, None)
            if oldest is None:
                break
            oldest.unload()
            loaded.remove(oldest)
        self._keep(_union(step, loaded))

    def _keep(self, needed: Collection[Resident]) -> bool:
        is_freed = self._residents.keep_only(needed)
        if is_freed:  # what PyTorch kept for the steps of other plans is given back as well
            cuda.give_back_memory()
            self._steps = dict.fromkeys(self._steps, False)
            self._fitting.clear()
        return is_freed

    def _overfull(self, residents: Collection[Resident], running: dict[str, int]) -> set[str]:
        """Accounts whose capacity is less than `residents` and what runs take."""
        held = defaultdict(int, running)
        for op, home in residents:
            held[self._account_of[home]] += self._num_bytes(op, home)
        return {account for account, num_bytes in held.items() if num_bytes > self._capacity[account]}

    def _num_bytes(self, op: int, home: str) -> int:
        """Of an op's tensors, or of an update's state."""
        size = int(self._graph.state_bytes[op] + self._graph.output_bytes[op])
        return -(-size // self._granularity[home]) * self._granularity[home]

    def _running_bytes(self, step: PlacedStep, peak_bytes: Sequence[int]) -> dict[str, int]:
        """By account, what `step` allocates at most beside residents: in a pool, as if all devices peaked at once."""
        context = np.array([device.context_bytes for device in self._host.devices], dtype=np.int64)
        own = np.array(peak_bytes or context) - context - resident_bytes(self._graph, self._host, step.plan.devices)
        held: dict[str, int] = defaultdict(int)
        for account, num_bytes in zip(self._accounts, np.maximum(own, 0).tolist(), strict=True):
            held[account] += num_bytes
        return held


def _capacities(host: Host, accounts: list[str]) -> dict[str, int]:
    """Bytes for a plan by account: the memory without contexts; of a pool, the least that a device of it says."""
    capacity: dict[str, int] = {}
    for account in accounts:
        members = [device for device, other in zip(host.devices, accounts, strict=True) if other == account]
        capacity[account] = min(each.memory_bytes for each in members) - sum(each.context_bytes for each in members)
    return capacity


def _union(step: PlacedStep, others: Iterable[PlacedStep]) -> frozenset[Resident]:
    return step.needs.union(*(other.needs for other in others))
