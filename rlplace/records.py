"""Records: frozen dataclasses whose fields are checked when they are made and when they are read from a file.

`record` is `dataclasses.dataclass` with checks by pydantic: strict types (text is not read as a number), no unknown
fields, finite numbers, and the ranges that a field's type gives. `read_record` builds one from the object of a file.
Both refuse by one `InvalidValue` or `UnknownName`, which names the field and, where there is one, the file.

pydantic and not msgspec: msgspec checks decoded objects, but not those that a program constructs.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import wraps
from numbers import Integral, Real
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeGuard, TypeVar, cast, get_args, get_type_hints

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from rlplace.errors import InvalidValue, UnknownName, UserError
from rlplace.files import check_values

__all__ = [
    "LARGEST_SEED",
    "AtLeastOne",
    "Count",
    "Described",
    "FirstSchema",
    "NotNegative",
    "Number",
    "Positive",
    "Seconds",
    "Seed",
    "Share",
    "Whole",
    "check_seed",
    "described",
    "is_whole",
    "make_record",
    "of_checked",
    "read_record",
    "record",
    "shortened",
    "to_plain",
    "words_of",
]

T = TypeVar("T")

_CONFIG = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False, defer_build=True)
_MOST_CHARACTERS = 80
_EXPECTED = {
    "int_type": "a whole number",
    "int_parsing_size": "a whole number of at most 63 bits",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a mapping",
    "dataclass_type": "a mapping of fields",
    "greater_than": "more than {gt:,}",
    "greater_than_equal": "at least {ge:,}",
    "less_than": "less than {lt:,}",
    "less_than_equal": "at most {le:,}",
    "too_long": "at most {max_length:,} values",
    "too_short": "at least {min_length:,} values",
    "string_too_long": "at most {max_length:,} characters",
    "string_too_short": "at least {min_length:,} characters",
}
"""The expected value, by pydantic's name of an error."""


def _whole(value: object) -> object:
    """Whole numbers of other kinds as `int`: NumPy's, and floats without a fraction (`16e9`)."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, bool) or not isinstance(value, Integral) else int(value)


def _number(value: object) -> object:
    """Numbers of other kinds as `float`: NumPy's among them."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _first_schema(value: object) -> object:
    """Only the number 1; `Literal[1]` alone would take `True`, which is equal to it."""
    if type(value) is not int or value != 1:
        raise ValueError("1, the one that this version of rlplace reads")
    return value


Whole = Annotated[int, BeforeValidator(_whole), Field(ge=-(2**63), lt=2**63)]
"""An integer; also one that is written `16e9`, or a NumPy integer."""
Number = Annotated[float, BeforeValidator(_number)]
"""A finite float; a whole number and NumPy's numbers will do."""
NumberOrNan = Annotated[
    float, Field(allow_inf_nan=True), BeforeValidator(lambda value: math.nan if value is None else value)
]
"""A float that may be NaN, which files hold as null."""
Count = Annotated[Whole, Field(ge=0)]
AtLeastOne = Annotated[Whole, Field(ge=1)]
Positive = Annotated[Number, Field(gt=0)]
NotNegative = Annotated[Number, Field(ge=0)]
Share = Annotated[Number, Field(ge=0, le=1)]
Seconds = Annotated[Number, Field(ge=0, le=1e300)]
FirstSchema = Annotated[Literal[1], BeforeValidator(_first_schema)]
"""The schema of a file format that has had one so far."""
LARGEST_SEED = 2**32 - 1
"""NumPy's global generator, which Stable-Baselines3 seeds, takes no larger one."""
Seed = Annotated[Whole, Field(ge=0, le=LARGEST_SEED)]

if TYPE_CHECKING:
    from dataclasses import dataclass as record
