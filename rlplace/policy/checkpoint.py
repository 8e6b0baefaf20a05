"""Checkpoints of policies: weights as safetensors, everything else as JSON beside them; loading runs no code.

Weights that come with the package, trained by `rlplace pretrain`, are in the folder `weights`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from rlplace.errors import FileProblem, UnknownName
from rlplace.files import check_header, read_json, read_plain, write_bytes_atomic, write_json_atomic
from rlplace.records import shortened

SCHEMA = 1
LARGEST_BYTES = 256 << 20
"""Of a file of weights; those of policies have a few megabytes."""
_STRANGE = (
    *(SafetensorError, ArithmeticError, AssertionError, AttributeError, LookupError),
    *(RuntimeError, TypeError, ValueError),
)
"""Errors of safetensors, PyTorch and NumPy on tensors, numbers or names that are not the expected ones."""


def save_checkpoint(path: str | os.PathLike[str], about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Writes `tensors` to `path` (`policy.safetensors`) and `about`, with its `schema` and `kind`, beside it (`.json`).

    Raises:
        FileProblem: a file cannot be written.
    """
    path = Path(path)
    write_bytes_atomic(path, save({name: tensor.detach().contiguous() for name, tensor in tensors.items()}))
    write_json_atomic(path.with_suffix(".json"), dict(about))


def load_checkpoint(path: str | os.PathLike[str], kind: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The description and the tensors that `save_checkpoint` wrote for a policy of that kind.

    Raises:
        FileProblem: a file is missing, malformed, or of another kind.
    """
    path = Path(path)
    about_path = path.with_suffix(".json")
    if not os.path.isfile(path):
        raise FileProblem(path, "no such file.")
    if not os.path.isfile(about_path):
        hint = f"It describes the weights of {path.name} and has to be beside them."
        raise FileProblem(about_path, f"no such file. {hint}")
    about = read_json(about_path)
    if not isinstance(about, dict) or about.get("schema") != SCHEMA or about.get("kind") != kind:
        raise FileProblem(about_path, _another(about, kind))
    data = read_plain(path, largest_bytes=LARGEST_BYTES, holds="weights", follows_links=True)
    check_header(data, path)
    with refusing(path, f"not the weights of {about_path.name}"):
        return about, load(data)


def _another(about: object, kind: str) -> str:
    wrong = f"not a policy of schema {SCHEMA} and kind {kind!r}"
    actual = about.get("kind") if isinstance(about, dict) else None
    if not isinstance(actual, str) or actual == kind:
        return f"{wrong}."
    reader = f"`load_checkpoint(path, {actual!r})` reads what its `save` kept"
    return f"{wrong}, but of kind {actual!r}: {reader}. If that is a policy, `--policy {actual}` takes it."


@contextmanager
def refusing(path: str | os.PathLike[str], what: str) -> Iterator[None]:
    """While active, an error of tensors, numbers or names that do not fit is one of the file.

    Raises:
        FileProblem: such an error; the message begins with `what`.
    """
    try:
        yield
    except _STRANGE as error:
        raise FileProblem(path, f"{what}: {shortened(str(error))}.") from error


Sizes = Mapping[str, tuple[torch.dtype, Sequence[int]]]
"""Types and shapes of tensors, by name."""


def check_tensors(
    tensors: Mapping[str, Tensor], expected: Sizes, path: str | os.PathLike[str], what: str = "not these weights"
) -> None:
    """Refuses tensors of a checkpoint that a network cannot use, before anything of their size is made.

    Args:
        tensors: as `load_checkpoint` returned them.
        expected: of each that is needed; any floating-point type will do for another.
        path: of the checkpoint, for messages.
        what: the message begins with it.

    Raises:
        FileProblem: one is missing, of another shape or type, or holds numbers that are not finite.
    """
    for name, (dtype, shape) in expected.items():
        found, wanted = tensors.get(name), tuple(shape)
        are_real = found is not None and found.is_floating_point() and dtype.is_floating_point
        if found is None or tuple(found.shape) != wanted or not (are_real or found.dtype == dtype):
            looks = "missing" if found is None else f"{tuple(found.shape)} {found.dtype}"
            raise FileProblem(path, f"{what}: {name} is {looks}, expected {wanted} {dtype}.")
        if found.is_floating_point() and not bool(torch.isfinite(found.float()).all()):
            raise FileProblem(path, f"{name} holds numbers that are not finite.")


def set_tensors(
    own: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    path: str | os.PathLike[str],
    what: str = "weights of a policy of another size",
) -> None:
    """Sets parameters and buffers to those of the same names in a checkpoint; `check_tensors` refuses what is wrong."""
    check_tensors(tensors, {name: (tensor.dtype, tensor.shape) for name, tensor in own.items()}, path, what)
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


def set_all(module: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Sets all parameters and buffers of a module to those of a checkpoint, which may hold no others.

    Raises:
        FileProblem: names or shapes are others.
    """
    with refusing(path, f"not the weights of {path.with_suffix('.json').name}"):
        module.load_state_dict(tensors)


def pretrained_kinds() -> tuple[str, ...]:
    """Names of the policies whose pretrained weights come with the package."""
    folder = files("rlplace.policy.weights")
    return tuple(sorted(Path(one.name).stem for one in folder.iterdir() if one.name.endswith(".safetensors")))


def pretrained_path(kind: str) -> Path:
    """The file of the pretrained weights of a policy; their description is beside it (`.json`).

    Raises:
        UnknownName: there are none for that policy.
    """
    if kind not in (known := pretrained_kinds()):
        raise UnknownName(
            "pretrained policy", kind, known, hint="Others begin with weights of a run: FILE.safetensors."
        )
    with as_file(files("rlplace.policy.weights") / f"{kind}.safetensors") as path:
        return path
