"""Translates schemas of Kafka Connect to Avro, as Confluent's Avro converter does.

Source: Confluent Schema Registry, AvroData (`fromConnectSchema`, the properties `connect.*`); Debezium,
SchemaNameAdjuster (names that Avro does not allow); Avro 1.12 specification, "Logical Types".
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tailrace.converters.connect_schemas import Document
from tailrace.errors import Kind, TailraceError

#: Precision of a decimal whose precision is unknown.
_PRECISION = 64
_NAMESPACE, _NAMELESS = "io.confluent.connect.avro", "ConnectDefault"

_TYPES = {
    "int8": "int", "int16": "int", "int32": "int", "int64": "long", "float": "float", "double": "double",
    "boolean": "boolean", "string": "string", "bytes": "bytes",
}  # fmt: skip

_DECIMAL = "org.apache.kafka.connect.data.Decimal"
_CONNECT = {
    "org.apache.kafka.connect.data.Date": "date",
    "org.apache.kafka.connect.data.Time": "time-millis",
    "org.apache.kafka.connect.data.Timestamp": "timestamp-millis",
}
UUID_NAME = "io.debezium.data.Uuid"
#: Avro's logical types of Debezium's types. A timestamp without a time zone is local.
_DEBEZIUM = {
    "io.debezium.time.Date": "date",
    "io.debezium.time.Time": "time-millis",
    "io.debezium.time.MicroTime": "time-micros",
    "io.debezium.time.Timestamp": "local-timestamp-millis",
    "io.debezium.time.MicroTimestamp": "local-timestamp-micros",
    "io.debezium.time.NanoTimestamp": "local-timestamp-nanos",
    UUID_NAME: "uuid",
}

#: A function that returns a valid name in Avro for a name without dots.
Adjustment = Callable[[str], str]

#: Prefixes of the names of Debezium's own structs, and a suffix: their members are not columns of a table.
_OWN, _OWN_END = ("io.debezium.", "event."), ".Envelope"


def avro_schema(schema: Document, adjust: Adjustment, *, logical_types: bool) -> Any:
    """Return the Avro schema of a value that is not null itself.

    :param adjust: adjusts names.
    :param logical_types: whether Debezium's types get Avro's logical types, too.
    :raises TailraceError: `CONVERSION_FAILED` if two members would have the same name, or a name is invalid.
    """
    return _Translation(adjust, logical_types).of({**schema, "optional": False})


class _Translation:
    """A translation of one schema; a record is defined where it first occurs, and then named."""

    def __init__(self, adjust: Adjustment, logical_types: bool) -> None:
        self._adjust = adjust
        self._logical = _CONNECT | _DEBEZIUM if logical_types else _CONNECT
        self._known: dict[str, Document] = {}

    def of(self, schema: Document) -> Any:
        found = self._plain(schema)
        if not schema["optional"]:
            return found
        return ["null", found] if schema.get("default") is None else [found, "null"]

    def _plain(self, schema: Document) -> Any:
        kind = schema["type"]
        if kind == "struct":
            return self._record(schema)
        if kind == "array":
            return {"type": "array", "items": self.of(schema["items"]), **_properties(schema)}
        if kind == "map":
            return {"type": "map", "values": self.of(schema["values"]), **_properties(schema)}
        extra = {**self._logic(schema), **_properties(schema)}
        if kind in ("int8", "int16"):
            extra["connect.type"] = kind
        return {"type": _TYPES[kind], **extra} if extra else _TYPES[kind]

    def _logic(self, schema: Document) -> dict[str, Any]:
        name = schema.get("name")
        if name == _DECIMAL:
            parameters = schema["parameters"]
            precision = int(parameters.get("connect.decimal.precision", _PRECISION))
            scale = int(parameters["scale"])
            logical = {} if scale > precision else {"logicalType": "decimal"}
            return {"scale": scale, "precision": precision, **logical}
        return {"logicalType": self._logical[name]} if name in self._logical else {}

    def _record(self, schema: Document) -> Any:
        given = schema.get("name")
        name = given or f"{_NAMESPACE}.{_NAMELESS}{self._nameless(schema)}"
        full = ".".join(map(self._adjust, name.split(".")))
        same = _bare(schema)
        if full in self._known:
            if self._known[full] != same:
                raise _invalid(f"two different structs would be the record {full!r}", full)
            return full
        self._known[full] = same
        within, _, last = full.rpartition(".")
        adjust = (lambda name: name) if _is_own(name) else self._adjust
        fields = [self._field(field, adjust) for field in schema["fields"]]
        names = [field["name"] for field in fields]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise _invalid(f"two columns would be the field {twice!r}", full)
        noted = _properties({**schema, "name": given and full})
        return {"type": "record", "name": last, "namespace": within, "fields": fields, **noted}

    def _field(self, field: Document, adjust: Adjustment) -> dict[str, Any]:
        found = {"name": adjust(field["field"]), "type": self.of(field)}
        default = field.get("default")
        if default is not None or field["optional"]:
            found["default"] = default
        return found

    def _nameless(self, schema: Document) -> str:
        # Avro requires a name for each record: from the second one on, it includes a number.
        same = _bare(schema)
        known = [full for full in self._known if full.startswith(f"{_NAMESPACE}.{_NAMELESS}")]
        place = next((n for n, full in enumerate(known) if self._known[full] == same), len(known))
        return str(place) if place else ""


def _bare(schema: Document) -> Document:
    # The schema, without what depends on the member that has it.
    return {name: value for name, value in schema.items() if name not in ("field", "optional")}


def _is_own(name: str) -> bool:
    return name.startswith(_OWN) or name.endswith(_OWN_END)


def _properties(schema: Document) -> dict[str, Any]:
    # Properties that Avro does not have, for readers in Kafka Connect.
    found = {
        "connect.doc": schema.get("doc"),
        "connect.version": schema.get("version"),
        "connect.parameters": schema.get("parameters"),
        "connect.default": schema.get("default"),
        "connect.name": schema.get("name"),
    }
    return {name: value for name, value in found.items() if value is not None}


_PART = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WRONG, _WRONG_OR_UNDERSCORE = re.compile(r"[^A-Za-z0-9_]"), re.compile(r"[^A-Za-z0-9]")


def _unchanged(name: str) -> str:
    if not _PART.fullmatch(name):
        raise _invalid(f"{name!r} is not a valid name in Avro", name)
    return name


def _underscores(name: str) -> str:
    # A leading digit is kept after the underscore, so that 1a and 2a remain two names.
    first = "_" if "0" <= name[:1] <= "9" else ""
    return first + _WRONG.sub(lambda found: "_" * len(_java_letters(found[0])), name) or "_"


def _unicode(name: str) -> str:
    first = ""
    if "0" <= name[:1] <= "9":
        first, name = f"_u{ord(name[0]):04x}", name[1:]
    return first + _WRONG_OR_UNDERSCORE.sub(_codes, name) or "_u0000"


def _codes(found: re.Match[str]) -> str:
    return "".join(f"_u{letter}" for letter in _java_letters(found[0]))


def _java_letters(letter: str) -> list[str]:
    # The UTF-16 codes of a character, as in Java: two for a character beyond 16 bits.
    code = letter.encode("utf-16-be").hex()
    return [code[at : at + 4] for at in range(0, len(code), 4)]


#: Adjustments of names by Debezium's names for them.
ADJUSTMENTS: dict[str, Adjustment] = {"none": _unchanged, "avro": _underscores, "avro_unicode": _unicode}


def _invalid(found: str, where: str) -> TailraceError:
    return TailraceError(
        Kind.CONVERSION_FAILED,
        f"describe records in Avro: {found}",
        "rename one, in the table or by a transformation, or choose another name_adjustment",
        {"schema": where},
    )
