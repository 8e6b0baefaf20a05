"""`portable`: while active, layers run as ops that every backend has, so that a graph may be placed anywhere.

Batch norm in micro-batches: each normalises by its own statistics, and running ones are updated apart from that.

The ops `rlplace::attention` and `rlplace::attention_backward`: one of each for all backends.

The tensors that the forward keeps for the backward are the same on every backend, so that the two may run on different
devices.

Attention and its gradients by their definition, and the common part of the kernels: masks, grouped heads, layouts.

Attention on a CPU: PyTorch's own fused kernel, its logarithms in one layout.

Attention on a GPU: PyTorch's memory-efficient kernel, with inputs in its own layout and read in the layout of every
backend.

That kernel wants rows of whole 16 bytes, biases whose rows start at whole 16 items, its logarithms padded to 32
queries, and its output in memory as it made it; the padding is put on and taken off here. Half precision and float32
take it; float64 goes by the formula.

Products of rows in groups, a matrix for each group (`grouped_mm`, mixtures of experts): what they return and cost.

`fused_attention`: while active, `scaled_dot_product_attention` runs as one op a direction, wherever it can.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_impls import register_op_impl
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.flop_counter import flop_registry, register_flop_formula


@contextlib.contextmanager
def portable(model: nn.Module) -> Iterator[None]:
    """Attention is one op of ours, recurrent layers come apart; no layer reads a number from a tensor or is compiled.

    Nothing is left to oneDNN and cuDNN, whose ops no other backend has; PyTorch's own convolution still uses both when
    it runs.
    """
    had_onednn, had_cudnn = torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()
    forwards: dict[nn.Module, Callable[..., Any]] = {
        norm: _cumulative_norm(norm)
        for norm in updating_norms(model).values()
        if norm.momentum is None and norm.num_batches_tracked is not None
    }
    stacks = [each for each in model.modules() if "forward" not in vars(each) and type(each).forward in _STACKS]
    forwards |= {each: _taking_masks_as_they_are(each) for each in stacks}
    torch._C._set_mkldnn_enabled(False)
    torch._C._set_cudnn_enabled(False)
    try:
        with _replaced(forwards), fused_attention(), uncompiled():
            yield
    finally:
        torch._C._set_mkldnn_enabled(had_onednn)
        torch._C._set_cudnn_enabled(had_cudnn)


@contextlib.contextmanager
def _replaced(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """While active, modules run other functions in place of their `forward`."""
    try:
        for module, forward in forwards.items():
            vars(module)["forward"] = forward
        yield
    finally:
        for module in forwards:
            vars(module).pop("forward", None)


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """While active, results of `torch.compile` (models, methods, functions) run their originals."""
    if "torch._dynamo" not in sys.modules:  # nothing was compiled, and importing it takes a second
        yield
        return
    with torch.compiler.set_stance("force_eager"), torch._dynamo.config.patch(error_on_nested_fx_trace=False):
        yield


def original_of(model: nn.Module) -> nn.Module:
    """The model itself, or the original that `torch.compile` made it of."""
    while type(model).__name__ == "OptimizedModule" and isinstance(original := model._orig_mod, nn.Module):
        model = original
    return model


def _cumulative_norm(norm: _BatchNorm) -> Callable[[Tensor], Tensor]:
    """Batch norm with `momentum=None`, whose factor 1 / batches PyTorch computes as a Python number.

    The statistics of the batch come out of the same kernel, as running statistics of momentum 1.
    """

    def forward(x: Tensor) -> Tensor:
        norm._check_input_dim(x)  # type: ignore[no-untyped-call]
        mean, variance, count = map(norm.get_buffer, ("running_mean", "running_var", "num_batches_tracked"))
        batch_mean, batch_variance = torch.zeros_like(mean), torch.zeros_like(variance)
        try:
            return functional.batch_norm(x, batch_mean, batch_variance, norm.weight, norm.bias, True, 1.0, norm.eps)
        finally:  # a recomputed forward may end inside of its last norm
            with torch.no_grad():
                count.add_(1)
                factor = 1.0 / count.to(mean.dtype)
                mean.lerp_(batch_mean, factor)
                variance.lerp_(batch_variance, factor)

    return forward


_STACKS = (nn.TransformerEncoder.forward, nn.TransformerDecoder.forward)
"""They compare their mask with a causal one."""


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


Statistics = tuple[str, Tensor, Tensor]
"""The statistics of one call of a batch norm: dotted path of the module, mean (C,) and unbiased variance (C,)."""


def normalises_batch(model: nn.Module) -> bool:
    """Whether a layer of `model` normalises by the statistics of its batch."""
    return any(
        isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)
        for module in model.modules()
    )


def updating_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """By dotted path, the batch norms of `model` that update running statistics."""
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, _BatchNorm)
        and (type(module).forward is _BatchNorm.forward or _is_alone(module))
        and "forward" not in vars(module)
        and module.training
        and module.running_mean is not None
        and module.running_var is not None
    }


def _is_alone(norm: _BatchNorm) -> bool:
    """Whether a norm that takes the statistics of all processes is in the only one, where it is as any other."""
    has_others: bool = getattr(torch.distributed, "is_initialized", bool)()
    return type(norm).forward is nn.SyncBatchNorm.forward and not has_others


@contextlib.contextmanager
def statistics_handed_out(model: nn.Module) -> Iterator[list[Statistics]]:
    """While active, batch norms leave their running statistics alone: they append those of the batch to the list.

    So nothing that a micro-batch computes waits for another's.
    """
    found: list[Statistics] = []
    with _replaced({norm: _own_norm(path, norm, found) for path, norm in updating_norms(model).items()}):
        yield found


def _own_norm(path: str, norm: _BatchNorm, found: list[Statistics]) -> Callable[[Tensor], Tensor]:
    """The statistics of the batch come out of the same kernel, as running statistics of momentum 1."""

    def forward(x: Tensor) -> Tensor:
        norm._check_input_dim(x)  # type: ignore[no-untyped-call]
        like = norm.get_buffer("running_mean")
        mean, variance = (torch.zeros(like.shape, dtype=like.dtype, device=like.device) for _ in range(2))
        found.append((path, mean, variance))  # before: a recomputed forward may end inside of its last norm
        return functional.batch_norm(x, mean, variance, norm.weight, norm.bias, True, 1.0, norm.eps)

    return forward


Gradients = tuple[Tensor, Tensor, Tensor]
"""Of queries, keys and values."""


def attention_formula(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """softmax(query @ key^T * scale + mask) @ value, and the logarithm of the softmax's denominators.

    Args:
        query: (B, H, N, E).
        key: (B, G, M, E), G a divisor of H: a key head serves H / G query heads.
        value: (B, G, M, E).
        mask: broadcastable to (B, H, N, M): allowed positions (bool), or summands; None adds nothing.
        is_causal: query n sees keys 0 to n.
        scale: None means E ** -0.5.

    Returns:
        (B, H, N, E), laid out as `empty_out` says; and (B, H, N), natural logarithms, contiguous, float32 (float64 for
        float64). A query that sees no key gets 0 in both.
    """
    key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
    scores = _scores(query, key, mask, is_causal, scale)
    logsumexp = visible(scores.logsumexp(-1))
    weights = (scores - logsumexp.unsqueeze(-1)).exp()
    return out_like((weights @ value.to(scores.dtype)).to(query.dtype), query), logsumexp


def attention_backward_formula(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> Gradients:
    """The gradients of queries, keys and values (Dao et al. 2022, arXiv:2205.14135, appendix B.2).

    Args:
        grad: of `out`, (B, H, N, E).
        query: and the arguments that follow: as `attention_formula` took and returned them.

    Returns:
        Three tensors, shaped as queries, keys and values, laid out as (B, N, H, E).
    """
    heads = key.shape[1]
    key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
    scores = _scores(query, key, mask, is_causal, scale)
    weights = (scores - logsumexp.unsqueeze(-1)).exp()
    wide = grad.to(scores.dtype)
    grad_value = weights.mT @ wide
    delta = (wide * out).sum(-1, keepdim=True)
    grad_scores = weights * (wide @ value.to(scores.dtype).mT - delta) * _scale(query, scale)
    grad_query = grad_scores @ key.to(scores.dtype)
    sums = (grad_query, sum_heads(grad_scores.mT @ query.to(scores.dtype), heads), sum_heads(grad_value, heads))
    return tuple(laid_out(total.to(query.dtype)) for total in sums)  # type: ignore[return-value]


def logsumexp_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, as the fused kernels keep it for every narrower type; float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as summands of the scores, 2-D or 4-D; dims that it repeats (stride 0) have size 1.

    A boolean mask becomes 0 where it is true and -inf elsewhere, in `dtype`; another stays as it is.
    """
    if mask.dim() == 3:
        mask = mask.unsqueeze(0)
    for dim, (size, stride) in enumerate(zip(mask.shape, mask.stride(), strict=True)):
        if stride == 0 and size > 1:
            mask = mask.narrow(dim, 0, 1)
    return torch.where(mask, 0.0, -math.inf).to(dtype) if mask.dtype == torch.bool else mask


