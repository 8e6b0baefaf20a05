"""`pretrain`: weights of the policy `schedule` for any problem, learned from simulated placements of many."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlplace.errors import FileProblem
from rlplace.files import jsonable, read_json, write_json_atomic
from rlplace.measure.run.threads import one_thread_here
from rlplace.policy.schedule.network import KIND, Components, ScheduleNetwork, save_network
from rlplace.training.pretrain.components import best_together, draw, over_groupings, vary
from rlplace.training.pretrain.config import PretrainConfig
from rlplace.training.pretrain.fit import fit
from rlplace.training.pretrain.held_out import held_out
from rlplace.training.pretrain.problems import ProblemSource
from rlplace.training.pretrain.tables import Table, Tables

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
    """What was learned, as `--json` prints it; the weights are `schedule.safetensors` in `folder`.

    Weights of the list scheduler are drawn and simulated over all groupings, the best are varied, and those that do
    best together become components; each is simulated on further problems, and the gate and the ranker learn from
    that: first without every fifth problem, on which the guesses are judged, then from all.

    What was simulated is in `folder/tables`, a file for each problem: a run that was stopped at any moment goes on
    there. On one thread the same config gives the same weights, to the bit.

    Args:
        config: how much.
        folder: of the result.
        resume: go on with what is in `folder`.
        say: told how it goes.
        cluster: whose workers simulate; what is learned is the same.

    Raises:
        FileProblem: `folder` holds a run, and `resume` is not asked for; or it holds another one.
        UserError: a graph file cannot be read.
        RunnerError: the cluster is lost; `resume` goes on from what came.
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
        say("best of some guesses over the best of all components, on held-out problems: " + _words(figures))
    network = fit(_network(components, config), table, config.steps)
    path = folder / f"{KIND}.safetensors"
    save_network(network, path, _about(config, table))
    result = {"schema": 1, "weights": str(path), "components": len(components), "held_out": figures}
    result["seconds"] = time.monotonic() - begin
    write_json_atomic(folder / FIGURES, result)
    say(f"{path}: {path.stat().st_size / 1e6:.2f} MB")
    return result


def _begin(config: PretrainConfig, folder: Path, resume: bool) -> None:
    """Makes the folder, or checks that what is there is the same run."""
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


def _about(config: PretrainConfig, table: Table) -> str:
    count = len(table.summary) + config.drawn_problems + config.varied_problems
    return f"rlplace pretrain --seed {config.seed}: {count} problems, torch {torch.__version__}"


def _words(figures: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in figures.items())
