"""`boundaries`: the modules of a step that a stage of a pipeline may begin with."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.export import ExportedProgram

from rlplace.errors import InvalidValue
from rlplace.export.pipeline.stages import WholeStep, name_in_model, split_step
from rlplace.graphs.opgraph import FORWARD, OpGraph
from rlplace.search.parallel.step_roles import StepRoles

WHERE = "export pipeline"
MODEL = "model."
"""How paths of the model's modules begin in a `WholeStep`."""


def boundaries(step: WholeStep, tensors: Sequence[torch.Tensor]) -> list[str]:
    """Paths of the modules that run exactly once and not first, in order of their first op.

    Of modules that begin with the same op it is the outermost.

    Args:
        step: a copy of it is traced with `torch.export`.
        tensors: of one micro-batch.

    Raises:
        InvalidValue: it cannot be traced; says why.
    """
    nodes = [node for node in _exported(step, tensors).graph.nodes if node.op == "call_function"]
    first: dict[str, int] = {}
    repeated: set[str] = set()
    for place, node in enumerate(nodes):
        for key, (path, _) in node.meta.get("nn_module_stack", {}).items():
            first.setdefault(path.partition("@")[0], place)
            if "@" in key or "@" in path:
                repeated.add(path.partition("@")[0])
    known = dict(step.named_modules())
    outermost: dict[int, str] = {}
    for path, place in sorted(first.items(), key=lambda item: item[0].count(".")):
        if place > 0 and path.startswith(MODEL) and path in known and path not in repeated:
            outermost.setdefault(place, path)
    return [outermost[place] for place in sorted(outermost)]


def places_of(graph: OpGraph, step: StepRoles, paths: Sequence[str]) -> tuple[list[str], NDArray[np.int64]]:
    """The modules that begin at a place of the step's chain of their own, and those places, both ascending.

    Args:
        graph: of the same model, cut into micro-batches.
        step: its roles.
        paths: of modules, as `boundaries` gives them.
    """
    is_link = (step.follows >= 0) & ~graph.is_source & (graph.phases == FORWARD)
    begin: dict[str, int] = {}
    for op in np.flatnonzero(is_link).tolist():
        words = graph.modules[op].split(".")
        for end in range(1, len(words) + 1):
            path, place = MODEL + ".".join(words[:end]), int(step.op_position[op])
            begin[path] = min(begin.get(path, place), place)
    kept: list[str] = []
    places: list[int] = []
    for path in paths:
        place = begin.get(path, 0)
        if place > (places[-1] if places else 0):
            kept.append(path)
            places.append(place)
    return kept, np.array(places, dtype=np.int64)


def check_split(step: WholeStep, tensors: Sequence[torch.Tensor], begins: Sequence[str]) -> tuple[str, ...]:
    """Parameters that several stages hold a copy of, once `torch.distributed.pipelining` has split a copy of the step.

    Args:
        step: to be split.
        tensors: of one micro-batch.
        begins: the modules that its stages begin with.

    Raises:
        InvalidValue: it cannot be split so; says why.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pipe, shared = split_step(copy.deepcopy(step), tensors, begins)
    except Exception as error:  # of the tracer, which may raise anything
        raise _refused(step, "split it before " + ", ".join(_in_model(begins)), error) from error
    if pipe.num_stages != len(begins) + 1:
        raise InvalidValue(
            "stages", pipe.num_stages, f"{len(begins) + 1}: every module runs once and in turn", where=WHERE
        )
    return tuple(sorted(name_in_model(next(iter(names.values()))) for names in shared))


def _exported(step: WholeStep, tensors: Sequence[torch.Tensor]) -> ExportedProgram:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.export(copy.deepcopy(step), tuple(tensors))
    except Exception as error:  # of the user's model, traced
        raise _refused(step, "trace it", error) from error


def _refused(step: WholeStep, what: str, error: Exception) -> InvalidValue:
    cause = error.__cause__ or error
    said = str(cause).strip().splitlines() or [""]
    return InvalidValue(
        "model",
        type(step.model).__name__,
        "one that `torch.export` can trace and cut at modules",
        where=WHERE,
        hint=f"It cannot {what}: {type(cause).__name__}: {said[0]}",
    )


def _in_model(paths: Sequence[str]) -> list[str]:
    return [path.removeprefix(MODEL) for path in paths]
