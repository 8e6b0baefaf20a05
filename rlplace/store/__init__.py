"""The store: every step time measured on this machine, so that nothing is measured twice and no host is learned twice.

`schema` says what a database holds, `database` opens one with care, `records` are its rows, `store` reads and writes
them, `filters` chooses among them, `tables` writes them for other tools, `log` is what measuring sees of it, `trace` is
what is kept of a timeline, and `folders` says where it is.

Importing this imports no torch: names are looked up when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlplace.store.filters import Filter
    from rlplace.store.log import StoreLog, open_log
    from rlplace.store.records import Session, StoredMeasurement
    from rlplace.store.store import MeasurementStore

__all__ = ["Filter", "MeasurementStore", "Session", "StoreLog", "StoredMeasurement", "open_log"]

_HOMES = {
    "Filter": "rlplace.store.filters",
    "MeasurementStore": "rlplace.store.store",
    "Session": "rlplace.store.records",
    "StoreLog": "rlplace.store.log",
    "StoredMeasurement": "rlplace.store.records",
    "open_log": "rlplace.store.log",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
