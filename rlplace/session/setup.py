"""`Setup`: the options that `train`, `place`, `compare`, `simulate`, `measure`, `fidelity` and `advise` share.

`ProblemOptions`: those of them that also decide how a problem is made and searched. Importing this imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field

from rlplace.records import Seed, Whole, read_record, record
from rlplace.session.cut import WHOLE, CutOptions
from rlplace.workloads import WorkloadSpec

MOST_GROUPS = 10**9

if TYPE_CHECKING:
    from rlplace.graphs import Constraints
    from rlplace.measure import Host

    KeptConstraints = Constraints | None
else:

    def _constraints(value: object) -> object:
        """Constraints from the object of a file; they are imported then, since they bring NumPy."""
        if not isinstance(value, Mapping):
            return value
        from rlplace.graphs import Constraints

        return read_record(Constraints, dict(value), "constraints")

    KeptConstraints, Host = Annotated[Any, BeforeValidator(_constraints)], Any


@record(frozen=True)
class ProblemOptions:
    """How a problem is made of a step, and searched and measured on this machine."""

    seed: Seed = 0
    """Of the policy, of sampling and of random ops."""
    num_groups: Annotated[Whole, Field(ge=1, le=MOST_GROUPS)] = 256
    """Most groups of ops that are moved."""
    grouping: str = "heavy-edge"
    """The rule that groups are made by, a word of `rlplace.graphs.grouping.groups.GroupingRule`."""
    acyclic: bool = False
    """Keep the graph of groups without cycles, also where the rule must give way."""
    constraints: KeptConstraints = None
    """The user's pins, exclusions, and ops that stay together."""
    isolated: bool | None = None
    """Whether placements are measured in a worker process, so that one that crashes or hangs costs itself alone; by
    default they are, unless the environment says `RLPLACE_IN_PROCESS=1`."""
    store: str = "auto"
    """Where measured step times are kept and looked for: auto (the user's cache folder), off, or a file."""


@record(frozen=True, kw_only=True)
class Setup(ProblemOptions):
    """A step to place or to time, where, and how."""

    spec: WorkloadSpec
    host: Host
    host_word: str = ""
    """The user's word for the host."""
    gangs: bool = False
    """Whether the host was asked for with gangs."""
    asked: CutOptions = WHOLE
    """How the batch is cut."""
    workload_seed: Seed = 0
    """Of the workload's weights and inputs."""
    is_waiting: bool = True
    """Wait for another search that measures on this machine, instead of giving up."""
