"""`rlplace pretrain`: weights of a policy that suit any problem.

`rlplace fit-priors`: what to expect of a new host, from what runs learned about theirs.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Annotated

import tyro

from rlplace.cli.arguments import print_json
from rlplace.errors import FileProblem, InvalidValue
from rlplace.policy.options import PretrainConfig
from rlplace.say import say


def pretrain(
    out: tyro.conf.Positional[Path],
    config: Annotated[PretrainConfig, tyro.conf.arg(name="")],
    resume: bool = False,
    cluster: str = "off",
    json: bool = False,
    quiet: bool = False,
) -> None:
    """Train weights of the policy `schedule` on many simulated problems; `--init FILE` takes them.

    Args:
        out: a folder for the weights, and for what was simulated on the way
        config: how much
        resume: go on where a run with the same options was stopped
        cluster: whose workers simulate: off, auto (the Ray cluster that runs here, else one that is started here), or
            the ADDRESS of one
        json: print one JSON object on stdout
        quiet: no progress
    """
    from rlplace.cluster import reach
    from rlplace.pretrain.pretraining import pretrain as train

    tell = (lambda text: None) if quiet else say
    with reach(cluster, say=tell) as workers:
        result = train(config, out, resume=resume, say=tell, cluster=workers)
    if json:
        print_json(result)


def fit_priors(
    runs: tyro.conf.Positional[tuple[Path, ...]] = (),
    out: Path = Path("priors.json"),
    store: str = "off",
    overwrite: bool = False,
    json: bool = False,
) -> None:
    """Fit what is expected of a new host to what runs learned about theirs.

    Args:
        runs: run folders with a `host_model.json`, or such files
        out: where the priors go
        store: also what searches kept in a store: auto (the one in your cache folder), a file or a run folder
        overwrite: replace an existing file
        json: print one JSON object on stdout
    """
    from rlplace.measure.host_model.learned_host import FILE, load_learned_host
    from rlplace.measure.host_model.priors import load_priors, save_priors
    from rlplace.measure.host_model.refit import fit_priors as fit
    from rlplace.store.folders import OFF, store_path
    from rlplace.store.log import LEAST_IDLE
    from rlplace.store.store import MeasurementStore

    if not runs and store == OFF:
        hint = "For example: rlplace fit-priors runs/a runs/b, or rlplace fit-priors --store auto."
        raise InvalidValue("number of runs", 0, "at least one run folder", where="fit-priors", hint=hint)
    files = [(path / FILE if os.path.isdir(path) else path).resolve() for path in runs]
    for place, (path, file) in enumerate(zip(runs, files, strict=True)):
        if file in files[:place]:
            raise InvalidValue("RUN", str(path), "every run once", where="fit-priors")
    if out.resolve() in files:
        raise FileProblem(out, "what was learned is read from here: name another file for the priors.")
    if os.path.lexists(out) and not overwrite:
        raise FileProblem(out, "is there already: name another file, or give `--overwrite`.")
    learned = [load_learned_host(path) for path in runs]
    if (database := store_path(store)) is not None:
        with MeasurementStore.read(database) as kept:
            learned += [host for host in kept.learned_hosts(least_idle=LEAST_IDLE) if host not in learned]
    priors, fitted = fit(learned, load_priors())
    save_priors(priors, out)
    if json:
        figures = [dataclasses.asdict(figure) for figure in fitted]
        print_json({"schema": 1, "out": str(out), "num_runs": len(learned), "fitted": figures})
        return
    for figure in fitted:
        source = priors.section(figure.section)[figure.name].source
        say(f"{figure.section:10} {figure.name:16} {figure.value:<10g} {source}")
    say(f"{out}: {len(fitted)} figure{'s' * (len(fitted) != 1)} fitted, the others as they ship")
