"""`parse_workload`, `build`: from the words of a user to a model, its inputs and its loss.

A WORKLOAD is

- `NAME`, `NAME@small`, `NAME@paper`, `NAME@key=value,...` or `NAME@SIZE,key=value,...`;
- `multi:PART,PART,...`, several models as one: a PART is any of the above, with `*WEIGHT` behind it for its priority.
  A `key=value` belongs to the part before it: `multi:bert@small,layers=2*3,gpt2` is two parts;
- `package.module:function`;
- a graph file: what ends in one of `GRAPH_SUFFIXES`, or is the path of a file and no name.

Parsing checks all of it and imports no torch; building does.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from rlplace.errors import FileProblem, InvalidValue, UnknownName
from rlplace.workloads.catalog import CATALOG, CONFIGS, MULTI
from rlplace.workloads.options import SIZES, Size
from rlplace.workloads.spec import WeightedPart, WorkloadSpec
from rlplace.workloads.workload import Workload

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
    if os.path.isfile(text) and text not in CONFIGS:
        return WorkloadSpec(text, is_file=True)
    if text == MULTI or text.startswith(f"{MULTI}:"):
        return WorkloadSpec(MULTI, parts=_parse_parts(text))
    if text.endswith(GRAPH_SUFFIXES):
        raise FileProblem(text, "no such graph file")
    return _parse_single(text)


def build(spec: WorkloadSpec | str, *, default_size: Size = "small", seed: int = 0) -> Workload:
    """The workload's model, inputs, loss and optimizer; the same seed gives the same weights and inputs.

    The global random state is left as it was. Inside of `without_memory()` nothing is allocated.

    Args:
        spec: from `parse_workload`, or the text itself.
        default_size: the size of a spec that names none.
        seed: of torch's generators while the model and its inputs are made.

    Raises:
        UnknownName: no such size, module or function.
        InvalidValue: the options cannot be had together; or the user's function could not be imported, raised, or
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
    with _seeded(seed):
        if spec.is_function:
            from rlplace.workloads.user_function import load

            return load(spec.name)
        if spec.is_multi:
            from rlplace.workloads.multi import join

            built = [(part, CATALOG[part.spec.name].build(part.spec.config(default_size))) for part in spec.parts]
            parts = join([(part.spec.name, part.weight, made) for part, made in built])
        else:
            parts = CATALOG[spec.name].build(spec.config(default_size))
    return Workload(
        str(spec),
        parts.model,
        parts.inputs,
        parts.loss_fn,
        "adam",
        batch_dims=parts.batch_dims,
        loss=parts.loss,
    )


@contextmanager
def without_memory() -> Iterator[None]:
    """While active, what is built has shapes but no memory behind it, copies included.

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


def _parse_single(text: str) -> WorkloadSpec:
    name, at, rest = (part.strip() for part in text.partition("@"))
    if ":" in name:
        if at:
            raise InvalidValue("workload", text, f"{name!r} alone", hint="A function takes no size and no options.")
        return WorkloadSpec(name)
    if name not in CONFIGS:
        hint = "A function of yours is package.module:function, a graph file its path."
        raise UnknownName("workload", name, [*CONFIGS, MULTI], hint=hint)
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


def _parse_parts(text: str) -> tuple[WeightedPart, ...]:
    joined: list[str] = []
    for item in text.partition(":")[2].split(","):
        is_option = "=" in item and "@" not in item
        if not item.strip() or (is_option and not joined):
            raise InvalidValue("workload", text, f"{MULTI}:NAME[@...][*WEIGHT],NAME,...")
        if is_option:
            joined[-1] += f",{item}"
        else:
            joined.append(item)
    return tuple(_parse_part(part, text) for part in joined)


def _parse_part(text: str, whole: str) -> WeightedPart:
    named, star, weight = (part.strip() for part in text.partition("*"))
    if ":" in named or named.endswith(GRAPH_SUFFIXES):
        hint = "Functions, graph files and other multis cannot be parts."
        raise InvalidValue("workload", whole, f"a named workload where it says {named!r}", hint=hint)
    spec = _parse_single(named)
    try:
        return WeightedPart(spec, float(weight) if star else 1.0)
    except ValueError:
        raise InvalidValue("workload", whole, f"a number as the weight of {named!r}, not {weight!r}") from None


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
