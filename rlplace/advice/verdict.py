"""`decide`: the verdict on whether to place a step, by rules over a few figures.

docs/explaining.md says the rules; here they are in the order in which they are asked.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rlplace.measure.timing.verdict import Outcome
from rlplace.say import format_bytes, format_seconds
from rlplace.search.parallel.choose_micro_batches import HEADROOM

WORTH = 1.05
"""A step that is this many times as long as the placed one is worth placing."""
PROMISING = 0.9
"""A split of the batch must promise this share of the best step, or less, to be tried."""

Choice = Literal["place", "one-device", "eager", "cut-batch", "more-memory"]
WORDS: dict[Choice, str] = {
    "place": "place",
    "one-device": "stay on one device",
    "eager": "use eager/intra-op threads",
    "cut-batch": "cut the batch",
    "more-memory": "get more memory",
}
"""Verdicts as people read them."""
NOTHING_TO_RUN = "nothing: train as you do now"


@dataclass(frozen=True)
class Words:
    """The user's name for the step, for the next command."""

    workload: str = ""
    """As on the command line; empty in Python."""
    host: str = ""
    order: str = "rank"
    """Of ops, in which a placement was found; the command line chooses it again."""

    def train(self, count: int | None = None) -> str:
        """The command that searches a placement; `count` micro-batches, or how many is left open where it is 0."""
        if self.workload:
            cut = "" if count is None else f" --micro-batches {count or 'auto'}"
            return f"rlplace train {self.workload} --host {self.host}{cut}"
        if count is not None:
            return f"rlplace.capture(..., micro_batches={count or 'K'})"
        ordered = f"dataclasses.replace(problem, op_order={self.order!r})" if self.order != "rank" else "problem"
        return f"rlplace.train({ordered})"

    def advise(self) -> str:
        """The command that asks again, with the batch cut into slices."""
        words = f"rlplace advise {self.workload} --host {self.host} --micro-batches auto"
        return words if self.workload else self.train(0)


@dataclass(frozen=True)
class Figures:
    """The result of a short look at a step on a host; step times are None where nothing fits, or nothing was tried."""

    kind: Literal["measured", "simulated"]
    """Where the step times of placements, and of one device, come from."""
    costs: str
    """Where the op times come from: `profiled`, `estimated` or `given`."""
    bound_s: float
    """No placement's step is shorter, by those op times; scaled to the measured step of one device, where there is
    one."""
    bound: str
    single_s: float | None
    """Everything on the best single device."""
    single_device: str
    """Name of that device; where the step fits on none, of the device with the most memory."""
    single_bytes: int
    """Bytes that the whole step needs on it."""
    single_capacity_bytes: int
    """Bytes that it has."""
    placed_s: float | None
    """The best placement of the whole batch."""
    num_placements: int
    """Simulated to find it, and the one in micro-batches."""
    cut_s: float | None = None
    """The best placement of the step in micro-batches."""
    cut_count: int = 1
    """The number of micro-batches of that placement."""
    counts: tuple[int, ...] = (1,)
    """Numbers of micro-batches that were tried."""
    split_s: float | None = None
    """An even split of the batch over devices, at best: an estimate; None where no two devices hold the model."""
    work_s: float | None = None
    """All work of the step, spread evenly over the devices; None where ops cannot be split."""
    eager_s: float | None = None
    """Plain PyTorch, measured."""
    eager_why: str = ""
    """Why there is no such figure."""
    op_order: str = "rank"
    """The order of ops in which placements of the step as it was given were searched."""
    state_bytes: int = 0
    """Parameters, buffers and optimizer state, which every placement holds ..."""
    memory_bytes: int = 0
    """... in the memory of all devices together."""
    outcome: Outcome | Literal[""] = ""
    """Whether the best placement is faster than one device and plain PyTorch, by the rounds of its race; empty where
    step times are simulated, or no placement ran."""

    @property
    def best_s(self) -> float:
        """The best placement that was searched, with or without micro-batches; infinite without one."""
        return min(_or_inf(self.placed_s), _or_inf(self.cut_s))

    @property
    def is_unclear(self) -> bool:
        """Whether the race did not show that the best placement is faster."""
        return self.outcome not in ("", "faster")

    @property
    def now_s(self) -> float:
        """The step time without a placement: eager, else one device; infinite where neither can be had."""
        return _or_inf(self.eager_s) if self.eager_s is not None else _or_inf(self.single_s)


