"""`WorkloadSpec`: a workload that was named but not built; imports no torch.

`parse_workload`: from the words of a user to the workload that they name.

A WORKLOAD is

- `NAME`, `NAME@small`, `NAME@paper`, `NAME@key=value,...` or `NAME@SIZE,key=value,...`;
- `multi:PART,PART,...`, several models as one: a PART is any of the above, with `*WEIGHT` behind it for its priority.
  A `key=value` belongs to the part before it: `multi:bert@small,layers=2*3,gpt2` is two parts;
- `package.module:function`;
- a graph file: a word that ends in one of `GRAPH_SUFFIXES`, or is the path of a file and no name (`./nmt` is a path).

All of it is checked, and torch is not imported.

`build`: from a workload that was named to a model, its inputs and its loss, with memory or without.
"""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlplace.errors import FileProblem, InvalidValue, UnknownName, check_known, refuse_if
from rlplace.records import described, shortened
from rlplace.workloads.catalog import CATALOG, MULTI, Parts, Workload
from rlplace.workloads.configs import SIZES, Size, WorkloadConfig

if TYPE_CHECKING:
    from rlplace.measure import Host

MOST_GROWTH = 16.0
"""How much larger than its named sizes a workload may be that a run folder is believed."""


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """A workload that was named but not built: a name with options, several of them, a function or a graph file.

    Raises:
        UnknownName: no workload, size or option has that name.
        InvalidValue: the options exclude each other.
    """

    name: str
    """A name of `CATALOG`, `multi`, `package.module:function`, or the path of a graph file."""
    options: tuple[tuple[str, object], ...] = ()
    """Options given by the user, in their order."""
    size: Size | None = None
    """Where the other options come from; None is the default size of the caller that builds."""
    parts: tuple[WeightedPart, ...] = ()
    """The models of `multi`."""
    is_file: bool = False
    """Whether it is a graph file, which can be simulated but not built."""

    def __post_init__(self) -> None:
        if self.is_file or self.is_multi or self.is_function:
            if self.options or self.size:
                raise InvalidValue("options", self.options or self.size, "none", where=f"workload {self.name}")
            if self.is_multi and not self.parts:
                raise InvalidValue("parts", self.parts, "one model or more", where=f"workload {self.name}")
            module, _, function = self.name.partition(":")
            if self.is_function and not all(part.isidentifier() for part in [*module.split("."), function]):
                raise InvalidValue("workload", self.name, "package.module:function")
            return
        if self.name not in CATALOG:
            raise UnknownName("workload", self.name, [*CATALOG, MULTI])
        sizes, problems = (self.size,) if self.size else SIZES, list[InvalidValue]()
        for size in sizes:
            try:
                self.config(size)
            except InvalidValue as problem:
                problems.append(problem)
        if len(problems) == len(sizes):
            raise problems[0]

    def __str__(self) -> str:
        if self.is_multi:
            return f"{MULTI}:{','.join(map(str, self.parts))}"
        items = [*filter(None, [self.size]), *(f"{key}={str(value).lower()}" for key, value in self.options)]
        return f"{self.name}@{','.join(items)}" if items else self.name

    @property
    def is_function(self) -> bool:
        """Whether it names a user's function."""
        return ":" in self.name and not self.is_file

    @property
    def is_multi(self) -> bool:
        """Whether it is several models as one."""
        return self.name == MULTI and not self.is_file

    @property
    def is_believed(self) -> bool:
        """Whether a run folder that names it is enough to build it: no function, no file, and not of any size."""
        is_named = not self.is_function and not self.is_file
        return is_named and sum(map(_growth, [part.spec for part in self.parts] or [self])) <= MOST_GROWTH

    @property
    def path(self) -> Path:
        """Where the graph file lies."""
        return Path(self.name)

    def config(self, default_size: Size = "small") -> WorkloadConfig:
        """The options of a named workload, all of them.

        Args:
            default_size: where options that were not given come from, if the spec itself names no size.

        Raises:
            UnknownName: no such size or option; or the workload is no name, and has no options.
            InvalidValue: the options exclude each other.
        """
        check_known("workload with options", self.name, CATALOG)
        kind = CATALOG[self.name].config
        known = [field.name for field in fields(kind)]
        for key, _ in self.options:
            check_known(f"option of workload {self.name}", key, known)
        size = self.size or default_size
        check_known("size", size, SIZES)
        return replace(kind.paper() if size == "paper" else kind.small(), **dict(self.options))


