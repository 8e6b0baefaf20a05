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

from rlplace.errors import InvalidValue, RlplaceError, UnknownName
from rlplace.graphs.program import LossByName
from rlplace.workloads.catalog import OPTIMIZERS, BatchDims, Optimizer, Parts, Workload
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
        if isinstance(error, ModuleNotFoundError) and _is_or_contains(error.name, name):
            raise UnknownName(f"module (in {Path.cwd()} or on Python's path)", name, _modules_beside(name)) from error
        raise InvalidValue("workload", name, "a module that can be imported", hint=_raised(error)) from error


def _is_or_contains(missing: str | None, name: str) -> bool:
    return missing is not None and f"{name}.".startswith(f"{missing}.")


def _modules_beside(name: str) -> list[str]:
    """Names that could have been meant: modules of the imported parent package, else of the current folder."""
    parent, dot, _ = name.rpartition(".")
    package = sys.modules.get(parent)
    paths = getattr(package, "__path__", None) if package else None
    if paths is None:
        return [module.name for module in pkgutil.iter_modules([str(Path.cwd())])]
    return [f"{parent}{dot}{module.name}" for module in pkgutil.iter_modules(paths)]


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
    if not isinstance(model, nn.Module):
        raise InvalidValue("model", _type_name(model), "a torch.nn.Module", where=where)
    if loss_fn is not None and not callable(loss_fn):
        raise InvalidValue(
            "loss_fn", _type_name(loss_fn), "a function from the model's output to a scalar", where=where
        )
    optimizer = _checked_optimizer(optimizer, loss_fn, where)
    wanted: tuple[Tensor, ...] = ()
    if targets is not None:
        if loss_fn is None:
            raise InvalidValue("loss_fn", None, "a function, since there are targets", where=where)
        named = _checked_tensors("targets", targets, where)
        loss_fn = LossByName(loss_fn, tuple(named)) if isinstance(named, dict) else loss_fn
        wanted = tuple(named.values()) if isinstance(named, dict) else named
    return Workload(name, model, _checked_tensors("inputs", inputs, where), loss_fn, optimizer, wanted)


def _checked_tensors(field: str, given: object, where: str) -> tuple[Tensor, ...] | dict[str, Tensor]:
    if isinstance(given, Tensor):
        return (given,)
    if isinstance(given, Mapping):
        return {str(key): _checked_tensor(f"{field}[{key!r}]", value, where) for key, value in given.items()}
    if isinstance(given, Sequence) and not isinstance(given, str):
        return tuple(_checked_tensor(f"{field}[{index}]", value, where) for index, value in enumerate(given))
    raise InvalidValue(field, _type_name(given), "a tensor, a tuple or a dict of tensors", where=where)


def _checked_tensor(field: str, value: object, where: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise InvalidValue(
            field, _type_name(value), "a tensor", where=where, hint="Set whatever is not a tensor inside the model."
        )
    return value


def _checked_optimizer(optimizer: object, loss_fn: object, where: str) -> Optimizer | None:
    if optimizer is None:
        return None
    if not isinstance(optimizer, str):
        raise InvalidValue("optimizer", _type_name(optimizer), f"one of {', '.join(OPTIMIZERS)}", where=where)
    if optimizer not in OPTIMIZERS:
        raise UnknownName("optimizer", optimizer, OPTIMIZERS)
    if loss_fn is None:
        raise InvalidValue("loss_fn", None, f"a function, since the optimizer is {optimizer!r}", where=where)
    return optimizer


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
    return Parts(Multi(models), inputs, loss_fn, dims, _loss([parts.loss for _, _, parts in members]))


def _batch_dims(parts: Parts) -> BatchDims:
    """The cut of one member: as it says, else dimension 0 of tensors as long there as the first."""
    if parts.batch_dims is not None:
        return parts.batch_dims
    tensors = list(parts.inputs.values() if isinstance(parts.inputs, dict) else parts.inputs)
    return tuple(0 if tensor.shape[:1] == tensors[0].shape[:1] else None for tensor in tensors)


def _loss(kinds: Sequence[Loss]) -> Loss:
    """The kind of a sum of losses: accumulated with any that is, one that all have, else to be found."""
    if "accumulated" in kinds:
        return "accumulated"
    return kinds[0] if len(set(kinds)) == 1 else "auto"
