"""Tables that Vitess makes for itself beside those of its users: of online DDL and of its garbage collection.

A tablet leaves them out while it streams, and does not while it copies.

Source: the naming in Vitess' manual, "Table lifecycle" and "Online DDL".
"""

from __future__ import annotations

import re

_HEX = "[0-9a-fA-F]"
_UUID = f"{_HEX}{{8}}_{_HEX}{{4}}_{_HEX}{{4}}_{_HEX}{{4}}_{_HEX}{{12}}"
_INTERNAL = re.compile(
    rf"_vt_[a-zA-Z0-9]{{3}}_{_HEX}{{32}}_[0-9]{{14}}_"
    rf"|_vt_(HOLD|PURGE|EVAC|DROP)_{_HEX}{{32}}_[0-9]{{14}}"
    rf"|_{_UUID}_[0-9]{{14}}_(gho|ghc|del|new|vrepl)"
    r"|_.*_old",  # of pt-online-schema-change
    re.DOTALL,
)


def is_internal(table: str) -> bool:
    """Return whether a table of this name, without its keyspace, is Vitess' own."""
    return _INTERNAL.fullmatch(table) is not None