@dataclass(frozen=True, slots=True)
class WeightedPart:
    """One model of `multi`.

    Raises:
        InvalidValue: the model is not a name, or its weight is not positive and finite.
    """

    spec: WorkloadSpec
    weight: float = 1.0
    """Its loss counts this often in the sum."""

    def __post_init__(self) -> None:
        if self.spec.name not in CATALOG or self.spec.is_file:
            raise InvalidValue(
                "part",
                str(self.spec),
                "a named workload",
                where=f"workload {MULTI}",
                hint="Functions, graph files and other multis cannot be parts.",
            )
        if not (self.weight > 0 and math.isfinite(self.weight)):
            raise InvalidValue("weight", self.weight, "a positive number", where=f"workload {MULTI}, {self.spec}")

    def __str__(self) -> str:
        if self.weight == 1:
            return str(self.spec)
        short = f"{self.weight:g}"
        return f"{self.spec}*{short if float(short) == self.weight else repr(self.weight)}"


def _growth(spec: WorkloadSpec) -> float:
    """How many times a named workload's options multiply the larger of its named sizes, at least 1."""
    kind = CATALOG[spec.name].config
    whole = most_heads = 1.0
    for key, value in spec.options:
        if type(value) is not int:
            continue
        sizes = [getattr(each, key) for each in (kind.small(), kind.paper())]
        times = min(sizes) / value if key == "patch_size" else value / max(sizes)
        if key.endswith("heads"):  # they grow with the width, which counts already
            most_heads = max(most_heads, times)
        else:
            whole *= max(1.0, times)
    return max(whole, most_heads)


GRAPH_SUFFIXES = (".json", ".onnx", ".graphml", ".xml", ".txt")


def parse_workload(text: str) -> WorkloadSpec:
    """The workload that `text` names, checked; torch is not imported.

    Raises:
        UnknownName: no workload, size or option has that name.
        InvalidValue: the text is no WORKLOAD, or an option's value is of the wrong type or out of range.
        FileProblem: it is named like a graph file, and there is none.

    Example:
        >>> parse_workload("nmt@small,batch=4").options
        (('batch', 4),)
        >>> [str(part) for part in parse_workload("multi:nmt@layers=4,steps=5*2,rnnlm").parts]
        ['nmt@layers=4,steps=5*2', 'rnnlm']
    """
    text = text.strip()
    has_ending = text.endswith(GRAPH_SUFFIXES) and not _is_multi(text)
    # a file of a stranger's that is called `nmt@small` does not stand for the workload
    if os.path.isfile(text) and (has_ending or not _is_name(text)):
        return WorkloadSpec(text, is_file=True)
    if has_ending:
        raise FileProblem(text, "no such graph file")
    return _parse_name(text)


