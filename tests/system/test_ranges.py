"""Types and ranges of settings."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from grpo.config.help import compact
from grpo.system.errors import UserError
from grpo.system.ranges import Count, NonNegative, Positive, Range, ShareBelow1, accepts, enforced, require

PART = {"_target_": "a.b"}


@pytest.mark.parametrize(
    ("kind", "fits", "others"),
    [
        (Count, [1, 10**12], [0, -1, 1.0, 2.5, math.inf, math.nan, True, "1", None, [1], {}]),
        (Positive, [1e-9, 1], [0, -0.5, math.inf, math.nan, "0.5", True, None]),
        (ShareBelow1, [0, 0.0, 0.999], [1, 1.0, -0.1]),
        (float, [-1, 0.5], [math.nan, math.inf, False, "x"]),
        (bool, [True, False], [0, 1, "true", None]),
        (str | None, ["", "x", Path("x"), None], [1, [], {}]),
        (Literal[0, 1], [0, 1], [2, True, 1.0, "0"]),
        (Sequence[Count], [[], [1], (2, 3)], ["12", [0], [1, None], 1, None]),
        (tuple[Count, Count], [[1, 2]], [[1], [1, 2, 3], [0, 1], "12"]),
        (Mapping[Literal["a", "b"], NonNegative], [{}, {"a": 0}], [{"c": 1}, {"a": -1}, [], "a", None]),
        (Callable[..., Any] | None, [print, PART, None], ["print", 1, {}]),
        (Any, [None, [], math.nan], []),
    ],
)
def test_a_value_fits_or_does_not(kind, fits, others):
    assert [accepts(kind, value) for value in fits] == [True] * len(fits)
    assert [value for value in others if accepts(kind, value)] == []
    assert accepts(kind, PART)  # Hydra builds the value


@pytest.mark.parametrize(
    ("value", "kind", "line"),
    [
        (2.5, Count, "a.b=2.5 must be an integer of at least 1"),
        (None, Positive | None, None),
        (-1, Positive | None, "a.b=-1 must be a number above 0, or null"),
        ("ragged", Literal["padded", "packed"], "a.b=ragged is not one of padded, packed"),
        ([1, None], Sequence[float], "a.b=[1, null] must be a list, each item a number"),
        (True, ShareBelow1, "a.b=true must be a number of at least 0 and below 1"),
        (7, str, "a.b=7 must be a text; as a text: a.b=\"'7'\""),
        (0.1, Annotated[float, Range(0, 0, why=": it does nothing")], "a.b=0.1 must be 0: it does nothing"),
        ({"a": -1}, Mapping[str, NonNegative], "a.b={a: -1} must be a mapping, each value a number of at least 0"),
    ],
)
def test_the_line_names_key_value_and_what_is_allowed(value, kind, line):
    if line is None:
        return require("a.b", value, kind)
    with pytest.raises(UserError) as refusal:
        require("a.b", value, kind)
    assert str(refusal.value) == line


def test_a_range_in_help_is_compact():
    assert (compact(Count), compact(Positive | None)) == ("integer >= 1", "number > 0")
    assert (compact(Sequence[ShareBelow1]), compact(str | None)) == ("number >= 0 and < 1", "")


def test_a_class_and_a_function_check_their_arguments():
    @enforced("size")
    @dataclass(frozen=True)
    class Size:
        rows: Count
        name: str = ""

    @enforced("")
    def area(rows: Count, columns: Count = 1, **more: int) -> int:
        """Return the area."""
        return rows * columns

    assert Size(2).rows == 2 and area(2, columns=3) == 6 and area.__doc__ == "Return the area."
    for call, line in [
        (lambda: Size(rows=0), "size.rows=0 must be an integer of at least 1"),
        (lambda: area(2, 0.5), "columns=0.5 must be an integer of at least 1"),
    ]:
        with pytest.raises(UserError) as refusal:
            call()
        assert str(refusal.value) == line
