"""`report_page`: a run as one HTML page that needs no network and no other file.

Also the sections that are text and tables: the head, the table of methods, where the time goes, what was learned about
the host, and what was run.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import math
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Any

from rlplace.errors import MissingExtra
from rlplace.format import NOTHING, format_bytes, format_clock, format_ms
from rlplace.measure.explain.explanation import Explanation
from rlplace.report.html.figure import (
    Raw,
    Section,
    bullets,
    details,
    escaped,
    facts,
    figures_json,
    paragraph,
    prose,
    table,
)
from rlplace.report.html.run_data import RunData
from rlplace.report.html.search import fidelity_section, learning_section
from rlplace.report.html.step import memory_section, modules_section, timeline_section
from rlplace.report.printed import alternative_rows, cut_rows, path_rows, share
from rlplace.say import clean
from rlplace.session.facts import Row

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
    memory = data.trace.memory if data.trace else {}
    if peaks := [(value, name) for name, points in memory.items() for _, value in points]:
        peak, name = max(peaks)
        cards.append(("peak memory", format_bytes(peak), f"on {name}"))
    shown = (
        f'<div class="card"><span>{label}</span><strong>{value}</strong><small>{note}</small></div>'
        for label, value, note in (map(escaped, card) for card in cards)
    )
    return '<div class="cards">' + "".join(shown) + "</div>"


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


_MOST_SETTINGS, _MOST_DEPTH = 400, 8
_LEAST_S = 0.5


def what_was_run_section(data: RunData) -> Section:
    """The last section of every page."""
    settings = list(_flat(data.config, ""))[:_MOST_SETTINGS]
    lead = "The same again; the rest of the settings are the program's own, listed below as they were."
    body = f'<pre class="command">{prose(command(data.config))}</pre>'
    body += _durations(data.expected, data.taken)
    body += details(f"{len(settings)} settings", table(["setting", "value"], settings))
    if data.files:
        links = [[Raw(f'<a href="{escaped(name)}">{escaped(name)}</a>')] for name in data.files]
        body += details("Files of the run, beside this page", table(["file"], links))
    return Section("run", "What was run", lead, body)


def command(config: Mapping[str, Any]) -> str:
    """A command line that asks for the same run; for a shell, whatever the workload is called.

    Example:
        >>> command({"workload": "nmt", "host": "cores", "train": {"budget_s": 90.0, "seed": 3}})
        'rlplace train nmt --host cores --budget 90s --seed 3'
    """
    train = _object(config.get("train"))
    search, learn = _object(train.get("search")), _object(train.get("learn"))
    cut = _object(config.get("micro_batches"))
    words = ["rlplace", "train", config.get("workload", "WORKLOAD"), "--host", config.get("host", "auto")]
    if isinstance(train.get("budget_s"), int | float):
        words += ["--budget", f"{train['budget_s']:g}s"]
    if "seed" in train:
        words += ["--seed", train["seed"]]
    if config.get("workload_seed"):
        words += ["--workload-seed", config["workload_seed"]]
    if search.get("method"):
        words += ["--method", search["method"]]
    if search.get("method") == "policy" and learn.get("policy"):
        words += ["--policy", learn["policy"]]
    if config.get("gangs") is True:
        words.append("--gangs")
    if cut.get("count") not in (None, 1):
        words += ["--micro-batches", cut["count"]]
    return shlex.join(clean(word) for word in words)


def _durations(expected: Mapping[str, float], taken: Mapping[str, float]) -> str:
    """A row for each part that took time, or was expected to; empty where nothing is known."""
    rows = [
        [name.removesuffix("_s"), *(format_clock(known.get(name, 0.0)) for known in (expected, taken))]
        for name in {**expected, **taken}
        if max(known.get(name, 0.0) for known in (expected, taken)) >= _LEAST_S
    ]
    return table(["part of the run", "expected, m:ss", "taken, m:ss"], rows, numbers=(1, 2)) if rows else ""


def _flat(value: object, path: str, depth: int = 0) -> Iterator[list[object]]:
    """`a.b` and the value, for every value of nested objects."""
    if isinstance(value, Mapping) and depth < _MOST_DEPTH:
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}" if path else str(key), depth + 1)
    elif isinstance(value, Mapping | list):
        yield [path, ", ".join(map(str, value)) or "none"]
    else:
        yield [path, "none" if value is None else value]


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


_MOST_ROWS = 40
_SURE = 1.96
_LARGEST_LOG = 50.0


def learned_host_section(data: RunData) -> Section | None:
    """The lines that the run said, and the factors behind them; None where no method learned the host."""
    if data.learned is None:
        return None
    lead = (
        "Measured steps against the figures of the host: factors on op types, devices, links and launches that the "
        "measurements bear out, with the interval that holds 95 % of what is believed."
    )
    said = (
        bullets(data.learned.lines)
        if data.learned.lines
        else paragraph("The host is as profiled, as far as the steps tell.")
    )
    factors = [
        one for one in data.learned.factors if abs(one.log_mean) < _LARGEST_LOG and 0 < one.log_deviation < _LARGEST_LOG
    ]
    ranked = sorted(factors, key=lambda one: -abs(one.log_mean) / one.log_deviation)[:_MOST_ROWS]
    rows = []
    for one in ranked:
        low, high = (math.exp(one.log_mean + side * _SURE * one.log_deviation) for side in (-1, 1))
        left = f"{one.log_deviation / one.prior_deviation:.0%}" if one.prior_deviation > 0 else ""
        rows.append([one.kind, one.name, f"{math.exp(one.log_mean):.3g}×", f"{low:.3g} to {high:.3g}", left])
    heads = ["what", "name", "factor", "95 % interval", "deviation left"]
    summary = f"{len(ranked)} of {len(factors)} factors, the surest first"
    more = details(summary, table(heads, rows, numbers=(2, 3, 4))) if rows else ""
    return Section("host", "What was learned about the host", lead, said + more)


NO_PLACEMENT_NOTE = "† no placement: timed for comparison, cannot be handed back."


def field_section(data: RunData) -> Section:
    """Rows as the run printed them: placements first, fastest first, what failed last."""
    rows = sorted(
        data.rows,
        key=lambda row: (not row.placement, row.step_s or math.inf, row.method != data.best, row.method),
    )
    longest = max(((row.step_s or 0.0) + (row.spread_s or 0.0) for row in rows), default=0.0)
    single_s, eager_s = data.step_s("single"), data.step_s("eager")
    cells: list[list[object]] = []
    styles: dict[int, str] = {}
    for index, row in enumerate(rows):
        is_best = row.method == data.best and row.placement
        mark = " ★" if is_best else "" if row.placement else " †"
        styles[index] = "best" if is_best else "" if row.placement else "apart"
        cells.append(
            [
                f"{row.method}{mark}",
                NOTHING if row.step_s is None else format_ms(row.step_s),
                f"± {format_ms(row.spread_s)}" if row.step_s and row.spread_s else "",
                Raw(_bar(row, longest)),
                _over(row.step_s, single_s),
                _over(row.step_s, eager_s),
                f"{row.placements:,}" if row.placements else "",
                f"{row.measured:,}" if row.measured else "",
                ": ".join(filter(None, ("" if row.status == "ok" else row.status, row.why))),
            ]
        )
    if not any(row.step_s and row.spread_s for row in rows):
        how = "simulated" if not data.is_measured else "measured"
        lead = f"Step times are {how}; less is better."
    else:
        lead = (
            "Median step time of every row, and half the interquartile range of its samples, all measured in turn in "
            "one race. A lead within the spread is no lead."
        )
    heads = ["method", "step, ms", "", "", "of one device", "of eager", "placements", "measured", "notes"]
    body = table(heads, cells, numbers=(1, 2, 4, 5, 6, 7), styles=styles, minor=(3, 5, 6, 7, 8))
    if any(not row.placement for row in rows):
        body += paragraph(NO_PLACEMENT_NOTE, "note")
    return Section("field", "The field", lead, body)


def _bar(row: Row, longest: float) -> str:
    """The step time as a bar, its spread as a line over the end; empty where it was not timed."""
    if row.step_s is None or longest <= 0:
        return ""
    width, spread = 100 * row.step_s / longest, 100 * (row.spread_s or 0.0) / longest
    whisker = f'<i style="left:{max(width - spread, 0):.2f}%;width:{min(2 * spread, 100):.2f}%"></i>' if spread else ""
    return f'<span class="bar"><b style="width:{width:.2f}%"></b>{whisker}</span>'


def _over(step_s: float | None, other_s: float | None) -> str:
    return f"{step_s / other_s:.2f}×" if step_s and other_s else ""


_MOST_MODULES = 14
_MOST_COPIES = 10
_PARTS = ("busy", "transfer", "idle")


def explained_section(data: RunData) -> Section | None:
    """The explanation of the best placement; None where the run has none."""
    explanation = data.explanation
    if explanation is None:
        return None
    path, step_s = explanation.path, explanation.explained_s
    lead = (
        f"A typical {explanation.kind} step of {format_ms(step_s)} ms. No placement's step is shorter than "
        f"{format_ms(explanation.bound_s)} ms by the costs that are known ({explanation.bound})."
    )
    advice = f'<p class="advice">{prose(explanation.advice.sentence)}</p>'
    doubt = f'<p class="warning">{prose(explanation.disturbed)}</p>' if explanation.disturbed else ""
    rows = [cells for _, cells in path_rows(explanation, _MOST_MODULES)]
    path_table = table(["module", "phase", "items", "ms", "share"], rows, numbers=(2, 3, 4), minor=(2,))
    body = (
        f"{doubt}{advice}<h3>Devices</h3>{_devices(explanation)}"
        f"<h3>Critical path</h3><p>The chain that ends the step: {share(path.op_s, step_s)} ops, "
        f"{share(path.transfer_s, step_s)} copies, {share(path.wait_s, step_s)} waits.</p>{path_table}"
    )
    if explanation.cuts:
        heads = ["from", "to", "what", "bytes", "ms", "critical"]
        copies = table(heads, cut_rows(explanation, _MOST_COPIES), numbers=(3, 4), minor=(2, 5))
        sent = f"{explanation.num_transfers:,} copies send {format_bytes(explanation.transfer_bytes)} in all."
        body += f"<h3>Costliest copies</h3><p>{prose(sent)}</p>{copies}"
    if explanation.alternatives:
        heads = ["instead", "ms", "over this", "how", "notes"]
        others = table(heads, alternative_rows(explanation), numbers=(1, 2), minor=(4,))
        body += f"<h3>What else it would cost</h3>{others}"
    return Section("explained", "Where the time goes", lead, body)


def _devices(explanation: Explanation) -> str:
    rows = []
    for device in explanation.devices:
        parts = (device.busy_s, device.transfer_s, device.idle_s)
        whole = sum(parts) or 1.0
        stacked = "".join(
            f'<b class="{name}" style="width:{100 * part / whole:.2f}%"></b>'
            for name, part in zip(_PARTS, parts, strict=True)
        )
        capacity = f"{device.peak_bytes / device.capacity_bytes:.0%}" if device.capacity_bytes else ""
        rows.append(
            [
                device.name,
                f"{device.num_ops:,}",
                Raw(f'<span class="stack">{stacked}</span>'),
                *(share(part, explanation.explained_s) for part in parts),
                format_bytes(device.sent_bytes),
                format_bytes(device.received_bytes),
                format_bytes(device.peak_bytes),
                capacity,
            ]
        )
    heads = ["device", "ops", "", "busy", "copies alone", "idle", "sent", "received", "peak memory", "of capacity"]
    return table(heads, rows, numbers=(1, 3, 4, 5, 6, 7, 8, 9), minor=(1, 2, 6, 7, 9))


SECTIONS: tuple[tuple[str, str, Callable[[RunData], Section | None]], ...] = (
    ("The field", "the table", field_section),
    ("Timeline", "a timeline", timeline_section),
    ("Placement", "a timeline", modules_section),
    ("Where the time goes", "an explanation", explained_section),
    ("How the search went", "the history of a search", learning_section),
    ("Memory", "memory over time", memory_section),
    ("Simulator against measured", "placements both simulated and measured", fidelity_section),
    ("What was learned about the host", "what a method learned about the host", learned_host_section),
    ("What was run", "settings", what_was_run_section),
)
"""Title, what it is made from, and who makes it; in the order of the page."""


def report_page(data: RunData) -> str:
    """The page: its texts escaped, its script and plotly's inlined, and nothing else allowed to run.

    The page's policy names its scripts by their hashes: markup that came in with a name could run nothing, and nothing
    on the page can reach a network.

    Args:
        data: what the files of a run hold.

    Raises:
        MissingExtra: plotly is not installed.
    """
    made = [make(data) for _, _, make in SECTIONS]
    sections = [section for section in made if section is not None]
    missing = [what for (_, what, _), section in zip(SECTIONS, made, strict=True) if section is None]
    plotly, script = plotly_script(), _asset("page.js")
    return Template(_asset("page.html")).substitute(
        policy=_policy((plotly, script)),
        title=escaped(f"{data.workload}: rlplace report"),
        style=_asset("style.css"),
        contents="".join(f'<a href="#{section.id}">{escaped(section.title)}</a>' for section in sections),
        overview=overview(data),
        sections="".join(
            f'<section id="{section.id}"><h2>{escaped(section.title)}</h2>'
            f'<p class="lead">{prose(section.lead)}</p>{section.body}</section>'
            for section in sections
        ),
        missing=_missing(missing),
        figures=figures_json([figure for section in sections for figure in section.figures]),
        plotly=plotly,
        script=script,
    )


def plotly_script() -> str:
    """plotly.js, as the plotly package brings it.

    Raises:
        MissingExtra: plotly is not installed.
    """
    found = find_spec("plotly")
    if found is None or found.origin is None:
        raise MissingExtra("plotly", how="it draws the figures of reports: pip install plotly")
    return (Path(found.origin).parent / "package_data" / "plotly.min.js").read_text(encoding="utf-8")


def _missing(what: Sequence[str]) -> str:
    """What the run kept no data of, in a line."""
    kinds = list(dict.fromkeys(what))
    if not kinds:
        return ""
    listed = kinds[0] if len(kinds) == 1 else f"{', '.join(kinds[:-1])} or {kinds[-1]}"
    return f'<p class="note">This run kept nothing of these, so their sections are left out: {escaped(listed)}.</p>'


def _policy(scripts: Sequence[str]) -> str:
    """A content security policy under which these scripts run and nothing is loaded from anywhere."""
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode('utf-8')).digest()).decode('ascii')}'"
        for script in scripts
    )
    return f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'"


def _asset(name: str) -> str:
    return (resources.files("rlplace.report.html") / name).read_text(encoding="utf-8")