@dataclass(frozen=True)
class Verdict:
    """Whether to place a step, and why."""

    verdict: Choice
    reason: str
    """A sentence."""
    over: Literal["eager", "one device", ""]
    """The reference of the ratios; empty where nothing else can run the step."""
    ratio_found: float | None
    """Step time of the best placement over that of the reference. Below 1 is faster; at least 1 where the verdict is to
    stay; None where nothing else can run the step."""
    ratio_least: float | None
    """The least value that this ratio can have, by the bound; None where nothing else can run the step."""
    next: str
    """The next command, or another thing to do."""
    figures: Figures
    split_of_ops: str = ""
    """For people: that a split of ops may pay; empty where it may not."""

    def to_dict(self) -> dict[str, Any]:
        """The object that `rlplace advise --json` prints."""
        return {"schema": 1, **asdict(self)}


def decide(figures: Figures, words: Words | None = None) -> Verdict:
    """The verdict on a step, by the first rule that applies.

    Args:
        figures: of the step on its host.
        words: how to name both in the next command; by default as in Python.
    """
    words = words or Words(order=figures.op_order)
    choice, reason, following = _choose(figures, words)
    found, least = _ratios(figures, choice)
    over: Literal["eager", "one device", ""] = "eager" if figures.eager_s is not None else "one device"
    split = _split_of_ops(figures, choice, words)
    return Verdict(choice, reason, over if found is not None else "", found, least, following, figures, split)


def _choose(f: Figures, words: Words) -> tuple[Choice, str, str]:
    """Verdict, reason, and the recommended next step."""
    if math.isinf(f.best_s) and f.single_s is None and f.eager_s is None:
        return _nothing_fits(f, words)
    promise = _or_inf(f.split_s) if f.counts == (1,) else math.inf
    if promise <= PROMISING * min(f.best_s, f.now_s, _or_inf(f.single_s)):
        reason = (
            f"an even split of the batch would take {format_seconds(promise)} a step at best, "
            f"{_now(f)} and {_found(f, ' of the whole batch')}{_single(f)}"
        )
        return "cut-batch", reason, words.advise()
    unclear = f" ({f.outcome})" if f.is_unclear else ""
    if f.eager_s is not None and (
        f.eager_s <= WORTH * min(f.best_s, _or_inf(f.single_s)) or (unclear and f.eager_s <= _or_inf(f.single_s))
    ):
        return "eager", _eager_reason(f) + unclear, NOTHING_TO_RUN
    if f.single_s is not None and (unclear or f.single_s <= WORTH * f.best_s):
        return "one-device", _single_reason(f) + unclear, NOTHING_TO_RUN
    best = f"the best of {f.num_placements:,} placements takes {_placed(f.best_s)} a step"
    if 1 in f.counts and _or_inf(f.cut_s) * WORTH <= _or_inf(f.placed_s):
        whole_s = min(_or_inf(f.placed_s), _or_inf(f.single_s))
        reason = f"in {f.cut_count} micro-batches {best}, of the whole batch {_placed(whole_s)}; {_now(f)}"
        return "cut-batch", reason, words.train(f.cut_count)
    count = f.cut_count if 1 in f.counts and _or_inf(f.cut_s) < _or_inf(f.placed_s) else None
    return "place", f"{best}, {_now(f)}", words.train(count)


def _split_of_ops(f: Figures, choice: Choice, words: Words) -> str:
    """That a split may pay, by the rule of `choose`, once the batch is cut as far as that promises to help."""
    best_s, is_next = min(f.best_s, _or_inf(f.single_s), f.now_s), choice == "cut-batch" and f.counts == (1,)
    least_s = max(f.work_s or 0.0, f.bound_s if f.bound == "dispatcher" else 0.0)  # shards have more launches
    if f.work_s is None or is_next or best_s < HEADROOM * least_s:
        return ""
    over = f"takes {best_s / f.work_s:.1f} times as long as all its work spread evenly over the devices"
    how = "`rlplace train --split auto`" if words.workload else '`rlplace.place(..., split="auto")`'
    return f"may pay, try {how}: the best step {over if math.isfinite(best_s) else 'does not fit'}"


