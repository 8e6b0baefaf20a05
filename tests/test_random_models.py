"""Random models: members with what once went wrong, and some dozens of any kind, are as plain PyTorch."""

from __future__ import annotations

import pytest
from random_models import Member, Part, member_of, outcomes, tried

LINEAR, NORM = Part("layer", "linear", 1), Part("layer", "batch_norm", 0)


def wrapped(kind: str, *parts: Part, seed: int = 0) -> Part:
    return Part("wrapper", kind, seed, parts)


RECOMPUTED = [
    Member(1, "vector", (LINEAR, wrapped("checkpoint", NORM))),
    Member(2, "image", (wrapped("nested", Part("layer", "batch_norm", 1)),)),  # with `momentum=None`
    Member(3, "sequence", (LINEAR, wrapped("kwargs", NORM, Part("state", "counter", 0)))),
    Member(4, "vector", (wrapped("checkpoint", LINEAR, Part("state", "replaced", 0)),)),
]
"""Forwards that run again in the backward, and change buffers again."""
ON_THE_SIDE = [
    Member(5, "vector", (wrapped("reentrant", LINEAR), LINEAR)),
    Member(6, "sequence", (wrapped("nested_reentrant", Part("layer", "low_rank", 3)),)),
    Member(7, "vector", (LINEAR, wrapped("on_the_side", LINEAR))),
    Member(8, "image", (wrapped("sequential", LINEAR, seed=1),)),
]
"""Backwards of their own within the backward, which leave gradients in parameters."""
OTHER_LAYOUTS = [
    Member(9, "sequence", (NORM, Part("layer", "gated", 0))),
    Member(10, "sequence", (LINEAR, wrapped("residual", NORM))),
    Member(11, "sequence", (wrapped("loop", NORM),)),
]
"""Batch norm of (B, N, C) lays out its results otherwise than fake tensors have it."""
PENALTIES = [
    Member(12, "vector", (Part("layer", "linear", 4),), form="penalty"),
    Member(13, "image", (Part("layer", "conv", 0),), form="penalty", loss="huber"),
    Member(14, "vector", (wrapped("residual", LINEAR),), form="penalty", loss="classes", inputs="dict"),
]
"""Losses with the gradient of an input."""
FILLED = [
    Member(15, "vector", (LINEAR, Part("write", "filled_by_slices", 1))),
    Member(16, "sequence", (Part("write", "filled_by_columns", 0), LINEAR)),
    Member(17, "image", (LINEAR, Part("write", "filled_by_slices", 4))),
]
"""Memory without values (`torch.empty`) that is filled by slices."""


@pytest.mark.parametrize("way", ["gradients K=1", "module"])
@pytest.mark.parametrize("member", [*RECOMPUTED, *ON_THE_SIDE, *OTHER_LAYOUTS], ids=str)
def test_as_plain_pytorch(member: Member, way: str) -> None:
    found = tried(member, way)
    assert found.word == "right", found.why


@pytest.mark.parametrize("member", [*PENALTIES, *FILLED, ON_THE_SIDE[0]], ids=str)
def test_micro_batches_are_as_the_whole_batch(member: Member) -> None:
    found = tried(member, "gradients K=2")
    assert found.word == "right", found.why


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_nothing_is_silently_wrong(seed: int) -> None:
    found = outcomes(member_of(seed))
    assert not {way: each.why for way, each in found.items() if each.word in ("WRONG", "CRASH")}
