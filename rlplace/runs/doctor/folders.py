"""Checks of places to write: the current folder, and where compiled kernels are kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlplace.report.format import format_bytes
from rlplace.runs.doctor.check import Finding
from rlplace.runs.doctor.requirements import requirement_of
from rlplace.runs.doctor.system import System

LEAST_FREE_BYTES = 1 << 30


def check_disk(system: System) -> Iterator[Finding]:
    """Whether a run can be written into the current folder."""
    try:
        folder = Path(system.current_folder())
    except OSError:
        yield Finding("disk", "fail", "the current folder has been removed", "change to a folder that exists")
        return
    free_bytes = system.free_bytes(folder)
    found = f"{format_bytes(free_bytes)} free in {folder}"
    if not system.is_writable(folder):
        remedy = "change to another folder, or name one with --run"
        yield Finding("disk", "fail", f"{folder} cannot be written to", remedy)
    elif free_bytes < LEAST_FREE_BYTES:
        yield Finding("disk", "warn", found, f"free some: a run should have {format_bytes(LEAST_FREE_BYTES)}")
    else:
        yield Finding("disk", "ok", found)


def check_numba(system: System) -> Iterator[Finding]:
    """Whether kernels are compiled, and kept once they are."""
    wanted, version = requirement_of(system, "numba"), system.version_of("numba")
    if not version:
        yield Finding("numba", "fail", "not installed: the simulator needs it", f"pip install '{wanted.words}'")
        return
    found = f"{version}; the simulator runs on {len(system.usable_cores())} threads"
    if system.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        found = f"{version}; NUMBA_DISABLE_JIT is set: kernels are not compiled"
        yield Finding("numba", "fail", found, "unset NUMBA_DISABLE_JIT: the simulator cannot run without")
        return
    folder = next((folder for folder in _cache_folders(system) if _can_be_made(system, folder)), None)
    if folder is None:
        found += "; nowhere to keep compiled kernels"
        yield Finding("numba", "fail", found, "set NUMBA_CACHE_DIR to a folder that can be written to")
    else:
        yield Finding("numba", "ok", f"{found}, its kernels are kept in {folder}")


def _cache_folders(system: System) -> list[Path]:
    """Where numba tries to keep kernels, in its order (`numba.core.caching`)."""
    asked = system.environ.get("NUMBA_CACHE_DIR")
    caches = Path(system.environ.get("XDG_CACHE_HOME") or system.home() / ".cache")
    return [*([Path(asked)] if asked else []), system.package / "__pycache__", caches / "numba"]


def _can_be_made(system: System, folder: Path) -> bool:
    """Whether the folder can be written to, or made where it is not there yet."""
    nearest = next((path for path in (folder.absolute(), *folder.absolute().parents) if path.exists()), None)
    return nearest is not None and nearest.is_dir() and system.is_writable(nearest)
