"""`SchedulePolicy`: places one group after the other over the partial schedule.

`propose`: zero-shot placements of a problem, the best guess first. `roll` and `replay`: episodes of the policy, played
by it and along known placements.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlplace.env import SequentialBatch, SequentialObservation
from rlplace.env.problem_features import problem_features
from rlplace.env.sequential import GROUPINGS, ListSchedules, Pair, varied
from rlplace.measure import Problem
from rlplace.policy.base import PolicyModule, device_marks, divisor_for, gumbel, temperature_for
from rlplace.policy.options import ScheduleConfig
from rlplace.policy.schedule_network import (
    KIND,
    MARKS,
    ScheduleNetwork,
    group_features,
    heavy_tailed,
    load_network,
    problem_summary,
    save_network,
)

OWN = GROUPINGS.index("own")
LEAST_SCALE, MOST_SCALE, BISECTIONS = 1e-6, 1e3, 40


class SchedulePolicy(PolicyModule):
    """A device for one group after the other, each given the partial schedule of those before it.

    Of the family of GO (Zhou et al. 2020, arXiv:2010.12438) and DOPPLER (Yao et al. 2025): a network scores where the
    next group goes, over the state of a list scheduler. It differs from them in that the scores begin as a linear
    scheduler's, that which group is next is settled before the first decision, so that a placement has one
    log-probability, and that no message passes over the graph: the partial schedule contains the facts that a group
    needs of others.

    Attributes:
        network: of the learned part; several policies may share it.
        marks: (D, 4) float32, the n-th of several equal devices has the n-th row of a table drawn from the seed.
        component: whose weights the scores begin with: the first, by the gate, over the problem's own groups.
        scale: the divisor of the weighted sum of features; set once, so that about `flips` groups of a first sample
            differ from the mode.
        temperature: the divisor of all logits, in sampling as in log-probabilities; `set_flips` sets it.
        generator: draws the samples.
    """

    kind = KIND
    problem_buffers = ("network.grouping",)
    marks: Tensor
    scale: Tensor
    temperature: Tensor
    list_position: Tensor

    def __init__(self, problem: Problem, network: ScheduleNetwork, config: ScheduleConfig, *, seed: int = 0) -> None:
        """The policy that `network` is on `problem`."""
        super().__init__(problem.group_allowed, seed)
        self.problem = problem
        self._groups = torch.from_numpy(group_features(problem))
        self._summary = torch.from_numpy(problem_summary(problem))
        self._allowed = torch.from_numpy(problem.group_allowed.copy())
        self.register_buffer("marks", device_marks(problem_features(problem), MARKS, seed))
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("temperature", torch.ones(()))
        self.register_buffer("list_position", torch.zeros(self.num_groups))
        self._flips = config.flips
        self._episodes: dict[tuple[int, bytes], SequentialBatch] = {}
        self._last: tuple[tuple[object, ...], Decisions] | None = None
        self._take(network)

    def sample(self, num_samples: int, rng: np.random.Generator | None = None) -> NDArray[np.int32]:
        """(num_samples, G) devices of groups, drawn.

        Args:
            num_samples: placements to draw.
            rng: the random generator; by default the policy's own.
        """
        generator = self.drawing(rng)

        def draw(seen: SequentialObservation) -> NDArray[np.int64]:
            logits_BD = self._logits_now(seen)
            return np.asarray((logits_BD.double() + gumbel(logits_BD.shape, generator)).argmax(-1).numpy())

        return roll(self._begin(num_samples), draw)

    def mode(self) -> NDArray[np.int32]:
        """(G,) each group on its likeliest device, given those before it; the first of several as likely."""
        return best_guess(self._begin(1), self._logits_now)[0]

    def evaluate(self, group_devices: NDArray[np.integer]) -> tuple[Tensor, Tensor]:
        """Log-probabilities (B, G) of the devices (B, G) of groups, and entropies (B, G) in nats, with gradients.

        The placements are made again, group by group, and all that was seen goes through the network at once.
        """
        rows, order = np.ascontiguousarray(group_devices, dtype=np.int64), self.order()
        key = (rows.shape, rows.tobytes(), b"" if order is None else order.tobytes())
        if self._last is None or self._last[0] != key:  # learners ask several times for the same placements
            self._last = (key, replay(self._begin(len(rows)), rows))
        seen = self._last[1]
        logits_GBD = self._scores(seen.features, seen.groups)
        log_probs_GBD = torch.log_softmax(logits_GBD.masked_fill(~seen.mask, -torch.inf), dim=-1)
        # what memory bars, and pins do not, is never drawn; known placements may use it
        barred_GBD = torch.where(self._allowed[seen.groups], LOG_PROB_BARRED, -torch.inf)
        log_probs_GBD = torch.where(seen.mask, log_probs_GBD, barred_GBD)
        chosen_GB = log_probs_GBD.gather(-1, seen.devices[..., None])[..., 0]
        known_GBD = torch.where(seen.mask, log_probs_GBD, 0.0)
        entropy_GB = -(known_GBD.exp() * known_GBD).sum(dim=-1)
        place_GB = torch.argsort(seen.groups, dim=0)  # which decision was each group's
        return chosen_GB.gather(0, place_GB).T, entropy_GB.gather(0, place_GB).T

    def save(self, path: str | os.PathLike[str], about: str = "") -> None:
        """Writes the network to `path` (`policy.safetensors`), and its description beside it (`.json`).

        Nothing of the problem is kept: `load_network` gives a network for another one.

        Raises:
            FileProblem: a file cannot be written.
        """
        save_network(self.network, path, about)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Takes a network that `save` wrote, on whichever problem; learners made before teach the one it had.

        Raises:
            FileProblem, InvalidValue, UnknownName: as `load_network`.
        """
        self._take(load_network(path))

    def propose(self, count: int) -> NDArray[np.int32]:
        """(<= count, N) devices of ops, the best guess first: also over other groupings than the problem's groups."""
        return propose(self.problem, self.network, count).devices

    def schedules(self, count: int) -> tuple[Pair, ...]:
        """The list schedules behind the first `count` of `propose`: names of groupings, each with weights."""
        return propose(self.problem, self.network, count).pairs

    def set_flips(self, flips: float | None) -> None:
        """Sets the temperature at which a sample differs from the mode in `flips` groups, on average; 1 if None.

        Counted along the mode: changes for later groups are left out.
        """
        self.temperature.fill_(1.0)
        if flips is not None:
            _, logits_GD, _ = best_guess(self._begin(1), self._logits_now)
            self.temperature.fill_(temperature_for(logits_GD, flips))

    def order(self) -> NDArray[np.float64] | None:
        """(G,) priorities of groups, higher first; None for the list order, where nothing else was learned."""
        with torch.no_grad():
            earlier = self.network.priorities(self._groups, self._summary)
        return np.asarray((earlier - self.list_position).double().numpy()) if bool(earlier.any()) else None

    def _begin(self, num_episodes: int) -> SequentialBatch:
        """Episodes in the policy's order, made once for each number of them."""
        order = self.order()
        key = (num_episodes, b"" if order is None else order.tobytes())
        if key not in self._episodes:
            if len(self._episodes) > 3:
                self._episodes.clear()
            self._episodes[key] = SequentialBatch(self.problem, num_episodes, order=order)
        return self._episodes[key]

    def _scores(self, features: Tensor, groups: Tensor) -> Tensor:
        seen = (features, self.marks, self._groups[groups], self._summary)
        return self.network.device_scores(*seen, self.component, self.scale) / self.temperature

    def _logits_now(self, seen: SequentialObservation) -> Tensor:
        """(B, D) logits of the next decision, minus infinity where the group may not go."""
        with torch.no_grad():
            logits = self._scores(torch.from_numpy(seen.features), torch.from_numpy(seen.group))
        return logits.masked_fill(~torch.from_numpy(seen.mask), -torch.inf)

    def _take(self, network: ScheduleNetwork) -> None:
        """Goes on with a network: which component comes first, the scale, and the place of groups in the list order."""
        self.network, is_own = network, network.grouping == OWN
        with torch.no_grad():
            scores = network.component_scores(self._summary)
        # the best component by the gate over the problem's own groups; over any, where there is none
        self.component = int((scores.masked_fill(~is_own, torch.inf) if bool(is_own.any()) else scores).argmin())

        def nearness(seen: SequentialObservation) -> Tensor:
            with torch.no_grad():
                margins = network.margins(torch.from_numpy(seen.features), self._summary, self.component)
            return -margins.masked_fill(~torch.from_numpy(seen.mask), torch.inf)

        _, near_GD, sequence = best_guess(SequentialBatch(self.problem, 1), nearness)
        self.list_position[sequence] = torch.arange(len(sequence)) / max(len(sequence), 1)
        margins_GD = -near_GD.double()
        bounds = LEAST_SCALE, MOST_SCALE, BISECTIONS
        self.scale.fill_(divisor_for(self._flips, lambda divisor: heavy_tailed(margins_GD / divisor), *bounds))
        self.temperature.fill_(1.0)


