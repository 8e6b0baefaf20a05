"""Models dispatched by Hugging Face's accelerate over devices that are not there: fake tensors know where they are."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from rlplace.workloads.networks.zoo import fake_weights_fit


def on_devices(entries: Mapping[str, int | str]) -> dict[str, str]:
    """A device map with `cpu:1` for 1: fake tensors tell it from `cpu:2`, and PyTorch needs no GPU for it."""
    return {name: place if isinstance(place, str) else f"cpu:{place}" for name, place in entries.items()}


@contextmanager
def fake() -> Iterator[None]:
    """While active, tensors have no memory, and an op whose inputs are on two devices raises as on real ones."""
    with warnings.catch_warnings(), FakeTensorMode(), fake_weights_fit(), torch.no_grad():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        warnings.filterwarnings("ignore", "The following device_map keys do not match any submodules")
        yield


def dispatched(model: nn.Module, entries: Mapping[str, int | str], main_device: int | str | None = None) -> nn.Module:
    """`model`, dispatched over fake devices; its tensors are moved before, as loading a checkpoint does."""
    from accelerate import dispatch_model

    places = on_devices(entries)
    for path, module in model.named_modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    moved = tensor.detach().to(_place(f"{path}.{name}" if path else name, places))
                    held[name] = nn.Parameter(moved) if isinstance(tensor, nn.Parameter) else moved
    if len(set(places.values())) == 1:
        return model  # where accelerate moves the model, and adds no hooks
    main = None if main_device is None else on_devices({"": main_device})[""]
    result: nn.Module = dispatch_model(model, places, main_device=main)
    return result


def run_devices(
    make: Callable[[], nn.Module], inputs: Any, run: Callable[[nn.Module], nn.Module], device: str = "cpu"
) -> dict[str, str]:
    """Calls the model that `run` makes of a fake one; by path, the device of what each module returned.

    Args:
        make: builds the model.
        inputs: a tensor, or keyword arguments.
        run: dispatches it.
        device: of the inputs.
    """
    found: dict[str, str] = {}
    with fake():
        model = run(make())

        def look(path: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
                if tensors:
                    found[path] = str(tensors[0].device)

            return hook

        for path, module in model.named_modules():
            if path:
                module.register_forward_hook(look(path))
        fakes = pytree.tree_map_only(
            torch.Tensor, lambda each: torch.empty(each.shape, dtype=each.dtype, device=device), inputs
        )
        model(**fakes) if isinstance(fakes, dict) else model(fakes)
    return found


def _place(name: str, places: Mapping[str, str]) -> str:
    while name not in places:
        name = name.rpartition(".")[0]
    return places[name]
