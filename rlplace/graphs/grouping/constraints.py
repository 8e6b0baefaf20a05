"""`Constraints`: where the user wants ops to be, and which of them together, as patterns.

Patterns that pick ops: shell-style globs over module paths, op names and ATen targets.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue, UnknownName, nearest_names, refuse_if
from rlplace.graphs.opgraph import OpGraph


@dataclass(frozen=True)
class Constraints:
    """Pins, exclusions, and ops that stay together.

    A pattern is a glob for module paths (with all modules below them), op names and ATen targets. A device is a glob
    over device names (`cuda:1`, `cuda:*`), the part of a name before the colon (`cpu`), or a kind.

    Attributes:
        pins: (pattern, device): these ops run on such a device, and nowhere else.
        exclusions: (pattern, device): these ops never run on such a device.
        together: patterns whose ops are all on one device.

    Example:
        >>> Constraints.parse(pins=["encoder.embedding=cpu"], together=["attention,projection"]).pins
        (('encoder.embedding', 'cpu'),)
    """

    pins: tuple[tuple[str, str], ...] = ()
    exclusions: tuple[tuple[str, str], ...] = ()
    together: tuple[tuple[str, ...], ...] = ()

    @classmethod
    def parse(
        cls, *, pins: Sequence[str] = (), exclusions: Sequence[str] = (), together: Sequence[str] = ()
    ) -> Constraints:
        """The constraints in words: `PATTERN=DEVICE` for pins and exclusions, `PATTERN,PATTERN` for together.

        Raises:
            InvalidValue: a text of another form.
        """
        return cls(
            tuple(_pair("pin", word) for word in pins),
            tuple(_pair("exclude", word) for word in exclusions),
            tuple(_patterns(word) for word in together),
        )

    def __bool__(self) -> bool:
        return bool(self.pins or self.exclusions or self.together)

    def check_devices(self, device_names: Sequence[str], device_kinds: Sequence[str]) -> None:
        """Checks the device names of pins and exclusions; this check needs no graph.

        Raises:
            UnknownName: no such device.
        """
        for _, word in (*self.pins, *self.exclusions):
            _devices(word, device_names, device_kinds)

    def resolve(
        self, graph: OpGraph, device_names: Sequence[str], device_kinds: Sequence[str]
    ) -> tuple[NDArray[np.bool_], NDArray[np.int32]]:
        """The constraints on the ops of `graph` and these D devices.

        Ops that must be together may run only on the devices that are allowed for all of them.

        Returns:
            (N, D) bool, devices where each op may be, at least one for each; and (N,) int32, the graph's co-location
            classes, merged where ops are to be together, -1 for an op in none.

        Raises:
            InvalidValue: a pattern that matches no op, or an op without any allowed device.
            UnknownName: a device that the host does not have.
        """
        allowed = np.ones((graph.num_ops, len(device_names)), dtype=np.bool_)
        because: list[tuple[NDArray[np.int64], str]] = []
        for verb, pairs in (("pin", self.pins), ("exclude", self.exclusions)):
            for pattern, word in pairs:
                ops = _matching(graph, pattern, verb)
                devices = _devices(word, device_names, device_kinds)
                allowed[ops] &= devices if verb == "pin" else ~devices
                because.append((ops, f"{verb} {pattern}={word}"))
        together = tuple(
            np.unique(np.concatenate([_matching(graph, pattern, "together") for pattern in patterns]))
            for patterns in self.together
        )
        tied = _tied(graph, together)
        shared = np.ones((int(tied.max(initial=-1)) + 1, len(device_names)), dtype=np.bool_)
        np.logical_and.at(shared, tied, allowed)
        if not np.all(shared.any(axis=1)):
            stuck = tied == int(np.argmin(shared.any(axis=1)))
            reasons = [reason for matched, reason in because if np.any(stuck[matched])]
            others = f" (tied to {int(stuck.sum()) - 1} other ops)" if stuck.sum() > 1 else ""
            raise InvalidValue(
                "constraints",
                f"no device for op {graph.names[int(np.argmax(stuck))]!r}{others}",
                "at least one device where all of them may be",
                hint=f"Together these rule out every device: {'; '.join(reasons)}.",
            )
        return shared[tied], _classes(graph, tied, together)


def _pair(field: str, word: str) -> tuple[str, str]:
    pattern, equals, device = word.rpartition("=")
    refuse_if(not (pattern and equals and device), field, word, "PATTERN=DEVICE, e.g. encoder.*=cuda:1")
    return pattern, device


def _patterns(word: str) -> tuple[str, ...]:
    patterns = tuple(word.split(","))
    refuse_if(not all(patterns), "together", word, "PATTERN,PATTERN,... without gaps, e.g. attention,projection")
    return patterns


def _matching(graph: OpGraph, pattern: str, field: str) -> NDArray[np.int64]:
    if len(ops := ops_matching(graph, pattern)):
        return ops
    near = nearest_modules(graph, pattern)
    raise InvalidValue(
        field,
        pattern,
        "a glob that matches a module path, an op name or a target of this graph",
        hint=f"Did you mean {' or '.join(near)}?" if near else "It matches nothing.",
    )


def _devices(word: str, names: Sequence[str], kinds: Sequence[str]) -> NDArray[np.bool_]:
    """(D,) bool: the devices that `word` names."""
    found = [
        fnmatch.fnmatchcase(name, word) or name.partition(":")[0] == word or kind == word
        for name, kind in zip(names, kinds, strict=True)
    ]
    if not any(found):
        raise UnknownName("device", word, {*names, *kinds, *(name.partition(":")[0] for name in names)})
    return np.array(found, dtype=np.bool_)


def _tied(graph: OpGraph, together: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """(N,) int64: one number for all ops that must be on one device."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    members = np.flatnonzero(graph.colocation >= 0)
    _, leader, inverse = np.unique(graph.colocation[members], return_index=True, return_inverse=True)
    ends = [members, *together]
    heads = [members[leader][inverse], *(np.full(len(ops), ops[0]) for ops in together)]
    rows, columns = np.concatenate(heads), np.concatenate(ends)
    joined = coo_array((np.ones(len(rows), dtype=np.int8), (rows, columns)), shape=(graph.num_ops, graph.num_ops))
    return np.asarray(connected_components(joined, directed=False)[1], dtype=np.int64)


