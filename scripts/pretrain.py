"""Trains weights of the policy `schedule` for any problem: python scripts/pretrain.py FOLDER [--resume] [--help].

`python -m rlplace train ... --init FOLDER/schedule.safetensors` takes them. Weights of the list scheduler are drawn,
varied and chosen to do best together (`draw`, `vary`); `simulated` keeps their simulated step times in FOLDER; `fit`
trains the gate and the ranker of `ScheduleNetwork` from them; `held_out` judges the guesses of a network on problems
that it was not trained on. `ProblemSource` makes the problems, each a function of a seed and a number.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from numpy.typing import NDArray
from pydantic import Field
from safetensors import SafetensorError
from safetensors.numpy import load, save
from torch import Tensor, nn

from rlplace.env.sequential import GROUPINGS, ListSchedules, Pair
from rlplace.errors import FileProblem, RlplaceError, UserError
from rlplace.files import jsonable, os_errors, read_json, write_bytes_atomic, write_json_atomic
from rlplace.graphs import OpGraph
from rlplace.graphs.synthetic import synthetic
from rlplace.measure import Host, Problem, Simulator, resolve_host
from rlplace.measure.hosts.host_file import Wiring, lay_routes
from rlplace.measure.timing.threads import one_thread_here
from rlplace.policy.learn.learners import descend
from rlplace.policy.schedule import best_together, choose
from rlplace.policy.schedule_network import KIND, Components, ScheduleNetwork, problem_summary, save_network
from rlplace.records import AtLeastOne, Seed, Share, Whole, record

DRAWN, VARIED, KNOWN = range(3)
"""Stages, whose problems have nothing to do with each other."""
JUDGED = 5
"""One problem of so many is left out of a first training, to judge it."""
CONFIG, FIGURES = "pretrain.json", "figures.json"


@record(frozen=True)
class PretrainConfig:
    """How weights of the policy `schedule` are trained."""

    seed: Seed = 0
    """Of problems, weights and gradient steps."""
    num_drawn: AtLeastOne = 240
    """Weights of the list scheduler that are drawn, each tried over every grouping."""
    drawn_problems: AtLeastOne = 64
    """Problems that they are tried on."""
    num_bases: AtLeastOne = 24
    """Those of them that do best together, which are varied."""
    num_varied: AtLeastOne = 160
    """Variations of them."""
    varied_problems: AtLeastOne = 120
    """Problems that these are tried on."""
    num_components: AtLeastOne = 128
    """Groupings with weights that the policy knows, of those tried."""
    problems: Annotated[Whole, Field(ge=2)] = 600
    """Problems that each of them is simulated on, for the networks to learn from."""
    synthetic: Share = 0.4
    """Share of problems whose graphs are synthetic; the others are captured models, or `graphs`."""
    captured: bool = True
    """Capture models too; without, all graphs are synthetic or of `graphs`."""
    graphs: tuple[Path, ...] = ()
    """Graph files that are trained on besides."""
    hidden: Annotated[Whole, Field(ge=1, le=4096)] = 32
    """Width of the networks."""
    steps: AtLeastOne = 600
    """Gradient steps of each network."""


@one_thread_here()
def pretrain(
    config: PretrainConfig,
    folder: Path,
    *,
    resume: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """The result of training; the weights are `schedule.safetensors` in `folder`.

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

    Raises:
        FileProblem: `folder` holds a run, and `resume` is not asked for; or it holds another one.
        UserError: a graph file cannot be read.
    """
    begin = time.monotonic()
    _begin(config, folder, resume)
    simulate = partial(simulated, folder / "tables", ProblemSource(config).problem, say)
    generator = np.random.default_rng(config.seed)
    weights = draw(generator, config.num_drawn)
    table = simulate("drawn", DRAWN, config.drawn_problems, over_groupings(weights))
    columns = best_together(table.log_ratios, config.num_bases)
    bases = weights[list(dict.fromkeys(column // (table.log_times.shape[1] // len(weights)) for column in columns))]
    pairs = over_groupings(np.concatenate((bases, vary(generator, bases, config.num_varied))))
    table = simulate("varied", VARIED, config.varied_problems, pairs)
    components = [pairs[column] for column in best_together(table.log_ratios, config.num_components)]
    table = simulate("known", KNOWN, config.problems, components)
    is_judged = np.arange(len(table.summary)) % JUDGED == JUDGED - 1
    untrained = partial(ScheduleNetwork, Components.of(components), config.hidden, seed=config.seed)
    figures: dict[str, float] = {}
    if is_judged.any():
        judged = fit(untrained(), table.rows(np.flatnonzero(~is_judged)), config.steps)
        figures = held_out(judged, table.rows(np.flatnonzero(is_judged)))
        told = ", ".join(f"{name} {value:.3f}" for name, value in figures.items())
        say(f"best of some guesses over the best of all components, on held-out problems: {told}")
    network = fit(untrained(), table, config.steps)
    path = folder / f"{KIND}.safetensors"
    count = len(table.summary) + config.drawn_problems + config.varied_problems
    save_network(
        network, path, f"scripts/pretrain.py --seed {config.seed}: {count} problems, torch {torch.__version__}"
    )
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
    with os_errors(folder, "made"):
        (folder / "tables").mkdir(parents=True, exist_ok=True)
    write_json_atomic(path, told)


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
    summary, ratios = torch.from_numpy(table.summary), torch.from_numpy(table.log_ratios).float()
    with torch.no_grad():
        network.summary_mean.copy_(summary.mean(dim=0))
        network.summary_scale.copy_(summary.std(dim=0, correction=0).clamp(min=LEAST_SPREAD))
        network.gate.get_parameter("2.bias").copy_(ratios.mean(dim=0))  # what its last layer returns at first
    _descend(network.gate, steps, lambda: _loss(network.component_scores(summary), ratios))
    estimates, wide = torch.from_numpy(table.estimates), summary[:, None].expand(-1, ratios.shape[1], -1)
    times = torch.from_numpy(
        table.log_times.min(axis=1, keepdims=True) + table.log_ratios
    ).float()  # none is worse than `WORST` times the best
    _descend(network.ranker, steps, lambda: _loss(network.log_times(estimates, wide), times, ABSOLUTE))
    with torch.no_grad():
        missed = times - network.log_times(estimates, wide)
        missed -= missed.mean(dim=1, keepdim=True)
        network.scenarios = missed[:: max(-(-len(missed) // MOST_SCENARIOS), 1)].contiguous()
    return network


def _loss(scores: Tensor, times: Tensor, absolute: float = 0.0) -> Tensor:
    """Squared error within each problem, and the regret of a softmax over its components."""
    missed = scores - times
    common = missed.mean(dim=1, keepdim=True)
    share = torch.softmax(-SHARPNESS * scores, dim=1)
    regret = (share * (times - times.min(dim=1, keepdim=True).values)).sum(dim=1)
    loss: Tensor = ((missed - common) ** 2).mean() + REGRET * regret.mean() + absolute * (common**2).mean()
    return loss


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


def simulated(
    folder: Path,
    problem_of: Callable[[int, int], Problem],
    say: Callable[[str], None],
    name: str,
    stage: int,
    count: int,
    pairs: Sequence[Pair],
) -> Table:
    """The table of `pairs` on the first `count` problems of a stage.

    Every problem has a file in the folder, and is not simulated again where it is there: work goes on where it stopped.

    Args:
        folder: where the files are.
        problem_of: the problem of a stage and a number.
        say: told how far it is, ten times.
        name: of the table's files.
        stage: whose problems.
        count: of problems.
        pairs: names of groupings and weights.

    Raises:
        FileProblem: a file of the folder is malformed, or of other pairs.
    """
    paths = [folder / f"{name}-{number:05d}.safetensors" for number in range(count)]
    rows: list[Row] = []
    for number, path in enumerate(paths):
        if path.exists():
            rows.append(_read(path, len(pairs)))
        else:
            rows.append(simulate_pairs(problem_of(stage, number), pairs))
            write_bytes_atomic(path, save(rows[-1]))
        if len(rows) % max(count // 10, 1) == 0:
            say(f"{name}: {len(rows):,} of {count:,} problems")
    keys = ("summary", "log_times", "estimates")
    return Table(*(np.stack([row[key] for row in rows]) for key in keys))


def simulate_pairs(problem: Problem, pairs: Sequence[Pair]) -> Row:
    """A problem's row of a `Table`, by the names of its fields; equal placements are simulated once."""
    schedules, simulator = ListSchedules(problem), Simulator(problem, threads=1)
    times, estimates = np.empty(len(pairs)), []
    for first in range(0, len(pairs), _CHUNK):
        rows, place = np.unique(schedules.place(pairs[first : first + _CHUNK]), axis=0, return_inverse=True)
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


