"""The layout of the kernel's arrays of numbers, and the codes with which the kernel stops."""

from __future__ import annotations

# Fields of the state, carried from call to call.
(
    AT, TO, STOPPED, OPEN, BEGIN_AT, POSITION, TIME_US, SNAPSHOT_TIME_US, ORDINAL, ROWS, FACTS, CHANGE_AT,
    TABLE, COLUMN, PATCHED, GTID_AT, GTID_END, TRANSACTIONS, NEEDED,
) = range(19)  # fmt: skip
STATE_FIELDS = 19

# Values of OPEN: nothing is open; a transaction without frames yet; one with frames; a snapshot.
CLOSED, BEGUN, TRANSACTION, SNAPSHOT = range(4)

# Values of STOPPED: why the kernel stopped. From `FAILED` on it is an error.
DONE, DESCRIBES, NEEDS_ROOM, NEEDS_JSON, NEEDS_FACTS = range(5)
FAILED = 10
(
    BROKEN, UNKNOWN_EVENT, STATEMENTS, NO_TRANSACTION, NO_TABLE, OTHER_COLUMNS, NO_IMAGE, LACKS_VALUES,
    LACKS_KEY, ODD_POSITION, BEGUN_AGAIN,
) = range(FAILED, FAILED + 11)  # fmt: skip

# Fields of a table: its relation in the log, 0: left out; the index of its first column among all columns.
RELATION, SOURCES, FIRST_SOURCE, TARGETS, FIRST_TARGET, IS_FULL, ROOM, NAME_AT, NAME_END = range(9)
TABLE_FIELDS = 9

# Fields of a column as the shard sends it. MAY_LACK: an inserted row may lack the value, which is then NULL.
CODE, PARAMETER, IS_JSON, MAY_LACK, BEGIN, SIZE, OLD_BEGIN, OLD_SIZE = range(8)
SOURCE_FIELDS = 8

# Values of IS_JSON: the column has no documents; it has documents; in this row, the change of a document.
NO_DOCUMENT, A_DOCUMENT, A_CHANGE = range(3)

# Fields of a column as the log has it: the index of the shard's column, -1: the shard lacks it, `CONSTANT`:
# an added column; whether it is in the key; the text's offset and size in rows of a shard without the column.
SOURCE_OF, IN_KEY, MISSING_AT, MISSING_SIZE = range(4)
TARGET_FIELDS = 4
CONSTANT = -2

# Fields of a fact: the event's type, its time, its body, and its offset in the frames.
FACT_TYPE, FACT_TIME_S, FACT_BODY_AT, FACT_BODY_END, FACT_OUT_AT = range(5)
FACT_FIELDS = 5

#: The size of a value that is NULL, and of one that was not sent.
NULL_SIZE, NOT_SENT = -1, -2

# Conversions of a value: see `values.write_value`.
(
    PLAIN, NUMBER, FLOAT4, FLOAT8, UTC, HEX, PADDED_HEX, BITS, SINGLE_BYTES, DOUBLE_BYTES, UTF16, UTF16LE,
    UTF32,
) = range(13)  # fmt: skip
