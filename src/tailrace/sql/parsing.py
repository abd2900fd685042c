"""From an expression's text to its tree. Precedence and meaning are PostgreSQL's.

From the weakest: `or`; `and`; `not`; `is`; comparisons, which can't be chained; `in`, `between`,
`like`, `~`; `||`, `->`, `->>`; `+`, `-`; `*`, `/`, `%`; the sign; `::`.

`between`, `not in`, `not like`, `<>` and `is distinct from` are made of simpler nodes here, so that
whoever computes needs to know few.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable
from decimal import Decimal

from tailrace.sql.tokens import ExpressionError, Kind, Token, tokens_of
from tailrace.sql.tree import (
    Binary,
    Call,
    Case,
    Cast,
    Like,
    Listed,
    Literal,
    Matches,
    Node,
    Path,
    TypeName,
    Unary,
    parts_of,
)

#: Levels of parentheses, and of the tree: reading and computing go down by recursion.
DEPTH_MAX = 40
TREE_DEPTH_MAX = 100

#: Values in one `in (…)`, branches in one `case`.
ITEMS_MAX = 1000

#: By function: least and most arguments; -1: any number.
FUNCTIONS = {
    "abs": (1, 1),
    "ceil": (1, 1),
    "coalesce": (1, -1),
    "concat": (1, -1),
    "ends_with": (2, 2),
    "floor": (1, 1),
    "greatest": (1, -1),
    "least": (1, -1),
    "left": (2, 2),
    "length": (1, 1),
    "lower": (1, 1),
    "ltrim": (1, 1),
    "nullif": (2, 2),
    "replace": (3, 3),
    "right": (2, 2),
    "round": (1, 2),
    "rtrim": (1, 1),
    "starts_with": (2, 2),
    "substring": (2, 3),
    "trim": (1, 1),
    "upper": (1, 1),
    "was_sent": (1, 1),
}
_ALSO = {"char_length": "length", "substr": "substring", "ceiling": "ceil"}

#: By type's name in a cast: how it is called here, and how many numbers may follow.
TYPES = {
    "bool": ("boolean", 0),
    "boolean": ("boolean", 0),
    "smallint": ("smallint", 0),
    "int2": ("smallint", 0),
    "int": ("integer", 0),
    "integer": ("integer", 0),
    "int4": ("integer", 0),
    "bigint": ("bigint", 0),
    "int8": ("bigint", 0),
    "real": ("real", 0),
    "float4": ("real", 0),
    "float": ("double", 0),
    "float8": ("double", 0),
    "double": ("double", 0),
    "numeric": ("numeric", 2),
    "decimal": ("numeric", 2),
    "text": ("text", 0),
    "string": ("text", 0),
    "varchar": ("text", 0),
    "date": ("date", 0),
    "timestamp": ("timestamp", 0),
    "timestamptz": ("timestamptz", 0),
}

_RESERVED = frozenset(
    {
        *("and", "or", "not", "is", "in", "between", "like", "ilike", "escape", "case", "when", "then"),
        *("else", "end", "null", "true", "false", "cast", "as", "distinct", "from", "unknown"),
    }
)


@functools.lru_cache(maxsize=1024)
def parse(text: str, roots: tuple[str, ...]) -> Node:
    """Return the tree of an expression.

    :param roots: what a path may begin with.
    :raises ExpressionError: if it can't be read; with the place.
    """
    parser = _Parser(text)
    node = parser.expression()
    parser.expect_end()
    _require_shallow(node, text)
    _require_roots(node, roots, text)
    return node


def parse_type(text: str) -> TypeName:
    """Return the type that `text` names, as in a cast.

    :raises ExpressionError: if there is no such type.
    """
    parser = _Parser(text)
    found = parser.type_name()
    parser.expect_end()
    return found


class _Parser:
    """Reads tokens from left to right; a method for each level of precedence."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = tokens_of(text)
        self._next = 0
        self._depth = 0

    # ---- tokens

    @property
    def _token(self) -> Token:
        return self._tokens[self._next]

    def _take(self) -> Token:
        token = self._token
        self._next += token.kind is not Kind.END
        return token

    def _taken_word(self, *words: str) -> Token | None:
        return self._take() if self._token.is_word(*words) else None

    def _taken_symbol(self, *symbols: str) -> Token | None:
        return self._take() if self._token.is_symbol(*symbols) else None

    def _expect_word(self, word: str) -> None:
        if not self._taken_word(word):
            raise self._unexpected(f"{word!r}")

    def _expect_symbol(self, symbol: str) -> None:
        if not self._taken_symbol(symbol):
            raise self._unexpected(f"{symbol!r}")

    def expect_end(self) -> None:
        """:raises ExpressionError: if something is left."""
        if self._token.kind is not Kind.END:
            raise self._unexpected("an operator or the end")

    def _unexpected(self, wanted: str) -> ExpressionError:
        return self._error(f"expected {wanted}, found {self._token.shown}", self._token.at)

    def _error(self, message: str, at: int) -> ExpressionError:
        return ExpressionError(message, self._text, at)

    # ---- levels

    def expression(self) -> Node:
        """Read a whole expression."""
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise self._error(f"it nests more than {DEPTH_MAX} levels deep", self._token.at)
        node = self._conjunction()
        while token := self._taken_word("or"):
            node = Binary("or", node, self._conjunction(), token.at)
        self._depth -= 1
        return node

    def _conjunction(self) -> Node:
        node = self._negation()
        while token := self._taken_word("and"):
            node = Binary("and", node, self._negation(), token.at)
        return node

    def _negation(self) -> Node:
        tokens = []
        while token := self._taken_word("not"):
            tokens.append(token)
        node = self._test()
        for token in reversed(tokens):
            node = Unary("not", node, token.at)
        return node

    def _test(self) -> Node:
        node = self._comparison()
        while token := self._taken_word("is"):
            negated = self._taken_word("not") is not None
            if self._taken_word("distinct"):
                self._expect_word("from")
                same: Node = Binary("is not distinct from", node, self._comparison(), token.at)
                node = same if negated else Unary("not", same, token.at)
                continue
            word = self._taken_word("null", "unknown", "true", "false")
            if word is None:
                raise self._unexpected("'null', 'true', 'false' or 'distinct from'")
            what = word.text.lower()
            node = Unary("is " + ("null" if what == "unknown" else what), node, token.at)
            node = Unary("not", node, token.at) if negated else node
        return node

    def _comparison(self) -> Node:
        node = self._membership()
        token = self._taken_symbol("=", "<>", "!=", "<", "<=", ">", ">=")
        if token is None:
            return node
        operator = "<>" if token.text == "!=" else token.text
        node = Binary(operator, node, self._membership(), token.at)
        if self._token.is_symbol("=", "<>", "!=", "<", "<=", ">", ">="):
            raise self._error("comparisons can't be chained: join them with 'and'", self._token.at)
        return node

    def _membership(self) -> Node:
        node = self._other()
        negation = self._taken_word("not")
        token = self._token
        found: Node
        if self._taken_word("in"):
            found = Listed(node, self._items(), token.at)
        elif self._taken_word("between"):
            low = self._other()
            self._expect_word("and")
            bounds = Binary(">=", node, low, token.at), Binary("<=", node, self._other(), token.at)
            found = Binary("and", *bounds, token.at)
        elif self._taken_word("like", "ilike"):
            found = self._like(node, token)
        elif not negation and (symbol := self._taken_symbol("~", "~*", "!~", "!~*")):
            pattern = self._text_literal("a regular expression, as a text")
            found = Matches(node, pattern, symbol.text.endswith("*"), symbol.at)
            return Unary("not", found, symbol.at) if symbol.text.startswith("!") else found
        elif negation:
            raise self._unexpected("'in', 'between' or 'like'")
        else:
            return node
        return Unary("not", found, negation.at) if negation else found

    def _like(self, node: Node, token: Token) -> Node:
        pattern, escape = self._text_literal("a pattern, as a text"), "\\"
        if self._taken_word("escape"):
            at = self._token.at
            escape = self._text_literal("a character, as a text")
            if len(escape) > 1:
                raise self._error("an escape is one character, or none", at)
        return Like(node, pattern, escape, token.text.lower() == "ilike", token.at)

    def _text_literal(self, wanted: str) -> str:
        if self._token.kind is not Kind.TEXT:
            raise self._unexpected(wanted)
        return self._take().text

    def _items(self) -> tuple[Node, ...]:
        self._expect_symbol("(")
        items = [self.expression()]
        while self._taken_symbol(","):
            items.append(self.expression())
            if len(items) > ITEMS_MAX:
                raise self._error(f"more than {ITEMS_MAX} values", self._token.at)
        self._expect_symbol(")")
        return tuple(items)

    def _other(self) -> Node:
        return self._from_left(self._sum, "||", "->", "->>")

    def _sum(self) -> Node:
        return self._from_left(self._product, "+", "-")

    def _product(self) -> Node:
        return self._from_left(self._sign, "*", "/", "%")

    def _from_left(self, tighter: Callable[[], Node], *symbols: str) -> Node:
        node = tighter()
        while token := self._taken_symbol(*symbols):
            node = Binary(token.text, node, tighter(), token.at)
        return node

    def _sign(self) -> Node:
        signs = []
        while token := self._taken_symbol("-", "+"):
            signs.append(token)
        node = self._cast_after()
        for token in reversed(signs):
            if token.text == "-":
                negative = isinstance(node, Literal) and isinstance(node.value, int | float | Decimal)
                if negative and not isinstance(node.value, bool):  # type: ignore[union-attr]
                    node = Literal(-node.value, token.at)  # type: ignore[union-attr,operator]
                else:
                    node = Unary("-", node, token.at)
        return node

    def _cast_after(self) -> Node:
        node = self._primary()
        while token := self._taken_symbol("::"):
            node = Cast(node, self.type_name(), token.at)
        return node

    # ---- what stands alone

    def _primary(self) -> Node:
        token = self._token
        if token.kind is Kind.NUMBER:
            return Literal(_number(self._take().text), token.at)
        if token.kind is Kind.TEXT:
            return Literal(self._take().text, token.at)
        if self._taken_symbol("("):
            node = self.expression()
            self._expect_symbol(")")
            return node
        if token.is_word("null", "true", "false"):
            value = {"null": None, "true": True, "false": False}[self._take().text.lower()]
            return Literal(value, token.at)
        if self._taken_word("case"):
            return self._case(token)
        if token.kind is Kind.NAME and self._tokens[self._next + 1].is_symbol("("):
            return self._call()
        if token.kind is Kind.QUOTED_NAME or (
            token.kind is Kind.NAME and token.text.lower() not in _RESERVED
        ):
            return self._path()
        raise self._unexpected("a value")

    def _path(self) -> Node:
        first = self._take()
        typed = {"date": "date", "timestamp": "timestamp", "timestamptz": "timestamptz"}
        if first.is_word(*typed) and self._token.kind is Kind.TEXT:
            literal = Literal(self._token.text, self._take().at)
            return Cast(literal, TypeName(typed[first.text.lower()]), first.at)
        parts = [first.text]
        while self._taken_symbol("."):
            if self._token.kind not in (Kind.NAME, Kind.QUOTED_NAME):
                raise self._unexpected("a name")
            parts.append(self._take().text)
        return Path(tuple(parts), first.at)

    def _case(self, token: Token) -> Node:
        subject = None if self._token.is_word("when") else self.expression()
        branches: list[tuple[Node, Node]] = []
        while self._token.is_word("when") and len(branches) < ITEMS_MAX:
            at = self._take().at
            condition = self.expression()
            if subject is not None:
                condition = Binary("=", subject, condition, at)
            self._expect_word("then")
            branches.append((condition, self.expression()))
        if not branches:
            raise self._unexpected("'when'")
        otherwise = self.expression() if self._taken_word("else") else Literal(None, token.at)
        self._expect_word("end")
        return Case(tuple(branches), otherwise, token.at)

    def _call(self) -> Node:
        token = self._take()
        name = _ALSO.get(token.text.lower(), token.text.lower())
        if name == "cast":
            self._expect_symbol("(")
            node = self.expression()
            self._expect_word("as")
            found = Cast(node, self.type_name(), token.at)
            self._expect_symbol(")")
            return found
        if name not in FUNCTIONS:
            raise self._error(f"there is no function {token.text!r}{_near(name, FUNCTIONS)}", token.at)
        arguments = self._arguments(name)
        least, most = FUNCTIONS[name]
        if len(arguments) < least or (most >= 0 and len(arguments) > most):
            wanted = f"{least}" if least == most else f"{least} or more" if most < 0 else f"{least} to {most}"
            raise self._error(f"{name} takes {wanted} arguments, not {len(arguments)}", token.at)
        if name == "was_sent" and not isinstance(arguments[0], Path):
            raise self._error("was_sent takes a column, such as after.note", token.at)
        return Call(name, arguments, token.at)

    def _arguments(self, name: str) -> tuple[Node, ...]:
        self._expect_symbol("(")
        if self._taken_symbol(")"):
            return ()
        items = [self.expression()]
        while self._taken_symbol(",") or (
            # SQL's own spelling: substring(text from 2 for 3)
            name == "substring" and self._taken_word("from", "for")
        ):
            items.append(self.expression())
        self._expect_symbol(")")
        return tuple(items)

    def type_name(self) -> TypeName:
        """Read the name of a type."""
        token = self._token
        if token.kind is not Kind.NAME:
            raise self._unexpected("a type")
        self._take()
        name = token.text.lower()
        if name not in TYPES:
            raise self._error(f"there is no type {token.text!r}{_near(name, TYPES)}", token.at)
        known, numbers_max = TYPES[name]
        if name == "double":
            self._taken_word("precision")
        numbers: list[int] = []
        if numbers_max and self._taken_symbol("("):
            while True:
                if self._token.kind is not Kind.NUMBER or not self._token.text.isdigit():
                    raise self._unexpected("a whole number")
                numbers.append(int(self._take().text))
                if len(numbers) == numbers_max or not self._taken_symbol(","):
                    break
            self._expect_symbol(")")
            precision, scale = numbers[0], numbers[1] if len(numbers) > 1 else 0
            if not 1 <= precision <= 38 or scale > precision:
                raise self._error("numeric has 1 to 38 digits, and no more of them after the point", token.at)
        return TypeName(known, tuple(numbers))


