from __future__ import annotations

import importlib
import sys
import textwrap

import pytest
import torch

from rlplace.errors import FileProblem, InvalidValue, UnknownName
from rlplace.workloads import build, parse_workload, without_memory

LINEAR = """
    import torch

    def make():
        return torch.nn.Linear(3, 2), torch.randn(4, 3)
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a module into the current folder; what gets imported from there is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)

    def write(path, text):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))

    yield write
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    importlib.invalidate_caches()


def returning(write, expression):
    """What `build` makes of a function that returns `expression`."""
    write(
        "mine.py",
        f"import torch\nmodel = torch.nn.Linear(3, 2)\nx = torch.ones(4, 3)\ndef make():\n    return {expression}\n",
    )
    return build(parse_workload("mine:make"))


def test_function_in_the_current_folder(write):
    write("mine.py", LINEAR)
    path = list(sys.path)
    workload = build(parse_workload("mine:make"))
    assert workload.model(*workload.inputs).shape == (4, 2)
    assert (workload.name, workload.loss_fn, workload.optimizer) == ("mine:make", None, None)
    assert sys.path == path


def test_function_in_a_package(write):
    write("zoo/__init__.py", "")
    write("zoo/linear.py", LINEAR)
    assert build(parse_workload("zoo.linear:make")).model.in_features == 3


def test_function_may_import_late(write):
    write("mine.py", "def make():\n    from other import make\n    return make()\n")
    write("other.py", LINEAR)
    assert build(parse_workload("mine:make")).model.in_features == 3


def test_same_seed_same_weights_and_inputs(write):
    write("mine.py", LINEAR)
    first, second = (build(parse_workload("mine:make"), seed=3) for _ in range(2))
    assert torch.equal(first.model.weight, second.model.weight)
    assert torch.equal(first.inputs[0], second.inputs[0])


def test_everything_given(write):
    workload = returning(write, "model, (x,), lambda y: y.sum(), 'momentum'")
    assert workload.optimizer == "momentum"
    assert workload.loss_fn(workload.model(*workload.inputs)).shape == ()


@pytest.mark.parametrize(("targets", "count"), [("None", 0), ("x", 1), ("[x, x]", 2)])
def test_targets_are_a_tuple(write, targets, count):
    workload = returning(write, f"model, x, lambda y, *targets: y.sum(), 'sgd', {targets}")
    assert len(workload.targets) == count
    assert all(target.shape == (4, 3) for target in workload.targets)


def test_dict_inputs_stay_a_dict(write):
    workload = returning(write, "model, {'input': x}")
    assert workload.model(**workload.inputs).shape == (4, 2)


@pytest.mark.parametrize(
    ("expression", "field", "actual"),
    [
        ("model", "the value", "torch.nn.modules.linear.Linear"),
        ("(model,)", "the value", "a tuple of 1"),
        ("model, x, None, None, None, None", "the value", "a tuple of 6"),
        ("torch.relu, x", "model", "builtin_function_or_method"),
        ("model, 3", "inputs", "int"),
        ("model, 'x'", "inputs", "str"),
        ("model, (x, 3)", "inputs[1]", "int"),
        ("model, {'input': x, 'use_cache': False}", "inputs['use_cache']", "bool"),
        ("model, x, 'mse'", "loss_fn", "str"),
        ("model, x, torch.sum, torch.optim.Adam", "optimizer", "type"),
        ("model, x, None, 'adam'", "loss_fn", None),
        ("model, x, None, None, x", "loss_fn", None),
        ("model, x, torch.sum, 'adam', 3", "targets", "int"),
        ("model, x, torch.sum, 'adam', {'y': 3}", "targets['y']", "int"),
        ("model, x, torch.sum, 'adam', (x, 3)", "targets[1]", "int"),
    ],
)
def test_wrong_return_is_named(write, expression, field, actual):
    with pytest.raises(InvalidValue, match="what mine:make returned") as caught:
        returning(write, expression)
    assert (caught.value.field, caught.value.actual) == (field, actual)


def test_unknown_optimizer(write):
    with pytest.raises(UnknownName, match="'adam'"):
        returning(write, "model, x, torch.sum, 'adamm'")


IN_A_PACKAGE = {"zoo/__init__.py": "", "zoo/linear.py": LINEAR}
RAISES = "from rlplace.errors import FileProblem\ndef make():\n    raise FileProblem('x', 'is missing')\n"


@pytest.mark.parametrize(
    ("files", "name", "error", "told", "facts"),
    [
        ({"mine.py": LINEAR}, "mind:make", UnknownName, "'mine'", {"name": "mind"}),
        (IN_A_PACKAGE, "zoo.lineal:make", UnknownName, "zoo.linear", {"nearest": ("zoo.linear",)}),
        ({"mine.py": LINEAR}, "mine:male", UnknownName, "function of module mine", {"nearest": ("make",)}),
        ({"mine.py": "make = 3\n"}, "mine:make", InvalidValue, "make is of type int", {}),
        ({"mine.py": "def make(batch):\n    return batch\n"}, "mine:make", InvalidValue, "without arguments", {}),
        ({"mine.py": RAISES}, "mine:make", FileProblem, "is missing", {}),  # our own errors pass through
    ],
)
def test_what_is_not_there_or_no_function_is_told(write, files, name, error, told, facts):
    for path, text in files.items():
        write(path, text)
    with pytest.raises(error, match=told) as caught:
        build(parse_workload(name))
    assert {key: getattr(caught.value, key) for key in facts} == facts


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("import nothing_of_that_name\n", ModuleNotFoundError),
        ("def make(:\n", SyntaxError),
        ("raise RuntimeError('boom')\n", RuntimeError),
        ("import sys\nsys.exit(1)\n", SystemExit),
    ],
)
def test_module_that_cannot_be_imported(write, text, cause):
    write("mine.py", text)
    with pytest.raises(InvalidValue, match=f"can be imported. It raised {cause.__name__}") as caught:
        build(parse_workload("mine:make"))
    assert isinstance(caught.value.__cause__, cause)


def test_error_of_the_function_keeps_its_cause_and_place(write):
    write("mine.py", "def make():\n    raise ZeroDivisionError('boom')\n")
    with pytest.raises(InvalidValue, match=r"It raised ZeroDivisionError: boom \(.*mine.py:2\)") as caught:
        build(parse_workload("mine:make"))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_function_that_reads_values_where_there_are_none(write):
    write("mine.py", "import torch\ndef make():\n    return torch.zeros(int(torch.randint(3, (1,))))\n")
    message = r"reads the values of a tensor \(.*mine.py:3\)\. On a simulated host"
    with without_memory(), pytest.raises(InvalidValue, match=message):
        build(parse_workload("mine:make"))
