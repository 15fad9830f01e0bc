"""What goes from stage to stage: nested tuples, lists and dicts whose leaves are arrays or plain values.

flatten() takes such a value apart, build() puts it together again. A Layout is all that can be known of a value before
it is there: its structure, the shapes and dtypes of its arrays, and where they lie in one block of memory. Layouts are
interned, so that comparing two is comparing two references.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from pyxdev._pipeline import ARRAY, PLAIN, Activation, Layout, Layouts, Node, Value, build, flatten, plain_paths

__all__ = [
    "ARRAY",
    "PLAIN",
    "UNKNOWN",
    "Activation",
    "Joined",
    "Layout",
    "Layouts",
    "Node",
    "Spec",
    "Structure",
    "Value",
    "build",
    "flatten",
    "plain_paths",
]

Structure = Any  # Node | "array" | "plain"; hashable
UNKNOWN: Any = type("Unknown", (), {"__repr__": lambda self: "unknown", "__slots__": ()})()
"""Stands for a plain value that a stage has not computed yet."""


class Spec(NamedTuple):
    """Shape and dtype of an array, as a stage's `out` and `cost` functions see it."""

    shape: tuple[int, ...]
    dtype: str
    nbytes: int


class Joined(Value):
    """A tuple of values."""

    __slots__ = ("_parts",)

    def __init__(self, layouts: Layouts, parts: list[Value]) -> None:
        self._parts = parts
        guess = [known for part in parts for known in part.guess]
        super().__init__(layouts.joined(tuple([part.layout for part in parts])), [], guess)

    @property
    def complete(self) -> bool:
        return all(part.complete for part in self._parts)

    def values(self) -> list[Any]:
        return [plain for part in self._parts for plain in part.values()]
