"""`Expressions`: the ATen calls and views of a program as Python source, for one device."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from rlplace.graphs.program import Call, Program, Ref, View, refs_in


class Constants:
    """Values that Python has no literal for, each under a name: `c0`, `c1` and so on.

    Attributes:
        values: by name.
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self._names: dict[tuple[str, str], str] = {}

    def name(self, value: Any) -> str:
        """The name of `value`, the same for all that print alike."""
        key = (type(value).__name__, repr(value))
        if key not in self._names:
            self._names[key] = f"c{len(self.values)}"
            self.values[self._names[key]] = value
        return self._names[key]


class Expressions:
    """What one device's lines say, in the names of `StepCode`.

    A view is defined where it is first needed and is there until its tensor is dropped.

    Args:
        program: of the graph.
        device: index of the device.
        constants: those of the step, shared by its devices.
    """

    def __init__(self, program: Program, device: int, constants: Constants) -> None:
        self._program, self._device, self._constants = program, device, constants
        self._views: dict[int, list[int]] = defaultdict(list)  # base tensor -> views alive on this device

    def call(self, op: int, call: Call) -> tuple[list[str], tuple[int, ...]]:
        """Lines that run `op`, views that it needs among them, and the tensors that it makes."""
        lines = self.views(refs_in((call.args, call.kwargs)))
        arguments = ["step"] if call.is_random else []
        arguments += [self._literal(value) for value in call.args]
        for key, value in call.kwargs.items():
            if key == "device" and call.takes_device and value is not None:
                arguments.append(f"device=D{self._device}")
            else:
                arguments.append(f"{key}={self._literal(value)}")
        expression = f"f{op}({', '.join(arguments)})"
        produced = tuple(tensor for tensor in call.outputs if tensor >= 0)
        if call.returns_tuple:
            names = [f"t{tensor}" if tensor >= 0 else "_" for tensor in call.outputs]
            comma = "," if len(names) == 1 else ""
            return [*lines, f"{', '.join(names)}{comma} = {expression}"], produced
        target = f"t{call.outputs[0]} = " if produced else ""
        return [*lines, f"{target}{expression}"], produced

    def views(self, refs: Iterable[Ref]) -> list[str]:
        """Lines that define the views that `refs` need and that do not exist yet on this device."""
        lines: list[str] = []
        for ref in refs:
            if ref.id < self._program.num_tensors:
                continue
            index = ref.id - self._program.num_tensors
            view: View = self._program.views[index]
            if index in self._views[view.base]:
                continue
            lines += self.views(refs_in((view.args, view.kwargs)))
            arguments = [self._literal(value) for value in view.args]
            arguments += [f"{key}={self._literal(value)}" for key, value in view.kwargs.items()]
            lines.append(f"v{index} = g{index}({', '.join(arguments)})")
            self._views[view.base].append(index)
        return lines

    def name(self, ref: Ref) -> str:
        """The name of a tensor or view."""
        return f"t{ref.id}" if ref.id < self._program.num_tensors else f"v{ref.id - self._program.num_tensors}"

    def forget(self, tensor: int) -> list[str]:
        """Names of the views of `tensor`, which are there no more."""
        return [f"v{view}" for view in self._views.pop(tensor, ())]

    def forget_all(self) -> None:
        """Where another function begins, no view is there."""
        self._views.clear()

    def _literal(self, value: Any) -> str:
        if isinstance(value, Ref):
            return self.name(value)
        if value is None or isinstance(value, (bool, str)) or type(value) is int:
            return repr(value)
        if type(value) is float and math.isfinite(value):
            return repr(value)
        if isinstance(value, list):
            return f"[{', '.join(map(self._literal, value))}]"
        if type(value) is tuple:
            return f"({''.join(self._literal(item) + ', ' for item in value)})"
        return self._constants.name(value)
