"""Output in a terminal: progress on stderr, and the tables of each command, by `rich`.

The tables are also printed as text and shown in notebooks. `CleanConsole` shows nothing to a terminal that a stranger's
file may have put into names and messages.
"""

from __future__ import annotations

import html
import io
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from types import TracebackType
from typing import Any, Self, TextIO

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from rlplace.measure.explain.explanation import Explanation
from rlplace.say import (
    NOTHING,
    clean,
    clean_lines,
    counted,
    format_bytes,
    format_clock,
    format_ms,
    format_seconds,
    is_shown,
)


class CleanConsole(Console):
    """Text without control characters; the console's own colours and movements stay."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As of `Console`, which draws everything by it."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=clean_lines(segment.text))


LINE_EVERY_S = 10.0
REDRAW_EVERY_S = 0.25


class Progress:
    """A bar with placements tried, the best step as a share of one device's, and time left; plain lines off a terminal.

    It redraws only when told something new: a thread of its own would disturb measurements.

    Args:
        is_quiet: show nothing.
        is_concluding: show the last message; by default unless it is quiet.
        stream: the stream to write to; stderr by default, since results go to stdout.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        *,
        is_quiet: bool = False,
        is_concluding: bool | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        stream = sys.stderr if stream is None else stream
        self._clock, self._stream = clock, stream
        self._is_concluding = not is_quiet if is_concluding is None else is_concluding
        self._console = CleanConsole(file=stream, highlight=False, emoji=False, quiet=is_quiet)
        self._is_live = not is_quiet and stream.isatty() and not self._console.is_dumb_terminal
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=12),
            # goes on in the next line where the terminal is narrow
            TextColumn("{task.fields[detail]}", table_column=Column(no_wrap=False, overflow="fold")),
            console=self._console,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task("", total=1.0, detail="")
        self._shown_s, self._line = -math.inf, ""
        self._unshown: tuple[str, str, float] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def say(self, text: str) -> None:
        """Prints a line, above the bar if there is one; how the search stood is shown first."""
        self._show()
        self._console.print(text, markup=False, soft_wrap=True)

    def update(
        self,
        *,
        placements: int,
        best_s: float,
        single_s: float,
        left_s: float,
        budget_s: float,
        measured: int = 0,
        method: str = "",
    ) -> None:
        """Says how the search stands; shown at most four times a second, off a terminal every ten seconds.

        Args:
            placements: scored so far.
            best_s: best step time so far, at the present step time of one device; infinite while there is none.
            single_s: step time on the best single device; infinite or nan where it is not known.
            left_s: seconds of search left.
            budget_s: seconds of search in all.
            measured: how many placements were run so far.
            method: that searches, whose best it is; empty where several do side by side.
        """
        parts = (
            f"{placements:,} placements" + (f", {measured:,} measured" if measured else ""),
            _best(best_s, single_s, is_measured=measured > 0) if math.isfinite(best_s) and best_s > 0 else "",
            f"{format_clock(max(left_s, 0.0))} left",
        )
        done, text = 1.0 - left_s / budget_s if budget_s > 0 else 1.0, " · ".join(filter(None, parts))
        self._unshown = f"search{' of ' if method else ''}{method}", text, min(max(done, 0.0), 1.0)
        if self._clock() - self._shown_s >= (REDRAW_EVERY_S if self._is_live else LINE_EVERY_S):
            self._show()

    def conclude(self, text: str) -> None:
        """Prints the line that a search ends with."""
        self.close()
        if self._is_concluding:
            print(clean_lines(text), file=self._stream, flush=True)

    def close(self) -> None:
        """Shows waiting updates and leaves the last state standing; closing twice does no harm."""
        self._show()
        if self._is_live:
            self._bar.stop()

    def _show(self) -> None:
        if self._unshown is None:
            return
        (name, text, done), self._unshown = self._unshown, None
        self._shown_s = self._clock()
        if not self._is_live:
            if text != self._line:  # what changed since then is too little to be seen
                self.say(f"{name}: {text}")
            self._line = text
            return
        self._bar.update(self._task, description=name, completed=done, detail=text)
        self._bar.start()
        self._bar.refresh()


