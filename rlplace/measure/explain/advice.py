"""`advise_on`: one sentence on what to do with a placement that was explained, by the first rule that applies.

docs/explaining.md lists the rules; here they are in the order in which they are asked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from rlplace.measure.explain.explanation import Advice, Alternative, Explanation

ONE_DEVICE, DATA_PARALLEL, EAGER = "one device", "data parallel", "eager"
"""Names of alternatives."""
AS_GOOD = 1.03
"""An alternative that takes at most this many times as long as the placement, and is simpler, is as good."""
FASTER = 0.9
"""An estimate must promise this share of the step time, or less, to be followed."""
NEAR_BOUND = 1.05
"""A step at most this many times the bound cannot be made much shorter."""
NEARLY_FULL = 0.95
"""Share of a device's memory above which it may not suffice for long."""
MUCH = 0.2
"""Share of the critical path above which transfers, or waits, are what to change."""
MOSTLY = 0.7
"""Share of the critical path above which it is a chain of ops ..."""
IDLE = 0.4
"""... that devices wait for, if they are idle for this share of the step on average."""


def advise_on(explanation: Explanation) -> Advice:
    """What to do, in one sentence; the advice that `explanation` has already is not looked at."""
    if not explanation.explained_s or not explanation.step_time_s:
        return Advice("keep", "Keep this placement: the step takes no time.")
    for name, rule in RULES.items():
        sentence = rule(explanation)
        if sentence:
            return Advice(name, sentence)
    return Advice("keep", _keep(explanation))


def alternative(explanation: Explanation, name: str) -> Alternative | None:
    """The alternative called `name`, if it has a step time."""
    found = (other for other in explanation.alternatives if other.name == name and other.step_time_s is not None)
    return next(found, None)


def _use_eager(explanation: Explanation) -> str:
    eager_s = _step_s(explanation, EAGER)
    single_s = _step_s(explanation, ONE_DEVICE)
    if eager_s is None or eager_s > AS_GOOD * min(explanation.step_time_s, single_s or explanation.step_time_s):
        return ""
    if eager_s < explanation.step_time_s:
        return f"Use eager: it is faster ({_ms(eager_s)} a step, {_ms(explanation.step_time_s)} as placed)."
    return f"Use eager: it is as fast ({_ms(eager_s)} a step, {_ms(explanation.step_time_s)} as placed)."


def _one_device(explanation: Explanation) -> str:
    single_s = _step_s(explanation, ONE_DEVICE)
    if single_s is None or single_s > AS_GOOD * explanation.step_time_s:
        return ""
    return f"One device is as good ({_ms(single_s)} a step, {_ms(explanation.step_time_s)} as placed): export nothing."


def _memory(explanation: Explanation) -> str:
    fullest = max(explanation.devices, key=lambda device: device.peak_bytes / max(device.capacity_bytes, 1))
    share = fullest.peak_bytes / max(fullest.capacity_bytes, 1)
    if share <= NEARLY_FULL:
        return ""
    return (
        f"{fullest.name} is full to {_percent(share)}: leave room before you train for long, with a smaller batch or "
        f"{_more_micro_batches(explanation)}."
    )


def _near_bound(explanation: Explanation) -> str:
    if not 0 < explanation.step_time_s <= NEAR_BOUND * explanation.bound_s:
        return ""
    gap = max(explanation.step_time_s / explanation.bound_s - 1.0, 0.0)
    return f"Keep this placement: it is within {_percent(gap)} of the bound ({explanation.bound})."


def _data_parallel(explanation: Explanation) -> str:
    split_s, eager_s = _step_s(explanation, DATA_PARALLEL), _step_s(explanation, EAGER)
    now_s = explanation.step_time_s if eager_s is None else min(explanation.step_time_s, eager_s)
    if split_s is None or explanation.num_micro_batches > 1 or split_s > FASTER * now_s:
        return ""
    return (
        f"Cut the batch (`--micro-batches auto`): data parallelism is estimated at {_ms(split_s)} a step, this "
        f"placement takes {_ms(explanation.step_time_s)}."
    )


def _transfers(explanation: Explanation) -> str:
    path = explanation.path
    if not path.transfer_s or path.transfer_s < MUCH * explanation.explained_s:
        return ""
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    for route in path.routes:
        one, other = sorted((route.source, route.destination))
        seconds[one, other] += route.seconds
    (one, other), most_s = max(seconds.items(), key=lambda pair: pair[1])
    others = f", all copies {_percent(path.transfer_s / explanation.explained_s)}" if len(seconds) > 1 else ""
    return (
        f"Copies of {_what(explanation, {one, other})} between {one} and {other} take "
        f"{_percent(most_s / explanation.explained_s)} of the step{others}: a coarser grouping (fewer `--groups`) or "
        f"{_more_micro_batches(explanation)} may help."
    )


def _waits(explanation: Explanation) -> str:
    path = explanation.path
    if not path.wait_s or path.wait_s < MUCH * explanation.explained_s:
        return ""
    return (
        f"Launches and other waits of the host take {_percent(path.wait_s / explanation.explained_s)} of the step: its "
        f"ops are short, and a larger batch may help more than another placement."
    )


def _chain(explanation: Explanation) -> str:
    path, step_s = explanation.path, explanation.explained_s
    plain = [device for device in explanation.devices if not device.members]
    idle = sum(device.idle_s for device in plain) / len(plain)
    if not path.modules or path.op_s < MOSTLY * step_s or idle < IDLE * step_s:
        return ""
    longest = path.modules[0]
    return (
        f"One chain of ops is {_percent(path.op_s / step_s)} of the step, most of it in the {longest.phase} of "
        f"{longest.module or 'the model itself'} ({_percent(longest.seconds / step_s)}), and devices are idle for "
        f"{_percent(idle / step_s)} of it: {_more_micro_batches(explanation)} may give them work."
    )


def _keep(explanation: Explanation) -> str:
    single_s = _step_s(explanation, ONE_DEVICE)
    over_bound = (
        f"none can take less than {_percent(explanation.bound_s / explanation.step_time_s)} of its own step time"
    )
    if single_s is None:
        return f"Keep this placement: {over_bound}."
    share = _percent(explanation.step_time_s / single_s)
    return f"Keep this placement: it takes {share} of one device's step; {over_bound}."


RULES: dict[str, Callable[[Explanation], str]] = {
    "data-parallel": _data_parallel,
    "use-eager": _use_eager,
    "one-device": _one_device,
    "memory": _memory,
    "near-bound": _near_bound,
    "transfers": _transfers,
    "waits": _waits,
    "chain": _chain,
}
"""Rules by name, each a sentence or nothing, in the order in which they are asked; `keep` is what is left."""


def _step_s(explanation: Explanation, name: str) -> float | None:
    found = alternative(explanation, name)
    return None if found is None else found.step_time_s


def _what(explanation: Explanation, pair: set[str]) -> str:
    """What the copies between two devices on the critical path send for most of their time."""
    seconds: dict[str, float] = defaultdict(float)
    for part in explanation.path.parts:
        if part.kind == "transfer" and {part.source, part.device} == pair:
            seconds[part.what] += part.seconds
    return f"{max(seconds, key=lambda what: seconds[what])}s"


def _more_micro_batches(explanation: Explanation) -> str:
    if explanation.num_micro_batches > 1:
        return f"another number of micro-batches than {explanation.num_micro_batches}"
    return "micro-batches (`--micro-batches auto`)"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
