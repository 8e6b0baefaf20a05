"""`Nodes`: the processes that torchrun started, one for each device, on one machine or several.

`join` finds the others through torchrun's store: a name for each machine, an address on the network between them, and
the facts of every rank, of which `nodes_host` makes the devices of a host. No other machine is contacted.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import json
import os
import platform
import re
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlplace import __version__
from rlplace.errors import InvalidValue, RunnerError, check_known, refuse_if
from rlplace.measure.hosts.control_groups import allowed_cores, ram_bytes
from rlplace.measure.hosts.host import Device, Host

if TYPE_CHECKING:  # a PyTorch without `torch.distributed` runs everything else
    from torch._C._distributed_c10d import Store

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Of the environment, as torchrun sets them."""
START = (
    "Start the same command on each machine, with its number as N: torchrun --nnodes 2 --node-rank N "
    "--nproc-per-node 1 --master-addr ADDRESS --master-port 29400 -m -- rlplace train WORKLOAD --host nodes "
    "(docs/machines.md)."
)
COMES_WITHIN_S = 300.0
"""Seconds for all ranks to start Python and import PyTorch, and for each message between them."""
_LOOKS_EVERY_S = 0.02
_OVER = "over"
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


@dataclass(frozen=True)
class RankFacts:
    """One rank, as it describes itself to the others."""

    machine: str
    """Name of its machine; unique."""
    address: str
    """Of its machine, on the interface between machines."""
    interface: str
    local_rank: int
    num_local: int
    cores: tuple[int, ...]
    """This rank's share of the cores that torchrun may use on its machine."""
    ram_bytes: int
    cpu: str
    """Model of the CPU."""
    gpu: str = ""
    """Model of its GPU; empty: it has none."""
    gpu_bytes: int = 0
    gpu_free_bytes: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of Python and packages."""


@dataclass(frozen=True)
class Nodes:
    """This process among those that torchrun started.

    Attributes:
        rank: of this process, from 0 to `num_ranks` - 1.
        num_ranks: processes on all machines.
        local_rank: of this process among those of its machine.
        num_local: processes of its machine.
        machine: name of its machine; unique.
        address: of its machine, on the interface between machines.
        interface: name of that interface on this machine.
        store: of all ranks, for messages under keys that nobody else uses; what these ranks did not write is refused.
        secret: known to these ranks alone, for connections between them.
        facts: of each rank.
        crews: numbers for what all ranks make in one order: each has keys of its own in the store.
    """

    rank: int
    num_ranks: int
    local_rank: int
    num_local: int
    machine: str
    address: str
    interface: str
    store: Store = field(repr=False)
    secret: bytes = field(repr=False)
    facts: tuple[RankFacts, ...] = field(default=(), repr=False)
    crews: Iterator[int] = field(default_factory=itertools.count, repr=False, compare=False)

    @property
    def machines(self) -> tuple[str, ...]:
        """Names of all machines, in order of their first rank."""
        return tuple(dict.fromkeys(each.machine for each in self.facts))

    def ranks_of(self, machine: str) -> tuple[int, ...]:
        """The ranks on a machine; the first of them is its keeper."""
        return tuple(rank for rank, each in enumerate(self.facts) if each.machine == machine)

    def secret_of(self, machine: str) -> bytes:
        """That of connections to the keeper of one machine: what is proved to another proves nothing to it."""
        from rlplace.measure.hosts.signed_store import derived

        return derived(self.secret, machine)

    def gather(self, name: str, value: Any) -> list[Any]:
        """The values of all ranks, each of which calls this once for a name.

        Args:
            name: a key of the store that nobody else uses.
            value: of this rank; plain data.

        Raises:
            RunnerError: a rank did not send its own.
        """
        return _gather(self.store, self.rank, self.num_ranks, name, value)

    def end(self, *, has_failed: bool = False) -> None:
        """Tells all ranks that the command of rank 0 is over."""
        with contextlib.suppress(RuntimeError):  # the store may be gone
            self.store.set(_OVER, "failed" if has_failed else "done")

    @property
    def is_over(self) -> bool:
        """Whether the command of rank 0 has ended; also true where torchrun's store is gone."""
        try:
            return bool(self.store.check([_OVER]))
        except RuntimeError:
            return True

    @property
    def has_failed(self) -> bool:
        """Whether the command that is over has failed: then each rank has, and torchrun may start all of them again."""
        try:
            return bool(self.store.get(_OVER) != b"done")
        except RuntimeError:
            return True


