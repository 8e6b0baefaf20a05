"""`DistributedChannel`: a transfer of a plan between two processes, by `torch.distributed`; both may be on any machine.

`connect` makes a wire for each ordered pair of ranks: a process group of these two, NCCL's between GPUs and gloo's
between CPUs. NCCL knows no tags: the two ends of a wire must send and receive in one order, and a send may wait for its
receive. Programs with `sends_wait` do both (`rank_programs`).

gloo has tags, and its sends never wait. So a tensor is sent as soon as it is made. Its bytes go when the receive has
been posted, which a thread that runs a long op cannot do: receives are posted some transfers ahead of their place.

On a GPU the transfers of a wire run on a stream of their own, which events order with the stream that ops run on. No
call makes the host wait, but in the first step: then the strides of each tensor are sent before it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import permutations
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import torch

from rlplace import cuda
from rlplace.measure.execute.device_threads import torch_device
from rlplace.measure.execute.rank_programs import RankPrograms
from rlplace.measure.hosts.host import Host

if TYPE_CHECKING:  # a PyTorch without `torch.distributed` runs everything else
    from torch._C._distributed_c10d import Store

LATEST = timedelta(hours=1)
"""After which a group gives a message up, and ends the process: whoever measures has ended it long before."""
AHEAD = 8
"""So many receives of a rank are posted at a time, between CPUs: their memory is taken earlier than simulated."""


class Work(Protocol):
    """A message on its way."""

    def wait(self, within: timedelta = ..., /) -> Any:
        """Later work on the current stream runs after it; without a GPU, returns when it is done, or raises."""


class Group(Protocol):
    """A process group of `torch.distributed` of two ranks: 0 sends, 1 receives."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Work:
        """Sends a tensor to `rank`."""

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Work:
        """Receives one from `rank` into a tensor of that size."""


@dataclass(frozen=True, slots=True)
class Wire:
    """The way from one rank to another, as one of them has it.

    Attributes:
        group: of both.
        place: the device of this end.
        stream: of its messages; None without a GPU.
    """

    group: Group
    place: torch.device
    stream: cuda.Stream | None = None

    def using(self) -> contextlib.AbstractContextManager[object]:
        """While active, the calling thread launches on its stream."""
        return contextlib.nullcontext() if self.stream is None else cuda.using(self.stream)

    def send(self, row: torch.Tensor, tag: int = 0) -> Work:
        """Sends a contiguous tensor."""
        return self._settled(self.group.send([row], 1, tag))

    def receive(self, row: torch.Tensor, tag: int = 0) -> Work:
        """Receives into a contiguous tensor."""
        return self._settled(self.group.recv([row], 0, tag))

    def _settled(self, work: Work) -> Work:
        if self.stream is not None:  # a group of NCCL has a stream of its own, which ours waits for
            work.wait()
        return work


Wires = Mapping[tuple[int, int], Wire]
"""By (source, destination)."""


def connect(
    host: Host, rank: int, store: Store, *, interface: str = "lo", is_sparse: bool = False, within: timedelta = LATEST
) -> Wires:
    """The wires of a rank; all ranks must call this at the same time. Nobody else is contacted.

    Args:
        host: each device is a rank.
        rank: of this process.
        store: where the ranks find each other.
        interface: of the network; the default reaches this machine alone. NCCL_SOCKET_IFNAME goes before it.
        is_sparse: ranks that share a memory need no wire.
        within: the longest that a wait for another rank may take by default, between CPUs.

    Raises:
        RuntimeError: a rank did not come, or cannot be reached.
    """
    place = torch_device(host.devices[rank])
    if place.type == "cuda":
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        # that messages of one group run in order, which is as it must be
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "0")
    wires = {}
    for pair in permutations(range(host.num_devices), 2):
        if rank not in pair or (is_sparse and host.shares_memory[pair]):
            continue
        group = make_group(pair, rank, place, store, interface, within)
        wires[pair] = wire = Wire(group, place, cuda.stream(place, is_urgent=True) if place.type == "cuda" else None)
        # NCCL sets a connection up for its first message; in this order of pairs no two ranks wait for each other
        with wire.using():
            row = torch.zeros(1, dtype=torch.uint8, device=place)
            (wire.send if rank == pair[0] else wire.receive)(row).wait()
    return wires


def store_in(file: int, count: int) -> Store:
    """A store in a file without a name, where so many ranks find each other.

    PyTorch opens the file by its path whenever it uses the store, and once more, to write, when the garbage collector
    comes to it. So the path must mean this file for as long as the process lives: a descriptor of it is never closed.

    Args:
        file: its descriptor.
        count: ranks.
    """
    from torch._C._distributed_c10d import FileStore

    store: Store = FileStore(f"/proc/self/fd/{os.dup(file)}", count)
    return store


