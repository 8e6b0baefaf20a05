"""Weights that come with the package, trained by `rlplace pretrain`."""

from __future__ import annotations

from importlib.resources import as_file, files
from pathlib import Path

from rlplace.errors import UnknownName


def pretrained_kinds() -> tuple[str, ...]:
    """Names of the policies that there are weights for."""
    folder = files("rlplace.policy.weights")
    return tuple(sorted(Path(one.name).stem for one in folder.iterdir() if one.name.endswith(".safetensors")))


def pretrained_path(kind: str) -> Path:
    """The file of the weights of a policy; what they are is beside it (`.json`).

    Raises:
        UnknownName: there are none for that policy.
    """
    if kind not in pretrained_kinds():
        raise UnknownName(
            "pretrained policy", kind, pretrained_kinds(), hint="Others begin with what a run kept: FILE.safetensors."
        )
    with as_file(files("rlplace.policy.weights") / f"{kind}.safetensors") as path:
        return path
