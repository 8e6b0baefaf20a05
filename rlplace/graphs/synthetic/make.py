"""`synthetic`: a graph of a family, with drawn costs, and for a training step its mirror of gradients and updates."""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np

from rlplace.errors import InvalidValue, UnknownName
from rlplace.graphs.opgraph import OpGraph
from rlplace.graphs.synthetic.families import FAMILIES
from rlplace.graphs.synthetic.mirror import UPDATES, Sizes, Step

MAX_CELLS = 1_000_000
"""More forward ops than this are a mistake in the parameters."""


def synthetic(
    family: str,
    *,
    seed: int = 0,
    is_training: bool = True,
    optimizer: str = "adam",
    flops: float = 1e9,
    output_bytes: float = 1 << 20,
    spread: float = 1.0,
    rows: int = 64,
    **params: Any,
) -> OpGraph:
    """A synthetic graph; the same arguments give the same graph, to the bit.

    FLOPs and output sizes are lognormal around their medians, as those of ops of real models are. An op with a weight
    multiplies `rows` rows by it, so the weight has `flops / (2 * rows)` elements; other ops do one operation an
    element. With `is_training`, every forward op has its gradient twin (one for its inputs, one for its weight),
    gradients that several ops give are added up, and each weight has an in-place update that shares a device with it
    and with the op that makes its gradient, as in a captured step.

    Args:
        family: of `FAMILIES`; their docstrings say what `params` mean.
        seed: of all that is random.
        is_training: whether the step has a backward and updates.
        optimizer: `sgd`, `momentum`, `adam` or `adamw`.
        flops: median of an op with a weight.
        output_bytes: median of an op's output.
        spread: sigma of both lognormals; 0 makes all ops of a scale alike.
        rows: batch size times sequence length.
        **params: of the family.

    Raises:
        UnknownName: no such family, parameter or optimizer.
        InvalidValue: a parameter is of the wrong type or out of range.

    Example:
        >>> graph = synthetic("recurrent", layers=2, steps=3, seed=1)
        >>> graph.num_ops, int((graph.phases == 2).sum())
        (65, 3)
    """
    if family not in FAMILIES:
        raise UnknownName("synthetic family", family, FAMILIES)
    if optimizer not in UPDATES:
        raise UnknownName("optimizer", optimizer, UPDATES)
    where = f"synthetic {family}"
    known = {name: p.default for name, p in inspect.signature(FAMILIES[family]).parameters.items() if name != "rng"}
    for name, value in params.items():
        if name not in known:
            raise UnknownName(f"parameter of {where}", name, known)
        _check(name, value, known[name], where)
    for name, value, low in (("flops", flops, 1.0), ("output_bytes", output_bytes, 1.0), ("spread", spread, 0.0)):
        if not low <= value <= 1e15 or (name == "spread" and value > 3):
            raise InvalidValue(name, value, "a number from 0 to 3" if name == "spread" else "1 to 1e15", where=where)
    _check("rows", rows, 1, where)
    _check("seed", seed, 0, where)
    counts = [value for value in ({**known, **params}).values() if type(value) is int]
    if math.prod(counts) > MAX_CELLS:
        raise InvalidValue("parameters", math.prod(counts), f"a product of at most {MAX_CELLS}", where=where)
    rng = np.random.default_rng(seed)
    cells = FAMILIES[family](rng, **params)
    step = Step(cells, Sizes(rng, flops=flops, output_bytes=output_bytes, spread=spread, rows=rows))
    if is_training:
        step.add_backward()
        step.add_updates(optimizer)
    return step.graph()


def _check(name: str, value: object, default: object, where: str) -> None:
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise InvalidValue(name, value, "true or false", where=where)
    elif isinstance(default, int):
        low = 0 if name == "seed" else 1
        if type(value) is not int or value < low:
            raise InvalidValue(name, value, f"an integer >= {low}", where=where)
    elif not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise InvalidValue(name, value, "a number from 0 to 1", where=where)
