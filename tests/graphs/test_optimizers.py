"""In-place updates against `torch.optim`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small_models import random

from rlplace.errors import UnknownName
from rlplace.graphs.optimizers import OPTIMIZERS, UpdateState, resolve_optimizer, state_bytes, torch_optimizer, updater
from rlplace.graphs.program import OptimizerSpec

SPECS = {
    **OPTIMIZERS,
    "momentum of 0": OptimizerSpec("momentum", lr=0.1, momentum=0.0),
    "momentum_decay": OptimizerSpec("momentum", lr=0.1, momentum=0.8, weight_decay=0.1),
    "adam_decay": OptimizerSpec("adam", lr=0.1, betas=(0.5, 0.6), eps=1e-3, weight_decay=0.1),
}

GRADIENTS = {
    "contiguous": random(4, 6, seed=2),
    "transposed": random(6, 4, seed=2).t(),
    "expanded": random(4, 1, seed=2).expand(4, 6),
    "strided": random(8, 12, seed=2)[::2, ::2],
}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("layout", GRADIENTS)
@pytest.mark.parametrize("is_transposed", [False, True], ids=["parameter", "transposed_parameter"])
def test_updates_equal_torch_optim_whatever_the_memory_layout(name: str, layout: str, is_transposed: bool) -> None:
    spec, gradient = SPECS[name], GRADIENTS[layout]
    start = random(6, 4).t() if is_transposed else random(4, 6)
    parameter, expected = start.clone(), torch.nn.Parameter(start.clone())
    update = updater([UpdateState(spec, parameter)], [parameter])
    optimizer = torch_optimizer(spec, [expected])
    for factor in (1.0, -2.0, 3.0):
        update(gradient * factor if layout == "contiguous" else gradient)
        expected.grad = torch.empty_like(expected).copy_(gradient * factor if layout == "contiguous" else gradient)
        optimizer.step()
        assert torch.equal(parameter, expected)


@pytest.mark.parametrize("name", [*SPECS, "sgd_decay"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_updated_as_in_float32_but_for_rounding(name: str, dtype: torch.dtype) -> None:
    # longer than any vector of a CPU: PyTorch's fused SGD skips whole ones in half precision
    spec = OptimizerSpec("sgd", lr=0.1, weight_decay=0.1) if name == "sgd_decay" else SPECS[name]
    spec = replace(spec, lr=0.1)
    start, gradients = random(3, 67).to(dtype), [random(3, 67, seed=seed).to(dtype) for seed in (1, 2, 3)]
    parameter, exact = start.clone(), torch.nn.Parameter(start.float())
    eager = torch.nn.Parameter(start.clone())
    update = updater([UpdateState(spec, parameter)], [parameter])
    optimizers = [torch_optimizer(spec, [exact]), torch_optimizer(spec, [eager])]
    for gradient in gradients:
        update(gradient)
        exact.grad, eager.grad = gradient.float(), gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(parameter, eager)
    assert (parameter.float() - exact).abs().max() < 0.05
    assert (exact - start.float()).abs().max() > 0.1


@pytest.mark.parametrize("name", SPECS)
def test_several_parameters_at_once_are_updated_as_one_by_one(name: str) -> None:
    spec, shapes = SPECS[name], [(4, 6), (3,), (), (2, 3, 2)]
    alone, together = ([random(*shape) for shape in shapes] for _ in range(2))
    one_by_one = [updater([UpdateState(spec, parameter)], [parameter]) for parameter in alone]
    all_at_once = updater([UpdateState(spec, parameter) for parameter in together], together)
    for step in range(3):
        gradients = [random(*shape, seed=step + 1) for shape in shapes]
        for update, gradient in zip(one_by_one, gradients, strict=True):
            update(gradient)
        all_at_once(*gradients)
        assert all(map(torch.equal, alone, together))


@pytest.mark.parametrize("name", SPECS)
def test_a_parameter_with_a_new_state_may_join_one_with_an_old_one(name: str) -> None:
    """As where a part of a plan's residents was dropped and made anew."""
    spec = SPECS[name]
    old, new, expected_old, expected_new = random(4), random(5), random(4), random(5)
    state = UpdateState(spec, old)
    updater([state], [old])(random(4, seed=1))
    updater([state, UpdateState(spec, new)], [old, new])(random(4, seed=2), random(5, seed=3))
    alone = updater([UpdateState(spec, expected_old)], [expected_old])
    for seed in (1, 2):
        alone(random(4, seed=seed))
    updater([UpdateState(spec, expected_new)], [expected_new])(random(5, seed=3))
    assert torch.equal(old, expected_old)
    assert torch.equal(new, expected_new)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_reset_forgets_every_step(name: str) -> None:
    parameter = random(3)
    state = UpdateState(OPTIMIZERS[name], parameter)
    update = updater([state], [parameter])

    def two_steps() -> torch.Tensor:
        parameter.copy_(random(3))
        update(random(3, seed=2))
        update(random(3, seed=3))
        return parameter.clone()

    first = two_steps()
    state.reset()
    assert torch.equal(two_steps(), first)


def test_two_updaters_share_one_state() -> None:
    """Plans over the same devices bind the same parameter and its state again."""
    parameter = random(3)
    state = UpdateState(OPTIMIZERS["adam"], parameter)
    updater([state], [parameter])(random(3))
    updater([state], [parameter])(random(3))
    assert state.step is not None
    assert float(state.step) == 2.0


def test_state_bytes() -> None:
    parameter = torch.zeros(3, 4)
    assert {name: state_bytes(spec, parameter) for name, spec in OPTIMIZERS.items()} == {
        "sgd": 0,
        "momentum": 48,
        "adam": 100,
        "adamw": 100,
    }
    for spec in OPTIMIZERS.values():
        state = UpdateState(spec, parameter)
        kept = [*state.moments, *([state.step] if state.step is not None else [])]
        assert sum(tensor.numel() * tensor.element_size() for tensor in kept) == state_bytes(spec, parameter)


def test_names_resolve_and_mistyped_ones_offer_the_nearest() -> None:
    assert resolve_optimizer("adamw") is OPTIMIZERS["adamw"]
    assert resolve_optimizer(None) is None
    spec = OptimizerSpec("sgd", lr=1.0)
    assert resolve_optimizer(spec) is spec
    with pytest.raises(UnknownName) as unknown:
        resolve_optimizer("adm")
    assert unknown.value.nearest[0] == "adam"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_spec_has_the_defaults_of_its_name(name: str) -> None:
    """And those are PyTorch's: AdamW decays weights by 0.01."""
    spec = OptimizerSpec(name, lr=1e-3)
    assert spec == OPTIMIZERS[name] == resolve_optimizer(name)
    own = torch_optimizer(OPTIMIZERS[name], [torch.nn.Parameter(random(2))]).defaults
    plain = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}.get(name, torch.optim.SGD)
    expected = plain([torch.nn.Parameter(random(2))]).defaults
    assert spec.weight_decay == own["weight_decay"] == expected["weight_decay"]
    assert spec.momentum == (0.9 if name == "momentum" else 0.0)


def test_sgd_with_a_momentum_is_momentum() -> None:
    spec = OptimizerSpec("sgd", lr=0.1, momentum=0.8, weight_decay=0.1)
    assert resolve_optimizer(spec) == OptimizerSpec("momentum", lr=0.1, momentum=0.8, weight_decay=0.1)
