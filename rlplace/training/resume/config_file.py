"""`config.json` of a run: what was asked for, as it is written, and read again to go on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlplace.decode import decode_record
from rlplace.errors import FileProblem, InvalidValue
from rlplace.graphs.grouping.constraints import Constraints
from rlplace.measure.hosts.host import Host
from rlplace.policy.options import WEIGHTS_ENDING, LearnConfig
from rlplace.records import described, read_record
from rlplace.seeds import check_seed
from rlplace.session.cut import WHOLE, CutOptions, Loss, parse_count
from rlplace.session.folder import RunFolder
from rlplace.session.steps import versions
from rlplace.training.agent.config import AgentConfig
from rlplace.training.config import SearchConfig, TrainConfig
from rlplace.training.methods import method_of
from rlplace.workloads import WorkloadSpec, default_size

FILE = "config.json"
HARMLESS: dict[str, tuple[object, ...]] = {
    "store": ("off", "auto"),
    "track": ("disabled",),
    "cluster": ("off",),
    "isolated": (None, True),
}
"""Options that reach a path, a tracker, a host or code, with those of their values that a run folder is believed; the
first stands for all others."""


@dataclass(frozen=True)
class Request:
    """What a run is asked to do.

    Attributes:
        spec: the workload.
        host: where.
        config: how.
        host_word: as the user named the host.
        gangs: whether the host has devices of several cores.
        asked: how the batch is to be cut.
        placed_again: the run on another host that its costs and placement were carried over from; empty without one.
        workload_seed: of the workload's weights and inputs.
    """

    spec: WorkloadSpec
    host: Host
    config: TrainConfig
    host_word: str
    gangs: bool = False
    asked: CutOptions = WHOLE
    placed_again: str = ""
    workload_seed: int = 0

    @property
    def own_workload(self) -> list[str]:
        """The word that names the workload again where the run goes on, unless the run folder is believed."""
        return [] if self.spec.is_believed else [str(self.spec)]

    def to_dict(self) -> dict[str, Any]:
        """What `config.json` holds: what was asked for, to the word, and what that comes to with nothing left open."""
        return {
            "schema": 1,
            "workload": str(self.spec),
            "workload_seed": self.workload_seed,
            "default_size": default_size(self.host),
            "host": self.host_word,
            "host_fingerprint": self.host.fingerprint,
            "gangs": self.gangs,
            "micro_batches": self.asked.to_dict(),
            "train": dataclasses.asdict(_resolved(self.config, self.host)),
            "asked": {"train": dataclasses.asdict(self.config), "micro_batches": self.asked.to_dict()},
            "placed_again": self.placed_again,
            "versions": versions(),
        }


def again_words(config: TrainConfig) -> list[str]:
    """The options that have to be given again where a run goes on: a run folder is not believed them.

    >>> again_words(TrainConfig(store="mine.db", isolated=False))
    ['--store', 'mine.db', '--in-process']
    """
    words = []
    for option, harmless in HARMLESS.items():
        if (value := getattr(config, option)) not in harmless:
            words += ["--in-process"] if option == "isolated" else [f"--{option}", str(value)]
    if (config.learn.init or "").endswith(WEIGHTS_ENDING):
        words += ["--init", str(config.learn.init)]
    if config.search.priors is not None:
        words += ["--priors", str(config.search.priors)]
    return words


@dataclass(frozen=True)
class KeptRequest:
    """What `config.json` says of a run, before its workload and host are looked up."""

    workload: str
    host: str
    host_fingerprint: str
    gangs: bool
    config: TrainConfig
    asked: CutOptions
    versions: dict[str, str]
    placed_again: str = ""
    workload_seed: int = 0


@dataclass(frozen=True)
class _Head:
    """Plain fields of `config.json`."""

    workload: str
    host: str
    gangs: bool
    host_fingerprint: str
    versions: dict[str, str]
    placed_again: str = ""
    workload_seed: int | None = None
    """None in runs of versions that had one seed for all."""


@dataclass(frozen=True)
class _Plain:
    """Plain fields of `TrainConfig`."""

    budget_s: float
    seed: int
    num_groups: int
    grouping: str
    acyclic: bool
    evaluations: int | None = None
    isolated: bool | None = None
    track: str = "disabled"
    cluster: str = "off"
    store: str = "auto"
    total_s: float | None = None


@dataclass(frozen=True)
class _Constraints:
    """`Constraints`, as JSON holds them."""

    pins: tuple[tuple[str, ...], ...] = ()
    exclusions: tuple[tuple[str, ...], ...] = ()
    together: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        for name in ("pins", "exclusions"):
            if any(len(pair) != 2 for pair in getattr(self, name)):
                raise InvalidValue(name, "not pairs", "pairs of a pattern and a device")


def read_request(run: RunFolder) -> KeptRequest:
    """What the run in a folder was asked to do.

    Raises:
        FileProblem: `config.json` is missing or no JSON, or older than runs that can be gone on with.
        InvalidValue, UnknownName: it is malformed; names the field.
    """
    data, where = run.read_json(FILE), str(run.path(FILE))
    if "asked" not in data or "host_fingerprint" not in data:
        raise FileProblem(where, "the run is of a version that could not go on with one: start it again.")
    head = decode_record(_Head, {name: data[name] for name in _Head.__dataclass_fields__ if name in data}, where)
    asked = _mapping(data["asked"], "asked", where)
    config = _config(_mapping(asked.get("train"), "asked.train", where), where)
    cut = _cut(_mapping(asked.get("micro_batches"), "asked.micro_batches", where), where)
    return KeptRequest(
        head.workload,
        head.host,
        head.host_fingerprint,
        head.gangs,
        config,
        cut,
        head.versions,
        head.placed_again,
        config.seed if head.workload_seed is None else check_seed(head.workload_seed, where),
    )


def _config(data: Mapping[str, Any], where: str) -> TrainConfig:
    plain = dict(data)
    constraints = plain.pop("constraints", None)
    learn = read_record(LearnConfig, plain.pop("learn", None), f"{where}: asked.train.learn")
    agent = decode_record(AgentConfig, plain.pop("agent", None), where, "asked.train.agent")
    search = dict(_mapping(plain.pop("search", None), "asked.train.search", where))
    priors = search.pop("priors", None)
    if not isinstance(priors, str | None):
        raise InvalidValue("asked.train.search.priors", described(priors), "the path of a file", where=where)
    found = decode_record(SearchConfig, search, where, "asked.train.search")
    if constraints is not None:
        kept = decode_record(_Constraints, constraints, where, "asked.train.constraints")
        pins, exclusions = (
            tuple((pattern, device) for pattern, device in pairs) for pairs in (kept.pins, kept.exclusions)
        )
        constraints = Constraints(pins, exclusions, kept.together)
    return TrainConfig(
        **dataclasses.asdict(decode_record(_Plain, plain, where, "asked.train")),
        constraints=constraints,
        search=dataclasses.replace(found, priors=None if priors is None else Path(priors)),
        learn=learn,
        agent=agent,
    )


def _cut(data: Mapping[str, Any], where: str) -> CutOptions:
    count, dims, loss, is_exact = (data.get(name) for name in ("asked", "batch_dims", "loss", "exact"))
    if not isinstance(loss, str) or not isinstance(is_exact, bool):
        raise InvalidValue("asked.micro_batches", described(data), "asked, batch_dims, loss and exact", where=where)
    pairs = dims.items() if isinstance(dims, dict) else enumerate(dims) if isinstance(dims, list) else ()
    if not isinstance(dims, dict | list | None) or any(type(dim) not in (int, type(None)) for _, dim in pairs):
        raise InvalidValue("asked.micro_batches.batch_dims", described(dims), "dimensions", where=where)
    kind: Loss = loss  # type: ignore[assignment]  # refused below if it is none
    return CutOptions(parse_count(str(count)), tuple(dims) if isinstance(dims, list) else dims, kind, is_exact)


def _mapping(data: object, name: str, where: str) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise InvalidValue(name, described(data), "a mapping", where=where)
    return data


def _resolved(config: TrainConfig, host: Host) -> TrainConfig:
    """The configuration with nothing left open."""
    learn = dataclasses.replace(config.learn, **dataclasses.asdict(config.learn.recipe))
    search = dataclasses.replace(config.search, method=method_of(config, is_simulated=host.is_simulated))
    return dataclasses.replace(config, learn=learn, search=search)