CAPTURED = (
    ("t5@paper,layers=4", 1),
    ("vit@paper,layers=8", 1),
    ("whisper@paper", 1),
    ("llama@paper,layers=4", 1),
    ("resnet50@paper", 1),
    ("evoformer@paper,blocks=2", 1),
    ("t5@paper,layers=2,batch=32", 1),
    ("vit@paper,layers=4,batch=256", 1),
    ("whisper@paper,layers=3,batch=2", 1),
    ("llama@paper,layers=8,width=1024,heads=16,kv_heads=16,mlp=2752,batch=4,tokens=512", 1),
    ("resnet50@paper,batch=128", 1),
    ("evoformer@paper,blocks=1,residues=128", 1),
    ("vit@paper,layers=4,batch=256", 4),
    ("t5@paper,layers=2,batch=32", 2),
    ("resnet50@paper,batch=128", 2),
)
"""Training steps of models, and into how many micro-batches each is cut."""
BUILT_FOR = "4xV100-pcie"
"""Any simulated host: models are the same on all of them, and never allocated."""
TIGHT, ROOM = 0.12, (1.6, 4.0)
"""Probability that the memory of devices is cut, and to how many times the bytes that a step keeps."""
Range = tuple[float, float]
SHAPES: dict[str, dict[str, Range]] = {
    "layered": {"layers": (6, 24), "width": (3, 12)},
    "fork_join": {"stages": (3, 14), "width": (2, 6), "depth": (1, 3)},
    "series_parallel": {"ops": (40, 240)},
    "recurrent": {"layers": (1, 8), "steps": (6, 30)},
    "mixture_of_experts": {"layers": (2, 8), "experts": (3, 8)},
    "encoder_decoder": {"encoder": (2, 8), "decoder": (2, 8), "heads": (2, 8)},
}
"""Synthetic families, and the least and most of their parameters."""
FLOPS, OUTPUT_BYTES, SPREADS = (1e8, 3e10), (2.0**16, 2.0**25), (0.2, 1.2)
"""Medians of an op's work and output, drawn by their logs, and the spread of both."""


