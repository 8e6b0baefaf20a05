from __future__ import annotations

import math

import pytest

from rlplace.errors import InvalidValue
from rlplace.workloads import CONFIGS, InceptionV3Config, NMTConfig


def test_default_is_small():
    for kind in CONFIGS.values():
        assert kind() == kind.small()


def test_paper_sizes():
    assert InceptionV3Config.paper() == InceptionV3Config(batch=32, image_size=299, classes=1000, dropout=0.0)
    assert NMTConfig.paper() == NMTConfig(layers=2, units=1024, batch=64, steps=50, vocab=32000)


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (InceptionV3Config, "batch", 0),
        (InceptionV3Config, "batch", "4"),
        (InceptionV3Config, "batch", True),
        (InceptionV3Config, "batch", 4.0),
        (InceptionV3Config, "image_size", 74),
        (InceptionV3Config, "classes", 1),
        (InceptionV3Config, "dropout", 1.0),
        (InceptionV3Config, "dropout", -0.1),
        (InceptionV3Config, "dropout", math.nan),
        (NMTConfig, "layers", 0),
        (NMTConfig, "units", -1),
        (NMTConfig, "batch", 0),
        (NMTConfig, "steps", 0),
        (NMTConfig, "vocab", 1),
        (NMTConfig, "bidirectional", 1),
    ],
)
def test_bad_value_is_named(kind, field, value):
    with pytest.raises(InvalidValue, match=field) as caught:
        kind(**{field: value})
    assert (caught.value.field, caught.value.actual) == (field, value) or value is math.nan


def test_one_small_image_cannot_be_normalised():
    with pytest.raises(InvalidValue, match="batch=2"):
        InceptionV3Config(batch=1, image_size=106)
    InceptionV3Config(batch=1, image_size=107)
    InceptionV3Config(batch=2, image_size=75)


# Worked by hand with floor((n - kernel) / stride) + 1 down the stem and the first reduction.
@pytest.mark.parametrize(("image_size", "expected"), [(75, 3), (107, 5), (149, 7), (299, 17)])
def test_feature_map(image_size, expected):
    assert InceptionV3Config(batch=2, image_size=image_size).feature_map == expected
