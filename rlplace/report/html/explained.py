"""Where the time of the step goes: devices, the critical path, the costliest copies, and what else it would cost."""

from __future__ import annotations

from rlplace.format import NOTHING, format_bytes, format_ms
from rlplace.measure.explain.explanation import CutEdge, Explanation
from rlplace.report.html.figure import Raw, Section, prose, table
from rlplace.report.html.run_data import RunData

_MOST_MODULES = 14
_MOST_CUTS = 10
_ROOT = "(the model itself)"
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
    body = (
        f"{doubt}{advice}<h3>Devices</h3>{_devices(explanation)}"
        f"<h3>Critical path</h3><p>The chain that ends the step: {_share(path.op_s, step_s)} ops, "
        f"{_share(path.transfer_s, step_s)} copies, {_share(path.wait_s, step_s)} waits.</p>{_path(explanation)}"
    )
    if explanation.cuts:
        sent = f"{explanation.num_transfers:,} copies send {format_bytes(explanation.transfer_bytes)} in all."
        body += f"<h3>Costliest copies</h3><p>{prose(sent)}</p>{_cuts(explanation)}"
    if explanation.alternatives:
        body += f"<h3>What else it would cost</h3>{_alternatives(explanation)}"
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
                *(_share(part, explanation.explained_s) for part in parts),
                format_bytes(device.sent_bytes),
                format_bytes(device.received_bytes),
                format_bytes(device.peak_bytes),
                capacity,
            ]
        )
    heads = ["device", "ops", "", "busy", "copies alone", "idle", "sent", "received", "peak memory", "of capacity"]
    return table(heads, rows, numbers=(1, 3, 4, 5, 6, 7, 8, 9), minor=(1, 2, 6, 7, 9))


def _path(explanation: Explanation) -> str:
    path, step_s = explanation.path, explanation.explained_s
    rows: list[list[object]] = [
        [
            module.module or _ROOT,
            module.phase,
            f"{module.num_ops:,}",
            format_ms(module.seconds),
            _share(module.seconds, step_s),
        ]
        for module in path.modules[:_MOST_MODULES]
    ]
    if others := path.modules[_MOST_MODULES:]:
        seconds, count = sum(one.seconds for one in others), sum(one.num_ops for one in others)
        rows.append([f"{len(others):,} more", "", f"{count:,}", format_ms(seconds), _share(seconds, step_s)])
    rows += [
        [
            f"copies {route.source} → {route.destination}",
            "",
            f"{route.num_transfers:,}",
            format_ms(route.seconds),
            _share(route.seconds, step_s),
        ]
        for route in path.routes
    ]
    if path.wait_s > 0:
        count = sum(part.kind == "wait" for part in path.parts)
        rows.append(["waits", "", f"{count:,}", format_ms(path.wait_s), _share(path.wait_s, step_s)])
    return table(["module", "phase", "items", "ms", "share"], rows, numbers=(2, 3, 4), minor=(2,))


def _cuts(explanation: Explanation) -> str:
    rows = [
        [
            _end(cut.source, cut.op, cut.module),
            _end(cut.destination, cut.reader, cut.reader_module) + _more(cut),
            cut.what,
            format_bytes(cut.num_bytes),
            format_ms(cut.seconds),
            "yes" if cut.is_critical else "",
        ]
        for cut in explanation.cuts[:_MOST_CUTS]
    ]
    return table(["from", "to", "what", "bytes", "ms", "critical"], rows, numbers=(3, 4), minor=(2, 5))


def _end(device: str, op: str, module: str) -> str:
    return f"{device}: {op}" + (f" in {module}" if module else "")


def _more(cut: CutEdge) -> str:
    return f" and {cut.num_readers - 1:,} more" if cut.num_readers > 1 else ""


def _alternatives(explanation: Explanation) -> str:
    rows = []
    for other in explanation.alternatives:
        step_s = other.step_time_s
        known = step_s is not None and explanation.step_time_s > 0
        ratio = f"{step_s / explanation.step_time_s:.2f}×" if step_s is not None and known else NOTHING
        shown = NOTHING if step_s is None else format_ms(step_s)
        rows.append([other.name, shown, ratio, other.kind if known else "", other.note])
    return table(["instead", "ms", "over this", "how", "notes"], rows, numbers=(1, 2), minor=(4,))


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole > 0 else NOTHING
