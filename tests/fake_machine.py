"""Machines that are made up for the doctor: folders of files in place of `/proc` and `/sys`, fake packages and GPUs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from rlplace.doctor import CHECKS, Finding, System, run_checks

GIB = 2**30
REQUIRES = [
    *("numpy>=2.0", "numba<0.69,>=0.61", "torch>=2.9", "wandb>=0.18"),
    *("onnx>=1.16; extra == 'onnx'", "onnx>=1.16; extra == 'all'", "transformers>=5.0; extra == 'zoo'"),
]
VERSIONS = {"rlplace": "0.1.0", "numpy": "2.3.1", "numba": "0.62", "torch": "2.9.0", "wandb": "0.20"}
TOPOLOGY = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
FILES = {
    "proc/loadavg": "0.10 0.20 0.30 1/100 4242",
    "proc/meminfo": "MemTotal:       16777216 kB\nMemFree:         1048576 kB\nMemAvailable:    8388608 kB",
    "proc/self/cgroup": "0::/",
    **{TOPOLOGY.format(core): str(core) for core in range(4)},
}


def fake_torch(
    num_gpus: int = 0,
    *,
    cuda: str | None = None,
    peers: Collection[tuple[int, int]] = (),
    architectures: Collection[str] = ("sm_80", "sm_90"),
    threads: int = 4,
    says: str = "",
) -> SimpleNamespace:
    def is_available() -> bool:
        if says:
            warnings.warn(says, UserWarning, stacklevel=1)
        return num_gpus > 0

    gpu = SimpleNamespace(name="NVIDIA H100", total_memory=80 * GIB, major=9, minor=0)
    return SimpleNamespace(
        __version__="2.9.0+cpu" if cuda is None else "2.9.0+cu128",
        version=SimpleNamespace(cuda=cuda, hip=None),
        get_num_threads=lambda: threads,
        cuda=SimpleNamespace(
            is_available=is_available,
            device_count=lambda: num_gpus,
            get_device_properties=lambda index: gpu,
            get_arch_list=lambda: list(architectures),
            can_device_access_peer=lambda one, other: (one, other) in peers,
        ),
    )


def distributions(versions: Mapping[str, str]) -> Callable[[str], Distribution]:
    """What `importlib.metadata.distribution` would answer."""

    def distribution(name: str) -> Distribution:
        if name not in versions:
            raise PackageNotFoundError(name)
        return cast(Distribution, SimpleNamespace(version=versions[name], requires=REQUIRES))

    return distribution


class Machine:
    """A sound machine of four cores without GPUs, everything installed; tests say what is different."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for path, text in FILES.items():
            self.write(path, text)

    def write(self, path: str, text: str) -> None:
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_text(text)

    def system(self, *, versions: Mapping[str, str] = VERSIONS, **changes: Any) -> System:
        facts: dict[str, Any] = {
            "root": self.folder,
            "environ": {},
            "current_folder": lambda: str(self.folder),
            "usable_cores": lambda: (0, 1, 2, 3),
            "num_cores": lambda: 4,
            "distribution": distributions(versions),
            "import_torch": fake_torch,
            "op_times_s": lambda torch: [1e-3] * 100,
        }
        return System(**{**facts, **changes})

    def look(self, name: str, **changes: Any) -> list[Finding]:
        """What one check finds."""
        return run_checks(self.system(**changes), [check for check in CHECKS if check.name == name])


def only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    return finding
