"""Holds the comments of tensors' shapes, such as `# [B, C] bool`, at run time: in every Scores and TokenBatch that a test makes.

A letter has one value in an object; float32 may be float64, in which tests compare. The code itself has no check and no cost.
"""

import functools
import inspect
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
    """Return what is not as its comment says. Sums, such as P+C, are looked at when their letters are known."""
    sizes, wrong, sums = {}, [], []
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
                if "+" in letter:
                    sums.append((name, letter, size))
                elif (
                    size != 1 and sizes.setdefault(letter, size) != size
                ):  # a test may leave a size of 1 to broadcasting
                    wrong.append(f"{name}: {letter} is {size}, and {sizes[letter]} elsewhere")
    return wrong + [f"{name}: {letter} is {size}" for name, letter, size in sums if size < sizes.get("C", 0)]


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