def torchrun_store(prefix: str) -> Store:
    """The store of torchrun, which started this process or one that this one was started by; values are signed.

    Args:
        prefix: of keys that nobody else uses.
    """
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    from rlplace.measure.hosts.signed_store import SignedStore, own_secret

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False, timeout=LATEST, wait_for_workers=False)
    secret = own_secret()
    assert secret is not None, "who started this process has joined the other ranks"
    return PrefixStore(prefix, SignedStore(store, secret))


def make_group(
    pair: tuple[int, int], rank: int, place: torch.device, store: Store, interface: str, within: timedelta
) -> Group:
    """A rank's end of the process group of a pair; the default group of `torch.distributed` stays the user's."""
    from torch._C._distributed_c10d import PrefixStore

    place_in_pair, prefixed = pair.index(rank), PrefixStore(f"{pair}", store)
    if place.type == "cuda":
        from torch.distributed import ProcessGroupNCCL  # where PyTorch has no CUDA, this is not there

        # its own streams are of the pool of the wires, never of that which compute streams come from
        options = ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = LATEST
        nccl: Any = ProcessGroupNCCL(prefixed, place_in_pair, 2, options)
        nccl.eager_connect_single_device(place)
        return nccl  # type: ignore[no-any-return]
    from torch.distributed import ProcessGroupGloo

    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._timeout, options._devices = within, [gloo.create_device(interface=interface)]
    return gloo(prefixed, place_in_pair, 2, options)  # type: ignore[no-any-return]


def distributed_channels(
    wires: Wires, made: RankPrograms, rank: int, abort: Callable[[], None], *, is_traced: bool
) -> dict[int, DistributedChannel]:
    """The channels of a rank to those that it has wires to, by transfer: those that it receives, in this order, then
    those that it sends."""
    graph, plan = made.graph, made.plan
    ends = list(zip(made.sources, plan.transfer_destination.tolist(), plan.transfer_tensor.tolist(), strict=True))
    items = [item - graph.num_ops for kind, item, _ in made.programs[rank] if kind == "receive"]
    received = [k for k in items if ends[k][:2] in wires]
    sent = [k for k, (source, to, _) in enumerate(ends) if source == rank and (source, to) in wires]
    channels: dict[int, DistributedChannel] = {}
    for k in (*received, *sent):
        source, destination, tensor = ends[k]
        channels[k] = DistributedChannel(
            wires[source, destination],
            graph.tensor_shapes[tensor],
            getattr(torch, graph.tensor_dtypes[tensor]),
            abort,
            is_traced=is_traced,
            tag=k,
        )
    for place, k in enumerate(received):
        channels[k].ahead = [channels[each] for each in received[place : place + AHEAD]]
    return channels


def over_wires(run: Callable[[int], None], channels: Mapping[int, object]) -> Callable[[int], None]:
    """A rank's part of a step with its messages: the first receives are posted before it, and all are over after it."""
    sent = [channel for channel in channels.values() if isinstance(channel, DistributedChannel)]

    def whole(step: int) -> None:
        for channel in sent[:1]:
            channel.post_ahead()
        run(step)
        for channel in sent:
            channel.settle()

    return whole


