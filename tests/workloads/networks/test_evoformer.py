"""`Evoformer`'s parts against the paper's algorithms, written out in loops."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from rlplace.workloads import build, parse_workload
from rlplace.workloads.networks.evoformer import (
    DISTOGRAM_WEIGHT,
    IGNORED,
    MSA_WEIGHT,
    GatedAttention,
    OuterProductMean,
    TriangleMultiplication,
)

TINY = "evoformer@blocks=1,sequences=3,residues=4,msa_width=8,pair_width=6,heads=2,pair_heads=2,head_width=4"


def heads(layer: torch.nn.Module, x: Tensor, index: int, width: int) -> Tensor:
    return layer(x)[..., index * width : (index + 1) * width]


def test_row_attention_is_algorithm_7() -> None:
    """Also algorithm 8 without its bias, and 13 with pairs in place of the MSA."""
    torch.manual_seed(0)
    attention = GatedAttention(8, heads=2, head_width=4, bias_width=6)
    x_SRC, pair_RRP = torch.randn(3, 5, 8), torch.randn(5, 5, 6)
    m, gates = attention.norm(x_SRC), torch.sigmoid(attention.gate(attention.norm(x_SRC)))
    bias = attention.bias(pair_RRP)
    rows = []
    for s in range(3):
        outputs = []
        for h in range(2):
            q, k, v = (heads(layer, m[s], h, 4) for layer in (attention.queries, attention.keys, attention.values))
            for i in range(5):
                scores = torch.stack([q[i] @ k[j] / 4**0.5 + bias[i, j, h] for j in range(5)])
                outputs.append(gates[s, i, h * 4 : h * 4 + 4] * (torch.softmax(scores, dim=0) @ v))
        joined = torch.stack(outputs).view(2, 5, 4).transpose(0, 1).flatten(1)
        rows.append(attention.out(joined))
    torch.testing.assert_close(attention(x_SRC, pair_RRP), torch.stack(rows))


def test_transposed_pairs_make_algorithm_14() -> None:
    """Around the ending node: pair (i, j) attends to pairs (k, j), biased by pair (k, i)."""
    torch.manual_seed(0)
    attention, z = GatedAttention(6, heads=1, head_width=4, bias_width=6), torch.randn(4, 4, 6)
    actual = attention(z.transpose(0, 1), z.transpose(0, 1)).transpose(0, 1)
    n, bias = attention.norm(z), attention.bias(z)[..., 0]
    q, k, v, gate = attention.queries(n), attention.keys(n), attention.values(n), torch.sigmoid(attention.gate(n))
    for i in range(4):
        for j in range(4):
            scores = torch.stack([q[i, j] @ k[other, j] / 2 + bias[other, i] for other in range(4)])
            expected = attention.out(gate[i, j] * (torch.softmax(scores, dim=0) @ v[:, j]))
            torch.testing.assert_close(actual[i, j], expected)


def test_outer_product_mean_is_algorithm_10() -> None:
    torch.manual_seed(0)
    module, msa = OuterProductMean(8, 3, 6), torch.randn(5, 4, 8)
    left, right = module.left(module.norm(msa)), module.right(module.norm(msa))
    actual = module(msa)
    for i in range(4):
        for j in range(4):
            mean = torch.stack([torch.outer(left[s, i], right[s, j]) for s in range(5)]).mean(dim=0)
            torch.testing.assert_close(actual[i, j], module.out(mean.flatten()))


def test_triangle_multiplications_are_algorithms_11_and_12() -> None:
    torch.manual_seed(0)
    pair = torch.randn(4, 4, 6)
    for is_outgoing in (True, False):
        module = TriangleMultiplication(6, is_outgoing=is_outgoing)
        x = module.norm(pair)
        a = torch.sigmoid(module.left_gate(x)) * module.left(x)
        b = torch.sigmoid(module.right_gate(x)) * module.right(x)
        actual = module(pair)
        for i in range(4):
            for j in range(4):
                edges = [a[i, k] * b[j, k] if is_outgoing else a[k, i] * b[k, j] for k in range(4)]
                update = module.out(module.out_norm(torch.stack(edges).sum(dim=0)))
                torch.testing.assert_close(actual[i, j], torch.sigmoid(module.gate(x))[i, j] * update)


def test_loss_is_of_masked_residues_and_symmetric_distances() -> None:
    workload = build(parse_workload(TINY))
    msa_SR, labels_SR, distances_RR = tuple(workload.inputs)
    output = workload.model(msa_SR, labels_SR, distances_RR)
    masked = labels_SR != IGNORED
    assert bool(masked.any())
    assert bool((msa_SR[masked] == 22).all())
    torch.testing.assert_close(output.distance_logits, output.distance_logits.transpose(0, 1))
    expected = MSA_WEIGHT * cross_entropy(output.msa_logits[masked], labels_SR[masked])
    expected = expected + DISTOGRAM_WEIGHT * cross_entropy(output.distance_logits.flatten(0, 1), distances_RR.flatten())
    torch.testing.assert_close(output.loss, expected)
    assert workload.model(msa_SR).loss is None
