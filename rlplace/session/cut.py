"""`CutOptions`: how a user wants the batch of a step cut; importing it imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import SkipValidation

from rlplace.errors import InvalidValue
from rlplace.records import record

Loss = Literal["auto", "separate", "joined", "accumulated"]
BatchDims = tuple[int | None, ...] | Mapping[str, int | None]

AUTO: Literal["auto"] = "auto"
LOSSES: tuple[Loss, ...] = ("auto", "separate", "joined", "accumulated")
MOST = 1024
"""Micro-batches beyond this are taken for a slip: every one is a copy of the whole forward and backward."""


@record(frozen=True)
class CutOptions:
    """How the batch of a step is to be cut.

    Raises:
        InvalidValue: a count out of range; or a dimension or a loss for a batch that is not cut.
        UnknownName: no such loss.
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

    def __post_init__(self) -> None:
        if self.count != AUTO and (type(self.count) is not int or not 1 <= self.count <= MOST):
            raise InvalidValue("micro_batches", self.count, f"`{AUTO}`, or a number from 1 to {MOST}")
        if self.count != 1:
            return
        hint = "Cut the batch with `--micro-batches K`, in Python `micro_batches=K`."
        if self.batch_dims is not None:
            raise InvalidValue("batch_dims", self.batch_dims, "none for a batch that is not cut", hint=hint)
        if self.loss != "auto":
            raise InvalidValue("loss", self.loss, "`auto` for a batch that is not cut", hint=hint)

    @property
    def is_auto(self) -> bool:
        """Whether the count is to be chosen."""
        return self.count == AUTO

    def again(self, count: int, loss: Loss | None) -> tuple[int, CutOptions]:
        """The number of micro-batches that was chosen, and the options that cut a step so again.

        Args:
            count: of micro-batches.
            loss: as it was judged; None where it was not.
        """
        return count, WHOLE if count == 1 else CutOptions(count, self.batch_dims, loss or self.loss)

    def to_dict(self) -> dict[str, Any]:
        """The options as a run keeps them."""
        dims = self.batch_dims
        kept = dict(dims) if isinstance(dims, Mapping) else dims and list(dims)
        return {"asked": self.count, "batch_dims": kept, "loss": self.loss, "exact": self.is_exact}


WHOLE = CutOptions()
"""A batch that is not cut."""


def parse_count(text: str) -> int | Literal["auto"]:
    """K in `4`, or `auto`.

    Raises:
        InvalidValue: anything else.

    >>> parse_count("4"), parse_count("auto")
    (4, 'auto')
    """
    word = text.strip()
    if word == AUTO:
        return AUTO
    if not word.isdecimal() or not 1 <= int(word) <= MOST:
        raise InvalidValue("micro_batches", text, f"`{AUTO}`, or a number from 1 to {MOST}")
    return int(word)


def parse_batch_dims(text: str) -> BatchDims | None:
    """Dimensions in `0,0,none`, or by name in `input_ids=0,mask=none`; None for an empty text.

    Raises:
        InvalidValue: anything else.

    >>> parse_batch_dims("0,1,none"), parse_batch_dims("x=0,mask=none"), parse_batch_dims("")
    ((0, 1, None), {'x': 0, 'mask': None}, None)
    """
    if not text.strip():
        return None
    words = [word.strip() for word in text.split(",")]
    named = [word.partition("=") for word in words]
    if not any(equals for _, equals, _ in named):
        return tuple(_parse_dim(word, text) for word in words)
    names = [name.strip() for name, _, _ in named]
    if not all(equals and name for (_, equals, _), name in zip(named, names, strict=True)) or len(set(names)) < len(
        names
    ):
        raise _not_dims(text)
    return {name: _parse_dim(dim, text) for name, (_, _, dim) in zip(names, named, strict=True)}


def _parse_dim(word: str, text: str) -> int | None:
    word = word.strip().lower()
    if word != "none" and (not word.isdecimal() or len(word) > 3):
        raise _not_dims(text)
    return None if word == "none" else int(word)


def _not_dims(text: str) -> InvalidValue:
    return InvalidValue(
        "batch_dims", text, "a dimension or `none` for every tensor (0,0,none), or names with them (x=0,mask=none)"
    )


def number_only(count: object, why: str) -> InvalidValue:
    """The error where `auto` cannot be chosen; `why` names an alternative."""
    return InvalidValue("micro_batches", count, "a number here", hint=why)
