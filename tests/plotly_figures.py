"""Figures of reports, checked by plotly's own schema."""

from __future__ import annotations

import copy
import re
from typing import Any

import plotly.graph_objects as go

from rlplace.files import jsonable
from rlplace.report.html.figure import Figure

PAGE_COLOR = re.compile(r"@[a-z]+")


def check(figure: Figure) -> list[dict[str, Any]]:
    """The traces of every variant; plotly refuses an attribute or a value that it does not know."""
    shown = []
    for variant in figure.variants:
        data, layout = copy.deepcopy([dict(trace) for trace in figure.data]), copy.deepcopy(dict(figure.layout))
        for path, values in variant.restyle.items():
            assert len(values) <= len(data)
            for trace, value in zip(data, values):
                _set(trace, path, value)
        for path, value in variant.relayout.items():
            _set(layout, path, value)
        go.Figure(_plain(data), _plain(layout))
        shown.append({"data": data, "layout": layout})
    return shown


def _set(target: dict[str, Any], path: str, value: Any) -> None:
    *keys, last = path.split(".")
    for key in keys:
        target = target.setdefault(key, {})
    target[last] = value


def _plain(value: Any) -> Any:
    """With the page's colours as some colour."""
    if isinstance(value, str):
        return "#123456" if PAGE_COLOR.fullmatch(value) else value
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return jsonable(value)
