"""What goes from stage to stage: nested tuples, lists and dicts whose leaves are arrays or plain values.

flatten() takes such a value apart, build() puts it together again. A Layout is all that can be known of a value before
it is there: its structure, the shapes and dtypes of its arrays, and where they lie in one block of memory. Layouts are
interned, so that comparing two is comparing two references.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from pyxdev._pipeline import Activation, Value
from pyxdev.errors import InvalidArgument

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

ALIGNMENT = 256  # bytes; of every array in a slot

ARRAY = "array"
PLAIN = "plain"
UNKNOWN: Any = type("Unknown", (), {"__repr__": lambda self: "unknown", "__slots__": ()})()
"""Stands for a plain value that a stage has not computed yet."""


class Node(NamedTuple):
    """A tuple, list, dict or named tuple; children are Nodes, ARRAY or PLAIN."""

    kind: type
    keys: tuple[Any, ...] | None  # of a dict
    children: tuple[Any, ...]


Structure = Any  # Node | "array" | "plain"; hashable


class Spec(NamedTuple):
    """Shape and dtype of an array, as a stage's `out` and `cost` functions see it."""

    shape: tuple[int, ...]
    dtype: str
    nbytes: int


def flatten(x: Any, is_array: Callable[[Any], bool], arrays: list[Any], plain: list[Any]) -> Structure:
    """Appends the leaves of x, in order, to arrays and plain; returns the structure.

    Raises InvalidArgument for a subclass of tuple, list or dict that build() could not make again.
    """
    kind = type(x)
    if is_array(x):
        arrays.append(x)
        return ARRAY
    if kind is tuple or kind is list:
        return Node(kind, None, tuple([flatten(child, is_array, arrays, plain) for child in x]))
    if kind is dict:
        return Node(dict, tuple(x), tuple([flatten(child, is_array, arrays, plain) for child in x.values()]))
    if isinstance(x, tuple) and hasattr(kind, "_fields"):
        return Node(kind, None, tuple([flatten(child, is_array, arrays, plain) for child in x]))
    if isinstance(x, (tuple, list, dict)):
        raise InvalidArgument(
            f"a {kind.__qualname__} cannot go from stage to stage; tuples, named tuples, lists, dicts, arrays and "
            "plain values can"
        )
    plain.append(x)
    return PLAIN


def build(structure: Structure, arrays: Iterator[Any], plain: Iterator[Any]) -> Any:
    """The value of this structure, with leaves taken in order."""
    if structure is ARRAY:
        return next(arrays)
    if structure is PLAIN:
        return next(plain)
    children = [build(child, arrays, plain) for child in structure.children]
    if structure.kind is list:
        return children
    if structure.kind is dict:
        return dict(zip(structure.keys, children, strict=True))
    return tuple(children) if structure.kind is tuple else structure.kind(*children)


def plain_paths(structure: Structure, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where the plain leaves are, in order: the keys and positions that lead to each."""
    if structure is ARRAY:
        return []
    if structure is PLAIN:
        return [path]
    keys = structure.keys or range(len(structure.children))
    return [
        found for key, child in zip(keys, structure.children, strict=True) for found in plain_paths(child, (*path, key))
    ]


class Layout:
    """The structure of a value, its arrays, and their places in a block of nbytes bytes."""

    __slots__ = ("nbytes", "offsets", "paths", "specs", "structure")

    def __init__(self, structure: Structure, specs: tuple[Spec, ...]) -> None:
        self.structure = structure
        self.specs = specs
        offsets = []
        end = 0
        for spec in specs:
            offsets.append(end)
            end += -(-spec.nbytes // ALIGNMENT) * ALIGNMENT
        self.offsets = tuple(offsets)
        self.nbytes = end
        self.paths = plain_paths(structure)

    def __repr__(self) -> str:
        arrays = iter([f"{spec.dtype}{list(spec.shape)}" for spec in self.specs])
        return str(build(self.structure, arrays, iter(["plain"] * len(self.paths)))).replace("'", "")

    def fits(self, structure: Structure, arrays: Sequence[Any]) -> bool:
        """Whether a value of this structure, whose arrays tell shape and dtype as a Spec does, has this layout."""
        if structure is not self.structure and structure != self.structure:
            return False
        for leaf, spec in zip(arrays, self.specs, strict=True):
            if leaf.shape != spec.shape or leaf.dtype != spec.dtype:
                return False
        return True

    def same(self, other: Layout) -> bool:
        """Whether values of both look alike. Two layouts of one table nearly always are one object then."""
        return self.structure == other.structure and self.specs == other.specs

    def example(self, plain: Sequence[Any]) -> Any:
        """The value with a Spec for each array."""
        return build(self.structure, iter(self.specs), iter(plain))


class Layouts:
    """One Layout for each structure and its arrays."""

    LIMIT = 4096  # kept; values whose shapes change without end must not fill the memory

    def __init__(self) -> None:
        self._known: dict[tuple[Structure, tuple[Spec, ...]], Layout] = {}
        self._joined: dict[tuple[Layout, ...], Layout] = {}

    def of(self, structure: Structure, specs: tuple[Spec, ...]) -> Layout:
        layout = self._known.get((structure, specs))
        if layout is None:
            if len(self._known) >= self.LIMIT:
                self._known.clear()
            layout = self._known[structure, specs] = Layout(structure, specs)
        return layout

    def joined(self, parts: tuple[Layout, ...]) -> Layout:
        """Of a tuple of values, whose arrays lie one value after the other."""
        layout = self._joined.get(parts)
        if layout is None:
            if len(self._joined) >= self.LIMIT:
                self._joined.clear()
            structure = Node(tuple, None, tuple([part.structure for part in parts]))
            layout = self._joined[parts] = self.of(structure, tuple([spec for part in parts for spec in part.specs]))
        return layout


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
