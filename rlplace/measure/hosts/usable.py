"""How much of a memory that was detected a step may fill."""

SPARE = 0.05
"""What stays free of a detected memory.

A device may take its copy of a tensor later than simulated, so that the maker holds it longer, and allocators lose
some to fragmentation: the fullest devices held up to 3.5 % more than predicted (benchmarks/results/memory.md).
"""


def usable_bytes(total_bytes: int) -> int:
    """Bytes that a step may fill of a device's memory: all but `SPARE` of it.

    >>> usable_bytes(1_000)
    950
    """
    return total_bytes - int(total_bytes * SPARE)