def _classes(graph: OpGraph, tied: NDArray[np.int64], together: Sequence[NDArray[np.int64]]) -> NDArray[np.int32]:
    """(N,) int32: co-location classes, numbered by their first op, of all that is tied."""
    classed = graph.colocation >= 0
    for ops in together:
        classed[ops] = True
    classes = np.full(graph.num_ops, -1, dtype=np.int32)
    classes[classed] = np.unique(tied[classed], return_inverse=True)[1]
    return classes


def ops_matching(graph: OpGraph, pattern: str) -> NDArray[np.int64]:
    """Ops, ascending, whose module, name or target `pattern` matches.

    A pattern is a glob (`*` also matches dots, `?`, `[ab]`; case counts). It matches a module with all that is below it
    (`encoder` matches the ops of `encoder.layers.0`), an op by its name (`update_encoder.*`), and ops by their target
    (`aten.embedding.*`).

    Args:
        graph: whose ops.
        pattern: the glob.
    """
    glob = re.compile(fnmatch.translate(pattern))
    inside = {path: bool(_matched_prefix(glob, path)) for path in set(graph.modules)}
    targets = {target: glob.match(target) is not None for target in set(graph.targets)}
    picked = [
        inside[module] or targets[target] or glob.match(name) is not None
        for module, target, name in zip(graph.modules, graph.targets, graph.names, strict=True)
    ]
    return np.flatnonzero(picked).astype(np.int64)


def modules_matching(graph: OpGraph, pattern: str) -> NDArray[np.int64]:
    """(N,) int64: a number for each module that `pattern` matches, for its ops and all below it; -1 for other ops."""
    glob = re.compile(fnmatch.translate(pattern))
    number: dict[str, int] = {"": -1}
    label = {
        path: number.setdefault(_matched_prefix(glob, path), len(number) - 1) for path in sorted(set(graph.modules))
    }
    return np.array([label[path] for path in graph.modules], dtype=np.int64)


def nearest_modules(graph: OpGraph, pattern: str) -> list[str]:
    """At most three modules whose path comes close to `pattern`."""
    known = {
        ".".join(names[: depth + 1])
        for path in set(graph.modules)
        if path
        for names in [path.split(".")]
        for depth in range(len(names))
    }
    return nearest_names(pattern, sorted(known))


def _matched_prefix(glob: re.Pattern[str], path: str) -> str:
    """The shortest module at or above `path` that `glob` matches; empty where none does."""
    names = path.split(".")
    prefixes = (".".join(names[: depth + 1]) for depth in range(len(names)))
    return next((prefix for prefix in prefixes if prefix and glob.match(prefix)), "")
