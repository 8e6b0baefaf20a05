"""`parse_workload`: from the words of a user to the workload that they name.

A WORKLOAD is

- `NAME`, `NAME@small`, `NAME@paper`, `NAME@key=value,...` or `NAME@SIZE,key=value,...`;
- `multi:PART,PART,...`, several models as one: a PART is any of the above, with `*WEIGHT` behind it for its priority.
  A `key=value` belongs to the part before it: `multi:bert@small,layers=2*3,gpt2` is two parts;
- `package.module:function`;
- a graph file: what ends in one of `GRAPH_SUFFIXES`, or is the path of a file and no name.

All of it is checked, and torch is not imported.
"""

from __future__ import annotations

import os
import re
from dataclasses import fields

from rlplace.decode import described, shortened
from rlplace.errors import FileProblem, InvalidValue, UnknownName
from rlplace.workloads.catalog import CONFIGS, MULTI
from rlplace.workloads.options import SIZES, Size
from rlplace.workloads.spec import MOST_GROWTH, WeightedPart, WorkloadSpec

GRAPH_SUFFIXES = (".json", ".onnx", ".graphml", ".xml", ".txt")
_MOST_LETTERS = 4096
"""Of a workload that a run folder names: as many as a path has."""


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
    if not _is_multi(text) and text.endswith(GRAPH_SUFFIXES):
        raise FileProblem(text, "no such graph file")
    return _parse_name(text)


def parse_kept_workload(kept: str, again: str | None, *, where: str, command: str) -> WorkloadSpec:
    """The workload of a run folder: a name is believed, what is larger than `MOST_GROWTH` times a workload's named
    sizes, a function or a file only if the user names it again.

    Args:
        kept: what the folder says; no file of that name is looked for.
        again: the workload as the user names it; None where they do not.
        where: the folder's file, for messages.
        command: what names the workload again.

    Raises:
        InvalidValue: a function, a file or a size out of all bounds, which the user does not name; or as
            `parse_workload`.
        UnknownName, FileProblem: as `parse_workload`.
    """
    if again is not None:
        return parse_workload(again)
    kept = kept.strip()
    if len(kept) > _MOST_LETTERS:
        raise InvalidValue("workload", described(kept), "a workload's name", where=where)
    if not _is_multi(kept) and kept.partition("@")[0].strip() not in CONFIGS:
        hint = f"A function or a file of yours is opened only if you name it again: {command}"
        raise InvalidValue("workload", None, f"{kept!r}, as it was started", where=where, hint=hint)
    spec = _parse_name(kept)
    if not spec.is_believed:
        expected = f"at most {MOST_GROWTH:g} times the size that a workload has by name"
        hint = f"One of any size is built only if you name it again: {command}"
        raise InvalidValue("workload", shortened(kept), expected, where=where, hint=hint)
    return spec


def _is_multi(text: str) -> bool:
    return text == MULTI or text.startswith(f"{MULTI}:")


def _parse_name(text: str) -> WorkloadSpec:
    """The workload that a text names which is no file."""
    return WorkloadSpec(MULTI, parts=_parse_parts(text)) if _is_multi(text) else _parse_single(text)


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
