"""PostgreSQL's conversion of a column's values when its type changes, as far as it is known.

`ALTER TABLE … ALTER c TYPE` rewrites rows by an assignment cast and sends none of them. If the target
has the same type for both, such as text, it can follow only if the cast is known; otherwise the sink
stops. Domains are resolved, arrays are treated as their items.

Pure. Source: PostgreSQL manual, "Type Conversion", "Character Types"; bpchar(), varchar(), numeric() in
PostgreSQL 18's source.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from tailrace.decode.postgres_types import FIRST_NOT_BUILT_IN, OIDS, item_of
from tailrace.decode.types import numeric_shape
from tailrace.model import ValueType

_BPCHAR, _VARCHAR, _TEXT, _NAME = OIDS["bpchar"], OIDS["varchar"], OIDS["text"], OIDS["name"]
_NUMERIC = OIDS["numeric"]
_TEXTS = frozenset({_NAME, _TEXT, _VARCHAR})
#: Types whose cast to text gives the same text as their output function.
_WRITTEN_ALIKE = frozenset(OIDS[name] for name in ("json", "jsonb", "uuid")) | {
    OIDS[f"{of}{kind}"] for of in ("int4", "int8", "num") for kind in ("range", "multirange")
}
#: Types of a composite's attributes whose text no setting of the session that alters the table changes.
_PLAIN = frozenset(
    OIDS[name] for name in ("bool", "int2", "int4", "int8", "numeric", "text", "varchar", "bpchar", "uuid")
)
_CITEXT = "citext"
#: Types whose values are rounded to the digits of their modifier; without one they have most digits.
_WITH_DIGITS = frozenset(OIDS[name] for name in ("time", "timetz", "timestamp", "timestamptz"))
#: Digits after the point of the types in `_WITH_DIGITS` without a modifier.
_DIGITS_MAX = 6
_VARBIT = OIDS["varbit"]


@dataclass(frozen=True, slots=True)
class Coercion:
    """A conversion of texts. `trimmed`: blanks at the end are removed.

    :param padded: number of characters up to which blanks are then appended.
    :param cut: largest number of characters; PostgreSQL allows only blanks to be cut off.
    """

    trimmed: bool = False
    padded: int | None = None
    cut: int | None = None


SAME = Coercion()


def coercion(old: ValueType, new: ValueType, kind: pa.DataType) -> Coercion | None:
    """Return the conversion of values whose type in the target is `kind` before and after; None: unknown."""
    if old == new:
        return SAME
    items = item_of(old), item_of(new)
    if items[0] is not None and items[1] is not None:
        (item, delimiter), (other, other_delimiter) = items[0], items[1]
        found = coercion(item, other, kind)
        return SAME if delimiter == other_delimiter and found == SAME else None
    if items != (None, None):
        return None
    if old.oid != new.oid:
        return _to_another(old, new)
    return _of_own_type(old, new) if old.oid >= FIRST_NOT_BUILT_IN else _to_modifier(old, new, kind)


def _of_own_type(old: ValueType, new: ValueType) -> Coercion | None:
    if old.kind and new.kind:
        if old.kind == "e":
            return SAME if set(old.parts) <= set(new.parts) else None  # PostgreSQL can only add labels
        if old.parts != new.parts:
            return None
    return SAME if new.modifier in (-1, old.modifier) else None


def _to_modifier(old: ValueType, new: ValueType, kind: pa.DataType) -> Coercion | None:
    before, after = old.modifier, new.modifier
    if after == before:
        return SAME
    if old.oid == _BPCHAR:
        return SAME if after == -1 else Coercion(trimmed=True, padded=after - 4)
    if old.oid == _VARCHAR:
        return SAME if after == -1 or -1 < before <= after else Coercion(cut=after - 4)
    if old.oid == _NUMERIC:
        return SAME if _keeps_digits(before, after, kind) else None
    if old.oid in _WITH_DIGITS:
        return SAME if after == -1 or (_DIGITS_MAX if before == -1 else before) <= after else None
    if old.oid == _VARBIT:
        return SAME if after == -1 or -1 < before <= after else None
    return SAME if after == -1 else None


def _keeps_digits(before: int, after: int, kind: pa.DataType) -> bool:
    if after == -1:
        return True
    shape, other = numeric_shape(before), numeric_shape(after)
    if shape is None or other is None:
        return False
    # A text has all digits after the point, including trailing zeros.
    return shape[1] == other[1] or (not pa.types.is_string(kind) and shape[1] < other[1])


def _to_another(old: ValueType, new: ValueType) -> Coercion | None:
    is_text = old.oid in _TEXTS
    if new.oid in (_TEXT, _VARCHAR):
        cut = new.modifier - 4 if new.oid == _VARCHAR and new.modifier >= 4 else None
        if old.oid == _BPCHAR:
            return Coercion(trimmed=True, cut=cut)
        alike = is_text or old.oid in _WRITTEN_ALIKE or old.kind == "e" or old.name == _CITEXT
        if old.kind == "c":
            alike = bool(old.parts) and all(int(of.split()[0]) in _PLAIN for _, of in old.parts)
        return Coercion(cut=cut) if alike and (old.kind or old.oid < FIRST_NOT_BUILT_IN) else None
    if new.kind == "e":
        return SAME if is_text or old.kind == "e" else None
    return SAME if new.name == _CITEXT and is_text else None


def type_as_json(value: ValueType) -> str:
    """Return a type as JSON, for a column's metadata in a target; see `type_from_json`."""
    return json.dumps(_as_json(value), separators=(",", ":"))


def type_from_json(text: str) -> ValueType | None:
    """Return the type in `text`, from `type_as_json`; None if there is none that can be read."""
    try:
        return _from_json(json.loads(text)) if text else None
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def _as_json(value: ValueType) -> dict[str, Any]:
    noted: dict[str, Any] = {"oid": value.oid, "modifier": value.modifier}
    if value.name:
        noted["name"] = value.name
    if value.kind:
        noted |= {"kind": value.kind, "parts": [list(part) for part in value.parts]}
    if value.item is not None:
        noted |= {"item": _as_json(value.item), "delimiter": value.delimiter}
    return noted


def _from_json(noted: dict[str, Any]) -> ValueType:
    item = noted.get("item")
    return ValueType(
        int(noted["oid"]),
        int(noted["modifier"]),
        str(noted.get("name", "")),
        None if item is None else _from_json(item),
        str(noted.get("delimiter", ",")),
        str(noted.get("kind", "")),
        tuple((str(key), str(text)) for key, text in noted.get("parts", ())),
    )
