"""DuckDB in memory, locked down: no files, network, extensions or settings, one thread, and a deadline.

DuckDB is imported only when an expression is parsed or computed: most processes have none, and it takes a
tenth of the time of a process' imports.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING

import pyarrow as pa

if TYPE_CHECKING:
    import duckdb

#: Limits of one call: memory, in DuckDB's notation, and time in seconds.
MEMORY_MAX = "512MB"
DEADLINE_S = 60.0

_threads = threading.local()
_open: weakref.WeakValueDictionary[int, duckdb.DuckDBPyConnection] = weakref.WeakValueDictionary()
#: For each fork, the databases that the forked process must never close: closing needs threads that it does
#: not have. After a fork on another thread, as when Java is started, the child would otherwise close them
#: with that thread's variables, and crash.
_inherited: list[list[duckdb.DuckDBPyConnection | None]] = []

os.register_at_fork(
    # Listed in a single step, because another thread may open a database meanwhile.
    before=lambda: _inherited.append([held() for held in _open.valuerefs()]),
    after_in_parent=_inherited.pop,
)


def database() -> duckdb.DuckDBPyConnection:
    """Return a database that only this thread uses."""
    if getattr(_threads, "process", None) != os.getpid():
        _threads.database = _opened()
        _threads.process = os.getpid()
        _open[id(_threads.database)] = _threads.database
    found: duckdb.DuckDBPyConnection = _threads.database
    return found


def _opened() -> duckdb.DuckDBPyConnection:
    import duckdb

    database = duckdb.connect(
        ":memory:",
        config={
            "allow_community_extensions": "false",
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
            "enable_external_access": "false",
            "ieee_floating_point_ops": "false",
            "integer_division": "true",
            "memory_limit": MEMORY_MAX,
            "python_enable_replacements": "false",
            "temp_directory": "",
            "threads": "1",
        },
    )
    database.execute("SET TimeZone = 'UTC'")
    # The optimizer computes constant parts first, even those that are not needed for any row.
    database.execute("PRAGMA disable_optimizer")
    database.execute("SET lock_configuration = true")
    return database


def run(sql: str, table: pa.Table) -> pa.Array:
    """Return the value of an SQL expression for each row of a table.

    :raises duckdb.Error: if it does not fit the columns, a value is not valid, or it takes too long.
    """
    connection = database()
    guard = threading.Timer(DEADLINE_S, connection.interrupt)
    guard.daemon = True
    guard.start()
    try:
        found = connection.from_arrow(table).project(f"{sql} AS v").to_arrow_table().column(0)
    finally:
        guard.cancel()
        guard.join()
    return pa.concat_arrays(found.chunks) if found.num_chunks else pa.array([], found.type)


def reason(error: duckdb.Error) -> str:
    """Return the reason of an error. DuckDB's own message may quote a row's value, except when binding."""
    import duckdb

    text = str(error)
    if isinstance(error, duckdb.BinderException | duckdb.CatalogException):
        first = text.split("\n", 1)[0].partition(": ")[2]
        return first.replace("_LITERAL", "").replace("VARCHAR", "TEXT").replace("STRING", "TEXT")
    if isinstance(error, duckdb.InterruptException):
        return f"computing it takes longer than {DEADLINE_S:g} s"
    if isinstance(error, duckdb.OutOfMemoryException):
        return f"computing it takes more than {MEMORY_MAX} of memory"
    if "Division by zero" in text:
        return "division by zero"
    if "Malformed JSON" in text:
        return "a text is not JSON"
    return "a value is out of range, or can't be converted"
