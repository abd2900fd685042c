"""Extraction of keys and orders for the merge, with expressions over messages.

The language is that of transformations. A path starts with `value` or `key`; `value.a.b` is a field of a
field. `message.offset` and `message.timestamp_ms` are the message's offset and time in Kafka. Fields of
`value` and `key` are text, whatever their type in JSON: so the type does not depend on the messages of a
batch, and an expression with a wrong type is refused before anything is read.
"""

from __future__ import annotations

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.errors import Kind, TailraceError
from tailrace.expressions.computing import Expression, NoColumnError
from tailrace.expressions.database import reason, run
from tailrace.expressions.language import ExpressionError, Path, quoted
from tailrace.expressions.sql import inputs_of
from tailrace.join.extraction import MESSAGES, Transactions, keyed_data, keyed_transactions
from tailrace.join.merge import DataRows

#: The first names of paths in expressions.
ROOTS = ("value", "key", "message")
#: The names below `message`.
_NUMBERS = ("offset", "timestamp_ms")

#: The `payload` of a document that has a schema; otherwise the document.
_UNWRAPPED = (
    "CASE WHEN json_valid(c0) THEN CASE WHEN json_exists(c0, '/schema') "
    "THEN CAST(coalesce(c0 -> '/payload', c0) AS VARCHAR) ELSE c0 END ELSE c0 END"
)


class _MessageRows:
    """Messages as the rows of an expression (`expressions.computing.Rows`)."""

    def __init__(self, messages: pa.RecordBatch) -> None:
        self.messages = messages
        self._known: dict[Path, pa.Array] = {}

    def __len__(self) -> int:
        return len(self.messages)

    def column(self, parts: Path) -> pa.Array:
        """Return the column of a path.

        :raises NoColumnError: if there is none.
        :raises duckdb.Error: if a message is not JSON, and the path has fields.
        """
        if parts not in self._known:
            self._known[parts] = self._column(parts)
        return self._known[parts]

    def texts(self, parts: Path) -> pa.StringArray:
        """Return the column as text."""
        return self.column(parts).cast(pa.string())

    def was_sent(self, parts: Path) -> pa.Array:
        """:raises NoColumnError: always."""
        raise NoColumnError("was_sent is of a change in a log; ask whether a field of a message is null")

    def _column(self, parts: Path) -> pa.Array:
        root, *members = parts
        if root == "message":
            if len(members) != 1 or members[0] not in _NUMBERS:
                raise NoColumnError(f"message has {' and '.join(_NUMBERS)}, and nothing else")
            return self.messages.column(members[0])
        if members:
            pointer = "".join("/" + name.replace("~", "~0").replace("/", "~1") for name in members)
            return run(f"c0 ->> {quoted(pointer)}", pa.table({"c0": self.column((root,))}))
        text = self.messages.column(root).cast(pa.string())
        return run(_UNWRAPPED, pa.table({"c0": text})) if root == "value" else text


def require_key(text: str) -> None:
    """Check that an expression returns texts or whole numbers.

    :raises ExpressionError: with the place.
    """
    _require_type(text, "a key is a text or a whole number")


def require_number(text: str) -> None:
    """Check that an expression returns whole numbers, or texts that may be such; as `require_key`."""
    _require_type(text, "this must be a whole number")


def _require_type(text: str, wanted: str) -> None:
    none, expression = _MessageRows(pa.RecordBatch.from_pylist([], MESSAGES)), Expression(text, ROOTS)
    for kind, path, at in inputs_of(text, ROOTS):
        try:
            getattr(none, kind)(path)
        except NoColumnError as error:
            raise ExpressionError(str(error), text, at) from None
    found = expression.values(none).type
    if not (pa.types.is_string(found) or pa.types.is_integer(found)):
        raise ExpressionError(f"{wanted}, and it gives {found}: cast it", text, 0)


class ComputedFields:
    """Extraction from messages of any kind, by expressions.

    :param data: the expressions `key` and `order` of data messages.
    :param ones: `key`, `order`, `count` and `time_ms` of the transaction topic's messages, one for each key.
        An empty text: not given.
    """

    def __init__(self, data: dict[str, str], ones: dict[str, str]) -> None:
        self._data, self._ones = (
            {name: Expression(text, ROOTS) if text else None for name, text in side.items()}
            for side in (data, ones)
        )

    def data(self, messages: pa.RecordBatch) -> DataRows:
        """Return keys and orders; a message whose key is null has no transaction."""
        keys, keyed = _keyed(messages, "data", self._data)
        orders = pa.nulls(len(messages), pa.int64())
        found = _computed("data.order", self._data["order"], keyed)
        return keyed_data(messages, keys, pc.replace_with_mask(orders, keys.is_valid(), found))

    def transactions(self, messages: pa.RecordBatch) -> Transactions:
        """Return a transaction for each message whose key is not null."""
        keys, keyed = _keyed(messages, "transactions", self._ones)
        orders, counts, times_ms = (
            _computed(f"transactions.{name}", self._ones[name], keyed)
            for name in ("order", "count", "time_ms")
        )
        rises = self._ones["order"] is not None
        return keyed_transactions(keyed.messages, keys.drop_null(), orders, counts, times_ms, rises=rises)


def _keyed(
    messages: pa.RecordBatch, side: str, expressions: dict[str, Expression | None]
) -> tuple[pa.Array, _MessageRows]:
    # Returns each message's key, and the messages that have one: the others may have any form.
    keys = _computed(f"{side}.key", expressions["key"], _MessageRows(messages))
    return keys, _MessageRows(messages.filter(keys.is_valid()))


def _computed(name: str, expression: Expression | None, rows: _MessageRows) -> pa.Array:
    kind = pa.string() if name.endswith("key") else pa.int64()
    if expression is None:
        return pa.nulls(len(rows), kind)
    try:
        return expression.values(rows).cast(kind)
    except ExpressionError as error:
        said = str(error)
    except duckdb.Error as error:
        said = reason(error)
    except pa.ArrowInvalid:
        # Arrow's message quotes what it read.
        said = "a value is no whole number" if kind == pa.int64() else "a message is not text"
    offsets = rows.column(("message", "offset"))
    raise TailraceError(
        Kind.JOIN_VIOLATED,
        f"compute expressions.{name} of messages: {said}",
        "see what the topic holds: have the key's expression give null for JSON that is something else; "
        "messages that are no JSON need an extraction of your own",
        {"offset_first": offsets[0].as_py(), "messages": len(rows)},
    )
