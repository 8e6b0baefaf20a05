"""Damage to files, drawn by hypothesis: bytes that changed, and JSON trees with values that nobody expects."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st


def nested(depth: int) -> object:
    """A value so many levels deep."""
    data: object = 1
    for level in range(depth):
        data = [data] if level % 2 else {"a": data}
    return data


HOSTILE = '"""\nraise SystemExit'
"""Text that would end a docstring, or a quotation, that it was put into."""
JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.text(max_size=5),
    st.sampled_from([-1, 0, 1, 2**31, 2**63, 10**400, -(10**400)]),
    st.floats(allow_nan=False, allow_infinity=False), st.sampled_from([1e308, -1e308, 1e300, 5e-324]),
    st.sampled_from(["", "0", "\ud800", "x" * 999, "../../etc/passwd", "\x00", "\x1b[31m", "[/b]", HOSTILE]),
    st.lists(st.integers(-3, 9), max_size=4), st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    st.sampled_from([60, 450]).map(nested),
)  # fmt: skip


def share(examples: int) -> Callable[[Any], Any]:
    """Settings of a test that draws so many examples, the same on every run."""
    return settings(
        max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None
    )


def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Bytes changed, dropped, doubled or cut off."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        place, length = draw(st.integers(0, len(data))), draw(st.integers(0, 20))
        kind = draw(st.sampled_from(["change", "drop", "double", "cut", "insert"]))
        if kind == "change" and place < len(data):
            data[place] = draw(st.integers(0, 255))
        elif kind == "drop":
            del data[place : place + length]
        elif kind == "double":
            data[place:place] = data[place : place + length]
        elif kind == "cut" and place:
            del data[place:]
        else:
            data[place:place] = draw(st.binary(max_size=4))
    return bytes(data)


def places_in(tree: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a JSON tree."""
    items = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree)) if isinstance(tree, list) else []
    return [(tree, key) for key, _ in items] + [place for _, child in items for place in places_in(child)]


def damaged_tree(draw: st.DrawFn, tree: Any) -> Any:
    """Values replaced, dropped, doubled or renamed; those near the root as often as all others."""
    tree = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, 3))):
        places = places_in(tree)
        if not places:
            break
        near = [place for place in places if place[0] is tree]
        container, key = draw(st.sampled_from(near if draw(st.booleans()) else places))
        kind = draw(st.sampled_from(["replace", "replace", "drop", "double", "rename"]))
        if kind == "drop":
            del container[key]
        elif kind == "double" and isinstance(container, list):
            container.insert(key, container[key])
        elif kind == "rename" and isinstance(container, dict):
            container[draw(st.text(max_size=8))] = container.pop(key)
        else:
            container[key] = draw(JUNK)
    return tree


def mutation(content: bytes) -> st.SearchStrategy[bytes]:
    """Damaged JSON: its bytes, or its tree."""

    @st.composite
    def mutated(draw: st.DrawFn) -> bytes:
        if draw(st.booleans()):
            return damaged(draw, content)
        return json.dumps(damaged_tree(draw, json.loads(content))).encode()

    return mutated()
