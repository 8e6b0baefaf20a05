"""`report_page`: a run as one HTML page that needs no network and no other file; `write_report` puts it into a folder.

Also the sections that are text and tables, and those on the search. Those on one step are in `step_sections`.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import math
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from rlplace.files import write_text_atomic
from rlplace.measure.explain.explanation import Explanation
from rlplace.report.console import (
    NO_PLACEMENT_NOTE,
    alternative_rows,
    cut_rows,
    device_rows,
    path_rows,
    share,
    starred_note,
)
from rlplace.report.drawing import best_so_far_figure, fidelity_figure, svg_of
from rlplace.report.html.markup import (
    Raw,
    Section,
    bullets,
    details,
    escaped,
    facts,
    paragraph,
    picture,
    prose,
    stacked,
    table,
)
from rlplace.report.html.run_data import RunData
from rlplace.report.html.step_sections import memory_section, modules_section, timeline_section
from rlplace.report.plots import COLUMNS, Curve, readable
from rlplace.say import NOTHING, clean, format_bytes, format_clock, format_ms, format_seconds
from rlplace.session.folder import RUN_FILES, SESSION, RunFolder
from rlplace.session.session import Session
from rlplace.session.session_records import MethodResult, Row

_LATEST_S = 253_402_300_799.0
"""The end of the year 9999: `datetime` knows no later one."""


def overview(data: RunData) -> str:
    """The head: title, the result in a sentence, four figures, and the host and versions of the run."""
    simulated = "" if data.ending.is_measured else '<p class="warning">Simulated: no step of this run was measured.</p>'
    return (
        f"<h1>{escaped(data.workload)}<span> on {escaped(data.host or data.config.get('host', 'a host'))}</span></h1>"
        f"{simulated}{paragraph(sentence(data), 'lead')}{_cards(data)}{_facts(data)}"
    )


def sentence(data: RunData) -> str:
    """The result of the run, in a sentence or two."""
    best = data.best_row
    if best is None or best.step_s is None:
        return "No placement ran to its end."
    others = {"the best single device's time": data.step_s("single"), "eager PyTorch's": data.step_s("eager")}
    ratios = [f"{best.step_s / other_s:.2f} of {name}" for name, other_s in others.items() if other_s]
    over = f": {' and '.join(ratios)}" if ratios else ""
    text = f"The best placement, found by {best.method}, takes {format_ms(best.step_s)} ms a step, {data.kind}{over}."
    return text if data.verdict is None else f"{text} Raced again, beside others: {data.verdict}."


def _cards(data: RunData) -> str:
    best = data.best_row
    if best is None or best.step_s is None:
        return ""
    spread = f"± {format_ms(best.spread_s)} ms, {best.method}" if best.spread_s else best.method
    others = {"over one device": data.step_s("single"), "over eager PyTorch": data.step_s("eager")}
    memory = data.trace.memory if data.trace else {}
    peaks = sorted((value, name) for name, points in memory.items() for _, value in points)
    cards = [
        ("best step", f"{format_ms(best.step_s)} ms", spread),
        *(
            (label, f"{best.step_s / other_s:.2f}×", f"{format_ms(other_s)} ms there")
            for label, other_s in others.items()
            if other_s
        ),
        *(("peak memory", format_bytes(peak), f"on {name}") for peak, name in peaks[-1:]),
    ]
    shown = (
        f'<div class="card"><span>{label}</span><strong>{value}</strong><small>{note}</small></div>'
        for label, value, note in (map(escaped, card) for card in cards)
    )
    return '<div class="cards">' + "".join(shown) + "</div>"


def _facts(data: RunData) -> str:
    kinds = Counter(device.kind or device.backend for device in data.devices if not device.members)
    cut = f", {data.num_micro_batches} micro-batches" if data.num_micro_batches > 1 else ""
    time_s = data.ending.time_s
    told = {
        "host": f"{data.host}: " + ", ".join(f"{count} × {kind}" for kind, count in kinds.items()) if kinds else "",
        "step": f"{data.num_ops:,} ops{cut}" if data.num_ops else "",
        "finished": f"{datetime.datetime.fromtimestamp(time_s, tz=datetime.UTC):%Y-%m-%d %H:%M} UTC"
        if time_s <= _LATEST_S
        else "",
        "versions": ", ".join(f"{name} {version}" for name, version in _object(data.config.get("versions")).items()),
    }
    return facts([(name, value) for name, value in told.items() if value])


_MOST_SETTINGS, _MOST_DEPTH = 400, 8
_LEAST_S = 0.5


def what_was_run_section(data: RunData) -> Section:
    """The last section of every page."""
    settings = list(_flat(data.config, ""))[:_MOST_SETTINGS]
    links = [[Raw(f'<a href="{escaped(name)}">{escaped(name)}</a>')] for name in data.files]
    parts = (
        f'<pre class="command">{prose(command(data.config))}</pre>',
        _durations(data.ending.expected, data.ending.taken),
        details(f"{len(settings)} settings", table(["setting", "value"], settings)),
        details("Files of the run, beside this page", table(["file"], links)) if links else "",
    )
    lead = "The same again; the rest of the settings are the program's own, listed below as they were."
    return Section("run", "What was run", lead, "".join(parts))


def command(config: Mapping[str, Any]) -> str:
    """A command line that asks for the same run; for a shell, with any name of the workload.

    Example:
        >>> command({"workload": "nmt", "host": "cores", "train": {"budget_s": 90.0, "seed": 3}})
        'rlplace train nmt --host cores --budget 90s --seed 3'
    """
    train = _object(config.get("train"))
    search, learn = _object(train.get("search")), _object(train.get("learn"))
    cut, budget_s = _object(config.get("micro_batches")), train.get("budget_s")
    options = {
        "--host": config.get("host", "auto"),
        "--budget": f"{budget_s:g}s" if isinstance(budget_s, int | float) else None,
        "--seed": train.get("seed"),
        "--workload-seed": config.get("workload_seed") or None,
        "--method": search.get("method") or None,
        "--policy": (learn.get("policy") or None) if search.get("method") == "policy" else None,
        "--gangs": "" if config.get("gangs") is True else None,
        "--micro-batches": cut.get("count") if cut.get("count") != 1 else None,
        "--split": cut.get("split"),
        "--split-parts": cut.get("split_parts"),
    }
    words = ["rlplace", "train", config.get("workload", "WORKLOAD")]
    words += [str(word) for pair in options.items() if pair[1] is not None for word in pair if word != ""]
    return shlex.join(map(clean, words))


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
    factors = [
        one for one in data.learned.factors if abs(one.log_mean) < _LARGEST_LOG and 0 < one.log_deviation < _LARGEST_LOG
    ]
    ranked = sorted(factors, key=lambda one: -abs(one.log_mean) / one.log_deviation)[:_MOST_ROWS]
    rows = [
        [
            one.kind,
            one.name,
            f"{math.exp(one.log_mean):.3g}×",
            " to ".join(f"{math.exp(one.log_mean + side * _SURE * one.log_deviation):.3g}" for side in (-1, 1)),
            f"{one.log_deviation / one.prior_deviation:.0%}" if one.prior_deviation > 0 else "",
        ]
        for one in ranked
    ]
    heads = ["what", "name", "factor", "95 % interval", "deviation left"]
    summary = f"{len(ranked)} of {len(factors)} factors, the surest first"
    more = details(summary, table(heads, rows, numbers=(2, 3, 4))) if rows else ""
    said = bullets(data.learned.lines or ["The host is as profiled, as far as the steps tell."])
    return Section("host", "What was learned about the host", lead, said + more)


def field_section(data: RunData) -> Section:
    """Rows as the run printed them: placements first, fastest first, failed rows last."""
    rows = sorted(
        data.rows,
        key=lambda row: (not row.placement, row.step_s or math.inf, row.method != data.best, row.method),
    )
    longest = max(((row.step_s or 0.0) + (row.spread_s or 0.0) for row in rows), default=0.0)
    single_s, eager_s = data.step_s("single"), data.step_s("eager")
    looks = [
        (" †", "apart") if not row.placement else (" ★", "best") if row.method == data.best else ("", "")
        for row in rows
    ]
    cells = [
        [
            f"{row.method}{mark}",
            NOTHING if row.step_s is None else format_ms(row.step_s),
            f"± {format_ms(row.spread_s)}" if row.step_s and row.spread_s else "",
            Raw(_bar(row, longest)),
            *(f"{row.step_s / other_s:.2f}×" if row.step_s and other_s else "" for other_s in (single_s, eager_s)),
            f"{row.placements:,}" if row.placements else "",
            f"{row.measured:,}" if row.measured else "",
            ": ".join(filter(None, ("" if row.status == "ok" else row.status, row.why))),
        ]
        for row, (mark, _) in zip(rows, looks, strict=True)
    ]
    lead = (
        "Median step time of every row, and half the interquartile range of its samples, all measured in turn in one "
        "race. This race chose the best placement, and another one gave the verdict."
        if any(row.step_s and row.spread_s for row in rows)
        else f"Step times are {data.kind}; less is better."
    )
    heads = ["method", "step, ms", "", "", "of one device", "of eager", "placements", "measured", "notes"]
    styles = {index: style for index, (_, style) in enumerate(looks)}
    body = table(heads, cells, numbers=(1, 2, 4, 5, 6, 7), styles=styles, minor=(3, 5, 6, 7, 8))
    starred = starred_note([row.method for row in rows if row.placement], data.best)
    notes = starred, "" if all(row.placement for row in rows) else NO_PLACEMENT_NOTE
    body += "".join(paragraph(note, "note") for note in notes if note)
    return Section("field", "The field", lead, body)


def _bar(row: Row, longest: float) -> str:
    """The step time as a bar, its spread as a line over the end; empty where it was not timed."""
    if row.step_s is None or longest <= 0:
        return ""
    width, spread = 100 * row.step_s / longest, 100 * (row.spread_s or 0.0) / longest
    whisker = f'<i style="left:{max(width - spread, 0):.2f}%;width:{min(2 * spread, 100):.2f}%"></i>' if spread else ""
    return f'<span class="bar"><b style="width:{width:.2f}%"></b>{whisker}</span>'


_MOST_MODULES, _MOST_COPIES = 14, 10


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
    doubt = f'<p class="warning">{prose(explanation.disturbed)}</p>' if explanation.disturbed else ""
    rows = [cells for _, cells in path_rows(explanation, _MOST_MODULES)]
    path_table = table(["module", "phase", "items", "ms", "share"], rows, numbers=(2, 3, 4), minor=(2,))
    body = (
        f'{doubt}<p class="advice">{prose(explanation.advice.sentence)}</p>'
        f"<h3>Devices</h3>{_devices(explanation)}"
        f"<h3>Critical path</h3><p>The chain that ends the step: {share(path.op_s, step_s)} ops, "
        f"{share(path.transfer_s, step_s)} copies, {share(path.wait_s, step_s)} waits.</p>{path_table}"
    )
    if cuts := cut_rows(explanation, _MOST_COPIES):
        copies = table(["from", "to", "what", "bytes", "ms", "critical"], cuts, numbers=(3, 4), minor=(2, 5))
        sent = f"{explanation.num_transfers:,} copies send {format_bytes(explanation.transfer_bytes)} in all."
        body += f"<h3>Costliest copies</h3><p>{prose(sent)}</p>{copies}"
    if rows := alternative_rows(explanation):
        others = table(["instead", "ms", "over this", "how", "notes"], rows, numbers=(1, 2), minor=(4,))
        body += f"<h3>What else it would cost</h3>{others}"
    return Section("explained", "Where the time goes", lead, body)


def _devices(explanation: Explanation) -> str:
    rows = []
    for device, (name, ops, *cells) in zip(explanation.devices, device_rows(explanation), strict=True):
        parts = ("busy", device.busy_s), ("transfer", device.transfer_s), ("idle", device.idle_s)
        rows.append([name, ops, Raw(stacked([(f"var(--{part})", seconds) for part, seconds in parts])), *cells])
    heads = ["device", "ops", "", "busy", "copies alone", "idle", "sent", "received", "peak memory"]
    return table(heads, rows, numbers=(1, 3, 4, 5, 6, 7, 8), minor=(1, 2, 6, 7))


_EVALUATIONS, _MEASURED, _SECONDS, _STEP_S = range(4)
_FEW = 3


def learning_section(data: RunData) -> Section | None:
    """The curves, and a table of where each of them begins and ends; None where no history was kept."""
    curves = curves_of(data)
    if not curves:
        return None
    caveat = (
        "The curves are of the search's own races: the least of many noisy figures is too low, so a curve may end "
        "below what the table says, and the table is right."
        if data.ending.is_measured
        else "All of it is simulated."
    )
    lead = f"The best {data.kind} step so far of each search, and the steps that it had to beat. {caveat}"
    rows = []
    for curve in curves:
        first, *_, last = [curve.history[0], *curve.history]
        counts = f"{last[_EVALUATIONS]:,.0f}", f"{last[_MEASURED]:,.0f}", format_seconds(last[_SECONDS])
        steps = format_ms(first[_STEP_S]), format_ms(last[_STEP_S])
        rows.append([curve.method, *steps, f"{len(curve.history)}", *counts])
    levels_ms = {name: step_s * 1e3 for name, step_s in _references(data, [one.method for one in curves]).items()}
    figure = best_so_far_figure(curves, title=f"Best {data.kind} step so far", kind=data.kind, levels_ms=levels_ms)
    heads = ["method", "first, ms", "best, ms", "improvements", "scored by then", "measured by then", "after"]
    shown = picture("learning-figure", "Best step so far", {"": svg_of(figure, "learning")})
    return Section("learning", "How the search went", lead, shown + table(heads, rows, numbers=range(1, 7)))


def curves_of(data: RunData) -> list[Curve]:
    """A curve for each method that searched; the table's own where the run kept no more of them."""
    found = [
        Curve(
            name,
            [best.to_list() for best in one.history],
            (one.num_scored, one.num_measured, one.seconds),
            tried=_pairs(one),
        )
        for name, one in data.searches.items()
    ] or [
        Curve(row.method, row.history, (row.placements or 0, row.measured or 0, 0.0))
        for row in data.rows
        if row.measured or not data.ending.is_measured
    ]
    kept = [replace(one, history=[best for best in one.history if len(best) == len(COLUMNS)]) for one in found]
    # heuristics that score a few placements have one point, at no time
    return [one for one in kept if len(one.history) > 1 or (one.history and one.history[-1][_SECONDS] > 0)]


