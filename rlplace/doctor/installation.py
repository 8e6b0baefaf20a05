"""Checks of the installed packages: Python, rlplace, the packages that it requires, PyTorch, and the extras."""

from __future__ import annotations

import json
import platform
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from rlplace import __version__
from rlplace.doctor.system import Finding, System, first_of

EXTRAS = {
    "zoo": ("transformers", "models from transformers"),
    "onnx": ("onnx", "ONNX files"),
    "metis": ("pymetis", "METIS, as a method and as a grouping"),
    "exact": ("ortools", "exact solvers"),
}
"""Each extra: the module that it brings, and its purpose."""
SCOTCH_PROGRAMS = ("gmap", "scotch_gmap")
"""As `search.rules.baselines` looks for; importing that would import all of search."""
OWN_ROWS = {"torch", "wandb"}
"""Required packages with a check of their own."""


def check_python(system: System) -> Iterator[Finding]:
    """Whether this Python will do."""
    try:
        wanted = system.distribution(PACKAGE).metadata["Requires-Python"] or ""
    except PackageNotFoundError:
        wanted = ""
    found = f"{platform.python_implementation()} {system.python_version}, {sys.executable}"
    is_old = release(system.python_version) < release(wanted.removeprefix(">="))
    found += f"; rlplace needs {wanted}" if is_old else ""
    yield first_of("python", found, (is_old, "fail", f"install Python {wanted}"))


def check_rlplace(system: System) -> Iterator[Finding]:
    """Whether the installed rlplace is the one that runs."""
    running = f"{__version__} in {system.package}"
    try:
        installed = system.distribution(PACKAGE)
    except PackageNotFoundError:
        remedy = f"pip install -e {system.package.parent}"
        yield Finding("rlplace", "warn", f"{running}, which is not installed: what it requires is unknown", remedy)
        return
    home = installed_folder(installed)
    if home.resolve() != system.package.resolve():
        remedy = "leave it if you meant to; else see PYTHONPATH, or install the one that runs"
        yield Finding("rlplace", "warn", f"{running}; installed is {installed.version} in {home}", remedy)
    elif installed.version != __version__:
        found = f"{running}, installed as {installed.version}"
        yield Finding("rlplace", "warn", found, f"install it again: pip install -e {system.package.parent}")
    else:
        yield Finding("rlplace", "ok", running)


def installed_folder(installed: Distribution) -> Path:
    """Where the package lies: its source tree, if it was installed as editable."""
    origin = json.loads(installed.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):
        return Path(unquote(urlsplit(origin["url"]).path)) / PACKAGE
    return Path(str(installed.locate_file(PACKAGE)))


def check_packages(system: System) -> Iterator[Finding]:
    """Whether every required package is there and new enough."""
    needed = [each for each in requirements(system) if not each.extra and each.package not in OWN_ROWS]
    wrong = [(each, system.version_of(each.package)) for each in needed]
    wrong = [(each, version) for each, version in wrong if not version or not each.is_met_by(version)]
    if wrong:
        found = ", ".join(f"{each.words} is {version or 'not installed'}" for each, version in wrong)
        yield Finding("packages", "fail", found, f"pip install {_quoted(each for each, _ in wrong)}")
    elif not needed:
        yield Finding("packages", "warn", "what rlplace requires is unknown: it is not installed as a package")
    else:
        yield Finding("packages", "ok", f"{len(needed)} required packages, all new enough")


def check_torch(system: System) -> Iterator[Finding]:
    """Whether PyTorch can be imported and is new enough, and for which accelerator it was built."""
    wanted = requirement_of(system, "torch")
    try:
        system.current_folder()
    except OSError:
        found = "not imported: the current folder has been removed, and there MKL ends the process"
        yield Finding("torch", "fail", found, "change to a folder that exists")
        return
    try:
        torch = system.import_torch()
    except (ImportError, OSError) as error:
        found = f"cannot be imported: {' '.join(str(error).split())}"
        yield Finding("torch", "fail", found, f"pip install {_quoted([wanted])}")
        return
    found = f"{torch.__version__}, {torch_build(torch)}"
    is_old = not wanted.is_met_by(str(torch.__version__))
    found += f"; rlplace needs {wanted.words}" if is_old else ""
    yield first_of("torch", found, (is_old, "fail", f"pip install {_quoted([wanted])}"))


def torch_build(torch: Any) -> str:
    """The accelerator that a PyTorch was built for, such as `CUDA 12.8 build`."""
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda} build"
    if getattr(torch.version, "hip", None):
        return f"ROCm {torch.version.hip} build"
    return "CPU build"


def check_extras(system: System) -> Iterator[Finding]:
    """Which optional packages and programs are there."""
    for extra, (module, what) in EXTRAS.items():
        wanted = requirement_of(system, module)
        install = f"pip install 'rlplace[{extra}]'"
        if not system.has_module(module):
            yield Finding(extra, "ok", f"{module} is not installed", f"{install}, for {what}")
            continue
        version = system.version_of(module)
        if version and not wanted.is_met_by(version):
            yield Finding(extra, "warn", f"{module} {version}; rlplace needs {wanted.words}", install)
        else:
            yield Finding(extra, "ok", f"{module} {version}".rstrip())
    paths = (system.find_program(name) for name in SCOTCH_PROGRAMS)
    if path := next(filter(None, paths), None):
        yield Finding("scotch", "ok", path)
    else:
        yield Finding("scotch", "ok", "no program gmap", "apt install scotch, for the method scotch")


def _quoted(wanted: Iterable[Requirement]) -> str:
    return " ".join(f"'{each.words}'" for each in wanted)


PACKAGE = "rlplace"

_REQUIREMENT = re.compile(
    r"(?P<package>[\w.-]+)\s*(?:>=\s*(?P<least>[\d.]+))?\s*(?:;\s*extra\s*==\s*['\"](?P<extra>\w+))?"
)


@dataclass(frozen=True, slots=True)
class Requirement:
    """A package that is needed, always or for one extra."""

    package: str
    least: str = ""
    """lowest version that will do; empty: any"""
    extra: str = ""
    """the extra that it belongs to; empty: always needed"""

    @property
    def words(self) -> str:
        """As pip takes it."""
        return f"{self.package}>={self.least}" if self.least else self.package

    def is_met_by(self, version: str) -> bool:
        """Whether that version will do.

        >>> Requirement("torch", "2.9").is_met_by("2.10.0+cu128")
        True
        """
        return not self.least or release(version) >= release(self.least)


def parse_requirement(text: str) -> Requirement:
    """A line of `Requires-Dist`; of its versions only a lowest one is read, as all of ours are.

    >>> parse_requirement("onnx>=1.16; extra == 'onnx'")
    Requirement(package='onnx', least='1.16', extra='onnx')
    """
    match = _REQUIREMENT.match(text)
    if match is None:
        raise ValueError(f"{text!r} is no requirement")
    return Requirement(match["package"], match["least"] or "", match["extra"] or "")


def release(version: str) -> tuple[int, ...]:
    """The numbers that a version starts with, zeros at the end left out.

    >>> release("2.13.0+cpu")
    (2, 13)
    """
    match = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(number) for number in match[0].split(".")] if match else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def requirements(system: System) -> list[Requirement]:
    """All requirements of the installed package; none where it is not installed."""
    try:
        lines = system.distribution(PACKAGE).requires or []
    except PackageNotFoundError:
        return []
    return [parse_requirement(line) for line in lines]


def requirement_of(system: System, package: str) -> Requirement:
    """The requirement of one package; any version where none is known."""
    known = (each for each in requirements(system) if each.package == package)
    return next(known, Requirement(package))