def _nothing_fits(f: Figures, words: Words) -> tuple[Choice, str, str]:
    if f.state_bytes > f.memory_bytes:
        return (
            "more-memory",
            f"parameters and optimizer state alone take {format_bytes(f.state_bytes)}, and all devices together have "
            f"{format_bytes(f.memory_bytes)}: no batch and no order of ops fits",
            "more memory, an optimizer with less state (sgd has none), or a smaller dtype",
        )
    needs = (
        f"the step takes {format_bytes(f.single_bytes)} of {f.single_device}'s {format_bytes(f.single_capacity_bytes)} "
        f"and none of {f.num_placements:,} placements over the devices fits"
    )
    if f.counts == (1,):
        return "cut-batch", f"{needs}; in micro-batches its activations take less", words.advise()
    tried = ", ".join(map(str, f.counts))
    return (
        "cut-batch",
        f"{needs}, cut into {tried} micro-batches, in any order of ops: it needs a smaller batch, or more memory",
        "a smaller batch, then the same again",
    )


def _eager_reason(f: Figures) -> str:
    found = f"and no placement of {f.num_placements:,} fits" if math.isinf(f.best_s) else _found(f) + _single(f)
    return f"plain PyTorch takes {format_seconds(_or_inf(f.eager_s))} a step, {found}"


def _single_reason(f: Figures) -> str:
    gain = _or_inf(f.single_s) / f.bound_s if f.bound_s > 0 else math.inf
    if gain <= WORTH:
        return f"everything on {f.single_device} is within {max(gain - 1, 0.0):.0%} of the bound ({f.bound})"
    return f"everything on {f.single_device} takes {format_seconds(_or_inf(f.single_s))} a step, {_found(f)}"


def _found(f: Figures, of: str = "") -> str:
    """The best placement; one that measured slower than one device was the best by simulation only."""
    among, is_slower = f"{f.num_placements:,} placements{of}", _or_inf(f.single_s) < f.best_s < math.inf
    return f"{f'the one of {among} that simulated best' if is_slower else f'the best of {among}'} {_placed(f.best_s)}"


def _single(f: Figures) -> str:
    """The step time of one device, where that is shorter than any searched placement, and eager is named instead."""
    single_s = _or_inf(f.single_s)
    return f", one device {_placed(single_s)}" if f.eager_s is not None and single_s < f.best_s else ""


def _now(f: Figures) -> str:
    """The step time of today."""
    if f.eager_s is not None:
        return f"plain PyTorch {format_seconds(f.eager_s)}"
    if f.single_s is not None:
        return f"one device {format_seconds(f.single_s)}"
    return (
        f"no single device holds it: it takes {format_bytes(f.single_bytes)} of "
        f"{f.single_device}'s {format_bytes(f.single_capacity_bytes)}"
    )


def _placed(step_s: float) -> str:
    return format_seconds(step_s) if math.isfinite(step_s) else "does not fit"


def _ratios(f: Figures, choice: Choice) -> tuple[float | None, float | None]:
    """Step times over that of now: the best found, and the least possible; None where there is nothing to compare with.

    Where the verdict is to stay, the best found is no gain.
    """
    if math.isinf(f.now_s):
        return None, None
    is_split = choice == "cut-batch" and f.counts == (1,)
    least_s = min(f.bound_s, _or_inf(f.split_s)) if is_split else f.bound_s
    found = f.best_s / f.now_s if math.isfinite(f.best_s) else 1.0
    if choice in ("eager", "one-device"):
        found = max(found, 1.0)
    return found, min(least_s / f.now_s, found)


def _or_inf(step_s: float | None) -> float:
    return math.inf if step_s is None else step_s
