"""`AnnealSettings`: how hot annealing is, which moves it tries, and how it divides its budget."""

from __future__ import annotations

from dataclasses import dataclass

from rlplace.errors import InvalidValue
from rlplace.search.guide import Guide
from rlplace.search.improve.moves import CHANCES, TABLE_CHANCES


@dataclass(frozen=True)
class AnnealSettings:
    """Every figure of annealing; the defaults were chosen over several problems and budgets."""

    hot: float | None = None
    """Temperature at the start, as a share of the step time; None suits it to the number of groups, a tenth of an even
    share of the step for a group, and to the moves there are: up to `most_reheat` times as hot where there are many."""
    cold: float | None = None
    """Temperature at the end; None for a tenth of `hot`, before that is made hotter for many moves."""
    patience: float = 0.5
    """Moves for each group and device from which on annealing starts hotter, in proportion ..."""
    most_reheat: float = 16.0
    """... but no more than this many times."""
    chances: tuple[float, ...] = CHANCES
    """How often each kind of move is tried, as `Neighbourhood.propose` takes them ..."""
    table_chances: tuple[float, ...] = TABLE_CHANCES
    """... and in a step that is cut into micro-batches, whose runs of layers also move to where the next run is."""
    critical_share: float = 0.8
    """Share of the moves that begin with a group of the critical path, where the timer tells it: moves of others
    seldom make a step shorter, but make room."""
    guide: Guide | None = None
    """What suggests a share of the moves; it is told the placements that annealing goes on from."""
    batch: int | None = None
    """Moves tried at once from the placement at hand: the first that is accepted is taken, so that a few of them are
    wasted, but they keep the cores busy. None for 1 under a budget of evaluations, for `timed_batch` under one of
    seconds alone."""
    timed_batch: int = 8
    """Moves tried at once where time is what counts."""
    few_moves: int = 1000
    """Moves that are too few for more than one level; where ops repeat, also those of each short annealing."""
    repeats: float = 4.0
    """Atoms for each role, on average, from which on ops repeat."""
    num_middle: int = 200
    """Groups that the level between the problem's own groups and atoms has at least; it has about 256."""
    num_roles: int = 256
    """Groups that roles are cut into, about."""
    num_runs: int = 32
    """Runs of layers that move with all micro-batches, where the step is cut into them."""
    most_branches: int = 8
    """Most short annealings of which the best goes on, where ops repeat ..."""
    branches_share: float = 0.6
    """... and the share of the budget that goes into them."""

    def __post_init__(self) -> None:
        hot, cold = self.temperatures(1)
        if not 0 < cold <= hot:
            raise InvalidValue("temperatures", (self.hot, self.cold), "0 < cold <= hot", where="anneal")
        if not 0 <= self.critical_share <= 1:
            raise InvalidValue("critical_share", self.critical_share, "0 to 1", where="anneal")
        if self.batch is not None and self.batch < 1:
            raise InvalidValue("batch", self.batch, "at least 1", where="anneal")

    def temperatures(self, num_groups: int, moves_each: float = 0.0) -> tuple[float, float]:
        """At the start and at the end.

        Args:
            num_groups: groups that are moved.
            moves_each: moves there will be for each group and device; slow cooling pays from hotter starts.
        """
        share = 0.1 / max(num_groups, 1)
        reheat = min(max(moves_each / self.patience, 1.0), self.most_reheat)
        hot = share * reheat if self.hot is None else self.hot
        if self.cold is not None:
            return hot, self.cold
        return hot, (share if self.hot is None else self.hot) / 10