def _references(data: RunData, shown: Sequence[str]) -> dict[str, float]:
    """Seconds on one device, of plain PyTorch and of the best of the others in the table."""
    found = {"one device": data.step_s("single"), "eager PyTorch": data.step_s("eager")}
    others = [
        (row.step_s, row.method)
        for row in data.rows
        if row.placement and row.step_s and row.method not in ("single", *shown)
    ]
    found |= {f"best heuristic: {readable(name)}": step_s for step_s, name in sorted(others)[:1]}
    return {name: step_s for name, step_s in found.items() if step_s}


def _pairs(search: MethodResult) -> list[tuple[float, float]]:
    """Simulated and measured seconds of what it ran."""
    return [pair for pair in search.tried if min(pair) > 0]


def fidelity_section(data: RunData) -> Section | None:
    """The scatter, and its error in words; None where nothing was both simulated and measured."""
    pairs = {name: some for name, search in data.searches.items() if (some := _pairs(search))}
    every = [pair for some in pairs.values() for pair in some]
    if not every or not data.ending.is_measured:
        return None
    lead = (
        f"The {len(every):,} placements that the searches ran, as simulated and as measured (drift of the machine is "
        f"taken out by a reference placement in every race). {words(every)}"
    )
    title = "Simulated and measured step times"
    shown = picture("fidelity-figure", title, {"": svg_of(fidelity_figure(pairs, title), "fidelity")})
    return Section("fidelity", "Simulator against measured", lead, shown)