def _best(best_s: float, single_s: float, *, is_measured: bool) -> str:
    """The best so far: its share of one device's time, which only falls, before its seconds.

    Measured seconds rise where the machine slows down: they are those of now, and do not stand as the best.
    """
    if not math.isfinite(single_s):
        return f"best {format_seconds(best_s)}"
    slower, now = ", slower" if best_s > single_s else "", " now" if is_measured else ""
    return f"best {best_s / single_s:.2f} of one device's time{slower} ({format_seconds(best_s)}{now})"


def make_progress(*, is_quiet: bool = False) -> Progress:
    """The progress display on stderr; nothing at all if `is_quiet`."""
    return Progress(is_quiet=is_quiet)


def progress_of(asked: Progress | bool | None) -> Progress:
    """The progress display that is asked for.

    Args:
        asked: one of your own; True for one on stderr, False for none, None for one where stderr is a terminal, and the
            last line alone where it is none.
    """
    return (
        asked
        if isinstance(asked, Progress)
        else Progress(is_quiet=not is_shown(asked), is_concluding=asked is not False)
    )


WIDTH = 120
"""Columns of a printed table; longer notes continue in the next line."""
NO_PLACEMENT_NOTE = "† no placement: measured for comparison, cannot be handed back"
NOT_FASTEST_NOTE = "★ kept: in a race of their own, the rows above it were not clearly faster"
NO_STEP_TIME_NOTE = "† no placement: for comparison, cannot be handed back"
ROOT = "(the model itself)"
STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}
"""Colours of the doctor's verdicts."""


def show(*parts: RenderableType, **options: Any) -> None:
    """Prints a result to stdout.

    Args:
        parts: tables, groups and texts.
        options: of the console.
    """
    console = CleanConsole(**({"highlight": False, "emoji": False} | options))
    for part in parts:
        console.print(part)


def as_text(table: Table) -> str:
    """The table as lines without colours, the same on every terminal and in every file."""
    stream = io.StringIO()
    CleanConsole(file=stream, width=WIDTH, color_system=None, force_terminal=False, emoji=False).print(table)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()).strip("\n")


def as_html(table: Table) -> str:
    """The table as an HTML `<table>`, its text escaped; a caption follows as a paragraph."""
    names = "".join(f"<th>{_escaped(column.header)}</th>" for column in table.columns)
    rows = "".join(
        f"<tr>{''.join(f'<td>{_escaped(cell)}</td>' for cell in row)}</tr>"
        for row in zip(*(column.cells for column in table.columns), strict=True)
    )
    caption = f"<p>{_escaped(table.caption)}</p>" if table.caption else ""
    return f"<table><thead><tr>{names}</tr></thead><tbody>{rows}</tbody></table>{caption}"


def _escaped(cell: object) -> str:
    return html.escape(cell.plain if isinstance(cell, Text) else str(cell))


def plain_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    title: str | None = None,
    styles: Sequence[str | None] = (),
    **options: Any,
) -> Table:
    """A table; cells are plain text, not markup.

    Args:
        columns: headings. `>` in front aligns to the right, `<` to the left, both on one line; without, lines wrap.
        rows: cells; a row without any is a rule.
        title: above the table.
        styles: of the rows.
        options: of `Table`.
    """
    looks: dict[str, Any] = {"box": box.SIMPLE_HEAD, "padding": (0, 1), "title_style": "bold", "title_justify": "left"}
    table = Table(title=title, caption_justify="left", **(looks | options))
    for column in columns:
        is_line = column.startswith(("<", ">"))
        table.add_column(
            column.lstrip("<>"),
            justify="right" if column.startswith(">") else "left",
            no_wrap=is_line,
            overflow="ellipsis" if is_line else "fold",
        )
    for cells, style in zip_longest(rows, styles):
        if cells:
            table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells), style=style)
        else:
            table.add_section()
    return table


