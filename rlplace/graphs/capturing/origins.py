"""Where a traced op comes from: the module that called it, in the forward and in the backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import nn


@contextlib.contextmanager
def annotated(model: nn.Module) -> Iterator[None]:
    """While active, every traced op carries the dotted path of the innermost module that called it.

    A module that is called twice, or that has several names, has one path: the first of `named_modules`.
    """
    entered: list[contextlib.AbstractContextManager[Any]] = []
    handles = []

    def enter(path: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            context = fx_traceback.annotate({"module": path})
            context.__enter__()
            entered.append(context)

        return hook

    def leave(*_: Any) -> None:
        entered.pop().__exit__(None, None, None)

    try:
        for path, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(enter(path)))
            handles.append(module.register_forward_hook(leave, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
        while entered:  # hooks do not run after every kind of failure
            leave()


def spread_origins(module: torch.fx.GraphModule) -> None:
    """Gives every node its phase and its module, `""` for the root and for what runs outside of the model.

    A backward op belongs to the module of the forward op whose autograd node it runs (same `seq_nr`), unless a module
    called it itself (a recomputed forward). A sum of gradients runs under no autograd node: it belongs to the module of
    what it sums. A constant belongs to the first module that reads it.
    """
    owner: dict[int, str] = {}
    nodes = module.graph.nodes
    for node in nodes:
        custom = node.meta.get("custom") or {}
        own, number = custom.get("module"), node.meta.get("seq_nr", -1)
        if node.op != "call_function":
            continue
        if custom.get("phase") == "forward":
            path, phase = own or "", "forward"
            owner.setdefault(number, path)
        else:
            phase = "backward"
            found = None if node.meta.get("is_gradient_acc") else owner.get(number)
            path = own if own is not None else found if found is not None else _of_inputs(node, owner.get(number, ""))
        seed = {"seed": True} if custom.get("seed") else {}
        node.meta["custom"] = {"phase": phase, "module": path, **seed}
    for node in nodes:
        if node.op == "get_attr":
            reader = next(iter(node.users), None)
            node.meta["custom"] = {"module": "" if reader is None else module_of(reader)}


def _of_inputs(node: torch.fx.Node, otherwise: str) -> str:
    return next(filter(None, map(module_of, node.all_input_nodes)), otherwise)


def module_of(node: torch.fx.Node) -> str:
    """The dotted path of the module that a node came from."""
    return str((node.meta.get("custom") or {}).get("module") or "")
