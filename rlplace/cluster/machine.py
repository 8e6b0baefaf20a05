"""`Machine`: what must be alike of two machines whose step times are to be compared."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from rlplace.errors import UserError
from rlplace.measure.hosts.host import Host
from rlplace.measure.hosts.present import check_present
from rlplace.measure.measurement_log import versions_line
from rlplace.runs.host_lock import machine_id
from rlplace.store.folders import machine_facts


@dataclass(frozen=True)
class Machine:
    """A machine, as another one is told of it.

    Attributes:
        name: its host name.
        start: what names the start of its system, which tells machines of one name apart.
        versions: of rlplace, PyTorch and Python.
        facts: its processor, number of cores and memory, by name.
        host: the devices that are found there.
        fingerprint: of that host.
    """

    name: str
    start: str
    versions: str
    facts: tuple[tuple[str, str], ...]
    host: str
    fingerprint: str

    @classmethod
    def here(cls) -> Machine:
        """This one."""
        host = Host.detect()
        return cls(socket.gethostname(), machine_id(), versions_line(), machine_facts(), repr(host), host.fingerprint)

    def is_same(self, other: Machine) -> bool:
        """Whether the two are one machine, and one container of it."""
        return (self.name, self.start) == (other.name, other.start)

    def differences(self, other: Machine) -> list[str]:
        """What of `other` is not as it is here, in words."""
        found = [] if self.versions == other.versions else [f"{other.versions}, here {self.versions}"]
        theirs = dict(other.facts)
        found += [f"{name} {theirs.get(name)}, here {fact}" for name, fact in self.facts if theirs.get(name) != fact]
        if self.fingerprint != other.fingerprint:
            found.append(f"devices {other.host} [{other.fingerprint}], here {self.host} [{self.fingerprint}]")
        return found


def refusal(host: Host, driver: Machine) -> str:
    """Why this machine cannot measure in the place of `driver`'s; empty where it can.

    Args:
        host: that is to be measured.
        driver: the machine that asks.
    """
    found = driver.differences(Machine.here())
    try:
        check_present(host)
    except UserError as error:
        found.append(str(error))
    return "; ".join(found)
