"""Holds the comments of tensors' shapes, such as `# [B, C] bool`, at run time: in every Scores and TokenBatch that a test makes.

A letter has one value in an object; float32 may be float64, in which tests compare. The code itself has no check and no cost.
"""

import functools
import inspect
import math
import re
import sys

import pytest

NOTED = re.compile(r"^    (\w+): .*# \[([^\]]*)\](?: each)?,?(?: (bool|int64|float32))?", re.M)
PLACE = "grpo.objectives.batch"


def noted(cls: type) -> dict[str, tuple[list[str], str]]:
    """Return the dimensions and the type of each field that has a comment; "" for a type that it does not name."""
    found = NOTED.findall(inspect.getsource(cls))
    return {name: (shape.replace(" ", "").split(","), kind) for name, shape, kind in found}


def faults(one: object, notes: dict[str, tuple[list[str], str]]) -> list[str]:
    """Return what is not as its comment says. P+C counts as a letter, which is at least C."""
    sizes, wrong = {}, []
    for name, (dims, kind) in notes.items():
        value = getattr(one, name)
        for tensor in value.values() if isinstance(value, dict) else [value]:
            if not hasattr(tensor, "shape"):  # None, or a stand-in
                continue
            exact = kind in ("", str(tensor.dtype)[6:]) or (kind == "float32" and tensor.is_floating_point())
            if len(tensor.shape) != len(dims) or not exact:
                wrong.append(f"{name} is {[*tensor.shape]} {tensor.dtype}, not {dims} {kind}")
                continue
            for letter, size in zip(dims, tensor.shape, strict=True):
                known = sizes.setdefault(letter, size) if size != 1 else size  # a test may leave 1 to broadcasting
                if known != size:
                    wrong.append(f"{name}: {letter} is {size}, and {known} elsewhere")
    if sizes.get("P+C", math.inf) < sizes.get("C", 0):
        wrong.append(f"P+C is {sizes['P+C']}, and C is {sizes['C']}")
    return wrong


@pytest.fixture(autouse=True, scope="session")
def shapes_hold():
    """Checks every object of the two classes when it is made, if a test has imported them."""
    module = sys.modules.get(PLACE)
    for cls in (module.Scores, module.TokenBatch) if module else ():
        notes, made = noted(cls), cls.__init__

        @functools.wraps(made)
        def checked(self, *values, made=made, notes=notes, **named):
            made(self, *values, **named)
            assert not (wrong := faults(self, notes)), wrong

        cls.__init__ = checked
