"""`pretrain`: weights of the policy `schedule` for any problem, learned from simulated placements of many.

Weights of the list scheduler are drawn, varied and chosen to do best together (`draw`, `vary`); `Tables` keep their
simulated step times in a folder; `fit` trains the gate and the ranker of `ScheduleNetwork` from them; `held_out` judges
the guesses of a network on problems that it was not trained on.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save
from torch import Tensor, nn

from rlplace.env.schedule_batch import GROUPINGS, ListSchedules, Pair
from rlplace.errors import FileProblem
from rlplace.files import jsonable, read_json, write_bytes_atomic, write_json_atomic
from rlplace.measure import Problem, Simulator
from rlplace.measure.timing.threads import one_thread_here
from rlplace.policy.learn.learners import descend
from rlplace.policy.options import PretrainConfig
from rlplace.policy.schedule import best_together, choose
from rlplace.policy.schedule_network import KIND, Components, ScheduleNetwork, problem_summary, save_network
from rlplace.pretrain.training_problems import ProblemSource

if TYPE_CHECKING:
    from rlplace.cluster import Cluster


DRAWN, VARIED, KNOWN = range(3)
"""Stages, whose problems have nothing to do with each other."""
JUDGED = 5
"""One problem of so many is left out of a first training, to judge it."""
CONFIG, FIGURES = "pretrain.json", "figures.json"


@one_thread_here()
def pretrain(
    config: PretrainConfig,
    folder: Path,
    *,
    resume: bool = False,
    say: Callable[[str], None] = lambda text: None,
    cluster: Cluster | None = None,
) -> dict[str, Any]:
    """The result of training, as `--json` prints it; the weights are `schedule.safetensors` in `folder`.

    Weights of the list scheduler are drawn and simulated over all groupings, the best are varied, and those that do
    best together become components; each is simulated on further problems, and the gate and the ranker learn from
    that: first without every fifth problem, on which the guesses are judged, then from all.

    Simulated step times are in `folder/tables`, a file for each problem: a run that was stopped at any moment goes on
    there. On one thread the same config gives the same weights, to the bit.

    Args:
        config: how much.
        folder: of the result.
        resume: go on with the files in `folder`.
        say: told how it goes.
        cluster: whose workers simulate; the learned weights are the same.

    Raises:
        FileProblem: `folder` holds a run, and `resume` is not asked for; or it holds another one.
        UserError: a graph file cannot be read.
        RunnerError: the cluster is lost; `resume` goes on from the tables so far.
    """
    begin = time.monotonic()
    _begin(config, folder, resume)
    tables = Tables(folder / "tables", ProblemSource(config).problem, cluster)
    generator = np.random.default_rng(config.seed)
    weights = draw(generator, config.num_drawn)
    table = tables.simulate("drawn", DRAWN, config.drawn_problems, over_groupings(weights), say)
    columns = best_together(table.log_ratios, config.num_bases)
    bases = weights[list(dict.fromkeys(column // (table.log_times.shape[1] // len(weights)) for column in columns))]
    pairs = over_groupings(np.concatenate((bases, vary(generator, bases, config.num_varied))))
    table = tables.simulate("varied", VARIED, config.varied_problems, pairs, say)
    components = [pairs[column] for column in best_together(table.log_ratios, config.num_components)]
    table = tables.simulate("known", KNOWN, config.problems, components, say)
    is_judged = np.arange(len(table.summary)) % JUDGED == JUDGED - 1
    figures: dict[str, float] = {}
    if is_judged.any():
        judged = fit(_network(components, config), table.rows(np.flatnonzero(~is_judged)), config.steps)
        figures = held_out(judged, table.rows(np.flatnonzero(is_judged)))
        told = ", ".join(f"{name} {value:.3f}" for name, value in figures.items())
        say(f"best of some guesses over the best of all components, on held-out problems: {told}")
    network = fit(_network(components, config), table, config.steps)
    path = folder / f"{KIND}.safetensors"
    count = len(table.summary) + config.drawn_problems + config.varied_problems
    save_network(network, path, f"rlplace pretrain --seed {config.seed}: {count} problems, torch {torch.__version__}")
    result = {"schema": 1, "weights": str(path), "components": len(components), "held_out": figures}
    result |= {"seconds": time.monotonic() - begin}
    write_json_atomic(folder / FIGURES, result)
    say(f"{path}: {path.stat().st_size / 1e6:.2f} MB")
    return result


def _begin(config: PretrainConfig, folder: Path, resume: bool) -> None:
    """Makes the folder, or checks that it is of the same run."""
    path, told = folder / CONFIG, jsonable(dataclasses.asdict(config))
    if path.exists():
        if not resume:
            raise FileProblem(folder, "holds a run already: go on with `--resume`, or name another folder.")
        if read_json(path) != told:
            raise FileProblem(path, "is of a run with other options: give the same ones, or name another folder.")
        return
    try:
        (folder / "tables").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileProblem(folder, f"cannot be made: {error.strerror or error}.") from error
    write_json_atomic(path, told)


def _network(components: list[tuple[str, tuple[float, ...]]], config: PretrainConfig) -> ScheduleNetwork:
    return ScheduleNetwork(Components.of(components), config.hidden, seed=config.seed)


RANGES = np.array([2.5, 2.5, 4.0, 6.0, 5.0, 1.0, 4.0, 3.0, 1.0])
"""The values that weights are drawn from, uniformly, before they are spread by a log-normal factor."""
SPREAD, IS_ZERO = 0.7, 0.25
"""Sigma of that factor, and the share of weights that are 0."""
VARIED_COMPONENTS, VARIATION, LEAST = 0.6, 0.4, 0.3
"""Share of weights that a variation changes, by which part of themselves, and their least value for it."""

Floats = NDArray[np.float64]


def draw(generator: np.random.Generator, count: int) -> Floats:
    """(count, 9) weights; a quarter of them are 0, some of `module` and half of `order` are negative."""
    weights = generator.random((count, 9)) * RANGES * np.exp(generator.normal(0.0, SPREAD, (count, 9)))
    weights[:, 7] *= np.where(generator.random(count) < 0.3, -0.3, 1.0)
    weights[:, 8] *= np.where(generator.random(count) < 0.5, -1.0, 1.0)
    weights[generator.random(weights.shape) < IS_ZERO] = 0.0
    return np.asarray(weights.round(2))


def vary(generator: np.random.Generator, bases: Floats, count: int) -> Floats:
    """(count, 9) weights around those of `bases`, more than half of each varied; `memory` stays at 0 or more."""
    parents = bases[generator.integers(len(bases), size=count)]
    scale = VARIATION * np.maximum(np.abs(parents), LEAST) * (generator.random(parents.shape) < VARIED_COMPONENTS)
    weights = parents + generator.normal(size=parents.shape) * scale
    weights[:, 5] = np.maximum(weights[:, 5], 0.0)
    return np.asarray(weights.round(2))


def over_groupings(weights: Floats) -> list[Pair]:
    """Every one of W weights (W, 9) over every grouping."""
    return [(name, tuple(row)) for row in weights.tolist() for name in GROUPINGS]


LEARNING_RATE, WEIGHT_DECAY = 3e-3, 1e-2
SHARPNESS = 12.0
"""How sharply the better of two components is preferred where their regret is learned: e-fold for 8 %."""
REGRET = 2.0
"""Weight of the regret beside the squared error."""
ABSOLUTE = 0.05
"""Weight of the common error of all placements of a problem, which changes no order."""
MOST_SCENARIOS = 256
LEAST_SPREAD = 1e-3


def fit(network: ScheduleNetwork, table: Table, steps: int) -> ScheduleNetwork:
    """`network`, its gate, ranker and scenarios learned from a table whose columns are its components.

    Both are regressions of log step times, and policies at once: the expected step time of a softmax over components
    is lowered along its exact gradient, as every component was simulated on every problem.

    Args:
        network: learns, in place.
        table: (P, C); problems that no component fits on teach nothing.
        steps: gradient steps (Adam with weight decay; Loshchilov and Hutter 2019) of each.
    """
    table = table.rows(np.flatnonzero(np.isfinite(table.log_times).any(axis=1)))
    if not len(table.summary):
        return network
    summary = torch.from_numpy(table.summary)
    with torch.no_grad():
        network.summary_mean.copy_(summary.mean(dim=0))
        network.summary_scale.copy_(summary.std(dim=0, correction=0).clamp(min=LEAST_SPREAD))
    ratios = torch.from_numpy(table.log_ratios).float()
    _start_at(network.gate, ratios.mean(dim=0))
    _descend(network.gate, steps, lambda: _loss(network.component_scores(summary), ratios))
    estimates, wide = torch.from_numpy(table.estimates), summary[:, None].expand(-1, ratios.shape[1], -1)
    times = torch.from_numpy(capped_log_times(table)).float()
    _descend(network.ranker, steps, lambda: _loss(network.log_times(estimates, wide), times, ABSOLUTE))
    with torch.no_grad():
        missed = times - network.log_times(estimates, wide)
        missed -= missed.mean(dim=1, keepdim=True)
        network.scenarios = missed[:: max(-(-len(missed) // MOST_SCENARIOS), 1)].contiguous()
    return network


def capped_log_times(table: Table) -> NDArray[np.float64]:
    """(P, C) log step times, none worse than `WORST` times the problem's best; on each, something must fit."""
    return np.asarray(table.log_times.min(axis=1, keepdims=True) + table.log_ratios)


