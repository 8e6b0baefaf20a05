"""The head of the page: what was run, and what came of it, before any figure."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Mapping

from rlplace.report.format import format_bytes, format_ms
from rlplace.report.html.escape import escaped
from rlplace.report.html.run_data import RunData
from rlplace.report.html.tags import facts, paragraph

_LATEST_S = 253_402_300_799.0
"""The end of the year 9999: `datetime` knows no later one."""


def overview(data: RunData) -> str:
    """The head: title, the result in a sentence, four figures, and where they were had."""
    simulated = "" if data.is_measured else '<p class="warning">Simulated: no step of this run was measured.</p>'
    return (
        f"<h1>{escaped(data.workload)}<span> on {escaped(data.host or data.config.get('host', 'a host'))}</span></h1>"
        f"{simulated}{paragraph(sentence(data), 'lead')}{_cards(data)}{_facts(data)}"
    )


def sentence(data: RunData) -> str:
    """What came of the run, in a sentence or two."""
    best = data.best_row
    if best is None or best.step_s is None:
        return "No placement ran to its end."
    single_s, eager_s = data.step_s("single"), data.step_s("eager")
    ratios = []
    if single_s:
        ratios.append(f"{best.step_s / single_s:.2f} of the best single device's time")
    if eager_s:
        ratios.append(f"{best.step_s / eager_s:.2f} of eager PyTorch's")
    over = f": {' and '.join(ratios)}" if ratios else ""
    text = f"The best placement, found by {best.method}, takes {format_ms(best.step_s)} ms a step, {data.kind}{over}."
    if eager_s and eager_s < best.step_s:
        text += " Eager PyTorch was faster than every placement here: use eager."
    return text


def _cards(data: RunData) -> str:
    best = data.best_row
    if best is None or best.step_s is None:
        return ""
    spread = f"± {format_ms(best.spread_s)} ms, {best.method}" if best.spread_s else best.method
    cards = [("best step", f"{format_ms(best.step_s)} ms", spread)]
    for label, method in (("over one device", "single"), ("over eager PyTorch", "eager")):
        other_s = data.step_s(method)
        if other_s:
            cards.append((label, f"{best.step_s / other_s:.2f}×", f"{format_ms(other_s)} ms there"))
    peaks = _peaks(data)
    if peaks:
        name, peak = max(peaks.items(), key=lambda item: item[1])
        cards.append(("peak memory", format_bytes(peak), f"on {name}"))
    return '<div class="cards">' + "".join(map(_card, cards)) + "</div>"


def _card(card: tuple[str, str, str]) -> str:
    label, value, note = map(escaped, card)
    return f'<div class="card"><span>{label}</span><strong>{value}</strong><small>{note}</small></div>'


def _peaks(data: RunData) -> dict[str, int]:
    memory = data.trace.memory if data.trace else {}
    return {name: max(value for _, value in points) for name, points in memory.items() if points}


def _facts(data: RunData) -> str:
    pairs: list[tuple[str, object]] = []
    if data.devices:
        kinds = Counter(device.kind or device.backend for device in data.devices if not device.members)
        pairs.append(("host", f"{data.host}: " + ", ".join(f"{count} × {kind}" for kind, count in kinds.items())))
    if data.num_ops:
        cut = f", {data.num_micro_batches} micro-batches" if data.num_micro_batches > 1 else ""
        pairs.append(("step", f"{data.num_ops:,} ops{cut}"))
    if data.time_s is not None and 0 <= data.time_s <= _LATEST_S:
        when = datetime.datetime.fromtimestamp(data.time_s, tz=datetime.UTC)
        pairs.append(("finished", f"{when:%Y-%m-%d %H:%M} UTC"))
    versions = data.config.get("versions")
    if isinstance(versions, Mapping):
        pairs.append(("versions", ", ".join(f"{name} {version}" for name, version in versions.items())))
    return facts(pairs) if pairs else ""