def words(pairs: Sequence[tuple[float, float]]) -> str:
    """The error of simulated against measured seconds, in a sentence or two.

    Example:
        >>> words([(1.0, 1.0), (1.1, 1.0)])
        'The median error is 5 %; on the whole the simulator says 5 % too much.'
    """
    from scipy.stats import spearmanr

    simulated, measured = np.array(pairs, dtype=np.float64).T
    errors = simulated / measured - 1.0
    bias, error = float(np.median(errors)), float(np.median(np.abs(errors)))
    side = f"on the whole the simulator says {_percent(abs(bias))} too {'much' if bias > 0 else 'little'}."
    text = f"The median error is {_percent(error)}; {side}"
    if len(pairs) < _FEW or np.ptp(simulated) == 0 or np.ptp(measured) == 0:
        return text
    rank = spearmanr(simulated, measured).statistic
    return f"{text} It orders them with a rank correlation of {rank:.2f} (1 is perfect)."


def _percent(share: float) -> str:
    return f"{share:.1%}".replace(".0%", "%").replace("%", " %")


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
"""Title, source, and maker of a section; in the order of the page."""


def report_page(data: RunData) -> str:
    """The page: its texts escaped, its script inlined, and nothing else allowed to run.

    The page's policy names its script by its hash: markup that came in with a name could run nothing, and nothing on
    the page can reach a network.

    Args:
        data: of the run.
    """
    made = [make(data) for _, _, make in SECTIONS]
    sections = [section for section in made if section is not None]
    missing = [what for (_, what, _), section in zip(SECTIONS, made, strict=True) if section is None]
    script = _asset("page.js")
    return Template(_asset("page.html")).substitute(
        policy=_policy(script),
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
        script=script,
    )


