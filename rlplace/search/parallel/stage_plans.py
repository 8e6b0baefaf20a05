"""`StagePlan`: stages of a chain, each on a team of devices; the plans next to one, and all where they are few."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rlplace.search.parallel.layouts import Chain, Layout, Owners, deal

MOST_PLANS = 2000
"""Plans that are few enough to try all of them."""


@dataclass(frozen=True)
class StagePlan:
    """Where a chain is cut, and who runs each stage.

    Attributes:
        ends: where each stage but the last ends, ascending places of the chain.
        teams: the devices of each stage; micro-batches are dealt out over them in contiguous runs.
        owners: who owns the parameters of a stage.
        by_speed: faster devices of a team get more micro-batches.
    """

    ends: tuple[int, ...]
    teams: tuple[tuple[int, ...], ...]
    owners: Owners = "spread"
    by_speed: bool = True

    @classmethod
    def of(cls, layout: Layout, chain: Chain) -> StagePlan:
        """The plan of a layout whose stages are contiguous; those without a place of the chain are left out."""
        stage_of = stages_of(layout, chain)
        teams = tuple(tuple(dict.fromkeys(row)) for row in layout.devices[np.unique(stage_of)].tolist())
        return cls(tuple((np.flatnonzero(np.diff(stage_of)) + 1).tolist()), teams, layout.owners)

    def layout(self, chain: Chain) -> Layout:
        """The plan as a layout.

        It has a column of devices for each replica where all teams can be dealt out together, else one for each
        micro-batch; columns that are neighbours are far apart in time, so that owners, which are dealt out over
        columns, are spread over every team.
        """
        count = chain.num_micro_batches
        dealt = [self._dealt(team, chain) for team in self.teams]
        columns = math.lcm(*(len(team) for team in self.teams))
        together = np.arange(count) * columns // count
        as_dealt = [np.arange(columns) * len(team) // columns for team in self.teams]
        if columns > count or any(
            not np.array_equal(place[together], own) for place, own in zip(as_dealt, dealt, strict=True)
        ):
            columns, together, as_dealt = count, np.arange(count), dealt
        column = far_apart(columns)
        table = np.empty((len(self.teams), columns), dtype=np.int32)
        for stage, (team, place) in enumerate(zip(self.teams, as_dealt, strict=True)):
            table[stage, column] = np.array(team)[place]
        stage_of = np.searchsorted(np.array(self.ends), np.arange(chain.step.num_positions), side="right")
        return Layout(
            devices=table,
            role_stage=stage_of.astype(np.int32)[chain.step.position],
            replica=column[together],
            owners=self.owners,
            name=f"stages of {', '.join(str(len(team)) for team in self.teams)} replicas",
        )

    def neighbours(self, num_positions: int, far: int) -> Iterator[StagePlan]:
        """Plans with one thing changed: an end moved, a device of another stage, a stage more or less, other owners.

        Args:
            num_positions: P, places of the chain.
            far: how far an end is moved.
        """
        for index, end in enumerate(self.ends):
            for moved in (end + far, end - far):
                ends = (*self.ends[:index], moved, *self.ends[index + 1 :])
                if all(a < b for a, b in itertools.pairwise((0, *ends, num_positions))):
                    yield replace(self, ends=ends)
        for index in range(len(self.ends)):
            yield from self._across(index)
        bounds = (0, *self.ends, num_positions)
        for index, team in enumerate(self.teams):
            middle = (bounds[index] + bounds[index + 1]) // 2
            if len(team) > 1 and bounds[index] < middle:
                half = (len(team) + 1) // 2
                teams = (*self.teams[:index], team[:half], team[half:], *self.teams[index + 1 :])
                yield replace(self, ends=tuple(sorted((*self.ends, middle))), teams=teams)
        yield replace(self, owners="with-stage" if self.owners == "spread" else "spread")
        yield replace(self, by_speed=not self.by_speed)

    def _across(self, index: int) -> Iterator[StagePlan]:
        """A device moved over the end of a stage, both ways; the two nearest swapped; the two stages as one."""
        first, second = self.teams[index : index + 2]
        pairs = [(tuple(sorted((*first, *second))),), ((*first[:-1], second[0]), (first[-1], *second[1:]))]
        if len(first) > 1:
            pairs.append((first[:-1], (first[-1], *second)))
        if len(second) > 1:
            pairs.append(((*first, second[0]), second[1:]))
        for teams in pairs:
            ends = self.ends if len(teams) == 2 else (*self.ends[:index], *self.ends[index + 1 :])
            yield replace(self, ends=ends, teams=(*self.teams[:index], *teams, *self.teams[index + 2 :]))

    def _dealt(self, team: tuple[int, ...], chain: Chain) -> NDArray[np.int64]:
        """(K,) int64: the member of a team that runs each micro-batch."""
        count, speed = chain.num_micro_batches, chain.speed[list(team)]
        if self.by_speed and np.ptp(speed) > 0 and len(team) <= count:
            return deal(count, 1.0 / speed).astype(np.int64)
        return np.arange(count) * len(team) // count


def stages_of(layout: Layout, chain: Chain) -> NDArray[np.int64]:
    """(P,) int64: the stage of each place of the chain."""
    found = np.zeros(chain.step.num_positions, dtype=np.int64)
    found[chain.step.position] = layout.role_stage
    return found


def all_plans(num_positions: int, devices: list[int]) -> list[StagePlan]:
    """Every plan of contiguous stages on some of the devices, in every order; empty where there are too many.

    Args:
        num_positions: P, places of the chain.
        devices: whose teams are taken.
    """
    sizes = range(1, min(num_positions, len(devices)) + 1)
    if len(devices) > 4 or sum(math.comb(num_positions - 1, p - 1) for p in sizes) * 60 > MOST_PLANS:
        return []
    found: dict[StagePlan, None] = {}
    for line in itertools.permutations(devices):
        for stages in sizes:
            for cuts in itertools.combinations(range(1, len(line) + 1), stages):
                teams = tuple(tuple(sorted(line[a:b])) for a, b in itertools.pairwise((0, *cuts)))
                for ends in itertools.combinations(range(1, num_positions), stages - 1):
                    found[StagePlan(ends, teams)] = None
    return list(found)


def far_apart(count: int) -> NDArray[np.int32]:
    """(count,) int32: a permutation, by van der Corput's sequence, in which any run of places is spread evenly."""
    bits = max(count - 1, 1).bit_length()
    turned = [int(f"{number:0{bits}b}"[::-1], 2) for number in range(1 << bits)]
    order = [number for number in turned if number < count]
    column = np.empty(count, dtype=np.int32)
    column[order] = np.arange(count)
    return column
