"""`load`: a workload from a user's function.

`join`: several models on one host as one workload.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from rlplace.errors import InvalidValue, RlplaceError, UnknownName, check_known, refuse_if
from rlplace.graphs.program import LossByName
from rlplace.workloads.catalog import OPTIMIZERS, BatchDims, Parts, Workload
from rlplace.workloads.configs import Loss

RETURNED = "(model, inputs[, loss_fn[, optimizer[, targets]]])"


def load(name: str) -> Workload:
    """The workload that the function `package.module:function` returns, checked.

    The current folder is importable while the module is imported and the function runs.

    Args:
        name: the module and a function of it that takes no arguments and returns `(model, inputs[, loss_fn[,
            optimizer[, targets]]])`.

    Raises:
        UnknownName: there is no such module, function or optimizer.
        InvalidValue: the module could not be imported, the function raised (`__cause__` is its error), or it returned
            something else.
    """
    module_name, _, function_name = name.partition(":")
    with _current_folder_importable():
        function = _find(_import(module_name), function_name, name)
        try:
            returned = function()
        except RlplaceError:
            raise
        except (Exception, SystemExit) as error:
            raise InvalidValue(
                "workload", name, f"a function without arguments that returns {RETURNED}", hint=_raised(error)
            ) from error
    return _checked(returned, name)


@contextmanager
def _current_folder_importable() -> Iterator[None]:
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        with suppress(ValueError):
            sys.path.remove(folder)


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except RlplaceError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise UnknownName(f"module (in {Path.cwd()} or on Python's path)", name, _modules_beside(name)) from error
        raise InvalidValue("workload", name, "a module that can be imported", hint=_raised(error)) from error


def _modules_beside(name: str) -> list[str]:
    """Names that could have been meant: modules of the imported parent package, else of the current folder."""
    parent = name.rpartition(".")[0]
    paths = getattr(sys.modules.get(parent), "__path__", None)
    return [module.name for module in pkgutil.iter_modules(paths or [str(Path.cwd())], f"{parent}." if paths else "")]


def _find(module: ModuleType, function_name: str, name: str) -> Callable[[], object]:
    if not hasattr(module, function_name):
        raise UnknownName(
            f"function of module {module.__name__}",
            function_name,
            [key for key, _ in inspect.getmembers(module, inspect.isfunction)],
        )
    found: object = getattr(module, function_name)
    if not callable(found):
        raise InvalidValue("workload", name, f"a function, but {function_name} is of type {_type_name(found)}")
    return found


def _raised(error: BaseException) -> str:
    """The error, and the last line of its traceback that is neither in the import machinery nor in PyTorch."""
    ours = ("<frozen ", importlib.__file__, __file__, str(Path(torch.__file__).parent))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(ours)]
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        return (
            f"It reads the values of a tensor{where}. On a simulated host it is called without them, so that a model "
            "of any size needs no memory: take such numbers from Python's `random`, from NumPy, or as constants."
        )
    return f"It raised {type(error).__name__}: {error}{where}."


def _checked(returned: object, name: str) -> Workload:
    where = f"what {name} returned"
    if not isinstance(returned, tuple) or not 2 <= len(returned) <= 5:
        raise InvalidValue(
            "the value",
            f"a tuple of {len(returned)}" if isinstance(returned, tuple) else _type_name(returned),
            RETURNED,
            where=where,
        )
    model, inputs, loss_fn, optimizer, targets = (*returned, None, None, None)[:5]
    is_function, is_name = loss_fn is None or callable(loss_fn), isinstance(optimizer, str | None)
    for field, value, is_right, expected in (
        ("model", model, isinstance(model, nn.Module), "a torch.nn.Module"),
        ("loss_fn", loss_fn, is_function, "a function from the model's output to a scalar"),
        ("optimizer", optimizer, is_name, f"one of {', '.join(OPTIMIZERS)}"),
    ):
        refuse_if(not is_right, field, _type_name(value), expected, where=where)
    if optimizer is not None:
        check_known("optimizer", optimizer, OPTIMIZERS)
    if loss_fn is None and (optimizer is not None or targets is not None):
        why = "there are targets" if optimizer is None else f"the optimizer is {optimizer!r}"
        raise InvalidValue("loss_fn", None, f"a function, since {why}", where=where)
    wanted = () if targets is None else _checked_tensors("targets", targets, where)
    if isinstance(wanted, dict):
        loss_fn, wanted = LossByName(loss_fn, tuple(wanted)), tuple(wanted.values())
    return Workload(name, model, _checked_tensors("inputs", inputs, where), loss_fn, optimizer, wanted)


def _checked_tensors(field: str, given: object, where: str) -> tuple[Tensor, ...] | dict[str, Tensor]:
    if isinstance(given, Tensor):
        return (given,)
    if isinstance(given, str) or not isinstance(given, Mapping | Sequence):
        raise InvalidValue(field, _type_name(given), "a tensor, a tuple or a dict of tensors", where=where)
    for key, value in given.items() if isinstance(given, Mapping) else enumerate(given):
        if not isinstance(value, Tensor):
            raise InvalidValue(
                f"{field}[{key!r}]",
                _type_name(value),
                "a tensor",
                where=where,
                hint="Set whatever is not a tensor inside the model.",
            )
    return {str(key): value for key, value in given.items()} if isinstance(given, Mapping) else tuple(given)


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


class Multi(nn.Module):
    """Models side by side, each a child under its own name; the output is every model's own, by that name."""

    def __init__(self, models: dict[str, nn.Module]) -> None:
        super().__init__()
        for name, model in models.items():
            self.add_module(name, model)

    def forward(self, **inputs: Tensor) -> dict[str, Any]:
        """Outputs by model; `inputs` are `NAME.0`, `NAME.1`, ... or `NAME.key` of every model."""
        outputs = {}
        for name, model in self.named_children():
            own = {key.removeprefix(f"{name}."): x for key, x in inputs.items() if key.startswith(f"{name}.")}
            args = [own.pop(str(index)) for index in range(len(own)) if str(index) in own]
            outputs[name] = model(*args, **own)
        return outputs