def _loss(scores: Tensor, times: Tensor, absolute: float = 0.0) -> Tensor:
    """Squared error within each problem, and the regret of a softmax over its components."""
    missed = scores - times
    common = missed.mean(dim=1, keepdim=True)
    share = torch.softmax(-SHARPNESS * scores, dim=1)
    regret = (share * (times - times.min(dim=1, keepdim=True).values)).sum(dim=1)
    loss: Tensor = ((missed - common) ** 2).mean() + REGRET * regret.mean() + absolute * (common**2).mean()
    return loss


def _start_at(net: nn.Sequential, values: Tensor) -> None:
    """Makes a network return `values` for any input."""
    last = net[-1]
    assert isinstance(last, nn.Linear)
    with torch.no_grad():
        last.bias.copy_(values)


def _descend(net: nn.Module, steps: int, loss_of: Callable[[], Tensor]) -> None:
    """Takes gradient steps that become shorter and shorter along half a cosine."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        descend(optimizer, loss_of())
        schedule.step()


COUNTS = (1, 4, 16, 64)
"""Numbers of guesses of which the best one counts."""


def held_out(network: ScheduleNetwork, table: Table) -> dict[str, float]:
    """Geometric means over problems of the best of some guesses over the best of all components.

    Args:
        network: guesses.
        table: (P, C) of its components on other problems; those that none of them fits on are left out.

    Returns:
        The source of guesses (`gate` alone, `ranker`, or `listed` for the components in their order), and their number.
    """
    table = table.rows(np.flatnonzero(np.isfinite(table.log_times).any(axis=1)))
    summary = torch.from_numpy(table.summary)
    wide = summary[:, None].expand(-1, table.log_times.shape[1], -1)
    with torch.no_grad():
        gate = network.component_scores(summary).double().numpy()
        ranker = network.log_times(torch.from_numpy(table.estimates), wide).double().numpy()
    scenarios, ratios = network.scenarios.double().numpy(), table.log_ratios
    orders = {
        "gate": [choose(row, scenarios, max(COUNTS)) for row in gate],
        "ranker": [choose(row, scenarios, max(COUNTS)) for row in ranker],
        "listed": [list(range(table.log_times.shape[1]))] * len(ratios),
    }
    return {
        f"{name}@{count}": float(
            np.exp(np.mean([row[order[:count]].min() for row, order in zip(ratios, found, strict=True)]))
        )
        for name, found in orders.items()
        for count in COUNTS
    }


WORST = 3.0
"""Ratio to a problem's best from which on placements are equally bad, those that do not fit among them."""
_CHUNK = 64
Row = dict[str, NDArray[Any]]
"""One problem of a table, by the names of its fields."""