def _facts(pairs: Iterable[tuple[str, str]], title: str | None = None) -> Table:
    """Names and values, one pair a line."""
    dimmed = ((Text(name, "dim"), value) for name, value in pairs)
    return plain_table(("<", ""), dimmed, title=title, box=None, show_header=False, padding=(0, 2, 0, 0))


def results_table(rows: Sequence[Mapping[str, object]], *, best: str | None = None, title: str | None = None) -> Table:
    """Rows of `result.json` as a table: fastest first, failed rows last.

    Rows that are no placement (`"placement": false`) form a section of their own below, with a note. The ratio is to
    the row called `single`.

    Args:
        rows: with `method`, `step_time_s`, `spread_s`, `placements`, `placement`, `status`, and `measured` and `why`
            where they apply.
        best: the method to mark as winner; by default the fastest placement.
        title: above the table.
    """
    ranked = sorted(rows, key=lambda row: (_step_time_s(row), row["method"] != best))
    placements = [row for row in ranked if row.get("placement", True)]
    others = [row for row in ranked if not row.get("placement", True)]
    if best is None:
        best = next((str(row["method"]) for row in placements if math.isfinite(_step_time_s(row))), None)
    notes = starred_note([str(row["method"]) for row in placements], best), NO_PLACEMENT_NOTE if others else ""
    single_s = next((_step_time_s(row) for row in rows if row["method"] == "single"), math.inf)
    shown, styles = _in_sections(placements, others, lambda row: row["method"] == best, partial(_cells, single_s))
    columns = ("<method", ">step, ms", "<", ">vs single", ">placements", "notes")
    return plain_table(columns, shown, title=title, styles=styles, caption="\n".join(filter(None, notes)) or None)


def starred_note(placements: Sequence[str], best: str | None) -> str:
    """Why the row with the star is not the first; empty where it is.

    Args:
        placements: methods of the rows, as they stand below each other.
        best: the method with the star.
    """
    return NOT_FASTEST_NOTE if best in placements[1:] else ""


def _in_sections(
    placed: Sequence[Mapping[str, Any]],
    others: Sequence[Mapping[str, Any]],
    is_best: Callable[[Mapping[str, Any]], bool],
    cells: Callable[[Mapping[str, Any], str], list[str]],
) -> tuple[list[list[str]], list[str | None]]:
    """Cells and styles of placements, the best marked, then of rows that are none, below a rule."""
    rows = [cells(row, " ★" if is_best(row) else "") for row in placed]
    styles = ["bold green" if is_best(row) else None for row in placed]
    if others:
        rows += [[], *(cells(row, " †") for row in others)]
        styles += [None, *["dim"] * len(others)]
    return rows, styles


def _cells(single_s: float, row: Mapping[str, object], mark: str) -> list[str]:
    step_time_s, spread_s, tried = _step_time_s(row), _number(row.get("spread_s")), row.get("placements")
    is_timed, one_thread_s = math.isfinite(step_time_s), row.get("one_thread_s")
    notes = (
        f"{row['measured']:,} measured" if row.get("measured") else "",
        "" if one_thread_s is None else f"one thread {format_ms(_number(one_thread_s))}",
        _status_note(row),
    )
    return [
        f"{row['method']}{mark}",
        format_ms(step_time_s),
        f"± {format_ms(spread_s)}" if is_timed and 0 < spread_s < math.inf else "",
        f"{step_time_s / single_s:.2f}×" if is_timed and math.isfinite(single_s) and single_s > 0 else NOTHING,
        f"{tried:,}" if isinstance(tried, int) and tried else "",
        "; ".join(filter(None, notes)),
    ]


def _status_note(row: Mapping[str, object]) -> str:
    """The status where it is not `ok`, and the reason."""
    status = str(row.get("status", "ok"))
    return ": ".join(filter(None, ("" if status == "ok" else status, str(row.get("why") or ""))))


def _step_time_s(row: Mapping[str, object]) -> float:
    """The row's step time, infinite where it failed or was not timed."""
    step_time_s = _number(row.get("step_time_s"))
    return step_time_s if row.get("status", "ok") == "ok" and not math.isnan(step_time_s) else math.inf


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.inf


