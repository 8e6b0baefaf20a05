"""`parse_yaml`: what a YAML text holds: plain data, no larger than it looks, every key of a mapping once."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import yaml

from rlplace.errors import FileProblem

MOST_VALUES = 1_000_000
"""Values that a text may stand for: one that is named and repeated, level by level, counts wherever it is."""


def parse_yaml(text: str, path: str | os.PathLike[str]) -> object:
    """What the YAML text of the file `path` holds; reading runs no code.

    Raises:
        FileProblem: it is not YAML, a key is given twice, it is nested too deeply, holds itself, or means too much.
    """
    try:
        data = yaml.load(text, Loader=_Loader)
        num_values = _num_values(data, {})
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise FileProblem(path, f"not valid YAML: {' '.join(str(error).split())}.") from error
    except RecursionError as error:
        raise FileProblem(path, "nested too deeply for a host file.") from error
    if num_values > MOST_VALUES:
        raise FileProblem(path, f"YAML that stands for too many values, expected at most {MOST_VALUES:,}.")
    return data


class _Loader(yaml.SafeLoader):
    """Safe YAML, with repeated keys refused and `1e9` a number (YAML 1.1, PyYAML's dialect, takes it for text)."""

    num_merged = 0
    """Fields of all mappings, with what they merge, as often as they are looked at."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"the key {key.value!r} is given twice", problem_mark=key.start_mark
                    )
                seen.add(key.value)
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Puts the fields of what `<<` names in its place; mappings that name one another may double each time."""
        super().flatten_mapping(node)
        self.num_merged += len(node.value)
        if self.num_merged > MOST_VALUES:
            raise yaml.MarkedYAMLError(problem="it merges too many fields", problem_mark=node.start_mark)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+\Z"),
    list("-+.0123456789"),
)


def _num_values(data: object, known: dict[int, int | None]) -> int:
    """How many values there are if each is counted wherever it stands.

    Args:
        data: what was parsed, in which one object may stand in many places.
        known: by identity what was counted before; None for what is being counted.

    Raises:
        ValueError: a value holds itself.
    """
    if not isinstance(data, Mapping | list | tuple | set):
        return 1
    if id(data) not in known:
        known[id(data)] = None
        children = data.values() if isinstance(data, Mapping) else data
        known[id(data)] = 1 + sum(_num_values(child, known) for child in children)
    count = known[id(data)]
    if count is None:
        raise ValueError("a value that holds itself")
    return count