def parse_kept_workload(kept: str, again: str | None, *, where: str, command: str) -> WorkloadSpec:
    """The workload of a run folder: a name is believed; a workload larger than `MOST_GROWTH` times its named sizes, a
    function or a file only if the user names it again.

    Args:
        kept: the word of the folder; no file of that name is looked for.
        again: the workload as the user names it; None where they do not.
        where: the folder's file, for messages.
        command: the word with which the user names the workload again.

    Raises:
        InvalidValue: a function, a file or a size out of all bounds, which the user does not name; or as
            `parse_workload`.
        UnknownName, FileProblem: as `parse_workload`.
    """
    if again is not None:
        return parse_workload(again)
    kept = kept.strip()
    if len(kept) > 4096:  # as long as a path can be
        raise InvalidValue("workload", described(kept), "a workload's name", where=where)
    if not _is_multi(kept) and kept.partition("@")[0].strip() not in CATALOG:
        raise InvalidValue(
            "workload",
            None,
            f"{kept!r}, as it was started",
            where=where,
            hint=f"A function or a file of yours is opened only if you name it again: {command}",
        )
    spec = _parse_name(kept)
    refuse_if(
        not spec.is_believed,
        "workload",
        shortened(kept),
        f"at most {MOST_GROWTH:g} times the size that a workload has by name",
        where=where,
        hint=f"One of any size is built only if you name it again: {command}",
    )
    return spec


def _is_multi(text: str) -> bool:
    return text == MULTI or text.startswith(f"{MULTI}:")


def _is_name(text: str) -> bool:
    """Whether a text has the form of a known name with its options, of several models, or of a function."""
    name = text.partition("@")[0].strip()
    is_function = ":" in name and all(map(str.isidentifier, name.replace(":", ".").split(".")))
    return name in CATALOG or is_function or _is_multi(text)


def _parse_name(text: str) -> WorkloadSpec:
    """The workload that a text names which is no file."""
    return WorkloadSpec(MULTI, parts=_parse_parts(text)) if _is_multi(text) else _parse_single(text)


def _parse_single(text: str) -> WorkloadSpec:
    name, at, rest = (part.strip() for part in text.partition("@"))
    if ":" in name:
        if at:
            raise InvalidValue("workload", text, f"{name!r} alone", hint="A function takes no size and no options.")
        return WorkloadSpec(name)
    if name not in CATALOG:
        raise UnknownName(
            "workload",
            name,
            [*CATALOG, MULTI],
            hint="A function of yours is package.module:function, a graph file its path.",
        )
    items = [item.strip() for item in rest.split(",")] if at else []
    size = _parse_size(items.pop(0), name, text) if items and "=" not in items[0] else None
    options = tuple(_parse_option(item, name, text) for item in items)
    keys = [key for key, _ in options]
    if repeated := next((key for key in keys if keys.count(key) > 1), ""):
        raise InvalidValue("workload", text, f"every option once, but {repeated!r} comes twice")
    return WorkloadSpec(name, options, size)


def _parse_parts(text: str) -> tuple[WeightedPart, ...]:
    joined: list[str] = []
    for item in text.partition(":")[2].split(","):
        is_option = "=" in item and "@" not in item
        if not item.strip() or (is_option and not joined):
            raise InvalidValue("workload", text, f"{MULTI}:NAME[@...][*WEIGHT],NAME,...")
        joined.append(f"{joined.pop()},{item}" if is_option else item)
    return tuple(_parse_part(part, text) for part in joined)


def _parse_part(text: str, whole: str) -> WeightedPart:
    named, star, weight = (part.strip() for part in text.partition("*"))
    if ":" in named or named.endswith(GRAPH_SUFFIXES):
        raise InvalidValue(
            "workload",
            whole,
            f"a named workload where it says {named!r}",
            hint="Functions, graph files and other multis cannot be parts.",
        )
    spec = _parse_single(named)
    try:
        return WeightedPart(spec, float(weight) if star else 1.0)
    except ValueError:
        raise InvalidValue("workload", whole, f"a number as the weight of {named!r}, not {weight!r}") from None


def _parse_size(item: str, name: str, text: str) -> Size:
    if item in SIZES:
        return item
    if not item or item in (field.name for field in fields(CATALOG[name].config)):
        raise InvalidValue("workload", text, f"a size ({', '.join(SIZES)}) or key=value after '@'")
    raise UnknownName("size", item, SIZES)