def _missing(what: Sequence[str]) -> str:
    """The parts that the run kept no data of, in a line."""
    *others, last = dict.fromkeys(what) or [""]
    listed = escaped(f"{', '.join(others)} or {last}" if others else last)
    told = f'<p class="note">This run kept nothing of these, so their sections are left out: {listed}.</p>'
    return told if last else ""


def _policy(script: str) -> str:
    """A content security policy under which this script runs and nothing is loaded from anywhere."""
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'"
    )


def _asset(name: str) -> str:
    return (resources.files("rlplace.report.html") / name).read_text(encoding="utf-8")


REPORT = "report.html"
"""Its name in a run folder."""


def write_report(folder: RunFolder | Path, session: Session | None = None) -> Path:
    """Writes the report of a run, overwrites an older one, and returns its path.

    It executes no code of the run, and needs neither the model nor the host.

    Args:
        folder: of a run that has ended.
        session: of the run, if it is already open.

    Raises:
        FileProblem: no run in the folder, a run without a result, or a file that cannot be read or written.
        InvalidValue, UnknownName: its session is malformed.
    """
    run = folder if isinstance(folder, RunFolder) else RunFolder.open(folder)
    path = run.path(REPORT)
    with Session.read(run.root) if session is None else nullcontext(session) as opened:
        files = tuple(name for name in RUN_FILES if name not in (REPORT, SESSION) and run.has(name))
        data = RunData.of(opened, files)
    write_text_atomic(path, report_page(data))
    return path