def join(members: Sequence[tuple[str, float, Parts]]) -> Parts:
    """One model of all members, whose loss is the sum of theirs.

    Args:
        members: for each its name (a second `gpt2` becomes `gpt2_2`), the weight of its loss, and its workload.
    """
    named: dict[str, tuple[float, Parts]] = {}
    inputs: dict[str, Tensor] = {}
    for position, (plain, weight, parts) in enumerate(members):
        count = 1 + sum(other == plain for other, _, _ in members[:position])
        name = plain if count == 1 else f"{plain}_{count}"
        named[name] = weight, parts
        given = parts.inputs.items() if isinstance(parts.inputs, dict) else enumerate(parts.inputs)
        inputs |= {f"{name}.{key}": tensor for key, tensor in given}

    losses = {name: (weight, parts.loss_fn) for name, (weight, parts) in named.items()}

    def loss_fn(outputs: dict[str, Any]) -> Tensor:
        return torch.stack([weight * loss(outputs[name]) for name, (weight, loss) in losses.items()]).sum()

    models = {name: parts.model for name, (_, parts) in named.items()}
    dims = tuple(dim for _, _, parts in members for dim in _batch_dims(parts))
    kinds = [parts.loss for _, _, parts in members]
    # of a sum of losses: accumulated with any that is, one that all have, else to be found
    alike: Loss = kinds[0] if len(set(kinds)) == 1 else "auto"
    return Parts(Multi(models), inputs, loss_fn, dims, "accumulated" if "accumulated" in kinds else alike)


def _batch_dims(parts: Parts) -> BatchDims:
    """The cut of one member: as it says, else dimension 0 of tensors as long there as the first."""
    tensors = list(parts.inputs.values() if isinstance(parts.inputs, dict) else parts.inputs)
    default = (0 if tensor.shape[:1] == tensors[0].shape[:1] else None for tensor in tensors)
    return tuple(default) if parts.batch_dims is None else parts.batch_dims