def _parse_option(item: str, name: str, text: str) -> tuple[str, object]:
    key, equals, value = (part.strip() for part in item.partition("="))
    if not equals:
        raise InvalidValue(
            "workload", text, f"key=value where it says {item!r}", hint="The size comes first." if item in SIZES else ""
        )
    types = {field.name: type(field.default) for field in fields(CATALOG[name].config)}
    check_known(f"option of workload {name}", key, types)
    return key, _parse_value(key, value, types[key], f"workload {name}")


def _parse_value(key: str, value: str, kind: type, where: str) -> object:
    if kind is bool and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if kind is int and re.fullmatch(r"[+-]?[0-9]+", value):
        return int(value)
    with suppress(ValueError):
        if kind is float:
            return float(value)
    expected = {bool: "true or false", int: "an integer"}.get(kind, "a number")
    raise InvalidValue(key, value, expected, where=where)


def build(spec: WorkloadSpec | str, *, default_size: Size = "small", seed: int = 0) -> Workload:
    """The workload's model, inputs, loss and optimizer; the same seed gives the same weights and inputs.

    The global random state is left as it was. Inside of `without_memory()` nothing is allocated.

    Args:
        spec: from `parse_workload`, or the text itself.
        default_size: the size of a spec that names none.
        seed: of torch's generators while the model and its inputs are made.

    Raises:
        UnknownName: no such size, module or function.
        InvalidValue: the options exclude each other; or the user's function could not be imported, raised, or
            returned something else than `(model, inputs[, loss_fn[, optimizer[, targets]]])`; or the workload is a
            graph file.
        MissingExtra: the model comes from a package that is not installed.
    """
    if isinstance(spec, str):
        spec = parse_workload(spec)
    if spec.is_file:
        raise InvalidValue(
            "workload",
            str(spec),
            "a name or package.module:function",
            hint="A graph file alone can be simulated, not measured; capture the graph again from its model.",
        )
    from rlplace.workloads.user_function import join, load

    def parts_of(named: WorkloadSpec) -> Parts:
        return CATALOG[named.name].build(named.config(default_size))

    with _seeded(seed):
        if spec.is_function:
            return load(spec.name)
        members = [(part.spec.name, part.weight, parts_of(part.spec)) for part in spec.parts]
        parts = join(members) if spec.is_multi else parts_of(spec)
    return Workload(
        str(spec),
        parts.model,
        parts.inputs,
        parts.loss_fn,
        "adam",
        batch_dims=parts.batch_dims,
        loss=parts.loss,
    )


def default_size(host: Host) -> Size:
    """The size of a workload named without one: `small` on a host of cores only, else `paper`."""
    return "small" if all(device.backend == "cpu" for device in host.devices) else "paper"


def build_for(spec: WorkloadSpec, host: Host, seed: int) -> Workload:
    """The workload at the size that suits the host; without memory behind it where the host is simulated."""
    with without_memory() if host.is_simulated else nullcontext():  # a simulated host runs nothing
        return build(spec, default_size=default_size(host), seed=seed)


@contextmanager
def without_memory() -> Iterator[None]:
    """While active, new tensors have shapes but no memory behind them, copies included.

    `copy.deepcopy` of a fake tensor copies its mode too, and tensors of two modes cannot meet in one op: so layers that
    are copies (`nn.TransformerEncoder` makes its own that way) keep the one mode here.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Mode(FakeTensorMode):  # type: ignore[no-untyped-call]
        def __deepcopy__(self, memo: dict[int, Any]) -> Mode:
            return self

    with warnings.catch_warnings(), Mode():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor", UserWarning)  # `deepcopy` does
        yield


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    import torch

    from rlplace import cuda

    # `torch.manual_seed` would queue a reseed of GPUs that are not in use yet, and outlive the fork.
    devices = list(range(cuda.num_gpus())) if cuda.is_started() else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        if devices:
            cuda.seed_all(seed)
        yield
