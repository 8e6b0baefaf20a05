"""Optimizers as in-place updates of one parameter or several, as PyTorch's fused kernels compute them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from rlplace.errors import InvalidValue, check_known
from rlplace.graphs.program import OptimizerSpec

OPTIMIZERS = {name: OptimizerSpec(name, lr=1e-3) for name in ("sgd", "momentum", "adam", "adamw")}

STATES_PER_PARAMETER = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}

Updater = Callable[..., None]
"""Takes a gradient of each parameter's shape and updates the parameters and their own states in place."""


def resolve_optimizer(optimizer: object) -> OptimizerSpec | None:
    """The spec that a name stands for, with PyTorch's defaults; a spec itself, and None, come back as they are.

    `sgd` with a momentum becomes `momentum`, which has a state for it.

    Raises:
        UnknownName: not one of `sgd`, `momentum`, `adam`, `adamw`.
        InvalidValue: neither a name nor a spec.
    """
    if optimizer is None:
        return None
    if not isinstance(optimizer, str | OptimizerSpec):
        kind = optimizer if isinstance(optimizer, type) else type(optimizer)
        known = kind.__name__.lower() if kind.__name__.lower() in OPTIMIZERS else "adam"
        raise InvalidValue(
            "optimizer",
            f"the class {kind.__name__}" if isinstance(optimizer, type) else f"{kind.__module__}.{kind.__qualname__}",
            f"one of {', '.join(OPTIMIZERS)}, or an OptimizerSpec",
            where="capture",
            hint=f'Name one (`"{known}"`, or `rlplace.OptimizerSpec("{known}", lr=...)`); for others, make it over '
            "`step.parameters()` and fill `grad` by `step.backward(...)`.",
        )
    name = optimizer if isinstance(optimizer, str) else optimizer.name
    check_known("optimizer", name, OPTIMIZERS)
    if isinstance(optimizer, str):
        return OPTIMIZERS[name]
    return replace(optimizer, name="momentum") if name == "sgd" and optimizer.momentum else optimizer


def state_bytes(spec: OptimizerSpec, parameter: torch.Tensor) -> int:
    """Bytes of state that `spec` keeps for `parameter` (the step counter of Adam is 4 more)."""
    moments = STATES_PER_PARAMETER[spec.name] * parameter.numel() * parameter.element_size()
    return moments + (4 if spec.name in ("adam", "adamw") else 0)


class UpdateState:
    """One parameter's optimizer state, beside the parameter.

    Attributes:
        spec: options of the next update; another of the same optimizer may be set at any time.
        moments: tensors of the parameter's shape, zero at the start.
        step: Adam's step counter, a float32 scalar, or None.
    """

    def __init__(self, spec: OptimizerSpec, parameter: torch.Tensor) -> None:
        self.spec = spec
        self.moments = [torch.zeros_like(parameter) for _ in range(STATES_PER_PARAMETER[spec.name])]
        is_adam = spec.name in ("adam", "adamw")
        self.step = torch.zeros((), dtype=torch.float32, device=parameter.device) if is_adam else None

    def reset(self) -> None:
        """Back to the state before the first step."""
        for each in self.tensors:
            each.zero_()

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The moments, then the step counter where there is one."""
        return self.moments if self.step is None else [*self.moments, self.step]

    def hold(self, tensors: Sequence[torch.Tensor]) -> None:
        """Has these in the place of its own `tensors`."""
        self.moments = list(tensors[: len(self.moments)])
        self.step = None if self.step is None else tensors[-1]


def updater(states: Sequence[UpdateState], parameters: Sequence[torch.Tensor]) -> Updater:
    """Updates `parameters` and their states in place by the gradients it is given, in one fused call if that is right.

    Args:
        states: one a parameter, all of one optimizer.
        parameters: of one dtype and device.
    """
    if states[0].step is not None:
        return _adam(states, parameters)
    return _sgd_op_by_op(states, parameters) if _is_fused_sgd_wrong(parameters[0]) else _sgd(states, parameters)


def _adam(states: Sequence[UpdateState], parameters: Sequence[torch.Tensor]) -> Updater:
    fused = torch._fused_adamw_ if states[0].spec.name == "adamw" else torch._fused_adam_
    parameters, steps = _reals(parameters), [state.step for state in states if state.step is not None]
    firsts, seconds = (_reals([state.moments[k] for state in states]) for k in (0, 1))
    laid_out = _layouts(parameters)

    def adam(*gradients: torch.Tensor) -> None:
        spec = states[0].spec
        beta1, beta2 = spec.betas
        torch._foreach_add_(steps, 1)
        fused(
            parameters,
            laid_out(gradients),
            firsts,
            seconds,
            [],
            steps,
            lr=spec.lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=spec.weight_decay,
            eps=spec.eps,
            amsgrad=False,
            maximize=False,
        )

    return adam


def _sgd(states: Sequence[UpdateState], parameters: Sequence[torch.Tensor]) -> Updater:
    parameters, momenta = _reals(parameters), _reals([moment for state in states for moment in state.moments])
    laid_out = _layouts(parameters)

    def sgd(*gradients: torch.Tensor) -> None:
        spec = states[0].spec
        torch._fused_sgd_(
            parameters,
            laid_out(gradients),
            momenta
            if spec.momentum
            else [],  # as in `torch.optim.SGD`, where a momentum of 0 leaves its state as it is
            weight_decay=spec.weight_decay,
            momentum=spec.momentum,
            lr=spec.lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,  # a momentum of zeros needs none: 0 * momentum + gradient
        )

    return sgd


def _is_fused_sgd_wrong(parameter: torch.Tensor) -> bool:
    """Whether PyTorch's fused SGD leaves vectors of it as they were: in half precision on a CPU (pytorch#191763)."""
    return parameter.device.type == "cpu" and parameter.dtype in (torch.bfloat16, torch.float16)