def _number(written: str) -> int | float | Decimal:
    if "e" in written.lower():
        return float(written)
    return Decimal(written) if "." in written else int(written)


def _require_shallow(node: Node, text: str) -> None:
    # A chain of one operator is as deep as it is long. By a stack, since this is what bounds recursion.
    below = [(node, 1)]
    while below:
        found, depth = below.pop()
        if depth > TREE_DEPTH_MAX:
            raise ExpressionError(f"it goes more than {TREE_DEPTH_MAX} levels deep", text, found.at)
        below += [(part, depth + 1) for part in parts_of(found)]


def _require_roots(node: Node, roots: tuple[str, ...], text: str) -> None:
    if isinstance(node, Path) and node.parts[0] not in roots:
        name, known = node.parts[0], ", ".join(roots)
        near = difflib.get_close_matches(name.lower(), roots, n=1, cutoff=0.7)
        hint = f"did you mean {near[0]!r}?" if near else f"a column is after.{name}, a text is 'in quotes'"
        raise ExpressionError(f"there is no {name!r}, but {known}; {hint}", text, node.at)
    for part in parts_of(node):
        _require_roots(part, roots, text)


def _near(name: str, known: dict[str, tuple[int, int]] | dict[str, tuple[str, int]]) -> str:
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {found[0]!r}?" if found else ""
