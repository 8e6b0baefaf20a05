"""A step as lanes of bars: a lane for each device, one for each direction in which tensors were sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rlplace.measure import Device
from rlplace.report.chrome_trace import TRANSFER, Slice, Trace
from rlplace.report.plots import OTHER_COLOR, PHASE_COLORS, blended, luminance, readable
from rlplace.say import clean, format_bytes, format_ms, format_seconds

LIGHTEST = 0.62
"""Part of white in the colour of the last micro-batch."""
JOINED = 0.004
"""A break of up to this part of the step does not end a run of ops ..."""
BUSY = 0.6
"""... which is one as long as its own ops take this part of it: others may take turns with them."""
MOST_DIRECTIONS = 20
_MOST_NAME = 40
"""Characters of a lane's name."""
_FIRST_GRAIN = 1 / 20_000


@dataclass(frozen=True)
class Parts:
    """Parts of a step that have a colour.

    Attributes:
        colors: of the parts, by name.
        part_of: the part of an op or transfer.
    """

    colors: Mapping[str, str]
    part_of: Callable[[Slice], str]

    def color(self, one: Slice) -> str:
        """The colour of an op or transfer."""
        return self.colors.get(self.part_of(one), OTHER_COLOR)


PHASES = Parts(PHASE_COLORS, lambda one: one.kind)


@dataclass
class Row:
    """A lane of the chart; ops on gangs apart; `bottom` and `height` in inches."""

    name: str
    is_device: bool
    items: list[Slice] = field(default_factory=list)
    gang_items: list[Slice] = field(default_factory=list)
    bottom: float = 0.0
    height: float = 0.0


def rows_of(trace: Trace, devices: Sequence[Device]) -> list[Row]:
    """A row for each device except gangs, in order, then one for each direction used.

    Where there are too many directions to read, one for each sender.
    """
    members = {device.name: device.members for device in devices if device.members}
    names = [device.name for device in devices] + [lane.owner for lane in trace.lanes if lane.is_device]
    rows = {name: Row(readable(name, _MOST_NAME), True) for name in names if name not in members}
    order = {name: place for place, name in enumerate([*rows, *members])}
    for one in trace.ops:
        if (name := trace.device_of(one)) in rows:
            rows[name].items.append(one)
        for member in members.get(name, ()):
            rows[member].gang_items.append(one)
    # a transfer over several links once
    transfers = {(one.ends, one.tensor, one.start_s): one for one in trace.slices if one.kind == TRANSFER}
    is_many = len({one.ends for one in transfers.values()}) > MOST_DIRECTIONS
    for one in sorted(transfers.values(), key=lambda one: [order.get(end, len(order)) for end in one.ends]):
        name = f"{one.ends[0]} → {'others' if is_many else one.ends[1]}"
        rows.setdefault(name, Row(readable(name, _MOST_NAME), False)).items.append(one)
    return list(rows.values())


def join(rows: Sequence[Row], step_s: float, most: int) -> None:
    """Joins bars of one phase that are shorter than a grain of the step; the grain grows until they are few enough."""
    whole, grain_s = [(row, row.items, row.gang_items) for row in rows], 0.0
    while sum(len(row.items) + len(row.gang_items) for row in rows) > most and grain_s < step_s:
        grain_s = 2 * grain_s or _FIRST_GRAIN * step_s
        for row, items, gang_items in whole:
            row.items, row.gang_items = joined(items, grain_s), joined(gang_items, grain_s)


def joined(items: Iterable[Slice], grain_s: float) -> list[Slice]:
    """Neighbours of one phase as one where both, and the gap between them, are no longer than a grain.

    What is joined has the target, the module and the micro-batch of the longest, and says how many it stands for.
    """
    groups = list[list[Slice]]()
    for one in sorted(items, key=lambda one: one.start_s):
        last = groups[-1] if groups else []
        longest_s = max(one.start_s - last[-1].end_s, one.seconds, last[-1].end_s - last[0].start_s) if last else 0.0
        if last and longest_s <= grain_s and last[0].kind == one.kind:
            last.append(one)
        else:
            groups.append([one])
    return [_as_one(group) if len(group) > 1 else group[0] for group in groups]


def _as_one(group: Sequence[Slice]) -> Slice:
    longest = max(group, key=lambda one: one.seconds)
    what = f"{len(group):,} {'transfers' if longest.ends else 'ops'}, the longest: {longest.name}"
    return replace(longest, name=what, start_s=group[0].start_s, end_s=max(one.end_s for one in group))


def words_of(one: Slice) -> str:
    """An op or transfer in a few lines."""
    part = f", micro-batch {one.micro_batch}" if one.micro_batch >= 0 else ""
    what = f"{' → '.join(one.ends)}, {format_bytes(one.num_bytes)}" if one.ends else one.target
    when = f"{format_seconds(one.seconds)}, {format_ms(one.start_s)} to {format_ms(one.end_s)} ms"
    lines = one.name, what, one.module, f"{one.kind}{part}: {when}"
    return "\n".join(readable(line) for line in lines if line)


def short_name(op: Slice) -> str:
    """The op's target without namespace and overload."""
    return clean(op.target).split(".")[:2][-1].removeprefix("_").removesuffix("_backward")


@dataclass
class _Run:
    first: Slice
    end_s: float
    busy_s: float = 0.0


def runs(ops: Iterable[Slice], step_s: float) -> list[tuple[float, float, Slice]]:
    """Where a device works for one micro-batch and phase, but for short breaks: start and end in seconds, first op.

    Args:
        ops: of one device; those that all micro-batches share are in no run.
        step_s: of the whole step.
    """
    found, last = list[_Run](), dict[tuple[int, str], _Run]()
    for op in sorted((op for op in ops if op.micro_batch >= 0), key=lambda one: (one.start_s, one.end_s)):
        run = last.get((op.micro_batch, op.kind))
        if run is None or op.start_s - run.end_s > JOINED * step_s:
            run = last[op.micro_batch, op.kind] = _Run(op, op.start_s)
            found.append(run)
        run.end_s = max(run.end_s, op.end_s)
        run.busy_s += op.seconds
    spans = [(run.first.start_s, run.end_s, run) for run in found]
    return [(start_s, end_s, run.first) for start_s, end_s, run in spans if run.busy_s >= BUSY * (end_s - start_s)]


def shade(color: str, micro_batch: int, num_micro_batches: int) -> str:
    """`color` mixed with white, the more the later the micro-batch; as it is for ops that all of them share.

    >>> shade("#0072B2", 0, 4), shade("#000000", 3, 4)
    ('#0072B2', '#9E9E9E')
    """
    if micro_batch <= 0 or num_micro_batches < 2:
        return color
    share = LIGHTEST * micro_batch / (num_micro_batches - 1)
    return blended({"own": 1 - share, "white": share}, {"own": color, "white": "#FFFFFF"})


def is_light(color: str) -> bool:
    """Whether dark text reads better on it: the luminance of a grey of half the brightness."""
    return luminance(color) > luminance("#808080")