def compare_table(comparison: Mapping[str, Any]) -> Table:
    """The object of `rlplace compare --json` as a table: fastest first, the winner and the bound marked.

    Args:
        comparison: with `rows`, `objective`, `best` and the bound.
    """
    best, truth, every = comparison["best"], comparison.get("truth"), comparison["rows"]

    def is_best(row: Mapping[str, Any]) -> bool:
        return best is not None and (row["method"], row["seed"]) == (best["method"], best["seed"])

    ranked = sorted(every, key=lambda row: (_value_ms(row), not is_best(row), row["method"], row["seed"]))
    placed, others = ([row for row in ranked if row["placement"] is kind] for kind in (True, False))
    has_seeds = len({row["seed"] for row in every}) > 1
    heading = {"max-load": "load, ms", "piece-latency": "ms"}.get(comparison["objective"], "step, ms")
    columns = [
        *("<method", *([">seed"] if has_seeds else []), f">{heading}"),
        *(("<", ">simulated") if comparison.get("measured") else ()),
        *((">as known", ">measured") if truth else ()),
        *(">over\nbound", ">evaluations", ">found\nin", ">peak\nmemory", "notes"),
    ]
    rows, styles = _in_sections(placed, others, is_best, partial(_compared_cells, comparison, has_seeds))
    bound_ms = comparison["lower_bound_ms"]
    bound_s = float(comparison["lower_bound_s"]) if bound_ms is None else float(bound_ms) / 1e3
    rows += [[], ["lower bound", *[""] * has_seeds, format_ms(bound_s)]]
    steps = "with timelines; " if comparison.get("traced") else ""
    known = f"truth: {truth}; {steps}`as known` is the step time that the simulator gives without knowing the truth"
    notes = f"bound: {comparison['lower_bound']}", NO_STEP_TIME_NOTE if others else "", known if truth else ""
    caption = "\n".join(filter(None, (*notes, comparison.get("summary"))))
    return plain_table(columns, rows, styles=[*styles, None, "cyan"], collapse_padding=True, caption=caption)


def _compared_cells(comparison: Mapping[str, Any], has_seeds: bool, row: Mapping[str, Any], mark: str) -> list[str]:
    spread_s, simulated_s, gap = row.get("spread_s"), row.get("simulated_s"), row["gap_to_bound"]
    simulated = NOTHING if simulated_s is None else format_ms(simulated_s)
    return [
        f"{row['method']}{mark}",
        *([str(row["seed"])] if has_seeds else []),
        format_ms(_value_ms(row) / 1e3),
        *([f"± {format_ms(spread_s)}" if spread_s else "", simulated] if comparison.get("measured") else []),
        *([simulated, f"{row['measured']}"] if comparison.get("truth") else []),
        NOTHING if gap is None else f"{gap:+.1%}",
        f"{row['evaluations']:,}" if row["evaluations"] else "",
        format_seconds(row["plan_s"]) if row["plan_s"] else "",
        format_bytes(max(row["peak_bytes"])) if row["peak_bytes"] else "",
        _status_note(row),
    ]


def _value_ms(row: Mapping[str, Any]) -> float:
    """The minimised value, in ms; infinite where the row failed."""
    if row["status"] != "ok" or (row["value_ms"] is None and row["step_time_s"] is None):
        return math.inf
    return float(row["step_time_s"]) * 1e3 if row["value_ms"] is None else float(row["value_ms"])


