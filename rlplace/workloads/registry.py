"""`parse_workload`, `build`: from the words of a user to a model, its inputs and its loss.

A WORKLOAD is `NAME`, `NAME@small`, `NAME@paper`, `NAME@key=value,...`, `NAME@small,key=value,...`, or
`package.module:function`. Parsing checks all of it and imports no torch; building does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from rlplace.errors import InvalidValue, UnknownName
from rlplace.workloads.config import CONFIGS, SIZES, InceptionV3Config, NMTConfig, Size, WorkloadConfig

if TYPE_CHECKING:
    from torch import Tensor, nn

Optimizer = Literal["sgd", "momentum", "adam", "adamw"]
OPTIMIZERS: tuple[Optimizer, ...] = ("sgd", "momentum", "adam", "adamw")


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """A model and all that one step of it needs."""

    name: str
    """As the user wrote it, size and options included."""
    model: nn.Module
    inputs: tuple[Tensor, ...] | dict[str, Tensor]
    """Positional arguments of the model, or keyword arguments where a user's function gave a dict."""
    loss_fn: Callable[[Any], Tensor] | None
    """From the model's output to a scalar; None makes the step an inference."""
    optimizer: Optimizer | None
    """What updates the parameters; None leaves them as they are."""


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """A workload that was named but not built.

    Raises:
        UnknownName: no workload, size or option has that name.
        InvalidValue: the options cannot be had together.
    """

    name: str
    """A name of `CONFIGS`, or `package.module:function`."""
    options: tuple[tuple[str, object], ...] = ()
    """Options given by the user, in their order."""
    size: Size | None = None
    """What the other options come from; None is the default size of whoever builds."""

    def __post_init__(self) -> None:
        if self.is_function:
            _check_function(self)
            return
        if self.name not in CONFIGS:
            raise UnknownName("workload", self.name, CONFIGS)
        if self.size is not None:
            self.config(self.size)
            return
        problems = []
        for size in SIZES:
            try:
                self.config(size)
            except InvalidValue as problem:
                problems.append(problem)
        if len(problems) == len(SIZES):
            raise problems[0]

    def __str__(self) -> str:
        size = [self.size] if self.size else []
        items = [*size, *(f"{key}={str(value).lower()}" for key, value in self.options)]
        return f"{self.name}@{','.join(items)}" if items else self.name

    @property
    def is_function(self) -> bool:
        """Whether it names a user's function."""
        return ":" in self.name

    def config(self, default_size: Size = "small") -> WorkloadConfig:
        """The options of a built-in workload, all of them.

        Args:
            default_size: where options that were not given come from, if the spec itself names no size.

        Raises:
            UnknownName: no such size or option; or the workload is a function, which has no options.
            InvalidValue: the options cannot be had together.
        """
        if self.name not in CONFIGS:
            raise UnknownName("workload with options", self.name, CONFIGS)
        kind = CONFIGS[self.name]
        known = [field.name for field in fields(kind)]
        for key, _ in self.options:
            if key not in known:
                raise UnknownName(f"option of workload {self.name}", key, known)
        size = self.size or default_size
        if size not in SIZES:
            raise UnknownName("size", size, SIZES)
        preset = kind.paper() if size == "paper" else kind.small()
        options: dict[str, Any] = {name: getattr(preset, name) for name in known} | dict(self.options)
        return kind(**options)


def parse_workload(text: str) -> WorkloadSpec:
    """The workload that `text` names, checked; torch is not imported.

    Raises:
        UnknownName: no workload, size or option has that name.
        InvalidValue: the text is no WORKLOAD, or an option's value is of the wrong type or out of range.

    Example:
        >>> parse_workload("nmt@small,batch=4")
        WorkloadSpec(name='nmt', options=(('batch', 4),), size='small')
    """
    name, at, rest = (part.strip() for part in text.partition("@"))
    if ":" in name:
        if at:
            raise InvalidValue("workload", text, f"{name!r} alone", hint="A function takes no size and no options.")
        return WorkloadSpec(name)
    if name not in CONFIGS:
        raise UnknownName("workload", name, CONFIGS)
    items = [item.strip() for item in rest.split(",")] if at else []
    size: Size | None = None
    if items and "=" not in items[0]:
        size = _parse_size(items.pop(0), name, text)
    options: dict[str, object] = {}
    for item in items:
        key, value = _parse_option(item, name, text)
        if key in options:
            raise InvalidValue("workload", text, f"every option once, but {key!r} comes twice")
        options[key] = value
    return WorkloadSpec(name, tuple(options.items()), size)


