"""`SpmdCrew`: each process runs one device's part of a step by itself (SPMD: one program, many processes).

No process leads. All make the same calls in the same order, so that each receives what another sends. What a step
returns is sent to all of them by the rank that makes it. If one fails, whoever started them ends the others.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from rlplace import cuda
from rlplace.errors import RunnerError
from rlplace.measure.execute.device_threads import Crew, Held, Job, Transport, as_device, torch_device
from rlplace.measure.execute.distributed import DistributedChannel, connect, distributed_channels, over_wires
from rlplace.measure.execute.rank_programs import RankPrograms
from rlplace.measure.execute.shared_heap import Layout
from rlplace.measure.hosts.host import Host
from rlplace.measure.hosts.nodes import Nodes
from rlplace.measure.problem import Plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from rlplace.graphs import OpGraph


class SpmdCrew(Crew):
    """The device of this process, among those of all ranks.

    From now on, this process runs on the cores of its device.

    Args:
        host: each device is a rank.
        nodes: this process and the others; all of them must make a crew at the same time.

    Raises:
        RuntimeError: a rank did not come, or cannot be reached.
    """

    is_wired = True

    def __init__(self, host: Host, nodes: Nodes) -> None:
        from torch._C._distributed_c10d import PrefixStore  # not in every PyTorch

        super().__init__(())
        self.here = (nodes.rank,)
        # its own keys in the store: those of a crew before it hold what that one wrote
        nodes = replace(nodes, store=PrefixStore(f"crew/{next(nodes.crews)}", nodes.store))
        self._nodes, self._place = nodes, torch_device(host.devices[nodes.rank])
        # before it is pinned: threads that carry messages may use any core
        self._wires = connect(host, nodes.rank, nodes.store, interface=nodes.interface)
        self.sends_wait = any(wire.stream is not None for wire in self._wires.values())
        with as_device(host.devices[nodes.rank], self.streams) as stream:
            self._stream = stream
        # they stay as long as the code of their step: both ends must have sent the same messages
        self._channels: WeakKeyDictionary[RankPrograms, dict[int, DistributedChannel]] = WeakKeyDictionary()
        self._numbers: dict[int, int] = {}  # by key of a step: its number, which is the same on all ranks
        self._layouts: dict[tuple[int, int], Layout] = {}  # by step and index, of results

    def held(self, host: Host) -> Sequence[int]:
        return self.here

    def look(self) -> None:
        super().look()
        if self.is_spent:
            raise RunnerError(
                "a step failed on this rank, and other ranks may wait in it: no step can run any more. Let this "
                "process end: torchrun then ends the others, and starts all of them again (`--max-restarts`)"
            )

    def channels(self, made: RankPrograms, host: Host, *, is_traced: bool = False) -> dict[int, Transport]:
        if made not in self._channels:
            sent = distributed_channels(self._wires, made, self.here[0], _nobody_waits, is_traced=is_traced)
            self._channels[made] = sent
        return dict(self._channels[made])

    def load(self, key: int, graph: OpGraph, plan: Plan, options: dict[str, Any], held: Held) -> None:
        if key in self._numbers:
            return
        self._numbers[key] = number = len(self._numbers)
        told = self._nodes.gather(f"step/{number}", [graph.fingerprint, plan.fingerprint, options["seed"]])
        if different := [rank for rank, each in enumerate(told) if each != told[0]]:
            self.is_spent = True
            raise RunnerError(
                f"rank {different[0]} has another step than rank 0 (graph, placement, seed: {told[different[0]]}, "
                f"{told[0]}): all ranks must build the same model, with inputs of the same shapes"
            )

    def job(self, device: int, key: int, part: int = 0) -> Job:
        return lambda _: None

    def part(self, run: Job, channels: Mapping[int, Transport]) -> Job:
        return over_wires(run, channels)

    def run(self, jobs: list[Job], step: int, *, on_error: Callable[[], None], deadline_s: float) -> None:
        """Runs this rank's own job on the calling thread; there is no deadline for those of other ranks.

        Raises:
            RunnerError: it raised, perhaps as another rank is gone; or an earlier step did.
        """
        self.look()
        try:
            with torch.inference_mode(), _on(self._stream):
                jobs[self.here[0]](step)
                if self._stream is not None:
                    cuda.await_stream(self._stream)
        except BaseException as error:
            self.is_spent = True
            on_error()
            if not isinstance(error, Exception):
                raise
            raise RunnerError(f"{type(error).__name__}: {error}") from error

    def results(self, key: int, makers: Mapping[int, int], made: Sequence[Any]) -> dict[int, torch.Tensor]:
        found = {}
        with torch.inference_mode():
            for index, maker in makers.items():
                own = made[index] if maker == self.here[0] else None
                layout = self._layout(key, index, own)
                found[index] = tensor = torch.empty_strided(
                    layout.shape, layout.stride, dtype=layout.dtype, device=self._place
                )
                self._share(tensor if own is None else tensor.copy_(own), maker)
        return found

    def gather(self, value: float) -> list[float]:
        """A number of each rank, in their order; all ranks call this."""
        numbers = torch.full((len(self._nodes.facts),), value, dtype=torch.float64, device=self._place)
        for rank in range(len(numbers)):
            self._share(numbers[rank : rank + 1], rank)
        return numbers.tolist()

    def _layout(self, key: int, index: int, own: torch.Tensor | None) -> Layout:
        """That of a result, which the rank that makes it tells the others once."""
        at = self._numbers[key], index
        if at not in self._layouts:
            name, store = f"layout/{at[0]}/{index}", self._nodes.store
            if own is not None:
                layout = Layout.of_copy(own)
                store.set(name, json.dumps([str(layout.dtype).removeprefix("torch."), layout.shape, layout.stride]))
            else:
                dtype, shape, stride = json.loads(store.get(name))
                layout = Layout(getattr(torch, dtype), tuple(shape), tuple(stride))
            self._layouts[at] = layout
        return self._layouts[at]

    def _share(self, tensor: torch.Tensor, source: int) -> None:
        """Sends a tensor without gaps from rank `source` to all others, which receive into theirs."""
        if tensor.numel() == 0:
            return
        if self._place.type == "cuda":
            cuda.await_stream(cuda.current_stream(self._place))
        row = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        for wire in (wire for (sender, _), wire in self._wires.items() if sender == source):
            with wire.using():
                (wire.send if source == self.here[0] else wire.receive)(row).wait()
                if wire.stream is not None:
                    cuda.await_stream(wire.stream)


def _on(stream: cuda.Stream | None) -> contextlib.AbstractContextManager[object]:
    """While active, the calling thread launches on a stream, where there is one."""
    return contextlib.nullcontext() if stream is None else cuda.using(stream)


def _nobody_waits() -> None:
    """What a channel calls where a step is given up: no other thread of this process is in it."""