def advice_panel(told: Mapping[str, Any], verdict: str) -> Group:
    """The output of `rlplace advise`: the verdict, then the figures behind it, then the next step.

    Args:
        told: the object of `rlplace advise --json`.
        verdict: in words.
    """
    figures = told["figures"]
    single_s, placed_s = figures["single_s"], figures["placed_s"]
    is_slower = single_s is not None and placed_s is not None and single_s < placed_s
    kind = "searched" if is_slower else "best"  # it may have measured slower than one device
    held = f"{format_bytes(figures['single_bytes'])} of {format_bytes(figures['single_capacity_bytes'])}"
    cut = (f"{figures['cut_count']} micro-batches", _time(figures["cut_s"], "not faster, or does not fit"))
    split = ("even split", f"{_time(figures['split_s'], '')} at best (estimated)")
    pairs = [
        ("expected step", _expected(told)),
        ("eager PyTorch", _time(figures["eager_s"], figures["eager_why"])),
        ("one device", f"{_time(single_s, 'does not fit')} on {figures['single_device']}, {held}"),
        (f"{kind} placement", _time(placed_s, "none fits, or none was tried")),
        *([cut] if max(figures["counts"]) > 1 else []),
        *([split] if figures["split_s"] is not None else []),
        *([("split of ops", told["split_of_ops"])] if told["split_of_ops"] else []),
        ("bound", f"{format_seconds(figures['bound_s'])} ({figures['bound']})"),
        ("step times", f"{figures['kind']}, op times {figures['costs']}"),
        ("it took", f"{format_seconds(told['capture_s'])} to capture, {format_seconds(told['seconds'])} from there"),
        ("next", str(told["next"])),
    ]
    return Group(Text(f"{verdict}: {told['reason']}", style="bold"), _facts(pairs))


def _expected(told: Mapping[str, Any]) -> str:
    if told["ratio_found"] is None:
        return f"{NOTHING} (nothing else can run the step)"
    return f"{told['ratio_least']:.2f} to {told['ratio_found']:.2f} of what {told['over']} takes"


def _time(step_s: float | None, why: str) -> str:
    return format_seconds(step_s) if step_s is not None else f"{NOTHING} ({why})"


def program_table(program: dict[str, Any]) -> Table:
    """The output of `rlplace explain --rank`: one row an instruction of a device's program.

    Args:
        program: as `program_of_run` returns it.
    """
    rows = [
        (
            row["kind"],
            _first_of([f"t{each}" for each in row["tensors"]], " "),
            _first_of(row["ops"], ", "),
            format_bytes(row["bytes"]) if row["tensors"] else "",
            {"send": "to ", "receive": "from "}.get(row["kind"], "") + row["peer"],
            "" if row["slot"] is None else str(row["slot"]),
        )
        for row in program["program"]
    ]
    title = f"rank {program['rank']}: {program['device']}; {counted(len(rows), 'instruction')}"
    return plain_table(("<", "<tensors", "of", ">bytes", "<", ">slot"), rows, title=title, collapse_padding=True)


def _first_of(names: Sequence[str], between: str) -> str:
    """The first three of many names: no cell may leave other columns without room."""
    more = f"{between}and {len(names) - 3:,} more" if len(names) > 4 else ""
    return between.join(names[:3] if more else names) + more


def explanation_tables(explanation: Explanation, top: int = 12) -> Group:
    """The output of `rlplace explain`: devices, critical path, costliest copies, alternatives; the advice last.

    Args:
        explanation: of a placed step.
        top: most modules of the critical path that are shown.
    """
    explanation = Explanation.from_dict(_printable(explanation.to_dict()), "explanation")
    columns = ("<device", ">ops", ">busy", ">copies\nalone", ">idle", ">sent", ">received", ">peak memory")
    devices = plain_table(columns, device_rows(explanation), title="devices", collapse_padding=True)
    copies = plain_table(
        ("from", "to", "<what", ">bytes", ">ms", ">critical"),
        cut_rows(explanation),
        title=f"costliest copies, of {explanation.num_transfers:,} with {format_bytes(explanation.transfer_bytes)}",
        collapse_padding=True,
    )
    others = plain_table(
        ("<instead", ">ms", ">over this", "<how", "notes"),
        alternative_rows(explanation),
        title="what else it would cost",
        collapse_padding=True,
    )
    return Group(
        _headline(explanation),
        *([Text(explanation.disturbed, style="yellow")] if explanation.disturbed else []),
        devices,
        _path(explanation, top),
        *([copies] if explanation.cuts else []),
        others,
        *([Text("\n".join(("learned about the host:", *explanation.learned)))] if explanation.learned else []),
        Text(explanation.advice.sentence, style="bold"),
    )


