"""`Setup`: the options that `train`, `place`, `compare`, `simulate`, `measure`, `fidelity` and `advise` share.

`ProblemOptions`: those of them that also decide how a problem is made and searched. `CutOptions`: how the batch is cut
into micro-batches, and ops are split. Importing this imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SkipValidation

from rlplace.errors import InvalidValue, refuse_if
from rlplace.records import Seed, Whole, read_record, record
from rlplace.workloads import WorkloadSpec

MOST_GROUPS = 10**9

if TYPE_CHECKING:
    from rlplace.graphs import Constraints, SplitPlan
    from rlplace.measure import Host
    from rlplace.measure.placement import PlacedSplit

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


Loss = Literal["auto", "separate", "joined", "accumulated"]
BatchDims = tuple[int | None, ...] | Mapping[str, int | None]

AUTO: Literal["auto"] = "auto"
NO_SPLIT, TWO = "none", "2"
LOSSES: tuple[Loss, ...] = ("auto", "separate", "joined", "accumulated")
MOST_MICRO_BATCHES = 1024
"""Micro-batches beyond this are taken for a slip: every one is a copy of the whole forward and backward."""


@record(frozen=True)
class CutOptions:
    """How the batch of a step is to be cut, and which of its ops are to be split into shards.

    Raises:
        InvalidValue: a count out of range; a dimension or a loss for a batch that is not cut; or shards that no op can
            be split into.
        UnknownName: no such loss, or no such class of ops.
    """

    count: SkipValidation[int | Literal["auto"]] = 1
    """K, how many slices; `auto` is chosen by simulation."""
    batch_dims: BatchDims | None = None
    """The dimension of the batch, None for a tensor that all slices share: of every tensor among the inputs, then the
    targets; or by the names of `forward`'s parameters. None: as the workload says, else found by sizes."""
    loss: Loss = "auto"
    """How the losses of slices make that of the batch; `auto` is found by a check."""
    is_exact: bool = False
    """Refuse a step that is not exactly that of the whole batch."""
    split: str = NO_SPLIT
    """Classes of ops that are split, as `attention,mlp`; `none` splits none, `auto` is chosen by simulation."""
    split_parts: str = TWO
    """The number of shards, or the share of each, as `3:1`."""

    def __post_init__(self) -> None:
        if self.count != AUTO and (type(self.count) is not int or not 1 <= self.count <= MOST_MICRO_BATCHES):
            raise InvalidValue("micro_batches", self.count, f"`{AUTO}`, or a number from 1 to {MOST_MICRO_BATCHES}")
        _ = self.plan  # refuses mistakes
        refuse_if(
            self.split in (NO_SPLIT, AUTO) and self.split_parts != TWO,
            "split_parts",
            self.split_parts,
            "none beside `--split auto`" if self.split == AUTO else "none without a split",
            hint="Split ops with `--split attention,mlp`, in Python `split=rlplace.SplitPlan(...)`.",
        )
        if self.count != 1:
            return
        hint = "Cut the batch with `--micro-batches K`, in Python `micro_batches=K`."
        refuse_if(
            self.batch_dims is not None, "batch_dims", self.batch_dims, "none for a batch that is not cut", hint=hint
        )
        refuse_if(self.loss != "auto", "loss", self.loss, "`auto` for a batch that is not cut", hint=hint)

    @property
    def plan(self) -> SplitPlan | None:
        """How ops are split; None where they are not, or that is to be chosen."""
        if self.split in (NO_SPLIT, AUTO):
            return None
        from rlplace.graphs import SplitPlan

        return SplitPlan.parse(self.split, self.split_parts)

    @property
    def is_auto(self) -> bool:
        """Whether the count is to be chosen."""
        return self.count == AUTO

    def again(self, count: int, loss: Loss | None, split: PlacedSplit | None = None) -> tuple[int, CutOptions]:
        """The number of micro-batches that was chosen, and the options that cut and split a step so again.

        Args:
            count: of micro-batches.
            loss: as it was judged; None where it was not.
            split: of the step; None for one that is not split.
        """
        classes, parts = (NO_SPLIT, TWO) if split is None else (split.classes, split.parts)
        if count == 1:
            return count, CutOptions(split=classes, split_parts=parts)
        return count, CutOptions(count, self.batch_dims, loss or self.loss, split=classes, split_parts=parts)

    def to_dict(self) -> dict[str, Any]:
        """The options as a run keeps them."""
        dims = self.batch_dims
        kept = dict(dims) if isinstance(dims, Mapping) else dims and list(dims)
        split = {} if self.split == NO_SPLIT else {"split": self.split}
        split |= {"split_parts": self.split_parts} if self.plan is not None else {}
        return {"asked": self.count, "batch_dims": kept, "loss": self.loss, "exact": self.is_exact, **split}


WHOLE = CutOptions()
"""A batch that is not cut."""
_DIM = re.compile(r"\s*(?:([^=]*[^=\s])\s*=)?\s*(none|\d{1,3})\s*", re.IGNORECASE)
"""A dimension or `none`, with or without a name before it."""


def parse_count(text: str) -> int | Literal["auto"]:
    """K in `4`, or `auto`.

    Raises:
        InvalidValue: anything else.

    >>> parse_count("4"), parse_count("auto")
    (4, 'auto')
    """
    word = text.strip()
    refuse_if(
        word != AUTO and not (word.isdecimal() and 1 <= int(word) <= MOST_MICRO_BATCHES),
        "micro_batches",
        text,
        f"`{AUTO}`, or a number from 1 to {MOST_MICRO_BATCHES}",
    )
    return AUTO if word == AUTO else int(word)


def parse_batch_dims(text: str) -> BatchDims | None:
    """Dimensions in `0,0,none`, or by name in `input_ids=0,mask=none`; None for an empty text.

    Raises:
        InvalidValue: anything else.

    >>> parse_batch_dims("0,1,none"), parse_batch_dims("x=0,mask=none"), parse_batch_dims("")
    ((0, 1, None), {'x': 0, 'mask': None}, None)
    """
    if not text.strip():
        return None
    found = [_DIM.fullmatch(word) for word in text.split(",")]
    names = [match[1] for match in found if match]
    refuse_if(
        None in found or (any(names) and (None in names or len(set(names)) < len(names))),
        "batch_dims",
        text,
        "a dimension or `none` for every tensor (0,0,none), or names with them (x=0,mask=none)",
    )
    dims = [None if match[2].lower() == "none" else int(match[2]) for match in found if match]
    return dict(zip(names, dims, strict=True)) if any(names) else tuple(dims)


def number_only(count: object, why: str) -> InvalidValue:
    """The error where `auto` cannot be chosen; `why` names an alternative."""
    return InvalidValue("micro_batches", count, "a number here", hint=why)


def check_named(asked: CutOptions) -> None:
    """Refuses a split that is to be chosen, where nothing is searched.

    Raises:
        InvalidValue: it is `auto`.
    """
    hint = "`auto` is chosen by a search: `rlplace train`, `place`, `compare` and `advise` do."
    refuse_if(asked.split == AUTO, "split", asked.split, "none, or classes of ops here", hint=hint)


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