class DistributedChannel:
    """One transfer of a plan, at one of its ends, used once a step.

    A tensor goes as a row of bytes. Its memory is not reused before it has been sent: on a GPU, the allocator waits for
    the stream of the wire; without one, it is held until the part of the rank ends.

    Args:
        wire: between both ends.
        shape: of the tensor.
        dtype: likewise.
        abort: has all ranks give the step up.
        is_traced: whether the times of its beginning and end are recorded.
        tag: of its messages between CPUs, no other transfer's.

    Attributes:
        ahead: at the receiver, itself and those that are received next.
        began: when it could begin at this end: a mark of the clock of the rank's device; None where it is not traced.
        ended: when it was there; at the sender, None.
    """

    def __init__(
        self,
        wire: Wire,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        abort: Callable[[], None],
        *,
        is_traced: bool = False,
        tag: int = 0,
    ) -> None:
        self._wire, self._shape, self._dtype, self._is_traced = wire, shape, dtype, is_traced
        self.ahead: Sequence[DistributedChannel] = ()
        # of a row, and of nothing, there is but one layout
        self._strides = torch.empty(shape, device="meta").stride() if len(shape) < 2 or 0 in shape else None
        self.abort = abort
        self._header: torch.Tensor | None = None  # until it has been copied to the GPU
        self._works: list[Work] = []
        self._is_gpu = wire.stream is not None
        self._tags = (0, 0) if self._is_gpu else (2 * tag, 2 * tag + 1)  # of strides, and of the tensor
        self._posted: torch.Tensor | None = None  # on its way, and not taken yet
        self._made, self._done = (cuda.event() if self._is_gpu else None for _ in range(2))
        self._marks = [cuda.event(is_timed=True) for _ in range(2)] if is_traced and self._is_gpu else []
        self.began: Any = None
        self.ended: Any = None

    def mark_made(self) -> None:
        """Called behind the op that makes the tensor, before `send`, which may come much later."""
        if self._made is not None:
            cuda.record(self._made, cuda.current_stream(self._wire.place))

    def send(self, tensor: torch.Tensor) -> None:
        """Sends it as soon as it is made."""
        wire = self._wire
        with wire.using():
            if self._made is not None and wire.stream is not None:
                cuda.wait(wire.stream, self._made)
                cuda.keep_for(tensor, wire.stream)
            if self._strides is None:
                like = torch.empty_strided(self._shape, tensor.stride(), device="meta")
                self._strides = torch.empty_like(like).stride()  # as a copy of it would be laid out
                self._send_strides(self._strides)
            self.began = self._mark(0)
            if tensor.stride() != self._strides:
                copy = torch.empty_strided(self._shape, self._strides, dtype=self._dtype, device=wire.place)
                tensor = copy.copy_(tensor)
            if 0 not in self._shape:
                self._keep(wire.send(_row(tensor), self._tags[1]))
            if self._done is not None and wire.stream is not None:
                cuda.record(self._done, wire.stream)

    def wait_copied(self) -> None:
        """What the calling thread launches from now on may overwrite the tensor."""
        if self._done is not None:
            cuda.wait(cuda.current_stream(self._wire.place), self._done)
        else:
            self.settle()

    def settle(self) -> None:
        """Without a GPU, returns when the message is over, and lets go of the tensor."""
        while self._works:
            self._works.pop(0).wait()

    def take(self) -> torch.Tensor:
        """Memory for the tensor, which is on its way from now on: nothing may read it before `wait_arrived`."""
        if self._strides is None:
            with self._wire.using():
                self._strides = self._receive_strides()
        self._post()
        self.post_ahead()
        tensor, self._posted = self._posted, None
        assert tensor is not None
        if self._is_gpu:
            cuda.keep_for(tensor, cuda.current_stream(self._wire.place))
        return tensor

    def post_ahead(self) -> None:
        """Posts the receives that come next, as far as the layout of their tensors is known."""
        for each in () if self._is_gpu else self.ahead:  # NCCL's would keep others from their turn
            if each._strides is not None:
                each._post()

    def _post(self) -> None:
        """Lets the sender's bytes come, unless they may already."""
        if self._posted is not None:
            return
        wire = self._wire
        assert self._strides is not None
        with wire.using():
            self._posted = torch.empty_strided(self._shape, self._strides, dtype=self._dtype, device=wire.place)
            self.began = self._mark(0)
            if 0 not in self._shape:
                self._keep(wire.receive(_row(self._posted), self._tags[1]))
            if self._done is not None and wire.stream is not None:
                self.ended = self._mark(1)
                cuda.record(self._done, wire.stream)

    def wait_arrived(self) -> None:
        """Makes the next work of the calling thread wait for the tensor."""
        self.wait_copied()
        if not self._is_gpu:
            self.ended = self._mark(1)

    def _keep(self, work: Work) -> None:
        """Until `settle`; NCCL's would keep the memory of what it received."""
        if not self._is_gpu:
            self._works.append(work)

    def _mark(self, which: int) -> Any:
        """A mark of this device's clock."""
        if not self._marks:
            return time.perf_counter() if self._is_traced else None
        assert self._wire.stream is not None
        cuda.record(self._marks[which], self._wire.stream)
        return self._marks[which]

    def _send_strides(self, strides: tuple[int, ...]) -> None:
        header = torch.tensor(strides, dtype=torch.int64)
        if self._is_gpu:
            self._header = cuda.pinned_like(header)
            header = cuda.copy(self._header.copy_(header), self._wire.place)
        self._keep(self._wire.send(header, self._tags[0]))  # gloo would wait for its receive

    def _receive_strides(self) -> tuple[int, ...]:
        header = torch.empty(len(self._shape), dtype=torch.int64, device=self._wire.place)
        self._wire.receive(header, self._tags[0]).wait()
        if self._wire.stream is not None:
            there = cuda.pinned_like(header)
            cuda.copy_into(there, header)
            cuda.await_stream(self._wire.stream)
            header = there
        return tuple(int(each) for each in header)


def _row(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor whose elements lie without gaps."""
    return tensor.as_strided((prod(tensor.shape),), (1,)).view(torch.uint8)
