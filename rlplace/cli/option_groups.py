"""Parts of several commands: groups of options, durations, answers, and the lookup of WORKLOAD and HOST."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TextIO, cast

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from rlplace.errors import InvalidValue, check_known
from rlplace.files import jsonable
from rlplace.measure import Host, resolve_host
from rlplace.records import check_seed
from rlplace.say import print_result
from rlplace.session.setup import NO_SPLIT, TWO, CutOptions, Loss, Setup, parse_batch_dims, parse_count
from rlplace.training import TrainConfig
from rlplace.workloads import parse_workload

if TYPE_CHECKING:
    from rich.console import RenderableType

    from rlplace.graphs import Constraints

GRANULARITIES = ("op", "module")
"""The unit of placement: single ops in groups, or modules."""
MODULE_RULE = "device-map"
"""The grouping that `--granularity module` stands for."""

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

_STDOUT: ContextVar[TextIO | None] = ContextVar("stdout", default=None)
"""Where `print_json` writes while stdout is redirected."""
GIVEN: ContextVar[frozenset[str]] = ContextVar("given", default=frozenset())
"""Names of the options that the user gave, without dashes: an option may be given with the value that it has."""

Seed = Annotated[
    int,
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=lambda words: check_seed(int(words[0])),
        is_instance=lambda value: isinstance(value, int),
        str_from_instance=lambda value: [str(value)],
    ),
]
"""The type of every `--seed`: one out of range is refused before a command starts."""


def format_duration(seconds: float) -> str:
    """Seconds as `parse_duration` reads them.

    >>> format_duration(300.0)
    '5m'
    """
    return f"{seconds / 60:g}m" if seconds and seconds % 60 == 0 else f"{seconds:g}s"


def _time(parse: Callable[[str], float]) -> PrimitiveConstructorSpec[float]:
    """How a time is read from the command line and shown in help."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="TIME",
        instance_from_str=lambda words: parse(words[0]),
        is_instance=lambda value: isinstance(value, float),
        str_from_instance=lambda value: [format_duration(value)],
    )


Duration = Annotated[float, _time(lambda text: parse_duration(text))]
"""The type of every time: `90`, `150s`, `5m`, `1.5h` or `7d`."""


class MoreTime(float):
    """Seconds on top of those that a run was given: `+30s`, `+5m`."""


Budget = Annotated[float, _time(lambda text: parse_budget(text))]
"""The type of a budget: a time, or with `+` before it so much more."""


@dataclass(frozen=True)
class PlacementOptions:
    """Where ops may run."""

    pin: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """PATTERN=DEVICE, again and again: these ops run there (a glob over modules, op names and targets)"""
    exclude: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """PATTERN=DEVICE, again and again: these ops never run there"""
    together: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """PATTERN,PATTERN,..., again and again: these ops move as one"""
    gangs: bool = False
    """on CPU hosts, also a device that runs an op on all cores at once"""

    def constraints(self, host: Host) -> Constraints:
        """The user's constraints, their devices checked against those of `host`.

        Raises:
            InvalidValue: a text of another form.
            UnknownName: a device that the host does not have.
        """
        from rlplace.graphs import Constraints

        constraints = Constraints.parse(pins=self.pin, exclusions=self.exclude, together=self.together)
        constraints.check_devices([device.name for device in host.devices], [device.kind for device in host.devices])
        return constraints

    def own_constraints(self, host: Host) -> Constraints | None:
        """The user's constraints; None where none was given, so that those of a run stay."""
        return self.constraints(host) if self.pin or self.exclude or self.together else None


@dataclass(frozen=True)
class GroupingOptions:
    """How ops are grouped."""

    num_groups: Annotated[int, tyro.conf.arg(name="groups")] = TrainConfig.num_groups
    """most groups of ops that are moved"""
    rule: Annotated[str, tyro.conf.arg(name="grouping")] = TrainConfig.grouping
    """how ops are grouped: heavy-edge, colocation, module, module:DEPTH, module:DEPTH:apart, device-map, metis, none"""
    granularity: str = "op"
    """op, or module: modules are placed, as `rlplace export --format device_map` writes them; the same as `--grouping
    device-map`"""

    def word(self, asked: CutOptions) -> str:
        """The word of the rule that groups are made by.

        Args:
            asked: how the user wants the batch cut.

        Raises:
            UnknownName: no such granularity.
            InvalidValue: the user asks to place modules, and for another rule, micro-batches or a split.
        """
        check_known("granularity", self.granularity, GRANULARITIES)
        if self.granularity == "op" and self.rule != MODULE_RULE:
            return self.rule
        if asked.count != 1:
            raise InvalidValue(
                "micro_batches",
                asked.count,
                "1 where modules are placed",
                hint="A device map places modules for whole batches: leave `--micro-batches` out.",
            )
        if asked.split != NO_SPLIT:
            raise InvalidValue(
                "split",
                asked.split,
                "none where modules are placed",
                hint="A device map places whole modules: leave `--split` out.",
            )
        if self.rule not in (TrainConfig.grouping, MODULE_RULE):
            raise InvalidValue(
                "grouping",
                self.rule,
                "none beside --granularity module",
                hint="Modules are a rule of their own: leave `--grouping` out.",
            )
        return MODULE_RULE