class ProblemSource:
    """Problem number i of a seed is always the same one.

    Args:
        config: which graphs there are.

    Raises:
        UserError: a graph file cannot be read.
    """

    def __init__(self, config: PretrainConfig) -> None:
        self._config = config
        self._real: list[OpGraph | tuple[str, int]] = list(CAPTURED) if config.captured else []
        if config.graphs:
            from rlplace.graphs import load_graph

            self._real += [load_graph(path) for path in config.graphs]  # other machines may not have the files

    def problem(self, stage: int, number: int) -> Problem:
        """A graph on a random host, with estimated costs and the default grouping.

        Args:
            stage: problems of different stages have nothing to do with each other.
            number: which of the stage.
        """
        draw = np.random.default_rng([self._config.seed, stage, number])
        host = random_host(draw)
        if not self._real or draw.random() < self._config.synthetic:
            graph = _synthetic(draw)
        else:
            chosen = self._real[int(draw.integers(len(self._real)))]
            graph = chosen if isinstance(chosen, OpGraph) else _capture(*chosen)
        problem = Problem.estimate(graph, host)
        if draw.random() >= TIGHT:
            return problem
        kept = graph.parameter_bytes + graph.gradient_bytes + graph.state_bytes
        room = float(np.exp(draw.uniform(*np.log(ROOM)))) * (kept.sum() + graph.output_bytes.sum())
        devices = tuple(
            replace(
                device, memory_bytes=min(device.memory_bytes, int(room / host.num_devices) + device.context_bytes + 1)
            )
            for device in host.devices
        )
        return Problem.estimate(graph, replace(host, devices=devices))