def build(spec: WorkloadSpec, *, default_size: Size = "small", seed: int = 0) -> Workload:
    """The workload's model, inputs, loss and optimizer; the same seed gives the same weights and inputs.

    The global random state is left as it was. Under an active `FakeTensorMode` nothing is allocated.

    Args:
        spec: from `parse_workload`.
        default_size: the size of a spec that names none.
        seed: of torch's generators while the model and its inputs are made.

    Raises:
        UnknownName: no such size, module or function.
        InvalidValue: the options cannot be had together; or the user's function could not be imported, raised, or
            returned something else than `(model, inputs[, loss_fn[, optimizer]])`.
    """
    if spec.is_function:
        from rlplace.workloads.user_function import load

        with _seeded(seed):
            return load(spec.name)
    config = spec.config(default_size)
    with _seeded(seed):
        model, inputs = _inception_v3(config) if isinstance(config, InceptionV3Config) else _nmt(config)
    return Workload(str(spec), model, inputs, _loss_of, "adam")


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    import torch

    # `torch.manual_seed` would queue a reseed of GPUs that are not in use yet, and outlive the fork.
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed_all(seed)
        yield


def _inception_v3(config: InceptionV3Config) -> tuple[nn.Module, tuple[Tensor, ...]]:
    import torch

    from rlplace.workloads.inception_v3 import InceptionV3

    images = torch.randn(config.batch, 3, config.image_size, config.image_size)
    labels = torch.randint(config.classes, (config.batch,))
    return InceptionV3(config), (images, labels)


def _nmt(config: NMTConfig) -> tuple[nn.Module, tuple[Tensor, ...]]:
    import torch

    from rlplace.workloads.nmt import NMT

    source_TB, target_TB, labels_TB = (torch.randint(config.vocab, (config.steps, config.batch)) for _ in range(3))
    return NMT(config), (source_TB, target_TB, labels_TB)


def _loss_of(output: Any) -> Tensor:
    """The loss that the built-in models compute themselves: labels are inputs, so no tensor hides in a closure."""
    loss: Tensor = output.loss
    return loss


def _check_function(spec: WorkloadSpec) -> None:
    module, _, function = spec.name.partition(":")
    if not all(part.isidentifier() for part in [*module.split("."), function]):
        raise InvalidValue("workload", spec.name, "package.module:function")
    if spec.options or spec.size:
        raise InvalidValue("options", spec.options or spec.size, "none", where=f"workload {spec.name}")


def _parse_size(item: str, name: str, text: str) -> Size:
    for size in SIZES:
        if item == size:
            return size
    if not item or item in (field.name for field in fields(CONFIGS[name])):
        raise InvalidValue("workload", text, f"a size ({', '.join(SIZES)}) or key=value after '@'")
    raise UnknownName("size", item, SIZES)


def _parse_option(item: str, name: str, text: str) -> tuple[str, object]:
    key, equals, value = (part.strip() for part in item.partition("="))
    if not equals:
        hint = "The size comes first." if item in SIZES else ""
        raise InvalidValue("workload", text, f"key=value where it says {item!r}", hint=hint)
    types = {field.name: type(field.default) for field in fields(CONFIGS[name])}
    if key not in types:
        raise UnknownName(f"option of workload {name}", key, types)
    return key, _parse_value(key, value, types[key], f"workload {name}")


def _parse_value(key: str, value: str, kind: type, where: str) -> object:
    if kind is bool:
        if value.lower() not in ("true", "false"):
            raise InvalidValue(key, value, "true or false", where=where)
        return value.lower() == "true"
    if kind is int:
        if not re.fullmatch(r"[+-]?[0-9]+", value):
            raise InvalidValue(key, value, "an integer", where=where)
        return int(value)
    try:
        return float(value)
    except ValueError:
        raise InvalidValue(key, value, "a number", where=where) from None
