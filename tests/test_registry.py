"""`Registry`: names, lazy entries, and what installed packages bring."""

from __future__ import annotations

import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest

from rlplace.errors import InvalidValue, MissingExtra, UnknownName
from rlplace.registry import Registry

GROUP = "rlplace.test_shapes"

Install = Callable[[str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a distribution on the path whose `entry_points.txt` has the given lines."""
    monkeypatch.syspath_prepend(tmp_path)

    def add(name: str, lines: str) -> None:
        folder = tmp_path / f"{name}-1.5.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n", encoding="utf-8")
        (folder / "entry_points.txt").write_text(f"[{GROUP}]\n{lines}\n", encoding="utf-8")

    return add


def shapes(**entries: object) -> Registry[object]:
    return Registry("shape", {"round": Fraction(1, 2), **entries}, group=GROUP)


def test_what_is_registered_is_there_until_it_is_taken_out() -> None:
    registry = shapes()
    registry.register("square-2", Fraction(2))
    assert dict(registry) == {"round": Fraction(1, 2), "square-2": Fraction(2)}
    assert len(registry) == 2
    registry.unregister("square-2")
    assert list(registry) == ["round"]
    with pytest.raises(UnknownName, match="unknown shape 'square-2'"):
        registry.unregister("square-2")


def test_a_taken_name_is_refused_and_keeps_its_entry() -> None:
    registry = shapes()
    with pytest.raises(InvalidValue, match=r"shape: name is 'round', expected a name that is not taken\. Choose"):
        registry.register("round", Fraction(3))
    assert registry["round"] == Fraction(1, 2)


@pytest.mark.parametrize("name", ["", "Round", "a b", "a:b", "a,b", "-a", "a-", "a*2", "a@b", "a=b", "a.json", "../a"])
def test_a_malformed_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidValue, match="expected lower-case letters and digits, joined by - or _"):
        shapes().register(name, Fraction(3))


def test_a_miss_names_what_could_be_meant() -> None:
    registry = shapes(square=Fraction(2))
    with pytest.raises(UnknownName, match=r"^unknown shape 'squre': did you mean 'square'\? Known: round, square\.$"):
        registry["squre"]
    assert "squre" not in registry
    assert registry.get("squre") is None


def test_a_lazy_entry_is_imported_when_it_is_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lazy_shape.py").write_text("SHAPE = object()\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    registry = shapes(lazy="lazy_shape:SHAPE")
    assert "lazy" in registry
    assert list(registry) == ["round", "lazy"]
    assert "lazy_shape" not in sys.modules
    assert registry["lazy"] is registry["lazy"] is sys.modules["lazy_shape"].SHAPE
    registry.unregister("lazy")
    assert registry.get("lazy") is None


def test_a_lazy_entry_that_is_not_there_says_so() -> None:
    for home in ("no_such_module:SHAPE", "fractions:NoSuchName", "no colon here"):
        with pytest.raises(InvalidValue, match=f"shape 'lazy': home is {home!r}, expected .* It raised"):
            shapes(lazy=home)["lazy"]


def test_our_own_errors_come_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "from rlplace.errors import MissingExtra\nraise MissingExtra('onnx', 'onnx')\n"
    (tmp_path / "needs_extra.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingExtra):
        shapes(onnx="needs_extra:SHAPE")["onnx"]


def test_entries_are_of_one_type() -> None:
    with pytest.raises(InvalidValue, match=r"number 'one': entry is 1\.0, expected of type Fraction"):
        Registry("number", {"one": 1.0}, entry_type=Fraction)
    lazy = Registry("number", {"pi": "math:pi", "half": "fractions:Fraction"}, entry_type=Fraction)
    with pytest.raises(InvalidValue, match=r"number 'pi': entry is 3\.14"):
        lazy["pi"]


def test_installed_packages_bring_entries(install: Install) -> None:
    install("ovals", "oval = fractions:Fraction\nround = math:pi")
    registry = shapes()
    assert registry["round"] == Fraction(1, 2), "what is built in hides an entry point of its name"
    assert list(registry) == ["round", "oval"]
    assert len(registry) == 2
    assert registry["oval"] is Fraction
    registry.register("oval", Fraction(7))
    assert registry["oval"] == Fraction(7)
    with pytest.raises(UnknownName, match="did you mean 'oval'"):
        registry["ovall"]


def test_entry_points_are_not_read_before_they_are_needed(install: Install) -> None:
    registry = shapes()
    assert registry["round"] == Fraction(1, 2)
    install("ovals", "oval = fractions:Fraction")
    assert "oval" in registry, "the look-up of a built-in name has read no entry points"


def test_a_broken_package_is_named_when_its_entry_is_asked_for(install: Install) -> None:
    install("broken", "bent = no_such_module:SHAPE")
    install("ovals", "oval = fractions:Fraction")
    registry = shapes()
    assert list(registry) == ["round", "bent", "oval"]
    assert registry["oval"] is Fraction
    with pytest.raises(InvalidValue, match=r"shape 'bent' of broken 1\.5: .* No module named 'no_such_module'"):
        registry["bent"]


def test_two_packages_that_use_one_name_are_both_named(install: Install) -> None:
    install("ovals", "oval = fractions:Fraction")
    install("eggs", "oval = math:pi")
    with pytest.raises(InvalidValue, match=r"shape 'oval' of eggs 1\.5 and ovals 1\.5: .* one installed package"):
        shapes()["oval"]
