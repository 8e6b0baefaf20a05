"""`reopen`: what a run was asked to do, looked up again on this machine."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

from rlplace.errors import FileProblem, InvalidValue
from rlplace.measure.hosts.resolve import resolve_host
from rlplace.runs.folder import RunFolder
from rlplace.runs.setup import versions
from rlplace.training.config import TrainConfig
from rlplace.training.resume.config_file import FILE, KeptRequest, Request, read_request
from rlplace.workloads import WorkloadSpec, parse_workload


def reopen(run: RunFolder, workload: str | None, budget_s: float | None) -> tuple[Request, bool]:
    """What the run in a folder was asked to do, and whether it gets a larger budget now.

    Args:
        run: the folder.
        workload: as the user names it again; None where they do not.
        budget_s: seconds of search in all; None for what the run was given.

    Raises:
        FileProblem: other versions are installed, or the host is another.
        InvalidValue: the workload is another, or has to be named; or the budget is smaller than before.
        UserError: `config.json` is malformed, or names what there is not.
    """
    kept = read_request(run)
    where = str(run.path(FILE))
    if kept.versions != versions():
        installed = ", ".join(f"{name} {version}" for name, version in versions().items())
        made = ", ".join(f"{name} {version}" for name, version in kept.versions.items())
        raise FileProblem(
            where,
            f"the run was made with {made}, and here is {installed}: what it measured and learned does not hold for "
            "these. Go on with those, or start it again in another folder.",
        )
    spec = _spec(kept, workload, where)
    host = resolve_host(kept.host, gangs=kept.gangs)
    if host.fingerprint != kept.host_fingerprint:
        raise FileProblem(
            where,
            f"the run is of host {kept.host!r} with other devices than it has here and now (fingerprint "
            f"{kept.host_fingerprint}, now {host.fingerprint}): go on where it was started, or name the new host with "
            "`--host`.",
        )
    config = _extended(kept.config, budget_s)
    request = Request(spec, host, config, kept.host, kept.gangs, kept.asked, kept.placed_again, kept.workload_seed)
    return request, config.budget_s > kept.config.budget_s


def _spec(kept: KeptRequest, workload: str | None, where: str) -> WorkloadSpec:
    """The workload of the run; a user's function is imported only if they name it."""
    spec = parse_workload(kept.workload)
    if workload is not None and workload != kept.workload and str(parse_workload(workload)) != str(spec):
        own = "Name that one" if spec.is_function else "Leave it out"
        hint = f"{own}, or start a run of its own."
        raise InvalidValue("workload", workload, f"{kept.workload!r}, the run's", where="train --resume", hint=hint)
    if spec.is_function and workload is None:
        command = shlex.join(["rlplace", "train", kept.workload, "--resume", str(Path(where).parent)])
        hint = f"It is code, which is imported only if you name it: {command}"
        raise InvalidValue("workload", None, f"{kept.workload!r}, as it was started", where=where, hint=hint)
    return spec


def _extended(config: TrainConfig, budget_s: float | None) -> TrainConfig:
    if budget_s is None:
        return config
    if config.evaluations is not None:
        hint = "Its budget are placements, so that the same seed finds the same: leave `--budget` out."
        raise InvalidValue("budget", budget_s, "none for a run of `--evaluations`", where="train --resume", hint=hint)
    if budget_s < config.budget_s:
        expected = f"at least {config.budget_s:g} s, which the run was given"
        hint = "It is the budget of the whole run, with what was spent of it before."
        raise InvalidValue("budget", budget_s, expected, where="train --resume", hint=hint)
    return dataclasses.replace(config, budget_s=budget_s)
