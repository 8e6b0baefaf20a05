"""`System`: everything that checks touch, one small function each, so that tests can stand in for a machine."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rlplace
from rlplace.measure.run.threads import usable_cores
from rlplace.runs.doctor.op_times import op_times_s


def glibc_version() -> str:
    """Such as `glibc 2.36`; empty where the C library is another."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (AttributeError, ValueError, OSError):
        return ""


def is_writable(path: Path) -> bool:
    """Whether this process may make files in that folder."""
    return os.access(path, os.W_OK | os.X_OK)


def free_bytes(path: Path) -> int:
    """Free space of the file system that holds `path`."""
    return shutil.disk_usage(path).free


def has_module(name: str) -> bool:
    """Whether a top-level module can be found; it is not imported."""
    return importlib.util.find_spec(name) is not None


@dataclass(frozen=True, slots=True)
class System:
    """The machine and the installation, as this process sees them."""

    root: Path = Path("/")
    """above `proc` and `sys`"""
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    """environment variables"""
    python_version: str = platform.python_version()
    """of the Python that runs"""
    package: Path = Path(rlplace.__file__).parent
    """folder of the rlplace that runs"""
    current_folder: Callable[[], str] = os.getcwd
    """raises OSError where it has been removed"""
    home: Callable[[], Path] = Path.home
    """the user's"""
    usable_cores: Callable[[], Sequence[int]] = usable_cores
    """logical cores that this process may run on"""
    num_cores: Callable[[], int | None] = os.cpu_count
    """logical cores of the machine"""
    distribution: Callable[[str], importlib.metadata.Distribution] = importlib.metadata.distribution
    """what is known of an installed package; raises PackageNotFoundError"""
    has_module: Callable[[str], bool] = has_module
    """whether a top-level module can be found"""
    find_program: Callable[[str], str | None] = shutil.which
    """path of a program"""
    is_writable: Callable[[Path], bool] = is_writable
    """whether files can be made in a folder"""
    free_bytes: Callable[[Path], int] = free_bytes
    """free space of the file system that holds a path"""
    glibc_version: Callable[[], str] = glibc_version
    """of the C library; empty where it is another"""
    import_torch: Callable[[], Any] = lambda: importlib.import_module("torch")
    """PyTorch, imported at the first call"""
    op_times_s: Callable[[Any], Sequence[float]] = op_times_s
    """times of one small op of that torch, again and again"""
    now_s: Callable[[], float] = time.perf_counter
    """the clock that steps are measured with"""

    def read(self, path: str) -> str:
        """A small file of the system, stripped; empty where there is none or it cannot be read."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

    def version_of(self, package: str) -> str:
        """Version of an installed package; empty where it is not installed."""
        try:
            return self.distribution(package).version
        except importlib.metadata.PackageNotFoundError:
            return ""