LOG_PROB_BARRED = -30.0
"""Log-probability of a device that memory bars, by an estimate: never drawn, but known placements may use it."""

Choose = Callable[[SequentialObservation], NDArray[np.int64]]
"""From features to a device for each episode, (B,)."""


@dataclass(frozen=True, eq=False)
class Decisions:
    """The features of B episodes of G decisions.

    Attributes:
        groups: (G, B) int64, which group was decided.
        features: (G, B, D, F) float32, of the partial schedule.
        mask: (G, B, D) bool, where the group might go.
        devices: (G, B) int64, where it went.
    """

    groups: Tensor
    features: Tensor
    mask: Tensor
    devices: Tensor


def roll(episodes: SequentialBatch, choose: Choose) -> NDArray[np.int32]:
    """(B, G) int32 devices of groups after every group was decided by `choose`."""
    episodes.reset()
    while not episodes.is_done:
        episodes.step(choose(episodes.observe()))
    return episodes.placed.copy()


def best_guess(
    episodes: SequentialBatch, logits_of: Callable[[SequentialObservation], Tensor]
) -> tuple[NDArray[np.int32], Tensor, Tensor]:
    """The first episode, each group on the first device of the largest logit.

    Returns:
        (G,) int32 devices of groups, (G, D) logits of each decision, and (G,) int64 the groups in their order.
    """
    rows, sequence = [], []

    def best(seen: SequentialObservation) -> NDArray[np.int64]:
        rows.append(logits_of(seen)[0])
        sequence.append(int(seen.group[0]))
        return np.asarray(rows[-1].argmax(-1, keepdim=True).numpy())

    return np.asarray(roll(episodes, best)[0]), torch.stack(rows), torch.tensor(sequence)


