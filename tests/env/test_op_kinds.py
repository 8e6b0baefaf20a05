import pytest

from rlplace.env.problem_features import OP_KINDS, op_kind


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        ("parameter", "parameter"),
        ("state", "parameter"),
        ("constant", "input"),
        ("update.adamw", "update"),
        ("aten.mm.default", "matmul"),
        ("aten.addmm.default", "matmul"),
        ("aten.bmm.default", "matmul"),
        ("aten._scaled_mm.default", "matmul"),
        ("rlplace.attention_backward.default", "attention"),
        ("aten._scaled_dot_product_flash_attention_for_cpu.default", "attention"),
        ("aten.convolution_backward.default", "convolution"),
        ("aten.native_layer_norm_backward.default", "norm"),
        ("aten._native_batch_norm_legit.default", "norm"),
        ("aten._log_softmax_backward_data.default", "loss"),
        ("aten.max_pool2d_with_indices.default", "pool"),
        ("aten.embedding_dense_backward.default", "embedding"),
        ("aten.index_put.default", "embedding"),
        ("aten.sum.dim_IntList", "reduction"),
        ("aten.cat.default", "movement"),
        ("aten.slice_backward.default", "movement"),
        ("aten.native_dropout.default", "random"),
        ("aten.threshold_backward.default", "elementwise"),
        ("aten.add.Tensor", "elementwise"),
        ("Gemm", "matmul"),
        ("Conv", "convolution"),
        ("Relu", "elementwise"),
        ("my_package.mystery.default", "other"),
        ("", "other"),
    ],
)
def test_ops_are_told_by_what_they_do(target: str, kind: str) -> None:
    assert op_kind(target) == kind


def test_weights_depend_on_the_order_of_kinds() -> None:
    assert OP_KINDS[:3] == ("parameter", "input", "matmul")
    assert len(OP_KINDS) == 15
