"""The parts of a model that figures colour and count: its modules, at the depth at which they tell something."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from rlplace.report.html.figure import MODULE_COLORS
from rlplace.report.html.trace import Slice

OUTSIDE = "(outside modules)"
OTHERS = "others"
_MOST_DEPTH = 5
_DOMINATES = 0.6
"""While one part takes more than this of the time, the model is cut one level deeper ..."""
_ENOUGH = 5
"""... unless it falls into as many parts already."""


@dataclass(frozen=True)
class ModuleGroups:
    """Parts of a model.

    Attributes:
        names: of the parts with a colour of their own, those that take longest first.
        depth: components of a module's path that name its part.
        has_others: whether there are parts without a colour.
    """

    names: tuple[str, ...]
    depth: int
    has_others: bool

    def name_of(self, op: Slice) -> str:
        """The part that an op belongs to."""
        return _part(op.module, self.depth)

    def index(self, op: Slice) -> int:
        """The place of an op's part among `names`; their number for all others."""
        name = self.name_of(op)
        return self.names.index(name) if name in self.names else len(self.names)

    def are_alike(self, a: Slice, b: Slice) -> bool:
        """Whether two ops have one phase and one part."""
        return a.kind == b.kind and self.name_of(a) == self.name_of(b)


def module_groups(ops: Sequence[Slice], most: int = len(MODULE_COLORS)) -> ModuleGroups:
    """The parts of the model that `ops` are of; at most `most` of them by name."""
    for depth in range(1, _MOST_DEPTH + 1):
        seconds = _seconds(ops, depth)
        total = sum(seconds.values())
        if len(seconds) >= _ENOUGH or max(seconds.values(), default=0.0) <= _DOMINATES * total:
            break
    ranked = sorted(seconds, key=lambda name: (-seconds[name], name))
    return ModuleGroups(tuple(ranked[:most]), depth, len(ranked) > most)


def _seconds(ops: Sequence[Slice], depth: int) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for op in ops:
        found[_part(op.module, depth)] += op.seconds
    return found


def _part(module: str, depth: int) -> str:
    return ".".join(module.split(".")[:depth]) or OUTSIDE
