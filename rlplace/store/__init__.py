"""The store: every step time measured on this machine, so that nothing is measured twice and no host is learned twice.

`database` has the schema, and opens a database with care. `rows` are its rows, and writes them for other tools; `store`
reads, chooses and keeps them. `log` finds the store of the user, and is its interface for measuring.

Importing this imports no torch: names are looked up when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlplace.lazy_imports import lazy

if TYPE_CHECKING:
    from rlplace.store.log import StoreLog, open_log
    from rlplace.store.rows import MeasuringProcess, StoredMeasurement
    from rlplace.store.store import Filter, MeasurementStore

__all__ = ["Filter", "MeasurementStore", "MeasuringProcess", "StoreLog", "StoredMeasurement", "open_log"]

__getattr__ = lazy(__name__, __file__)
