"""Patterns that pick ops: shell-style globs over module paths, op names and ATen targets."""

from __future__ import annotations

import difflib
import fnmatch
import re

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs.opgraph import OpGraph


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
    label = {}
    for path in sorted(set(graph.modules)):
        prefix = _matched_prefix(glob, path)
        label[path] = number.setdefault(prefix, len(number) - 1)
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
    return difflib.get_close_matches(pattern, sorted(known), n=3, cutoff=0.5)


def _matched_prefix(glob: re.Pattern[str], path: str) -> str:
    """The shortest module at or above `path` that `glob` matches; empty where none does."""
    names = path.split(".")
    prefixes = (".".join(names[: depth + 1]) for depth in range(len(names)))
    return next((prefix for prefix in prefixes if prefix and glob.match(prefix)), "")
