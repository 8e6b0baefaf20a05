from __future__ import annotations

import dataclasses
import math

import pytest

from rlplace.errors import InvalidValue
from rlplace.workloads import CATALOG, InceptionV3Config, NMTConfig, parse_workload


def test_default_is_small():
    for kind in [family.config for family in CATALOG.values()]:
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


@pytest.mark.parametrize("name", CATALOG)
def test_every_option_is_checked(name):
    """Integers and shares out of range, and values of another type, are refused by name."""
    kind = CATALOG[name].config
    assert name == kind.NAME
    for field in dataclasses.fields(kind):
        bad = {int: [0, -1, 2.5, True, "2"], float: [-0.1, 1.0, math.inf, "much"], bool: [1, "yes"]}
        for value in bad[type(field.default)]:
            with pytest.raises(InvalidValue, match=field.name):
                kind(**{field.name: value})


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("bert@heads=5", "heads"),
        ("gpt2@heads=5", "heads"),
        ("t5@heads=5", "heads"),
        ("vit@heads=5", "heads"),
        ("vit@patch_size=15", "patch_size"),
        ("clip@patch_size=15", "patch_size"),
        ("clip@text_heads=3", "text_heads"),
        ("llama@heads=8,kv_heads=3", "kv_heads"),
        ("llama@width=12,heads=4,kv_heads=4", "heads"),
        ("mixtral@experts=2,chosen=3", "chosen"),
        ("mixtral@width=12,heads=4", "heads"),
        ("whisper@frames=7", "frames"),
        ("whisper@width=9,heads=3", "width"),
        ("resnet50@image_size=32", "image_size"),
    ],
)
def test_options_that_cannot_be_had_together(text, field):
    with pytest.raises(InvalidValue) as caught:
        parse_workload(text)
    assert caught.value.field == field