@dataclass(frozen=True)
class BatchOptions:
    """How the batch of a step is cut, and which of its ops are split."""

    micro_batches: str = "1"
    """K, or auto (chosen by simulation): the batch is cut into K micro-batches, whose copies of an op are placed one by
    one: data parallelism, pipelines and mixtures of both are placements of such a step"""
    batch_dims: str = ""
    """the batch's dimension of every input, then every target, e.g. 0,1,none (none: not cut), or x=0,mask=none by name;
    by default as the workload says, else found by sizes"""
    loss: str = "auto"
    """how micro-batches make the loss of the batch: auto (checked), separate (a loss each), joined (one of their joined
    outputs), or accumulated (gradient accumulation, by definition)"""
    exact: bool = False
    """refuse micro-batches that do not make exactly the step of the whole batch: batch norm, which takes the statistics
    of each, and accumulated losses"""
    split: str = NO_SPLIT
    """none, auto (chosen by simulation), or some of vocabulary,attention,mlp,experts,tables,updates: these are split
    into shards, each placed by itself (tensor parallelism)"""
    split_parts: Annotated[str, tyro.conf.arg(metavar="P|3:1")] = TWO
    """with split: the number of shards, or the share of each; with /chunks behind it, sums are made in chunks"""

    def parse(self) -> CutOptions:
        """The options as a record.

        Raises:
            InvalidValue: a word of another form, or an option of a cut or a split without one.
            UnknownName: no such loss, or class of ops.
        """
        count, dims = parse_count(self.micro_batches), parse_batch_dims(self.batch_dims)
        return CutOptions(
            count, dims, cast("Loss", self.loss), self.exact, self.split.strip(), self.split_parts.strip()
        )


@dataclass(frozen=True)
class StoreOptions:
    """Where measurements of this machine are kept."""

    store: str = "auto"
    """where measured step times are kept, and looked for by later searches: auto (in your cache folder), off, or a
    file"""
    no_wait: bool = False
    """while another search measures on this machine, give up instead of waiting for it"""


Placing = Annotated[PlacementOptions, tyro.conf.arg(name="")]
"""`PlacementOptions` as options of a command, without a prefix."""
Grouped = Annotated[GroupingOptions, tyro.conf.arg(name="")]
"""`GroupingOptions` as options of a command, without a prefix."""
Batched = Annotated[BatchOptions, tyro.conf.arg(name="")]
"""`BatchOptions` as options of a command, without a prefix."""
Stored = Annotated[StoreOptions, tyro.conf.arg(name="")]
"""`StoreOptions` as options of a command, without a prefix."""


def parse_duration(text: str, field: str = "budget") -> float:
    """Seconds in `90`, `150s`, `5m`, `1.5h` or `7d`.

    Raises:
        InvalidValue: anything else.

    >>> parse_duration("1.5m")
    90.0
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", text.strip())
    if match is None:
        raise InvalidValue(field, text, "a duration such as 90, 150s, 5m, 1.5h or 7d")
    return float(match[1]) * _UNITS[match[2]]


def parse_budget(text: str) -> float:
    """Seconds in a duration, as `MoreTime` where a `+` stands before it.

    Raises:
        InvalidValue: anything else.

    >>> parse_budget("+3s") == MoreTime(3.0)
    True
    """
    word = text.strip()
    return MoreTime(parse_duration(word[1:])) if word.startswith("+") else parse_duration(word)


def setup_of(
    workload: str,
    host: str,
    placing: PlacementOptions,
    batch: BatchOptions,
    grouping: GroupingOptions | None = None,
    storing: StoreOptions | None = None,
    *,
    no_wait: bool = False,
    in_process: bool = False,
    **options: Any,
) -> Setup:
    """The options that commands share, looked up on this machine; `options` are further fields of `Setup`.

    Raises:
        UserError: a mistake in one of them.
    """
    grouping, storing = grouping or GroupingOptions(), storing or StoreOptions(no_wait=no_wait)
    spec, asked, found = parse_workload(workload), batch.parse(), resolve_host(host, gangs=placing.gangs)
    return Setup(
        spec=spec,
        host=found,
        host_word=host,
        gangs=placing.gangs,
        asked=asked,
        num_groups=grouping.num_groups,
        grouping=grouping.word(asked),
        constraints=placing.constraints(found),
        isolated=False if in_process else None,
        store=storing.store,
        is_waiting=not storing.no_wait,
        **options,
    )


def print_json(data: dict[str, Any]) -> None:
    """One JSON object on stdout; numbers that are not finite become null."""
    print(json.dumps(jsonable(data), allow_nan=False), file=_STDOUT.get() or sys.stdout, flush=True)


def answer(result: dict[str, Any], words: str, is_json: bool) -> None:
    """The answer of a command on stdout: its object where `--json` asks for that, else words."""
    if is_json:
        print_json(result)
    else:
        print_result(words)


def answer_tables(
    result: dict[str, Any], tables: Callable[[], Sequence[RenderableType]], is_json: bool, **options: Any
) -> None:
    """The answer of a command on stdout: its object where `--json` asks for that, else tables."""
    if is_json:
        print_json(result)
    else:
        from rlplace.report.console import show

        show(*tables(), **options)


@contextmanager
def options_given(arguments: Sequence[str]) -> Iterator[None]:
    """While active, the options in `GIVEN` are those among `arguments`, the words of a command line."""
    words = (word.partition("=")[0] for word in arguments)
    token = GIVEN.set(frozenset(word[2:].replace("_", "-") for word in words if word.startswith("--") and word[2:]))
    try:
        yield
    finally:
        GIVEN.reset(token)


@contextmanager
def only_json_on_stdout() -> Iterator[None]:
    """While active, stdout is for `print_json` alone, and all other output goes to stderr.

    A user's module, model or op that prints would otherwise stand before the object, where no program expects it.
    """
    token = _STDOUT.set(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _STDOUT.reset(token)