@dataclass(frozen=True, eq=False)
class Table:
    """P problems, and the step times of M pairs of a grouping and weights on each.

    Attributes:
        summary: (P, 22) float32, of the problems.
        log_times: (P, M) float64, logs of simulated step times in seconds, infinite where memory does not suffice.
        estimates: (P, M, 6) float64, features of the placements without simulation.
    """

    summary: NDArray[np.float32]
    log_times: NDArray[np.float64]
    estimates: NDArray[np.float64]

    @property
    def log_ratios(self) -> NDArray[np.float64]:
        """(P, M) float64: logs of step times over the problem's best, at most that of `WORST`."""
        best = self.log_times.min(axis=1, keepdims=True)
        ratios = np.where(np.isfinite(self.log_times), self.log_times - np.where(np.isfinite(best), best, 0.0), np.inf)
        return np.minimum(ratios, np.log(WORST))

    def rows(self, chosen: NDArray[np.integer]) -> Table:
        """The table of some of the problems."""
        return Table(self.summary[chosen], self.log_times[chosen], self.estimates[chosen])


class Tables:
    """A folder of tables, a file for each problem, so that work goes on where it was stopped.

    Args:
        folder: where they are.
        problem_of: the problem of a stage and a number.
        cluster: whose workers simulate, a problem each; this process does where there is none.
    """

    def __init__(self, folder: Path, problem_of: Callable[[int, int], Problem], cluster: Cluster | None = None) -> None:
        self._folder, self._problem_of = folder, problem_of
        self._map = _one_by_one if cluster is None else cluster.map

    def simulate(self, name: str, stage: int, count: int, pairs: Sequence[Pair], say: Callable[[str], None]) -> Table:
        """The table of `pairs` on the first `count` problems of a stage; tables in the folder are not made again.

        Args:
            name: of the table's files.
            stage: whose problems.
            count: of problems.
            pairs: names of groupings and weights.
            say: told how far it is, ten times.

        Raises:
            FileProblem: a file of the folder is malformed, or of other pairs.
            RunnerError: the cluster is lost.
        """
        paths = [self._folder / f"{name}-{number:05d}.safetensors" for number in range(count)]
        rows = {number: _read(path, len(pairs)) for number, path in enumerate(paths) if path.exists()}
        missing = [number for number in range(count) if number not in rows]
        for index, row in self._map(partial(_simulated, self._problem_of, stage, pairs), missing):
            write_bytes_atomic(paths[missing[index]], save(row))
            rows[missing[index]] = row
            if len(rows) % max(count // 10, 1) == 0:
                say(f"{name}: {len(rows):,} of {count:,} problems")
        keys = ("summary", "log_times", "estimates")
        return Table(*(np.stack([rows[number][key] for number in range(count)]) for key in keys))


def _one_by_one(function: Callable[[int], Row], items: Sequence[int]) -> Iterator[tuple[int, Row]]:
    return enumerate(map(function, items))


def _simulated(problem_of: Callable[[int, int], Problem], stage: int, pairs: Sequence[Pair], number: int) -> Row:
    with one_thread_here():
        return simulate_pairs(problem_of(stage, number), pairs)


def simulate_pairs(problem: Problem, pairs: Sequence[Pair]) -> Row:
    """A problem's row of a `Table`, by the names of its fields; equal placements are simulated once."""
    schedules, simulator = ListSchedules(problem), Simulator(problem, threads=1)
    times, estimates = np.empty(len(pairs)), []
    for first in range(0, len(pairs), _CHUNK):
        devices = schedules.place(pairs[first : first + _CHUNK])
        rows, place = np.unique(devices, axis=0, return_inverse=True)
        place = place.reshape(-1)
        times[first : first + _CHUNK] = simulator.step_times(np.ascontiguousarray(rows))[place]
        estimates.append(schedules.estimate(np.ascontiguousarray(rows))[place])
    return {
        "summary": problem_summary(problem),
        "log_times": np.log(np.maximum(times, 1e-300)),
        "estimates": np.concatenate(estimates),
    }


def _read(path: Path, count: int) -> Row:
    try:
        row = load(path.read_bytes())
    except (OSError, SafetensorError) as error:
        raise FileProblem(path, f"no table of simulated placements: {error}.") from error
    if row["log_times"].shape != (count,):
        raise FileProblem(path, f"a table of {row['log_times'].shape[0]} pairs, expected {count}: begin anew.")
    return dict(row)
