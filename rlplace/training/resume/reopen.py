"""`reopen`: what a run was asked to do, looked up again on this machine."""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass
from pathlib import Path

from rlplace.errors import FileProblem, InvalidValue
from rlplace.measure.hosts.host import Host
from rlplace.measure.hosts.host_file import host_from_dict
from rlplace.measure.hosts.resolve import is_host_file, resolve_host
from rlplace.policy.options import WEIGHTS_ENDING
from rlplace.records import shortened
from rlplace.say import clean, say
from rlplace.session.folder import RunFolder
from rlplace.session.steps import versions
from rlplace.training.config import TrainConfig
from rlplace.training.resume.config_file import FILE, HARMLESS, KeptRequest, Request, again_words, read_request
from rlplace.workloads import WorkloadSpec, parse_kept_workload


@dataclass(frozen=True)
class Named:
    """What the user names beside `--resume`; None leaves it to the run, as far as a run folder is believed.

    A folder may come from a stranger. What it says is believed where it only restricts; what reaches a host, a path, a
    tracker or code counts only if the user names it again.
    """

    workload: str | None = None
    """The workload again: a function or a file of the user's."""
    budget_s: float | None = None
    """Seconds of search in all."""
    more_s: float = 0.0
    """Seconds of search on top of what the run was given."""
    store: str | None = None
    """As of `TrainConfig`, and the next three likewise."""
    track: str | None = None
    cluster: str | None = None
    isolated: bool | None = None
    init: str | None = None
    """Weights to begin with, where those of the run are a file."""
    priors: Path | None = None
    """What is expected of hosts, where that of the run is a file."""


NOTHING = Named()
"""Everything is left to the run."""


def reopen(run: RunFolder, named: Named) -> tuple[Request, bool]:
    """What the run in a folder was asked to do, and whether it gets a larger budget now.

    Args:
        run: the folder.
        named: what the user names again.

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
    spec = _spec(kept, named.workload, where)
    host = _host(run, kept, where)
    if host.fingerprint != kept.host_fingerprint:
        raise FileProblem(
            where,
            f"the run is of host {kept.host!r} with other devices than it has here and now (fingerprint "
            f"{kept.host_fingerprint}, now {host.fingerprint}): go on where it was started, or name the new host with "
            "`--host`.",
        )
    config = _extended(believed(kept.config, named, where), named)
    request = Request(spec, host, config, kept.host, kept.gangs, kept.asked, kept.placed_again, kept.workload_seed)
    return request, config.budget_s > kept.config.budget_s


def believed(config: TrainConfig, named: Named, where: str) -> TrainConfig:
    """The options of a run folder, as far as they are believed, with those that the user names again.

    What is not believed is said on stderr, also where no progress is shown.

    Args:
        config: what the folder says.
        named: what the user names again.
        where: the folder's file, for messages.

    Raises:
        InvalidValue: the run began with a file that the user does not name again, or with another one: what was
            learned from it does not hold without it.
    """
    for option, kept, again in (
        ("init", config.learn.init, named.init),
        ("priors", config.search.priors, named.priors),
    ):
        is_file = kept is not None and (option == "priors" or str(kept).endswith(WEIGHTS_ENDING))
        if (again is not None and again != kept) or (is_file and again is None):
            expected = f"{shortened(str(kept))!r}, as it was started" if kept is not None else "none, as it was started"
            hint = "A file is opened only if you name it again." if is_file else ""
            raise InvalidValue(f"--{option}", None if again is None else str(again), expected, where=where, hint=hint)
    changed = {}
    for option, harmless in HARMLESS.items():
        kept, again = getattr(config, option), getattr(named, option)
        changed[option] = kept if again is None else again
        if again is None and kept not in harmless:
            changed[option] = harmless[0]
            told = dataclasses.replace(TrainConfig(), **{option: kept})
            words = shortened(shlex.join(again_words(told)))
            line = f"{where} asks for `{words}`, which counts only if you give it again: going on without it"
            say(clean(line))
    return dataclasses.replace(config, **changed)


def _spec(kept: KeptRequest, workload: str | None, where: str) -> WorkloadSpec:
    """The workload of the run; a user's function is imported, and a file opened, only if they name it."""
    command = shlex.join(["rlplace", "train", kept.workload, "--resume", str(Path(where).parent)])
    spec = parse_kept_workload(kept.workload, workload, where=where, command=command)
    is_moved = spec.is_file and Path(spec.name).name == Path(kept.workload).name  # its graph is compared later
    if workload is not None and kept.workload not in (workload, str(spec)) and not is_moved:
        hint = "Name that one, or start a run of its own."
        raise InvalidValue(
            "workload", workload, f"{shortened(kept.workload)!r}, the run's", where="train --resume", hint=hint
        )
    return spec


def _host(run: RunFolder, kept: KeptRequest, where: str) -> Host:
    """The host of the run; that of a host file as the run keeps it, since the file is not the folder's."""
    if not is_host_file(kept.host):
        return resolve_host(kept.host, gangs=kept.gangs)
    if not run.has("problem.json"):
        raise FileProblem(
            where,
            f"the run is of the host file {shortened(kept.host)!r} and stopped before it kept what that says: start it "
            "again.",
        )
    return host_from_dict(run.read_json("problem.json").get("host"), str(run.path("problem.json")))


def _extended(config: TrainConfig, named: Named) -> TrainConfig:
    budget_s = config.budget_s + named.more_s if named.more_s else named.budget_s
    if budget_s is None:
        return config
    if config.evaluations is not None:
        hint = "Its budget are placements, so that the same seed finds the same: leave `--budget` out."
        raise InvalidValue("budget", budget_s, "none for a run of `--evaluations`", where="train --resume", hint=hint)
    if budget_s < config.budget_s:
        expected = f"at least {config.budget_s:g} s, which the run was given"
        hint = (
            "It is the budget of the whole run, with what was spent of it before: "
            f"`--budget +{budget_s:g}s` gives the run {budget_s:g} s more."
        )
        raise InvalidValue("budget", budget_s, expected, where="train --resume", hint=hint)
    return dataclasses.replace(config, budget_s=budget_s)
