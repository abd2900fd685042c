"""An expression as a tree. Every node knows its place in the text, for messages."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal


@dataclass(frozen=True, slots=True)
class Literal:
    """A value that stands in the text; a text takes the type of what it is compared with."""

    value: bool | int | float | Decimal | str | None
    at: int


@dataclass(frozen=True, slots=True)
class Path:
    """A column, or a member of one: `after.qty`."""

    parts: tuple[str, ...]
    at: int

    @property
    def shown(self) -> str:
        """The path as it would be written."""
        return ".".join(part if part.isidentifier() else f'"{part}"' for part in self.parts)


@dataclass(frozen=True, slots=True)
class Unary:
    """`not`, `-`, or a test: `is null`, `is true`, `is false`."""

    operator: str
    operand: Node
    at: int


@dataclass(frozen=True, slots=True)
class Binary:
    """An operator between two values: of logic, comparison, arithmetic, text or JSON."""

    operator: str
    left: Node
    right: Node
    at: int


@dataclass(frozen=True, slots=True)
class Listed:
    """`value in (items)`."""

    operand: Node
    items: tuple[Node, ...]
    at: int


@dataclass(frozen=True, slots=True)
class Like:
    """`value like pattern`; `%` is any run of characters, `_` one, `escape` takes their meaning."""

    operand: Node
    pattern: str
    escape: str
    ignores_case: bool
    at: int


@dataclass(frozen=True, slots=True)
class Matches:
    """`value ~ 'regular expression'`, anywhere in the value."""

    operand: Node
    pattern: str
    ignores_case: bool
    at: int


@dataclass(frozen=True, slots=True)
class Case:
    """`case when … then … else … end`; the first condition that is true counts."""

    branches: tuple[tuple[Node, Node], ...]
    otherwise: Node
    at: int


@dataclass(frozen=True, slots=True)
class TypeName:
    """A type as it is written in a cast; `numbers` are those in parentheses."""

    name: str
    numbers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Cast:
    """`cast(value as type)`, `value::type`."""

    operand: Node
    to: TypeName
    at: int


@dataclass(frozen=True, slots=True)
class Call:
    """A function; its name in lower case."""

    name: str
    arguments: tuple[Node, ...]
    at: int


Node = Literal | Path | Unary | Binary | Listed | Like | Matches | Case | Cast | Call


def paths_of(node: Node) -> set[tuple[str, ...]]:
    """Return every path that the expression reads."""
    if isinstance(node, Path):
        return {node.parts}
    return {path for inner in parts_of(node) for path in paths_of(inner)}


def parts_of(node: Node) -> tuple[Node, ...]:
    """Return the nodes right below."""
    match node:
        case Literal() | Path():
            return ()
        case Unary() | Like() | Matches() | Cast():
            return (node.operand,)
        case Binary():
            return (node.left, node.right)
        case Listed():
            return (node.operand, *node.items)
        case Case():
            return (*(part for branch in node.branches for part in branch), node.otherwise)
        case Call():
            return node.arguments
