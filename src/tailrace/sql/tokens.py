"""The words of an expression, each with its place in the text.

Keywords and function names are taken in any case; names of columns are compared as they are
written. A name in double quotes may hold anything, a quote inside is doubled, as in SQL.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

#: An expression is written by a person.
TEXT_LENGTH_MAX = 10_000


class Kind(enum.Enum):
    """What a token is."""

    NAME = "a name"
    QUOTED_NAME = "a quoted name"
    NUMBER = "a number"
    TEXT = "a text"
    SYMBOL = "a symbol"
    END = "the end"


@dataclass(frozen=True, slots=True)
class Token:
    """A word; `text` is what it stands for, quotes undone. `at` counts characters from 0."""

    kind: Kind
    text: str
    at: int

    def is_word(self, *words: str) -> bool:
        """Tell whether it is one of these keywords, which are lower case."""
        return self.kind is Kind.NAME and self.text.lower() in words

    def is_symbol(self, *symbols: str) -> bool:
        return self.kind is Kind.SYMBOL and self.text in symbols

    @property
    def shown(self) -> str:
        """The token for a message; never the content of a text, which may be anything."""
        return self.kind.value if self.kind in (Kind.TEXT, Kind.END) else repr(self.text)


class ExpressionError(ValueError):
    """An expression that can't be read, or does not fit the columns that it is applied to.

    :param at: the place in the text, in characters from 0.
    """

    def __init__(self, message: str, text: str, at: int) -> None:
        super().__init__(message, text, at)
        self.message = message
        self.at = at
        before = text[:at]
        self.line = before.count("\n") + 1
        self.column = at - (before.rfind("\n") + 1) + 1

    def __str__(self) -> str:
        where = f"line {self.line}, column {self.column}" if self.line > 1 else f"character {self.column}"
        return f"at {where} of the expression: {self.message}"


_WORDS = re.compile(
    r"""
      (?P<space>\s+|--[^\n]*)
    | (?P<number>(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?(?![\w.]))
    | (?P<name>[^\W\d]\w*)
    | (?P<quoted>"(?:[^"]|"")+")
    | (?P<text>'(?:[^']|'')*')
    | (?P<symbol>->>|->|!~\*|~\*|!~|\|\||::|<=|>=|<>|!=|[-+*/%=<>(),.~])
    """,
    re.VERBOSE,
)

_KINDS = {
    "number": Kind.NUMBER,
    "name": Kind.NAME,
    "quoted": Kind.QUOTED_NAME,
    "text": Kind.TEXT,
    "symbol": Kind.SYMBOL,
}


def tokens_of(text: str) -> list[Token]:
    """Return the tokens of an expression, `Kind.END` last.

    :raises ExpressionError: if something in it is no word of the language.
    """
    if len(text) > TEXT_LENGTH_MAX:
        raise ExpressionError(f"it is longer than {TEXT_LENGTH_MAX} characters", text, TEXT_LENGTH_MAX)
    found: list[Token] = []
    at = 0
    while at < len(text):
        match = _WORDS.match(text, at)
        if match is None:
            raise ExpressionError(_complaint(text, at), text, at)
        group = match.lastgroup or ""
        if group in _KINDS:
            found.append(Token(_KINDS[group], _meaning(group, match[0]), at))
        at = match.end()
    found.append(Token(Kind.END, "", len(text)))
    return found


def _meaning(group: str, written: str) -> str:
    if group == "quoted":
        return written[1:-1].replace('""', '"')
    return written[1:-1].replace("''", "'") if group == "text" else written


def _complaint(text: str, at: int) -> str:
    if text[at] == "'":
        return "a text begins here and does not end: a quote inside it is doubled"
    if text[at] == '"':
        return "a quoted name begins here and does not end, or is empty"
    if text[at].isdigit():
        return "a number runs into what follows"
    return f"{text[at]!r} is no part of the language"