else:

    def record(**options: Any) -> Callable[[type[T]], type[T]]:
        """`dataclasses.dataclass(**options)` whose fields are checked: `@record(frozen=True, slots=True)`.

        An error of `__post_init__` (`InvalidValue`, `UnknownName`) names its place in the file that is read.

        >>> @record(frozen=True)
        ... class Budget:
        ...     seconds: Seconds
        >>> Budget(3)
        Budget(seconds=3.0)
        >>> Budget("3")
        Traceback (most recent call last):
        rlplace.errors.InvalidValue: budget: seconds is '3', expected a number.
        """
        from pydantic.dataclasses import dataclass as pydantic_dataclass

        def make(kind: type[T]) -> type[T]:
            if (post_init := kind.__dict__.get("__post_init__")) is not None:
                kind.__post_init__ = _told_by_pydantic(post_init)
            made = pydantic_dataclass(kind, config=_CONFIG, **options)
            init = made.__init__

            @wraps(init)
            def checked(self: object, *args: object, **values: object) -> None:
                try:
                    with _one_line(made, words_of(made)):
                        init(self, *args, **values)
                finally:
                    made.__init__ = checked  # pydantic sets its own when it builds the checks, at the first use

            made.__init__ = checked
            return made

        return make


def _told_by_pydantic(post_init: Callable[[Any], None]) -> Callable[[Any], None]:
    @wraps(post_init)
    def checked(self: object) -> None:
        try:
            post_init(self)
        except UserError as error:
            raise PydanticCustomError("of_record", "{error}", {"error": error}) from error

    return checked


def read_record(kind: type[T], data: object, where: str) -> T:
    """A `kind`, built from the object of a file.

    Args:
        kind: A record, or a type made of records (`tuple[Device, ...]`, `dict[str, Factor]`).
        data: JSON as text or bytes, or plain data: mappings, lists, text, numbers, `None`, records in them; an instance
            passes through.
        where: The file, named in every error.

    Raises:
        InvalidValue: A missing field, or a value of the wrong type or range.
        UnknownName: A field or choice that does not exist.
    """
    if isinstance(kind, type) and isinstance(data, kind):
        return data
    with _one_line(kind, where):
        try:
            text = data if isinstance(data, str | bytes) else json.dumps(data, default=to_plain)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidValue(words_of(kind), described(data), "plain data", where=where) from error
        check_values(text if isinstance(text, str) else text.decode("utf-8", errors="replace"), where)
        return cast(T, _adapter(kind).validate_json(text))


def make_record(kind: type[T], where: str, **values: object) -> T:
    """`kind(**values)`, for values of a file.

    Raises:
        InvalidValue, UnknownName: as of `read_record`.
    """
    try:
        return kind(**values)
    except InvalidValue as error:
        raise InvalidValue(error.field, error.actual, error.expected, where=where, hint=error.hint) from None
    except UnknownName as error:
        raise UnknownName(f"{error.kind} of {where}", error.name, error.known) from None


def of_checked(kind: type[T], values: dict[str, object]) -> T:
    """`kind(**values)` without its checks, of all fields, which were checked before: a million in a second."""
    made = object.__new__(kind)
    object.__setattr__(made, "__dict__", values)
    return made


def to_plain(value: object, kind: Any = None) -> Any:
    """A record as plain data, the inverse of `read_record`."""
    return _adapter(type(value) if kind is None else kind).dump_python(value, mode="json")


def to_json(value: object, kind: Any = None) -> str:
    """A record as JSON text, NaN and infinities as null; the inverse of `read_record`."""
    return _adapter(type(value) if kind is None else kind).dump_json(value).decode("utf-8")


def readable(kind: type[T]) -> type[T]:
    """A plain dataclass that `read_record` reads as strictly as a record, while making one checks nothing.

    For objects with big arrays: fields of the type `Unkept` are not written.
    """
    kind.__pydantic_config__ = _CONFIG  # type: ignore[attr-defined]
    return kind


_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}


def _adapter(kind: Any) -> TypeAdapter[Any]:
    if kind not in _ADAPTERS:
        is_record = isinstance(kind, type) and is_dataclass(kind)
        _ADAPTERS[kind] = TypeAdapter(kind, config=None if is_record else _CONFIG)
    return _ADAPTERS[kind]


@contextmanager
def _one_line(kind: Any, where: str) -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        raise _first_of(error, kind, where) from None


