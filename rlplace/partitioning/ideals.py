"""The lattice of ideals: all down-closed sets of a DAG, and which one follows from which by one more unit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.jit import kernel

Ints = NDArray[np.int32]
Words = NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class Lattice:
    """I ideals, smaller ones first, the empty one at 0 and the full one at I - 1.

    Attributes:
        offsets: (I + 1,) int64, CSR of the steps from each ideal.
        step_unit: (L,) int32, the unit that the step adds.
        step_ideal: (L,) int32, the ideal that it leads to.
    """

    offsets: NDArray[np.int64]
    step_unit: Ints
    step_ideal: Ints

    @property
    def num_ideals(self) -> int:
        return len(self.offsets) - 1


def chain_lattice(order: Ints) -> Lattice:
    """The prefixes of the topological order (U,): the lattice of a linearised graph."""
    count = len(order)
    offsets = np.minimum(np.arange(count + 2, dtype=np.int64), count)
    return Lattice(offsets, np.ascontiguousarray(order, dtype=np.int32), np.arange(1, count + 1, dtype=np.int32))


def enumerate_ideals(
    source_offsets: Ints, sources: Ints, reader_offsets: Ints, readers: Ints, *, most: int
) -> Lattice | None:
    """All ideals of a DAG given as CSRs of the units before and after each unit; None where there are more than `most`.

    Ideals are bit sets, found breadth first and told apart by a table over their Zobrist hashes.
    """
    num_units = len(source_offsets) - 1
    draw = np.random.default_rng(0)
    marks = draw.integers(0, np.iinfo(np.uint64).max, size=max(num_units, 1), dtype=np.uint64)
    count, offsets, step_unit, step_ideal = _enumerate(source_offsets, sources, reader_offsets, readers, marks, most)
    return Lattice(offsets, step_unit, step_ideal) if count else None


@kernel
def _enumerate(
    source_offsets: Ints, sources: Ints, reader_offsets: Ints, readers: Ints, marks: Words, most: int
) -> tuple[int, NDArray[np.int64], Ints, Ints]:
    """(number of ideals, offsets, units, ideals) of the lattice; the number is 0 where there are more than `most`."""
    num_units = len(source_offsets) - 1
    num_words = num_units // 64 + 1
    room, step_room = 1024, 4096
    bits = np.zeros((room, num_words), dtype=np.uint64)
    hashes = np.zeros(room, dtype=np.uint64)
    offsets = np.zeros(most + 2, dtype=np.int64)
    step_unit, step_ideal = np.empty(step_room, dtype=np.int32), np.empty(step_room, dtype=np.int32)
    slots = 4096
    table = np.full(slots, -1, dtype=np.int32)
    table[0] = 0
    count, steps, one = 1, 0, np.uint64(1)
    ideal = 0
    while ideal < count:
        for unit in range(num_units):
            word, bit = unit // 64, one << np.uint64(unit % 64)
            if bits[ideal, word] & bit:
                continue
            is_next = True
            for a in range(source_offsets[unit], source_offsets[unit + 1]):
                source = sources[a]
                if not bits[ideal, source // 64] & (one << np.uint64(source % 64)):
                    is_next = False
                    break
            if not is_next:
                continue
            mark = hashes[ideal] ^ marks[unit]
            slot = np.int64(mark & np.uint64(slots - 1))
            found = -1
            while table[slot] >= 0:
                other = table[slot]
                if hashes[other] == mark:
                    is_same = True
                    for w in range(num_words):
                        grown = bits[ideal, w] | bit if w == word else bits[ideal, w]
                        if bits[other, w] != grown:
                            is_same = False
                            break
                    if is_same:
                        found = other
                        break
                slot = (slot + 1) & (slots - 1)
            if found < 0:
                if count == most:
                    return 0, offsets[:1], step_unit[:0], step_ideal[:0]
                if count == room:
                    room *= 2
                    grown_bits = np.zeros((room, num_words), dtype=np.uint64)
                    grown_bits[:count] = bits
                    bits = grown_bits
                    grown_hashes = np.zeros(room, dtype=np.uint64)
                    grown_hashes[:count] = hashes
                    hashes = grown_hashes
                found = count
                bits[found] = bits[ideal]
                bits[found, word] |= bit
                hashes[found] = mark
                table[slot] = found
                count += 1
                if 2 * count > slots:
                    slots *= 4
                    table = np.full(slots, -1, dtype=np.int32)
                    for other in range(count):
                        place = np.int64(hashes[other] & np.uint64(slots - 1))
                        while table[place] >= 0:
                            place = (place + 1) & (slots - 1)
                        table[place] = other
            if steps == step_room:
                step_room *= 2
                grown_unit = np.empty(step_room, dtype=np.int32)
                grown_unit[:steps] = step_unit
                step_unit = grown_unit
                grown_ideal = np.empty(step_room, dtype=np.int32)
                grown_ideal[:steps] = step_ideal
                step_ideal = grown_ideal
            step_unit[steps] = unit
            step_ideal[steps] = found
            steps += 1
        ideal += 1
        offsets[ideal] = steps
    return count, offsets[: count + 1].copy(), step_unit[:steps].copy(), step_ideal[:steps].copy()
