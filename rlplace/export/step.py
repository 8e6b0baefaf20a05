"""The address of `matching_host` in programs `step.py` that earlier versions exported."""

from rlplace.export.placed.graphs import matching_host

__all__ = ["matching_host"]
