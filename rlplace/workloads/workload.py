"""`Workload`: a model and all that one step of it needs; and the parts that builders make it of.

`WorkloadConfig`: what the options of every named workload have in common, checked without importing torch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self, cast

from rlplace.errors import InvalidValue

if TYPE_CHECKING:
    from torch import Tensor, nn

    Inputs = tuple[Tensor, ...] | dict[str, Tensor]

Optimizer = Literal["sgd", "momentum", "adam", "adamw"]
OPTIMIZERS: tuple[Optimizer, ...] = ("sgd", "momentum", "adam", "adamw")
Loss = Literal["auto", "separate", "joined", "accumulated"]
"""How the micro-batches of a step make its loss; `auto` is found by a check."""
BatchDims = tuple[int | None, ...]
"""The dimension of the batch of every input, then every target; None for one that is not cut."""


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """A model and all that one step of it needs."""

    name: str
    """As the user wrote it, size and options included."""
    model: nn.Module
    inputs: Inputs
    """Positional arguments of the model, or keyword arguments in a dict."""
    loss_fn: Callable[..., Tensor] | None
    """From the model's output and the targets to a scalar; None makes the step an inference."""
    optimizer: Optimizer | None
    """What updates the parameters; None leaves them as they are."""
    targets: tuple[Tensor, ...] = ()
    """What the loss needs of a batch besides the model's output."""
    batch_dims: BatchDims | None = None
    """What is cut into micro-batches; None leaves it to sizes: dimension 0 of tensors as long there as the first."""
    loss: Loss = "auto"
    """How micro-batches make the loss, for whoever does not ask for one."""


class Parts(NamedTuple):
    """What the builder of a named workload makes; labels are inputs, so no tensor hides in a closure."""

    model: nn.Module
    inputs: Inputs
    loss_fn: Callable[[Any], Tensor]
    batch_dims: BatchDims | None = None
    """What is cut into micro-batches, see `Workload`."""
    loss: Loss = "auto"
    """How micro-batches make the loss; `separate` says that labels are never padded."""


def loss_of(output: Any) -> Tensor:
    """The loss that a model computed itself from the labels among its inputs."""
    loss: Tensor = output.loss
    return loss


Size = Literal["small", "paper"]
SIZES: tuple[Size, ...] = ("small", "paper")
MOST = 1 << 31
"""Largest value of an integer: tensors count their elements."""
COPIES = ("layers", "blocks", "steps", "experts", "tables")
"""Options that count what is built one by one."""
MOST_COPIES = 10_000
"""Largest value of those: more would take hours to build."""


@dataclass(frozen=True, slots=True)
class WorkloadConfig(ABC):
    """Options of a named workload; the defaults are its `small` size.

    An option is an integer of at least 1 (or what `LEAST` says), a share from 0 up to but not including 1, or a bool.

    Raises:
        InvalidValue: an option is of the wrong type or out of range, or options cannot be had together.
    """

    NAME: ClassVar[str]
    """What users call the workload."""
    LEAST: ClassVar[dict[str, int]] = {}
    """Smallest value of integers that must exceed 1."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, default = getattr(self, field.name), cast(object, field.default)
            if isinstance(default, bool):
                self._require(isinstance(value, bool), field.name, "true or false")
            elif isinstance(default, int):
                least = self.LEAST.get(field.name, 1)
                is_integer = isinstance(value, int) and not isinstance(value, bool)
                most = MOST_COPIES if field.name in COPIES else MOST
                is_in_range = is_integer and least <= value <= most
                self._require(is_in_range, field.name, f"an integer of at least {least} and at most {most:,}")
            else:
                is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
                self._require(is_number, field.name, "a finite number")
                self._require(0 <= value < 1, field.name, "at least 0 and below 1")
        self._check()

    @classmethod
    def small(cls) -> Self:
        """A step of well under a second on one core."""
        return cls()

    @classmethod
    @abstractmethod
    def paper(cls) -> Self:
        """The size of the paper."""

    def _check(self) -> None:  # noqa: B027 - most options can always be had together
        """Raises where options, each valid alone, cannot be had together."""

    def _require(self, is_met: bool, name: str, expected: str, hint: str = "") -> None:
        if not is_met:
            raise InvalidValue(name, getattr(self, name), expected, where=f"workload {self.NAME}", hint=hint)

    def _require_divisor(self, name: str, of: str) -> None:
        whole = getattr(self, of)
        self._require(whole % getattr(self, name) == 0, name, f"a divisor of {of}={whole}")
