"""Mutants: the code under test with one call that keeps an order taken out, found in its source by themselves.

Orders are kept by the functions of `rlplace.cuda` in `ORDERING`, by `settled`, by `CudaChannel`'s locks,
by `Streams.settle`, and by what generated code calls of a channel. A function of which one such call is
neutralised gets the code so compiled for as long as the mutant lives; its objects and its callers stay as they are.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

from rlplace.export.placed import graphs as placed_graph
from rlplace.export.placed import placed_model
from rlplace.export.placed import placed_module as module_graph
from rlplace.measure.execute import device_threads, distributed, launch_code, placed_step, residents

MODULES: tuple[ModuleType, ...] = (
    placed_step,
    residents,
    device_threads,
    distributed,
    placed_graph,
    module_graph,
    placed_model,
)
ORDERING = {"record", "wait", "keep_for", "await_event", "await_stream", "await_all"}
METHODS = {("self._ready", "release"), ("self._copied", "release"), ("self._copied", "acquire")}
METHODS |= {("self.streams", "settle"), ("work", "wait")}
EMITTED = ("_done()", "_copied()", "_wait()", "_arrived()", "_made()")
"""What lines of generated code that order a transfer end with."""
SLOTS = "._taken_lines"
"""Its lines are for slots in shared memory, which steps on GPUs do not use (`tests/measure/execute`)."""


@dataclass(frozen=True)
class Mutant:
    """One call that is taken out.

    Attributes:
        module: where it is.
        function: outermost function or method around it, by its qualified name.
        line: of it in the file.
        column: likewise.
        text: the call.
    """

    module: ModuleType
    function: str
    line: int
    column: int
    text: str

    def __str__(self) -> str:
        return f"{self.module.__name__.rpartition('.')[2]}.{self.function}: {self.text}"


def find_mutants() -> list[Mutant]:
    """All of them, in order of module and line."""
    found = [mutant for module in MODULES for mutant in _calls(module)]
    return found + [mutant for mutant in _emitted(launch_code) if not mutant.function.endswith(SLOTS)]


def _calls(module: ModuleType) -> Iterator[Mutant]:
    for name, function in _functions(module):
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_ordering(node.func, name):
                yield Mutant(module, name, node.lineno, node.col_offset, ast.unparse(node))


def _is_ordering(called: ast.Attribute, function: str) -> bool:
    owner = ast.unparse(called.value)
    if called.attr == "settled" or (owner == "cuda" and called.attr in ORDERING):
        return True
    return (owner, called.attr) in METHODS and not function.endswith("__init__")


def _emitted(module: ModuleType) -> list[Mutant]:
    return [
        Mutant(module, name, node.lineno, node.col_offset, ast.unparse(node))
        for name, function in _functions(module)
        for node in ast.walk(function)
        if isinstance(node, ast.JoinedStr) and _emits_order(node)
    ]


def _emits_order(node: ast.JoinedStr) -> bool:
    first, last = node.values[0], node.values[-1]
    constants = [each.value if isinstance(each, ast.Constant) else "" for each in (first, last)]
    return constants[0] == "k" and str(constants[1]).endswith(EMITTED)


def _functions(module: ModuleType) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in _tree(module).body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    yield f"{node.name}.{method.name}", method


def _tree(module: ModuleType) -> ast.Module:
    return ast.parse(inspect.getsource(module))


class _TakeOut(ast.NodeTransformer):
    """Puts its arguments in the place of a call, `unsettled` in that of `settled`, `pass` in that of a line of code."""

    def __init__(self, mutant: Mutant) -> None:
        self._place = mutant.line, mutant.column
        self.num_found = 0

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if (node.lineno, node.col_offset) != self._place or not isinstance(node.func, ast.Attribute):
            return node
        self.num_found += 1
        if node.func.attr == "settled":
            node.func.attr = "unsettled"
            return node
        return ast.copy_location(ast.Tuple(node.args, ast.Load()), node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        if (node.lineno, node.col_offset) != self._place:
            return node
        self.num_found += 1
        return ast.copy_location(ast.Constant("pass"), node)


@contextlib.contextmanager
def alive(mutant: Mutant) -> Iterator[None]:
    """While active, the code is the mutant's."""
    take_out = _TakeOut(mutant)
    tree = ast.fix_missing_locations(take_out.visit(_tree(mutant.module)))
    assert take_out.num_found == 1, mutant
    function = _function(mutant)
    before = function.__code__
    function.__code__ = _code(compile(tree, before.co_filename, "exec"), mutant.function)
    try:
        yield
    finally:
        function.__code__ = before


def _function(mutant: Mutant) -> FunctionType:
    value: Any = mutant.module
    for name in mutant.function.split("."):
        value = inspect.getattr_static(value, name)
    value = value.fget if isinstance(value, property) else inspect.unwrap(getattr(value, "__func__", value))
    assert isinstance(value, FunctionType)
    return value


def _code(compiled: CodeType, qualified_name: str) -> CodeType:
    pending = [compiled]
    while pending:
        code = pending.pop()
        if code.co_qualname == qualified_name:
            return code
        pending += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    raise AssertionError(qualified_name)