def replay(episodes: SequentialBatch, group_devices: NDArray[np.integer]) -> Decisions:
    """The features on the way to placements (B, G), each group decided as they say (teacher forcing)."""
    forced, rows = np.asarray(group_devices, dtype=np.int64), np.arange(len(group_devices))
    looks = []

    def follow(seen: SequentialObservation) -> NDArray[np.int64]:
        chosen = forced[rows, seen.group]
        looks.append((seen.group.copy(), seen.features.copy(), seen.mask.copy(), chosen))
        return chosen

    roll(episodes, follow)
    return Decisions(*(torch.from_numpy(np.stack(parts)) for parts in zip(*looks, strict=True)))


POOL_WORK = 2_000_000
"""Devices of ops that are looked at to rank components by the schedules that they lead to ..."""
LEAST_POOL = 8
"""... but so many schedules are made in any case."""
_TRIES = 8


@dataclass(frozen=True, eq=False)
class Proposals:
    """Guesses, the best first; no two are the same placement.

    Attributes:
        pairs: the grouping and weights of each.
        devices: (k, N) int32.
    """

    pairs: tuple[Pair, ...]
    devices: NDArray[np.int32]


def propose(
    problem: Problem,
    network: ScheduleNetwork,
    count: int,
    *,
    schedules: ListSchedules | None = None,
    is_ranked: bool = True,
    seed: int = 0,
) -> Proposals:
    """Up to `count` placements; fewer where even varied weights lead to no others.

    The gate says which components suit the problem; of those, as many as time allows are scheduled, and the ranker
    predicts the simulator's step times of the schedules. The first guess is the best by it, each further one is the one
    that adds most to the best of all, given which components failed together in training. Then weights are varied.
    Nothing is simulated.

    Args:
        problem: the problem to place.
        network: guesses.
        count: most placements.
        schedules: of the problem, where they are laid out already.
        is_ranked: False leaves the ranker out: the gate alone decides.
        seed: of varied weights.
    """
    schedules = ListSchedules(problem) if schedules is None else schedules
    summary = torch.from_numpy(problem_summary(problem))
    with torch.no_grad():
        expected = network.component_scores(summary).double().numpy()
    components, scenarios = network.components, network.scenarios.double().numpy()
    # fewer are scheduled where graphs are large, so that a first guess takes no longer
    pool = max(LEAST_POOL, POOL_WORK // max(problem.graph.num_ops * problem.host.num_devices, 1)) if is_ranked else 0
    places = choose(expected, scenarios, max(count, pool))
    devices = schedules.place([components.pair(place) for place in places])
    first = np.sort(np.unique(devices, axis=0, return_index=True)[1])  # of equal placements the first
    devices, places = devices[first], [places[row] for row in first]
    expected = rank(network, summary, schedules, devices) if is_ranked else expected[places]
    order = choose(expected, scenarios[:, places], count) if is_ranked else list(range(len(places)))[:count]
    pairs = tuple(components.pair(places[row]) for row in order)
    found = Proposals(pairs, devices[order])
    return found if len(pairs) == count else _varied(found, network, summary, schedules, count, seed)


def rank(
    network: ScheduleNetwork, summary: torch.Tensor, schedules: ListSchedules, devices: NDArray[np.int32]
) -> NDArray[np.float64]:
    """(B,) float64 expected log step times of placements (B, N)."""
    estimates = torch.from_numpy(schedules.estimate(devices))
    with torch.no_grad():
        return np.asarray(network.log_times(estimates, summary.expand(len(devices), -1)).double().numpy())


def choose(expected: NDArray[np.float64], scenarios: NDArray[np.float64], count: int) -> list[int]:
    """Places of up to `count` guesses, each the one with which the best of those chosen is expected to be least.

    The first is the least of `expected`. Over S scenarios a guess takes the expected step time and the error there;
    without scenarios guesses are ordered by the expected step time alone. Ties go by it, then by index.

    Args:
        expected: (M,) log step times.
        scenarios: (S, M) by how much they were missed.
        count: most guesses.
    """
    order = np.argsort(expected, kind="stable")
    if len(scenarios):
        order = order[best_together(expected[order] + scenarios[:, order], count, first=0)]
    return [int(place) for place in order[:count]]


def best_together(losses: NDArray[np.float64], count: int, first: int | None = None) -> list[int]:
    """Up to `count` columns of (P, M) losses, one after the other the one that most improves the best of all.

    Rows count alike: the mean over rows of the least of the chosen columns is lowered.

    Args:
        losses: (P, M).
        count: of columns.
        first: the column to begin with; the best alone by default.

    Example:
        >>> best_together(np.array([[0.0, 0.2, 0.5], [0.9, 0.3, 0.0]]), 2)
        [1, 2]
    """
    chosen = [] if first is None else [first]
    least = np.full(len(losses), losses.max(initial=0.0)) if first is None else losses[:, first]
    is_left = np.ones(losses.shape[1], dtype=np.bool_)
    is_left[chosen] = False
    while len(chosen) < min(count, losses.shape[1]):
        value = np.where(is_left, np.minimum(least[:, None], losses).mean(axis=0), np.inf)
        chosen.append(int(value.argmin()))
        is_left[chosen[-1]] = False
        least = np.minimum(least, losses[:, chosen[-1]])
    return chosen


def vary(pairs: tuple[Pair, ...], generator: np.random.Generator) -> list[Pair]:
    """Each pair with about half of its weights varied, over its own grouping."""
    return [(name, tuple(varied(np.array(weights), generator).tolist())) for name, weights in pairs]


def _varied(
    found: Proposals,
    network: ScheduleNetwork,
    summary: torch.Tensor,
    schedules: ListSchedules,
    count: int,
    seed: int,
) -> Proposals:
    """`found`, then placements of varied weights, the best guesses of each round first."""
    generator, pairs, rows = np.random.default_rng(seed), list(found.pairs), list(found.devices)
    seen = {row.tobytes() for row in rows}
    for _ in range(_TRIES):
        varied = vary(found.pairs, generator)
        made: dict[bytes, tuple[Pair, NDArray[np.int32]]] = {}
        for pair, row in zip(varied, schedules.place(varied), strict=True):
            made.setdefault(row.tobytes(), (pair, row))
        fresh = [one for key, one in made.items() if key not in seen]
        if not fresh:
            continue
        seen |= made.keys()
        expected = rank(network, summary, schedules, np.stack([row for _, row in fresh]))
        best = [fresh[place] for place in np.argsort(expected, kind="stable")[: count - len(pairs)]]
        pairs += [pair for pair, _ in best]
        rows += [row for _, row in best]
        if len(pairs) == count:
            break
    return Proposals(tuple(pairs), np.stack(rows))
