"""`Workload`: a model and all that one step of it needs; and the parts that builders make it of.

`CATALOG`: every named workload, its options, its builder and the packages that it needs; imports no torch.

`register_workload` adds one for this process; an installed package brings more as entry points of
`rlplace.workloads`, each of which is a `Family`.

`describe_workloads`: every named workload with its options and how many ops its step has; imports no torch.

The counts are kept in `op_counts.json` beside this file, which `python scripts/count_workloads.py` writes: counting
means building and capturing each.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from rlplace.errors import InvalidValue, UserError, refuse_if
from rlplace.files import read_json
from rlplace.registry import Registry
from rlplace.workloads.configs import (
    SIZES,
    ZOO,
    DLRMConfig,
    EvoformerConfig,
    InceptionV3Config,
    Loss,
    NMTConfig,
    RNNLMConfig,
    WorkloadConfig,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    Inputs = tuple[Tensor, ...] | dict[str, Tensor]

Optimizer = Literal["sgd", "momentum", "adam", "adamw"]
OPTIMIZERS: tuple[Optimizer, ...] = ("sgd", "momentum", "adam", "adamw")
BatchDims = tuple[int | None, ...]
"""The dimension of the batch of every input, then every target; None for one that is not cut."""
MULTI = "multi"
"""The name of several workloads as one, which no workload can have."""


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
    """The optimizer of the parameters; None leaves them as they are."""
    targets: tuple[Tensor, ...] = ()
    """The tensors that the loss takes besides the model's output."""
    batch_dims: BatchDims | None = None
    """The dimensions that are cut into micro-batches; None leaves it to sizes: dimension 0 of tensors as long there as
    the first."""
    loss: Loss = "auto"
    """How micro-batches make the loss, where the caller does not ask for one."""


class Parts(NamedTuple):
    """The result of the builder of a named workload; labels are inputs, so no tensor hides in a closure."""

    model: nn.Module
    inputs: Inputs
    loss_fn: Callable[[Any], Tensor]
    batch_dims: BatchDims | None = None
    """The dimensions that are cut into micro-batches, see `Workload`."""
    loss: Loss = "auto"
    """How micro-batches make the loss; `separate` says that labels are never padded."""


def loss_of(output: Any) -> Tensor:
    """The loss that a model computed itself from the labels among its inputs."""
    return cast("Tensor", output.loss)


@dataclass(frozen=True, slots=True)
class Family:
    """One named workload.

    Raises:
        InvalidValue: `config` is no class of options, its `NAME` is missing or taken by `multi`, or an option has no
            default.
    """

    config: type[WorkloadConfig]
    """The class of its options."""
    home: str | Callable[[Any], Parts]
    """The function that builds it, or its `module:function`."""
    package: str = ""
    """The package that it is built from; empty where torch alone does."""
    extra: str = ""
    """The extra that brings `package`."""

    def __post_init__(self) -> None:
        where = f"workload options {getattr(self.config, '__qualname__', self.config)!r}"
        is_config = isinstance(self.config, type) and issubclass(self.config, WorkloadConfig)
        refuse_if(
            not is_config or not is_dataclass(self.config) or inspect.isabstract(self.config),
            "config",
            self.config,
            "a dataclass that is a WorkloadConfig with `paper`",
            where=where,
        )
        name = getattr(self.config, "NAME", None)
        if not isinstance(name, str) or name == MULTI:
            raise InvalidValue("NAME", name, f"the name of the workload, which is not {MULTI!r}", where=where)
        if unset := next((field.name for field in fields(self.config) if field.default is MISSING), ""):
            raise InvalidValue(unset, "without a default", "a default, its size `small`", where=where)

    def build(self, config: WorkloadConfig) -> Parts:
        """A model, its inputs and its loss at the size that `config` says; imports torch.

        Raises:
            InvalidValue: the builder returned something else.
        """
        home = EntryPoint("", self.home, "").load() if isinstance(self.home, str) else self.home
        made: object = home(config)
        if not isinstance(made, Parts):
            raise InvalidValue(
                "the value",
                type(made).__name__,
                "Parts: the model, its inputs and its loss",
                where=f"what built workload {config.NAME}",
            )
        return made

    @property
    def is_installed(self) -> bool:
        """Whether the package that it is built from is installed."""
        return not self.package or find_spec(self.package) is not None


NETWORKS = "rlplace.workloads.networks"


CATALOG = Registry[Family](
    "workload",
    {
        "dlrm": Family(DLRMConfig, f"{NETWORKS}.dlrm:build"),
        "evoformer": Family(EvoformerConfig, f"{NETWORKS}.evoformer:build"),
        "inception_v3": Family(InceptionV3Config, f"{NETWORKS}.inception_v3:build"),
        "nmt": Family(NMTConfig, f"{NETWORKS}.nmt:build"),
        "rnnlm": Family(RNNLMConfig, f"{NETWORKS}.nmt:build_rnnlm"),
        **{
            name: Family(row.options_type(name), f"{NETWORKS}.zoo:build", package="transformers", extra="zoo")
            for name, row in ZOO.items()
        },
    },
    group="rlplace.workloads",
    entry_type=Family,
)


def register_workload(config: type[WorkloadConfig], build: str | Callable[[Any], Parts]) -> None:
    """Makes a workload of `config.NAME`, for this process: wherever a WORKLOAD is asked for, the name is one.

    Args:
        config: the class of its options.
        build: from the options to the model, its inputs and its loss; or `module:function` of it, imported when the
            workload is built.

    Raises:
        InvalidValue: the name is malformed or taken, or `config` is no class of options.
    """
    family = Family(config, build)
    CATALOG.register(family.config.NAME, family)


COUNTS_PATH = Path(__file__).with_name("op_counts.json")


def describe_workloads() -> list[dict[str, Any]]:
    """One row a workload, by name, as `rlplace workloads --json` prints them.

    Each has `name`, the options of sizes `small` and `paper`, `counts` (of each size `num_ops` and `num_edges` of a
    training step with Adam; empty for a workload that is not rlplace's own), the `extra` that it needs, if any,
    `is_installed`, and `problem`: why an entry of an installed package cannot be used, else null.
    """
    counts = op_counts()
    return [_describe(name, counts.get(name, {})) for name in sorted(CATALOG)]


def _describe(name: str, counts: dict[str, dict[str, int]]) -> dict[str, Any]:
    row = {"name": name, "small": {}, "paper": {}, "counts": counts, "extra": None}
    try:
        family = CATALOG[name]
        sizes = {"small": asdict(family.config.small()), "paper": asdict(family.config.paper())}
    except UserError as error:
        return {**row, "is_installed": False, "problem": str(error)}
    return {**row, **sizes, "extra": family.extra or None, "is_installed": family.is_installed, "problem": None}


def op_counts() -> dict[str, dict[str, dict[str, int]]]:
    """By name and size, `num_ops` and `num_edges` of a training step, as they were counted last."""
    kept = read_json(COUNTS_PATH)["workloads"]
    return {name: {size: dict(sizes[size]) for size in SIZES} for name, sizes in kept.items()}