def _sgd_op_by_op(states: Sequence[UpdateState], parameters: Sequence[torch.Tensor]) -> Updater:
    def sgd(*gradients: torch.Tensor) -> None:
        spec = states[0].spec
        with torch.no_grad():
            for state, parameter, gradient in zip(states, parameters, gradients, strict=True):
                change = gradient.add(parameter, alpha=spec.weight_decay) if spec.weight_decay else gradient
                for moment in state.moments if spec.momentum else ():
                    change = moment.mul_(spec.momentum).add_(change)
                parameter.add_(change, alpha=-spec.lr)

    return sgd


def _reals(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Complex tensors as real ones of one more dimension, as PyTorch's optimizers see them: fused kernels are real."""
    return [torch.view_as_real(each.resolve_conj()) if each.is_complex() else each for each in tensors]


def _layouts(parameters: Sequence[torch.Tensor]) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
    """Gradients in their parameters' layouts: fused kernels walk raw memory, for any strides."""
    strides = [parameter.stride() for parameter in parameters]

    def laid_out(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [
            gradient if gradient.stride() == stride else torch.empty_like(parameter).copy_(gradient)
            for gradient, stride, parameter in zip(_reals(gradients), strides, parameters, strict=True)
        ]

    return laid_out


def torch_optimizer(
    spec: OptimizerSpec, parameters: list[torch.nn.Parameter], *, is_capturable: bool = False, is_sharded: bool = False
) -> torch.optim.Optimizer:
    """The same optimizer as PyTorch offers it, with its fused kernels where they are right: the function that `eager`
    runs.

    Args:
        spec: its name and options.
        parameters: the parameters that it updates.
        is_capturable: whether its step counts must live on the GPU, as a CUDA graph needs them.
        is_sharded: whether they are shards (`DTensor`), for which there is no fused SGD.
    """
    is_real = not any(parameter.is_complex() for parameter in parameters)  # fused kernels take no others
    groups = [{"params": parameters}]  # which may be empty, where a list may not
    if spec.name in ("adam", "adamw"):
        return (torch.optim.AdamW if spec.name == "adamw" else torch.optim.Adam)(
            groups,
            lr=spec.lr,
            betas=spec.betas,
            eps=spec.eps,
            weight_decay=spec.weight_decay,
            fused=is_real,
            capturable=is_capturable,
        )
    return torch.optim.SGD(
        groups,
        lr=spec.lr,
        momentum=spec.momentum,
        weight_decay=spec.weight_decay,
        fused=is_real and not is_sharded and not any(map(_is_fused_sgd_wrong, parameters)),
    )
