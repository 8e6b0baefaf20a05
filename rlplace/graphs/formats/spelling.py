"""`check_spelling`: attributes of a `networkx` graph that nobody reads, and that look like one that is read."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from rlplace.decode import shortened
from rlplace.errors import InvalidValue
from rlplace.graphs.formats.attributes import ALIASES, place_of

_EDGE_FIELDS = ("bytes",)
_NODE_ONLY = (
    *("signature", "phase", "bytes_moved", "parameter_bytes", "gradient_bytes", "state_bytes", "workspace_bytes"),
    *("micro_batch", "tensors"),
)
NODE_NAMES = frozenset(
    {*_NODE_ONLY, *(name for field, names in ALIASES.items() if field not in _EDGE_FIELDS for name in names)}
)
"""Attributes of nodes that are read, under all their names."""
EDGE_NAMES = frozenset({"tensors", *(name for field in _EDGE_FIELDS for name in ALIASES[field])})
"""Attributes of edges that are read."""
ALIKE = 0.8
"""`difflib`'s ratio of two names from which one is taken for a misspelling of the other."""
SHORTEST = 4
"""Shorter names are like too many others."""
ORDINARY = frozenset({"dtype", "score", "time"})
"""Names that graphs of others use, and that are like one of ours by chance."""
MOST_COMPARED = 1000
"""Names that are compared with those that are read, which takes long; a file with more was not written by hand."""


def check_spelling(nodes: Iterable[tuple[object, Mapping[Any, Any]]], edges: Iterable[Any], where: str) -> None:
    """Refuses an attribute that is not read and looks like a misspelling of one that is; others are ignored.

    Args:
        nodes: each with its attributes.
        edges: source, target and attributes of each.
        where: for messages.

    Raises:
        InvalidValue: such an attribute; names the first node or edge that has it, and what it is like.
    """
    of_nodes: dict[object, object] = {}
    for node, row in nodes:
        for name in row:
            of_nodes.setdefault(name, node)
    of_edges: dict[object, object] = {}
    for source, target, row in edges:
        for name in row:
            of_edges.setdefault(name, f"{source} -> {target}")
    for owners, known in ((of_nodes, NODE_NAMES), (of_edges, EDGE_NAMES)):
        for name, owner in islice(owners.items(), MOST_COMPARED):
            nearest = nearest_name(name, known)
            if nearest:
                hint = f"Name it {nearest!r}, or if it is something else, leave it out: nothing reads it."
                raise InvalidValue(
                    "attribute", shortened(str(name)), repr(nearest), where=place_of(where, owner), hint=hint
                )


def nearest_name(name: object, known: frozenset[str]) -> str:
    """The known name that `name` is a misspelling of; empty where it is none.

    Example:
        >>> nearest_name("flps", NODE_NAMES), nearest_name("FLOPs", NODE_NAMES), nearest_name("module_id", NODE_NAMES)
        ('flops', 'flops', '')
    """
    if not isinstance(name, str) or name in NODE_NAMES | EDGE_NAMES or name in ORDINARY or len(name) < SHORTEST:
        return ""
    first = name.partition("_")[0]
    if first in known and not any(one.startswith(f"{first}_") for one in known):  # a compound, such as `module_id`
        return ""
    found = difflib.get_close_matches(name.lower(), sorted(known), n=1, cutoff=ALIKE)
    return found[0] if found else ""
