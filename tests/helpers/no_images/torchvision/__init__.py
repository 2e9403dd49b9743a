"""Torchvision by name only, for vLLM's CPU build, which lacks it: modules of empty classes, since no test reads images."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

__version__ = "0.0"


class Named(type):
    """A class in which every public name is a text, as of an enumeration."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("_"):
            raise AttributeError(name)
        return name


class Empty(ModuleType):
    """A module in which every public name is such a class."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return Named(name, (), {})


class Finder:
    """Finds every module below torchvision, and loads it empty."""

    @classmethod
    def find_spec(cls, name: str, path=None, target=None) -> ModuleSpec | None:
        """Return the spec of an empty module."""
        return ModuleSpec(name, cls, is_package=True) if name.startswith("torchvision.") else None

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        """Return an empty module."""
        return Empty(spec.name)

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """Do nothing."""


sys.meta_path.insert(0, Finder)