def under_torchrun() -> bool:
    """Whether torchrun started this process."""
    return all(name in os.environ for name in VARIABLES)


_JOINED: list[Nodes] = []
"""What `join` returned in this process."""


def is_here(device: Device) -> bool:
    """Whether a device is of the machine of this process, as far as is known here.

    A device that names its machine counts only where this process has joined the others.
    """
    return not device.machine or any(nodes.machine == device.machine for nodes in _JOINED)


def check_machines(host: Host, *, where: str) -> None:
    """Refuses a host some of whose machines run no process of torchrun.

    Raises:
        InvalidValue: this process was not started by torchrun, or a machine is not one of those that were.
    """
    named = dict.fromkeys(device.machine for device in host.devices if device.machine)
    if not named:
        return
    refuse_if(not under_torchrun(), "host", host.name, "a host of this machine alone", where=where, hint=START)
    refuse_if(not host.processes, "processes", False, "true on a host with machines", where=where)
    for known in _JOINED:
        for name in named:
            check_known(f"machine in devices of {where}", name, known.machines)
            count, most = sum(each.machine == name for each in host.devices), len(known.ranks_of(name))
            expected = f"at most {most}, one for each process of torchrun there"
            refuse_if(count > most, f"number of devices on machine {name!r}", count, expected, where=where)


def join() -> Nodes:
    """This process among the others of torchrun; all of them must call this, and get the same facts.

    Raises:
        InvalidValue: torchrun did not start this process, or an interface that is named does not exist.
        RunnerError: a rank did not come.
    """
    if not _JOINED:
        _JOINED.append(_joined())
    return _JOINED[0]