def _first_of(error: ValidationError, kind: Any, where: str) -> UserError:
    """The first thing that is wrong, as an error of ours."""
    first = error.errors(include_url=False)[0]
    what, context, loc = first["type"], first.get("ctx", {}), first["loc"]
    if loc and isinstance(loc[0], int) and is_dataclass(kind):  # an argument that was given by its position
        loc = (fields(kind)[loc[0]].name, *loc[1:])
    at = re.sub(r"\.\[", "[", ".".join(f"[{part}]" if isinstance(part, int) else str(part) for part in loc))
    if what == "of_record":
        inner = context["error"]
        if isinstance(inner, InvalidValue):
            field = f"{at}.{inner.field}" if at else inner.field
            return InvalidValue(field, inner.actual, inner.expected, where=where, hint=inner.hint)
        if isinstance(inner, UnknownName) and where != words_of(kind):
            return UnknownName(f"{inner.kind} of {f'{at} in ' if at else ''}{where}", inner.name, inner.known)
        return inner if isinstance(inner, UserError) else InvalidValue(at, described(first["input"]), str(inner))
    if what == "unexpected_keyword_argument":
        return UnknownName(
            f"field of {at.rpartition('.')[0] or words_of(kind)} in {where}", str(loc[-1]), _fields(kind, loc[:-1])
        )
    known = re.findall(r"'([^']*)'", context["expected"]) if what == "literal_error" else []
    if known and isinstance(first["input"], str):
        return UnknownName(f"{at} in {where}", first["input"], known)
    if what == "json_invalid":
        return InvalidValue(words_of(kind), described(first["input"]), f"JSON: {context['error']}", where=where)
    if what in ("missing", "missing_argument"):
        return InvalidValue(at, Described("missing"), "a value", where=where)
    told = _EXPECTED.get(what, "")
    expected = (
        told.format(**context) if told else first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    )
    return InvalidValue(at or words_of(kind), described(first["input"]), expected, where=where)


def _fields(kind: Any, loc: Sequence[int | str]) -> list[str]:
    """The names of the fields of the record at a place within another."""
    for part in loc:
        if isinstance(kind, type) and is_dataclass(kind) and isinstance(part, str):
            kind = get_type_hints(kind).get(part)
        found = [each for each in get_args(kind) if each not in (type(None), Ellipsis)]
        kind = found[-1] if found else kind
    return [field.name for field in fields(kind)] if isinstance(kind, type) and is_dataclass(kind) else []


class Described(str):
    """A value that an error message describes rather than quotes."""

    def __repr__(self) -> str:
        return str(self)


def described(value: object) -> object:
    """`value` as an error message should show it: numbers and short texts as they are, the rest in a few words."""
    if value is None:
        return Described("empty")
    if isinstance(value, Mapping):
        return Described(f"a mapping of {len(value)} fields")
    if isinstance(value, list | tuple | set):
        return Described(f"a list of {len(value)} values")
    if isinstance(value, str):
        return shortened(value)
    if isinstance(value, int) and abs(value) >= 2**63:
        return Described("a number of more than 63 bits")
    return value if isinstance(value, int | float) else Described(f"a {type(value).__name__}")


def shortened(text: str, most: int = _MOST_CHARACTERS) -> str:
    """The text, cut where it is long."""
    return text if len(text) <= most else text[: most - 3] + "..."


def words_of(kind: Any) -> str:
    """The name of a class as people write it: `LearnedHost` is a learned host."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", getattr(kind, "__name__", str(kind))).lower()


def is_whole(value: object) -> TypeGuard[int]:
    """Whether it is a whole number, NumPy's among them; a truth value is none.

    >>> is_whole(1), is_whole(1.5), is_whole(True)
    (True, False, False)
    """
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_seed(seed: int, where: str = "") -> int:
    """The seed itself.

    Raises:
        InvalidValue: it is no whole number, negative, or larger than `LARGEST_SEED`.

    >>> check_seed(7)
    7
    """
    if not is_whole(seed) or not 0 <= seed <= LARGEST_SEED:
        raise InvalidValue("seed", seed, f"a whole number from 0 to {LARGEST_SEED}", where=where)
    return seed