def _headline(explanation: Explanation) -> Text:
    spread = f" ± {format_ms(explanation.spread_s)}" if explanation.spread_s else ""
    cut = f", {explanation.num_micro_batches} micro-batches" if explanation.num_micro_batches > 1 else ""
    cut += f", {explanation.split}" if explanation.split else ""
    by = f" of {explanation.method}" if explanation.method else ""
    return Text(
        f"{explanation.host}: the placement{by}, {format_ms(explanation.step_time_s)}{spread} ms a step "
        f"{explanation.kind}{cut}; explained: a typical step of {format_ms(explanation.explained_s)} ms; "
        f"bound {format_ms(explanation.bound_s)} ms ({explanation.bound})"
    )


def device_rows(explanation: Explanation) -> list[list[str]]:
    """Cells of each device: name, ops, shares busy, with copies alone and idle, bytes sent and received, peak."""
    return [
        [
            device.name,
            f"{device.num_ops:,}",
            *(share(part, explanation.explained_s) for part in (device.busy_s, device.transfer_s, device.idle_s)),
            format_bytes(device.sent_bytes),
            format_bytes(device.received_bytes),
            f"{format_bytes(device.peak_bytes)} ({share(device.peak_bytes, device.capacity_bytes)})",
        ]
        for device in explanation.devices
    ]


def _path(explanation: Explanation, top: int) -> Table:
    path, step_s = explanation.path, explanation.explained_s
    title = (
        f"critical path: ops {share(path.op_s, step_s)}, copies {share(path.transfer_s, step_s)}, "
        f"waits {share(path.wait_s, step_s)}"
    )
    styles = {"more": "dim", "copies": "cyan", "waits": "yellow", "module": None}
    columns, found = ("what", "<phase", ">items", ">ms", ">share"), path_rows(explanation, top)
    rows, looks = [cells for _, cells in found], [styles[kind] for kind, _ in found]
    return plain_table(columns, rows, title=title, styles=looks, collapse_padding=True)


def path_rows(explanation: Explanation, top: int) -> list[tuple[str, list[str]]]:
    """The critical path by modules, routes and waits: the kind of each row, then its cells."""
    path, others = explanation.path, explanation.path.modules[top:]
    counts = sum(one.num_ops for one in others), sum(one.seconds for one in others)
    num_waits = sum(part.kind == "wait" for part in path.parts)
    found = [
        *(("module", one.module or ROOT, one.phase, one.num_ops, one.seconds) for one in path.modules[:top]),
        *([("more", f"{len(others):,} more", "", *counts)] if others else []),
        *(
            ("copies", f"copies {route.source} → {route.destination}", "", route.num_transfers, route.seconds)
            for route in path.routes
        ),
        *([("waits", "waits", "", num_waits, path.wait_s)] if path.wait_s > 0 else []),
    ]
    return [
        (kind, [what, phase, f"{count:,}", format_ms(seconds), share(seconds, explanation.explained_s)])
        for kind, what, phase, count, seconds in found
    ]


def cut_rows(explanation: Explanation, most: int | None = None) -> list[list[str]]:
    """The costliest copies, a row of cells each: source, destination, tensor, bytes, ms, `yes` if critical."""

    def end(device: str, op: str, module: str) -> str:
        return f"{device}: {op}" + (f" in {module}" if module else "")

    return [
        [
            end(cut.source, cut.op, cut.module),
            end(cut.destination, cut.reader, cut.reader_module)
            + (f" and {cut.num_readers - 1:,} more" if cut.num_readers > 1 else ""),
            cut.what,
            format_bytes(cut.num_bytes),
            format_ms(cut.seconds),
            "yes" if cut.is_critical else "",
        ]
        for cut in explanation.cuts[:most]
    ]