def _joined() -> Nodes:
    if missing := [name for name in VARIABLES if name not in os.environ]:
        raise InvalidValue(
            "host",
            "nodes",
            f"a process that torchrun started ({', '.join(missing)} not set)",
            hint=START,
        )
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    from rlplace.measure.hosts.signed_store import SignedStore, derived

    rank, num_ranks, local_rank, num_local = (int(os.environ[name]) for name in VARIABLES[:4])
    try:
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=COMES_WITHIN_S)))
        session, secret = _welcome_all(store, num_ranks) if rank == 0 else _await_welcome(store, rank)
    except (RuntimeError, OSError) as error:  # of PyTorch: DistStoreError, DistNetworkError
        raise RunnerError(_unreachable(error)) from error
    store = PrefixStore(f"rlplace/{session}", SignedStore(store, secret))
    group = os.environ.get("GROUP_RANK", str(rank // num_local))
    interface, address = _interface_to(os.environ["MASTER_ADDR"])
    known = _gather(store, rank, num_ranks, "where", [group, socket.gethostname().partition(".")[0], address])
    away = [there for of, _, there in known if of != group and not _is_loopback(there)]
    if _is_loopback(address) and away:  # where a machine gives its own name the address 127.0.1.1
        interface, address = _interface_to(away[0])
    names = _machine_names([(of, name) for of, name, _ in known])
    own = _own_facts(names[rank], address, interface, local_rank, num_local)
    facts = [RankFacts(**each) for each in _gather(store, rank, num_ranks, "facts", asdict(own))]
    facts = [RankFacts(**(asdict(each) | {"cores": tuple(each.cores)})) for each in facts]
    proof = derived(secret, f"connections/{session}")
    return Nodes(
        rank, num_ranks, local_rank, num_local, names[rank], address, interface, store, proof, facts=tuple(facts)
    )


def _unreachable(error: Exception) -> str:
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    first = str(error).strip().splitlines()[:1]
    return (
        f"not all ranks of torchrun found each other within {COMES_WITHIN_S:g} s: its store is at {address}:{port} "
        f"({''.join(first)}). Every machine must reach this address and port: see docs/machines.md"
    )


def _welcome_all(store: Store, num_ranks: int) -> tuple[str, bytes]:
    """Rank 0: gives every rank a name for this session, and sees that all know one secret.

    torchrun's store outlives the processes: after a restart it holds what those before have written, and neither the
    number of restarts nor that of ranks is the same on all machines, or new. So each rank writes a random word, and
    only the answer to this very word counts. The store is everybody's: the answer is signed, and the secret not in it.
    """
    from rlplace.measure.hosts.signed_store import Gift, SignedStore, code, keep_secret, own_secret
    from rlplace.measure.timing.race import looks  # it needs arrays: the command line begins without them

    session, given, welcomed = secrets.token_hex(8), own_secret(), set()
    with contextlib.closing(Gift()) as gift:
        secret, place = (gift.secret, gift.place) if given is None else (given, "")
        signed, waiting = SignedStore(store, secret), set(range(1, num_ranks))
        for _ in looks(COMES_WITHIN_S):
            for rank in sorted(waiting):
                if store.check([f"rlplace/{session}/refused/{rank}"]):
                    raise _unlike(rank)
                if store.check([f"rlplace/{session}/came/{rank}"]):
                    signed.get(f"rlplace/{session}/came/{rank}")
                    waiting.discard(rank)
                elif store.check([f"rlplace/hello/{rank}"]):
                    word = store.get(f"rlplace/hello/{rank}").decode(errors="replace")
                    if word not in welcomed:
                        proof = code(secret, f"welcome/{word}", session.encode()).hex()
                        store.set(f"rlplace/welcome/{word}", json.dumps([session, place, proof]))
                        welcomed.add(word)
            if not waiting:
                keep_secret(secret)
                return session, secret
            time.sleep(_LOOKS_EVERY_S)
    missing = ", ".join(map(str, sorted(waiting)))
    raise RunnerError(f"of {num_ranks} ranks, these did not come within {COMES_WITHIN_S:g} s: {missing}")


def _await_welcome(store: Store, rank: int) -> tuple[str, bytes]:
    """Another rank: the session that rank 0 chose, and the secret."""
    from rlplace.measure.hosts.signed_store import Gift, SignedStore, code, keep_secret, own_secret

    word = secrets.token_hex(16)
    store.set(f"rlplace/hello/{rank}", word)
    answer = store.get(f"rlplace/welcome/{word}")
    try:
        session, place, proof = (str(each) for each in json.loads(answer))
        secret = own_secret() or Gift.taken(place)
        expected = b"" if secret is None else code(secret, f"welcome/{word}", session.encode())
        is_known = bool(expected) and hmac.compare_digest(expected.hex().encode(), proof.encode())
    except (ValueError, TypeError, RecursionError) as error:
        raise RunnerError("the welcome in torchrun's store was not written by this run") from error
    if secret is None or not is_known:
        store.set(f"rlplace/{session}/refused/{rank}", "1")
        raise _unlike(rank)
    SignedStore(store, secret).set(f"rlplace/{session}/came/{rank}", "1")
    keep_secret(secret)
    return session, secret


def _unlike(rank: int) -> InvalidValue:
    from rlplace.measure.hosts.signed_store import HINT, SECRET

    hint = f"{HINT} (Or another process that reaches torchrun's store said so.)"
    return InvalidValue(SECRET, f"another, or none, of rank {rank}", "one that all ranks know", hint=hint)


def _gather(store: Store, rank: int, num_ranks: int, name: str, value: Any) -> list[Any]:
    store.set(f"{name}/{rank}", json.dumps(value))
    found = []
    for other in range(num_ranks):
        try:
            found.append(json.loads(store.get(f"{name}/{other}")))
        except RuntimeError as error:
            raise RunnerError(f"rank {other} of {num_ranks} did not send its {name!r}: {error}") from error
    return found


def _machine_names(known: Sequence[tuple[str, str]]) -> list[str]:
    """A unique name for the machine of each rank: its host name, with torchrun's number where two have the same.

    >>> _machine_names([("0", "a"), ("0", "a"), ("1", "b")])
    ['a', 'a', 'b']
    >>> _machine_names([("0", "a"), ("1", "a")])
    ['a-0', 'a-1']
    """
    clean = {group: re.sub(r"[^A-Za-z0-9_.-]", "-", name) or "machine" for group, name in known}
    names = list(clean.values())
    return [clean[group] if names.count(clean[group]) == 1 else f"{clean[group]}-{group}" for group, _ in known]


MOST_STRANGERS = 64
"""Connections of which nothing is known yet; the oldest makes room for the next."""
_PAUSE_S = 0.1


def accept_all(server: socket.socket, serve: Callable[[socket.socket, Callable[[], None]], None]) -> None:
    """Serves each connection in a thread of its own until the server is closed.

    Anyone can connect, say nothing, and stay: such connections cost a few descriptors, and keep nobody out.

    Args:
        server: listens.
        serve: called with a connection, which it closes, and with a function to call once the other side is known.
    """
    strangers: dict[socket.socket, None] = {}  # in the order in which they came
    lock = threading.Lock()

    def forget(accepted: socket.socket) -> None:
        with lock:
            strangers.pop(accepted, None)

    def run(accepted: socket.socket) -> None:
        try:
            serve(accepted, partial(forget, accepted))
        finally:
            forget(accepted)

    while server.fileno() >= 0:
        try:
            accepted, _ = server.accept()
        except OSError:  # it was closed, the other side has gone, or this process has no descriptor left
            time.sleep(_PAUSE_S)
            continue
        with lock:
            if len(strangers) >= MOST_STRANGERS:
                oldest = next(iter(strangers))
                del strangers[oldest]
                with contextlib.suppress(OSError):  # its thread closes it
                    oldest.shutdown(socket.SHUT_RDWR)
            strangers[accepted] = None
        try:
            threading.Thread(target=run, args=(accepted,), daemon=True).start()
        except RuntimeError:  # no further thread can be started now
            forget(accepted)
            accepted.close()
            time.sleep(_PAUSE_S)


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def interfaces() -> dict[str, str]:
    """The network interfaces of this machine that have an address: IPv4, or else IPv6."""
    import fcntl  # not on every system

    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                packed = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(packed[20:24])
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if scope in ("00", "10"):  # everywhere, or this machine alone; those of one link need a zone
                found.setdefault(name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found


def _interface_to(address: str) -> tuple[str, str]:
    """Name and own address of the interface to use: of the environment, else of the route to an address."""
    found = interfaces()
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        wanted = os.environ.get(variable, "").partition(",")[0].removeprefix("=")
        if not wanted or wanted.startswith("^"):  # NCCL: all but these
            continue
        name = wanted if wanted in found else next((each for each in found if each.startswith(wanted)), "")
        if not name:
            raise InvalidValue(variable, wanted, f"an interface with an address ({', '.join(found)})")
        return name, found[name]
    try:
        family, _, _, _, there = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(there)  # of datagrams: nothing is sent
            here = str(probe.getsockname()[0])
    except OSError as error:
        raise RunnerError(f"this machine has no route to {address}: {error}") from error
    named = next((name for name, own in found.items() if own == here), "lo" if _is_loopback(here) else "")
    if not named:
        raise RunnerError(f"no interface has the address {here} of the route to {address}; set GLOO_SOCKET_IFNAME")
    return named, here


def _own_facts(machine: str, address: str, interface: str, local_rank: int, num_local: int) -> RankFacts:
    import torch

    from rlplace import cuda

    cores = allowed_cores()
    share = max(1, len(cores) // num_local)
    own = cores[local_rank * share : (local_rank + 1) * share] or (cores[local_rank % len(cores)],)
    gpu = cuda.gpu(local_rank) if local_rank < cuda.num_gpus() else cuda.Gpu("", 0, 0)
    return RankFacts(
        machine,
        address,
        interface,
        local_rank,
        num_local,
        own,
        ram_bytes(),
        _cpu_model(),
        gpu.name,
        gpu.memory_bytes,
        gpu.free_bytes,
        {"python": platform.python_version(), "torch": str(torch.__version__), "rlplace": __version__},
    )


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    return platform.processor() or platform.machine()
