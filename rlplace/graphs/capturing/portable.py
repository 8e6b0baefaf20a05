"""`portable`: while active, layers run as ops that every backend has, so that a graph may be placed anywhere."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from rlplace.graphs.attention import fused_attention


@contextlib.contextmanager
def portable(model: nn.Module) -> Iterator[None]:
    """Attention is one op of ours, recurrent layers come apart; no layer reads a number from a tensor or is compiled.

    Nothing is left to oneDNN and cuDNN, whose ops no other backend has; PyTorch's own convolution still uses both when
    it runs.
    """
    had_onednn, had_cudnn = torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()
    averaging = [module for module in model.modules() if isinstance(module, _BatchNorm) and _averages(module)]
    masked = [module for module in model.modules() if _compares_masks(module)]
    torch._C._set_mkldnn_enabled(False)
    torch._C._set_cudnn_enabled(False)
    try:
        for norm in averaging:
            vars(norm)["forward"] = _cumulative_norm(norm)
        for stack in masked:
            vars(stack)["forward"] = _taking_masks_as_they_are(stack)
        with fused_attention(), uncompiled():
            yield
    finally:
        for module in (*averaging, *masked):
            del vars(module)["forward"]
        torch._C._set_mkldnn_enabled(had_onednn)
        torch._C._set_cudnn_enabled(had_cudnn)


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """While active, whatever `torch.compile` made (models, methods, functions) runs what it was made of."""
    if "torch._dynamo" not in sys.modules:  # nothing was compiled, and importing it takes a second
        yield
        return
    with torch.compiler.set_stance("force_eager"), torch._dynamo.config.patch(error_on_nested_fx_trace=False):
        yield


def original_of(model: nn.Module) -> nn.Module:
    """The model itself, or what `torch.compile` made it of."""
    while type(model).__name__ == "OptimizedModule" and isinstance(original := model._orig_mod, nn.Module):
        model = original
    return model


def _averages(norm: _BatchNorm) -> bool:
    return (
        type(norm).forward is _BatchNorm.forward
        and norm.training
        and norm.momentum is None
        and norm.running_mean is not None
        and norm.running_var is not None
        and norm.num_batches_tracked is not None
        and "forward" not in vars(norm)
    )


def _cumulative_norm(norm: _BatchNorm) -> Callable[[Tensor], Tensor]:
    """Batch norm with `momentum=None`, whose factor 1 / batches PyTorch computes as a Python number.

    The statistics of the batch come out of the same kernel, as running statistics of momentum 1.
    """

    def forward(x: Tensor) -> Tensor:
        norm._check_input_dim(x)  # type: ignore[no-untyped-call]
        mean, variance, count = norm.running_mean, norm.running_var, norm.num_batches_tracked
        assert mean is not None
        assert variance is not None
        assert count is not None
        batch_mean, batch_variance = torch.zeros_like(mean), torch.zeros_like(variance)
        y = functional.batch_norm(x, batch_mean, batch_variance, norm.weight, norm.bias, True, 1.0, norm.eps)
        with torch.no_grad():
            count.add_(1)
            factor = 1.0 / count.to(mean.dtype)
            mean.lerp_(batch_mean, factor)
            variance.lerp_(batch_variance, factor)
        return y

    return forward


def _compares_masks(module: nn.Module) -> bool:
    kinds = (nn.TransformerEncoder, nn.TransformerDecoder)
    return any(type(module).forward is kind.forward for kind in kinds) and "forward" not in vars(module)


def _taking_masks_as_they_are(stack: nn.Module) -> Callable[..., Any]:
    """A stack of PyTorch's transformer layers that does not compare the values of its mask with those of a causal one.

    A mask that happens to be causal is then applied like any other; the result is the same.
    """
    run = stack.forward
    signature = inspect.signature(run)
    name = "is_causal" if "is_causal" in signature.parameters else "tgt_is_causal"

    def forward(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        if given.arguments.get(name) is None:
            given.arguments[name] = False
        return run(*given.args, **given.kwargs)

    return forward