def alternative_rows(explanation: Explanation) -> list[list[str]]:
    """The step time of other placements: instead, ms, over this, how, notes."""
    own_s = explanation.step_time_s
    return [
        [
            other.name,
            NOTHING if other.step_time_s is None else format_ms(other.step_time_s),
            *(
                (NOTHING, "")
                if other.step_time_s is None or own_s <= 0
                else (f"{other.step_time_s / own_s:.2f}×", other.kind)
            ),
            other.note,
        ]
        for other in explanation.alternatives
    ]


def share(part: float, whole: float) -> str:
    """A part as a percentage of the whole."""
    return f"{part / whole:.0%}" if whole > 0 else NOTHING


def _printable(data: Any) -> Any:
    """The same data without characters that a terminal would act on."""
    if isinstance(data, dict):
        return {key: _printable(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_printable(item) for item in data]
    return clean(data) if isinstance(data, str) else data


def graph_table(facts: Mapping[str, Any]) -> Table:
    """The output of `rlplace graph`, one figure a line.

    Args:
        facts: the object of `rlplace graph --json`.
    """
    phases = ", ".join(f"{count:,} {phase}" for phase, count in facts["phases"].items() if count)
    host, count, shared = facts["costs_host"], facts["num_micro_batches"], facts["num_shared"]
    each = (facts["num_ops"] - shared) / count
    cut = [("micro-batches", f"{count:,} of about {each:,.0f} ops each; {shared:,} shared by all")]
    rows = [
        ("ops", f"{facts['num_ops']:,} ({phases}; {facts['num_sources']:,} of them sources)"),
        *(cut if count > 1 else []),
        ("edges", f"{facts['num_edges']:,} between {facts['num_tensors']:,} tensors"),
        ("groups", f"{facts['num_groups']:,} ({facts['grouping']})"),
        ("work", f"{facts['flops']:.3g} FLOPs, {format_bytes(facts['bytes_moved'])} moved"),
        ("outputs", format_bytes(facts["output_bytes"])),
        ("parameters", format_bytes(facts["parameter_bytes"])),
        ("gradients", format_bytes(facts["gradient_bytes"])),
        ("optimizer state", format_bytes(facts["state_bytes"])),
        ("largest workspace", format_bytes(facts["workspace_bytes"])),
        ("widest level", f"{facts['widest_level']:,} ops that can run at once"),
        ("critical path", f"{facts['critical_path_ops']:,} ops, {format_seconds(facts['critical_path_s'])} on {host}"),
        ("one device", f"{format_seconds(facts['single_device_s'])} on {facts['single_device']} of {host}"),
        ("costs", f"{'by roofline' if facts['costs_source'] == 'estimated' else 'as the file gives them'}, on {host}"),
        *(("warning", note) for note in facts["notes"]),
        ("read in" if facts["is_file"] else "captured in", format_seconds(facts["capture_s"])),
    ]
    return _facts(rows, title=str(facts["workload"]))


def targets_table(rows: Sequence[Mapping[str, Any]], host: str) -> Table:
    """The dearest targets, one a line.

    Args:
        rows: `top_targets` in the object of `rlplace graph --json`.
        host: whose costs these are.
    """
    shown = [
        (
            str(row["target"]),
            f"{row['num_ops']:,}",
            format_seconds(row["cost_s"]),
            f"{row['share']:.1%}",
            f"{row['flops']:.3g}",
            format_bytes(row["bytes_moved"]),
        )
        for row in rows
    ]
    columns = ("target", ">ops", ">time", ">share", ">FLOPs", ">bytes moved")
    return plain_table(columns, shown, title=f"dearest targets on {host}")


def doctor_table(rows: Sequence[Mapping[str, str]]) -> Table:
    """The output of `rlplace doctor`: one finding a row.

    Args:
        rows: `checks` in the object of `rlplace doctor --json`.
    """
    shown = [(Text(row["verdict"], STYLES[row["verdict"]]), row["name"], row["found"], row["remedy"]) for row in rows]
    table = plain_table(("<verdict", "<check", "found", "remedy"), shown)
    table.columns[2].ratio, table.columns[3].ratio = 3, 2
    return table
