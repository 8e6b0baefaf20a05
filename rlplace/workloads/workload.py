"""`Workload`: a model and all that one step of it needs; and the parts that builders make it of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

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
