"""`WorkloadSpec`: a workload that was named but not built; imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rlplace.errors import InvalidValue, UnknownName
from rlplace.workloads.catalog import CONFIGS, MULTI
from rlplace.workloads.options import SIZES, Size, WorkloadConfig

MOST_GROWTH = 16.0
"""How much larger than its named sizes a workload may be that a run folder is believed."""


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """A workload that was named but not built: a name with options, several of them, a function or a graph file.

    Raises:
        UnknownName: no workload, size or option has that name.
        InvalidValue: the options cannot be had together.
    """

    name: str
    """A name of `CONFIGS`, `multi`, `package.module:function`, or the path of a graph file."""
    options: tuple[tuple[str, object], ...] = ()
    """Options given by the user, in their order."""
    size: Size | None = None
    """What the other options come from; None is the default size of whoever builds."""
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
            if self.is_function:
                _check_function(self.name)
            return
        if self.name not in CONFIGS:
            raise UnknownName("workload", self.name, [*CONFIGS, MULTI])
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
        if self.is_multi:
            return f"{MULTI}:{','.join(map(str, self.parts))}"
        size = [self.size] if self.size else []
        items = [*size, *(f"{key}={str(value).lower()}" for key, value in self.options)]
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
        if self.is_function or self.is_file:
            return False
        specs = [part.spec for part in self.parts] if self.is_multi else [self]
        return sum(map(_growth, specs)) <= MOST_GROWTH

    @property
    def path(self) -> Path:
        """Where the graph file lies.

        Raises:
            InvalidValue: the workload is no graph file.
        """
        if not self.is_file:
            raise InvalidValue("workload", str(self), "a graph file")
        return Path(self.name)

    def config(self, default_size: Size = "small") -> WorkloadConfig:
        """The options of a named workload, all of them.

        Args:
            default_size: where options that were not given come from, if the spec itself names no size.

        Raises:
            UnknownName: no such size or option; or the workload is no name, and has no options.
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
        if self.spec.name not in CONFIGS or self.spec.is_file:
            hint = "Functions, graph files and other multis cannot be parts."
            raise InvalidValue("part", str(self.spec), "a named workload", where=f"workload {MULTI}", hint=hint)
        if not (self.weight > 0 and math.isfinite(self.weight)):
            raise InvalidValue("weight", self.weight, "a positive number", where=f"workload {MULTI}, {self.spec}")

    def __str__(self) -> str:
        if self.weight == 1:
            return str(self.spec)
        short = f"{self.weight:g}"
        return f"{self.spec}*{short if float(short) == self.weight else repr(self.weight)}"


def _growth(spec: WorkloadSpec) -> float:
    """How many times a named workload's options multiply the larger of its named sizes, at least 1."""
    kind = CONFIGS[spec.name]
    named = [kind.small(), kind.paper()]
    whole = most_heads = 1.0
    for key, value in spec.options:
        if type(value) is not int:
            continue
        sizes = [getattr(each, key) for each in named]
        times = min(sizes) / value if key == "patch_size" else value / max(sizes)
        if key.endswith("heads"):  # they grow with the width, which counts already
            most_heads = max(most_heads, times)
        else:
            whole *= max(1.0, times)
    return max(whole, most_heads)


def _check_function(name: str) -> None:
    module, _, function = name.partition(":")
    if not all(part.isidentifier() for part in [*module.split("."), function]):
        raise InvalidValue("workload", name, "package.module:function")
