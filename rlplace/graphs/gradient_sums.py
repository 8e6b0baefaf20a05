"""How the gradients of K micro-batches are added up: in a tree, so that neighbours are added where they are."""

from __future__ import annotations

from dataclasses import dataclass

LATER_HALF = -1
"""A `turn` with which every sum goes with its later half: the micro-batch that completes it."""


@dataclass(frozen=True)
class GradientSum:
    """One addition of two parts; a part below K is a micro-batch's own gradient, K + i is the i-th sum.

    Attributes:
        left: the part of the earlier micro-batches.
        right: the part of the later ones.
        micro_batch: which of them it goes with; -1 for the last sum, which lives with the parameter.
        last: the latest micro-batch in it: it can be had once that one's gradient is there.
    """

    left: int
    right: int
    micro_batch: int
    last: int


def gradient_sums(count: int, turn: int = 0) -> tuple[GradientSum, ...]:
    """The K - 1 additions of a balanced tree over micro-batches in order, each after its parts; the last is the root.

    Micro-batches that follow each other are added first. So where a device holds a run of them, their gradients are
    added there before anything is sent, and no more than log2(K) + 1 are there at a time. Each sum goes with one of
    its halves, the bits of `turn` say which: dealt out over parameters they spread the sums, and what is sent to them,
    evenly over replicas (recursive halving: Thakur, Rabenseifner and Gropp 2005).

    Args:
        count: K, at least 1.
        turn: a number of the parameter.

    >>> [(one.left, one.right, one.micro_batch) for one in gradient_sums(4, turn=1)]
    [(0, 1, 1), (2, 3, 3), (4, 5, -1)]
    """
    found: list[GradientSum] = []

    def add(first: int, end: int) -> tuple[int, int, int]:
        """The part that holds micro-batches `first` to `end - 1`, the one that it goes with, and its height."""
        if end - first == 1:
            return first, first, 0
        middle = first + (end - first + 1) // 2
        (left, near, height), (right, far, other) = add(first, middle), add(middle, end)
        height = max(height, other)
        goes_with = far if turn >> height & 1 else near
        found.append(GradientSum(left, right, goes_with, end - 1))
        return count + len(found) - 1, goes_with, height + 1

    add(0, count)
    if found:
        root = found[-1]
        found[-1] = GradientSum(root.left, root.right, -1, root.last)
    return tuple(found)