def visible(logsumexp: Tensor) -> Tensor:
    """The same with 0 for queries that see no key (-inf): exp(score - 0) is 0 for each of their keys."""
    return logsumexp.masked_fill(logsumexp == -math.inf, 0.0)


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """(B, G, M, E) to (B, heads, M, E), each head `heads / G` times in a row."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def sum_heads(x: Tensor, heads: int) -> Tensor:
    """(B, H, M, E) to (B, heads, M, E): gradients of repeated heads, summed."""
    return x if x.shape[1] == heads else x.unflatten(1, (heads, -1)).sum(2)  # type: ignore[no-untyped-call]


def empty_out(query: Tensor) -> Tensor:
    """Memory for the output: laid out as the queries are, as on PyTorch's CPU kernel, contiguous if they have no rows.

    The next op of models (heads back behind positions) then copies nothing where the queries were made as a view.
    """
    is_dense = query.stride(3) == 1
    return torch.empty_like(query, memory_format=torch.preserve_format if is_dense else torch.contiguous_format)


def out_like(x: Tensor, query: Tensor) -> Tensor:
    """`x`, laid out as `empty_out` says."""
    empty = empty_out(query)
    return x if x.stride() == empty.stride() else empty.copy_(x)


def laid_out(x: Tensor) -> Tensor:
    """(B, H, N, E) with memory in the order (B, N, H, E), as fused kernels return gradients."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _scale(query: Tensor, scale: float | None) -> float:
    return query.shape[-1] ** -0.5 if scale is None else scale


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
    """(B, H, N, M), in the dtype that sums are kept in."""
    dtype = logsumexp_dtype(query.dtype)
    scores = (query.to(dtype) * _scale(query, scale)) @ key.to(dtype).mT
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores if mask is None else scores + additive(mask, dtype)