@lru_cache(maxsize=64)
def _capture(workload: str, count: int) -> OpGraph:
    """The captured step of a workload, cut into micro-batches."""
    from rlplace.session.prepare import capture_workload
    from rlplace.workloads import build_for, parse_workload

    built = build_for(parse_workload(workload), resolve_host(BUILT_FOR), 0)
    return replace(capture_workload(built, count), program=None)


def _synthetic(draw: np.random.Generator) -> OpGraph:
    family = str(draw.choice(list(SHAPES)))
    params: dict[str, Any] = {
        name: int(draw.integers(int(low), int(high) + 1)) for name, (low, high) in SHAPES[family].items()
    }
    flops, output_bytes = (float(np.exp(draw.uniform(*np.log(bounds)))) for bounds in (FLOPS, OUTPUT_BYTES))
    return synthetic(
        family,
        seed=int(draw.integers(2**31)),
        flops=flops,
        output_bytes=output_bytes,
        spread=float(draw.uniform(*SPREADS)),
        optimizer=str(draw.choice(("sgd", "adam"))),
        **params,
    )


KINDS = ("2xK80", "4xV100-pcie", "4xA100-nvlink", "4xRTX3090-pcie", "8xH100-nvswitch", "RTX4090+RTX3060")
"""Presets whose first device is a kind that hosts are made of."""
WIRES = {"pcie3": (11.4e9, 14e-6), "pcie4": (22e9, 12e-6), "nvlink": (90e9, 2e-6), "nvswitch": (270e9, 2e-6)}
"""Bytes per second and latency in seconds between the devices of a node, as presets have them."""
DEVICE_COUNTS = (2, 3, 4, 6, 8, 16)
"""How many devices there may be."""
ONE_KIND, TWO_NODES, RATE_SPREAD = 0.7, 0.3, 0.15
"""Chance that all devices are of a kind, that four and more are on two nodes, and the spread of the log of a rate."""


def random_host(draw: np.random.Generator) -> Host:
    """Two to sixteen devices of one kind, or of two; on one wire, or on two nodes that InfiniBand joins."""
    count = int(draw.choice(DEVICE_COUNTS, p=(0.22, 0.12, 0.28, 0.1, 0.18, 0.1)))
    hosts = [resolve_host(str(name)) for name in draw.choice(KINDS, 2, replace=False)]
    first = count if draw.random() < ONE_KIND else int(draw.integers(1, count))
    kinds = [hosts[0].devices[0]] * first + [hosts[1].devices[0]] * (count - first)
    nodes = 2 if count >= 4 and draw.random() < TWO_NODES else 1
    names = [f"n{d * nodes // count}:{d}" for d in range(count)]
    rate, latency_s = WIRES[str(draw.choice(list(WIRES)))]
    rate *= float(np.exp(RATE_SPREAD * draw.normal()))
    wirings = [Wiring(f"wire-{node}", rate, latency_s, ports=(f"n{node}:*",)) for node in range(nodes)]
    wirings += [Wiring("ib", 22e9, 10e-6, ports=("*",))] * (nodes - 1)
    links, routes = lay_routes(wirings, names, "random host")
    devices = [replace(kind, name=name, dispatcher=name[:2]) for kind, name in zip(kinds, names, strict=True)]
    return replace(hosts[0], name="random", devices=tuple(devices), links=links, routes=routes, sources={})


def main(
    folder: tyro.conf.Positional[Path], config: Annotated[PretrainConfig, tyro.conf.arg(name="")], resume: bool = False
) -> None:
    """Trains weights of the policy `schedule` on many simulated problems; `rlplace train --init FILE` takes them.

    Args:
        folder: for the weights and the simulated data
        config: how much
        resume: go on where a run with the same options was stopped
    """
    pretrain(config, folder, resume=resume, say=partial(print, flush=True))


if __name__ == "__main__":
    try:
        tyro.cli(main, config=(tyro.conf.FlagCreatePairsOff,))
    except RlplaceError as error:
        print(f"pretrain: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 1)