_cpu_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default._op
_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default._op


def attention_cpu(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """As of `attention_formula`."""
    added = None if mask is None else additive(mask, query.dtype)
    query, key, value = _dense(query), _dense(key), _dense(value)
    out, logsumexp = _cpu_forward(query, key, value, 0.0, is_causal, attn_mask=added, scale=scale)
    return out, logsumexp.contiguous()


def attention_backward_cpu(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> Gradients:
    """As of `attention_backward_formula`."""
    added = None if mask is None else additive(mask, query.dtype)
    grad, query, key, value = _dense(grad), _dense(query), _dense(key), _dense(value)
    return _cpu_backward(  # type: ignore[no-any-return]
        grad, query, key, value, out, logsumexp, 0.0, is_causal, attn_mask=added, scale=scale
    )


def _dense(x: Tensor) -> Tensor:
    """The kernel reads whole rows, and looks at no stride of the last dim."""
    return x if x.stride(3) == 1 else x.contiguous()


ROW_BYTES = 16
"""The number that row lengths of queries, keys and values are a multiple of."""
BIAS_ITEMS = 16
"""The number that row lengths of a bias are a multiple of."""
LOGSUMEXP_ITEMS = 1 if torch.version.hip else 32
"""The number that the kernel's row lengths of logarithms are a multiple of."""

_cuda_forward = torch.ops.aten._scaled_dot_product_efficient_attention.default
_cuda_backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default


def attention_cuda(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """As of `attention_formula`."""
    if query.dtype == torch.float64:
        return attention_formula(query, key, value, mask, is_causal, scale)
    width, length = query.shape[-1], query.shape[2]
    bias = None if mask is None else aligned_bias(mask, query, key)
    out, logsumexp, _, _ = _cuda_forward(
        *_prepared(query, key, value), bias, True, 0.0, is_causal, scale=_scale(query, scale)
    )
    return out_like(out[..., :width], query), visible(logsumexp[..., :length]).contiguous()


def attention_backward_cuda(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> Gradients:
    """As of `attention_backward_formula`."""
    if query.dtype == torch.float64:
        return attention_backward_formula(grad, query, key, value, out, logsumexp, mask, is_causal, scale)
    width, heads = query.shape[-1], key.shape[1]
    bias = None if mask is None else aligned_bias(mask, query, key)
    # queries padded, by infinity, which makes every weight 0
    lse = pad(logsumexp, (0, -logsumexp.shape[-1] % LOGSUMEXP_ITEMS), value=math.inf)
    unused = torch.zeros((), dtype=torch.int64, device=query.device)  # the state of dropout's generator
    gradients = _cuda_backward(
        *(aligned_rows(grad), *_prepared(query, key, value), bias),
        *(laid_out(aligned_rows(out)), lse),  # whose stride of queries it takes for granted
        *(unused, unused, 0.0, [True, True, True, False], is_causal),
        scale=_scale(query, scale),
    )
    grad_query, grad_key, grad_value = (gradient[..., :width] for gradient in gradients[:3])
    return laid_out(grad_query), laid_out(sum_heads(grad_key, heads)), laid_out(sum_heads(grad_value, heads))


def aligned_rows(x: Tensor) -> Tensor:
    """(B, H, N, E) with rows that start at whole 16 bytes: E is padded by zeros, and tensors of another layout are
    copied."""
    items = ROW_BYTES // x.element_size()
    if x.shape[-1] % items:
        x = pad(x, (0, -x.shape[-1] % items))
    is_aligned = x.stride(-1) == 1 and not any(start % items for start in (x.storage_offset(), *x.stride()[:-1]))
    return x if is_aligned else x.clone(memory_format=torch.contiguous_format)


def aligned_bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The mask as a bias (B, H, N, M) in the dtype of `query`, its rows starting at whole 16 items of memory.

    Args:
        mask: broadcastable to (B, H, N, M).
        query: (B, H, N, E).
        key: (B, G, M, E).
    """
    bias = additive(mask, query.dtype).to(query.dtype)
    length = key.shape[2]
    bias = bias.expand(*bias.shape[:-1], length)
    bias = pad(bias, (0, -length % BIAS_ITEMS)).contiguous()[..., :length]
    return bias.expand(query.shape[0], query.shape[1], query.shape[2], length)


def _prepared(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    heads = query.shape[1]
    return aligned_rows(query), aligned_rows(repeat_heads(key, heads)), aligned_rows(repeat_heads(value, heads))


_library: Any = torch.library.Library("rlplace", "DEF")  # type: ignore[no-untyped-call]
_library.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, float? scale)"
    " -> (Tensor out, Tensor logsumexp)"
)
_library.define(
    "attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp,"
    " Tensor? mask, bool is_causal, float? scale) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)"
)

attention = torch.ops.rlplace.attention.default
"""(query (B, H, N, E), key (B, G, M, E), value, mask, is_causal, scale) to (out (B, H, N, E), logsumexp (B, H, N)), as
`attention_formula` says."""
attention_backward = torch.ops.rlplace.attention_backward.default
"""(grad, query, key, value, out, logsumexp, mask, is_causal, scale) to the gradients of query, key and value."""


def _fake_attention(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_out(query), query.new_empty(query.shape[:-1], dtype=logsumexp_dtype(query.dtype))


def _fake_attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Gradients:
    return _empty_gradient(query), _empty_gradient(key), _empty_gradient(value)


def _empty_gradient(x: Tensor) -> Tensor:
    return x.new_empty(x.transpose(1, 2).shape).transpose(1, 2)


for _op, _kernels, _fake in (
    ("attention", (attention_cpu, attention_cuda, attention_formula), _fake_attention),
    (
        "attention_backward",
        (attention_backward_cpu, attention_backward_cuda, attention_backward_formula),
        _fake_attention_backward,
    ),
):
    for _key, _kernel in zip(("CPU", "CUDA", "CompositeExplicitAutograd"), _kernels, strict=True):
        _library.impl(_op, _kernel, _key)
    torch.library.register_fake(f"rlplace::{_op}", _fake, lib=_library)


@register_flop_formula(torch.ops.rlplace.attention)
def _flops(query: torch.Size, key: torch.Size, *_: Any, **__: Any) -> int:
    """Two matrix products; masked positions count, as in PyTorch's own formulas."""
    return 4 * query.numel() * key[2]


@register_flop_formula(torch.ops.rlplace.attention_backward)
def _backward_flops(grad: torch.Size, query: torch.Size, key: torch.Size, *_: Any, **__: Any) -> int:
    """Five matrix products: the scores are computed again."""
    return 10 * query.numel() * key[2]


@register_op_impl(torch.ops.aten._grouped_mm.default)
def _fake_grouped_mm(
    mode: Any,
    func: Any,
    one: Tensor,
    other: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """As the kernels are: PyTorch's own shape function takes bfloat16 alone, and lays rows out as no kernel does.

    Offsets say where the groups end, among rows (2-D, 3-D), columns (3-D, 2-D) or what is summed (2-D, 2-D); (3-D, 3-D)
    has none, and is one product for each group.
    """
    kinds, items = (torch.bfloat16, torch.float32, torch.float16), ROW_BYTES // one.element_size()
    steps = [sorted(matrix.stride()[-2:]) for matrix in (one, other)]
    if one.dtype not in kinds or one.dtype != other.dtype or any(least != 1 or most % items for least, most in steps):
        raise ValueError(
            f"grouped_mm takes two tensors, both in one of {kinds}, in rows of a multiple of {items} items; got "
            f"{one.dtype} and {other.dtype} with strides {one.stride()} and {other.stride()}"
        )
    groups = () if one.dim() != other.dim() else one.shape[:-2] if offs is None else offs.shape
    shape = (*groups, one.shape[-2], other.shape[-1])
    row = shape[-1] if torch.version.hip else -(-shape[-1] // items) * items
    with mode:
        return torch.empty_strided(
            shape, (shape[-2] * row, row, 1)[-len(shape) :], dtype=out_dtype or one.dtype, device=one.device
        )


def _grouped_mm_flops(one: torch.Size, other: torch.Size, *_: Any, **__: Any) -> int:
    """Each row (or column) passes the matrix of its group; without offsets each group is a product of its own."""
    return 2 * math.prod(one[-2:] if len(one) > len(other) else one) * other[-1]


if torch.ops.aten._grouped_mm not in flop_registry:
    register_flop_formula(torch.ops.aten._grouped_mm)(_grouped_mm_flops)


_eager = torch.ops.aten.scaled_dot_product_attention.default
_KEYS = ("AutogradCPU", "AutogradCUDA", "AutogradMPS", "AutogradXPU", "AutogradPrivateUse1")
"""Where PyTorch's dispatcher asks us: behind autocast, and before attention comes apart."""


class _Override:
    """Our kernel for `aten::scaled_dot_product_attention`, registered while any thread captures."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._library: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
                for key in _KEYS:
                    self._library.impl("scaled_dot_product_attention", _attend, key)
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._library._destroy()


_override = _Override()


@contextlib.contextmanager
def fused_attention() -> Iterator[None]:
    """Attention becomes `rlplace::attention`; with dropout, or a mask that learns, it comes apart by its definition.

    It is the dispatcher that is told, so that every caller is covered: PyTorch's own layers, functions imported by
    name, and a forward that runs again within a backward. Other threads get the same results by the same ops meanwhile.
    """
    with sdpa_kernel(SDPBackend.MATH), _override:
        yield


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As `scaled_dot_product_attention`; a call that cannot be fused goes to PyTorch, which also refuses mistakes."""
    can_fuse = (
        dropout_p == 0
        and not (is_causal and attn_mask is not None)
        and query.is_floating_point()
        and query.dtype == key.dtype == value.dtype
        and _fit(query, key, value, enable_gqa=enable_gqa)
        and (attn_mask is None or _masks(attn_mask, query, key))
    )
    if not can_fuse:
        return _eager.decompose(  # type: ignore[no-any-return]
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    is_single = query.dim() == 3
    if is_single:
        query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
    out: Tensor = _Attention.apply(query, key, value, attn_mask, is_causal, scale)  # type: ignore[no-untyped-call]
    return out.squeeze(0) if is_single else out


def _fit(query: Tensor, key: Tensor, value: Tensor, *, enable_gqa: bool) -> bool:
    """Whether shapes are those of the ops: the same dims, none of them empty, and heads that go into each other."""
    dims = query.dim()
    if dims not in (3, 4) or not query.numel() or not key.numel() or key.shape != value.shape or key.dim() != dims:
        return False
    heads, key_heads = query.shape[-3], key.shape[-3]
    is_alike = query.shape[-1] == key.shape[-1] and query.shape[:-3] == key.shape[:-3]
    return is_alike and (heads == key_heads or (enable_gqa and dims == 4 and heads % key_heads == 0))


def _masks(mask: Tensor, query: Tensor, key: Tensor) -> bool:
    """Whether a mask needs no gradient and is one that the ops can read."""
    full = (*query.shape[:-1], key.shape[-2])
    if (mask.requires_grad and torch.is_grad_enabled()) or not 2 <= mask.dim() <= len(full):
        return False
    is_read = mask.dtype in (torch.bool, torch.float32, query.dtype)
    return is_read and all(size in (1, whole) for size, whole in zip(mask.shape[::-1], full[::-1], strict=False))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        scale: float | None,
    ) -> Tensor:
        out: Tensor
        out, logsumexp = attention(query, key, value, mask, is_causal, scale)
        ctx.save_for_backward(query, key, value, out, logsumexp, mask)
        ctx.is_causal, ctx.scale = is_causal, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *saved, mask = ctx.saved_tensors
        return (*attention_backward(grad, *saved, mask, ctx.is_causal, ctx.scale), None, None, None)
