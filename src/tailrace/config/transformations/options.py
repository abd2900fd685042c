"""The list `transformations`: the transformations of records, in their order.

Each entry has a `type`. A type that is not defined here belongs to an installed package, which provides it
under the entry points `tailrace.transformations`, and validates its settings itself.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import AfterValidator, Field, PlainValidator, model_validator

from tailrace.config.fields import Extension
from tailrace.config.patterns import Patterns
from tailrace.config.source.column_policy import MaskMethod, MaskOptions
from tailrace.config.transformations.steps import (
    FIELDS,
    METADATA,
    ROOTS,
    ROWS,
    Expression,
    Metadata,
    Names,
    OfKeyAndRow,
    OfRow,
    Regex,
    RenamedMetadata,
    Text,
    TransformationConfig,
    TypeText,
    WithExpressions,
    check_references,
    one_of,
)
from tailrace.extensions import TRANSFORMATIONS as GROUP


def _time_format(text: str) -> str:
    if "%f" in text:
        raise ValueError("does not support %f: times have a precision of seconds; ISO 8601 has fractions")
    if "%" not in text:
        raise ValueError("must be a format of strftime, such as %Y-%m-%d")
    return text


class FilterConfig(TransformationConfig, WithExpressions):
    """Keeps the records for which an expression is true."""

    where: Expression = Field(description="Condition; a record for which it is false is dropped.")
    nulls: Literal["drop", "keep"] = Field(
        default="drop", description="Whether records for which the condition is NULL are dropped or kept."
    )


class DropConfig(TransformationConfig):
    """Drops all records, or those that the predicate chooses."""


class Route(TransformationConfig, WithExpressions):
    """Changes the topic of records, by a regular expression for topics or by an expression."""

    regex: Regex | None = Field(
        default=None, description="Regular expression that must match the whole topic; other topics stay."
    )
    replacement: str | None = Field(
        default=None, description="The new topic; `$1` and `${name}` are groups of `regex`."
    )
    topic: Expression | None = Field(
        default=None,
        description="Instead of `regex`: an expression whose value is the new topic; NULL keeps the old one.",
    )
    key_field: str | None = Field(
        default=None,
        min_length=1,
        description="Name of a field that is added to the keys of routed records and has the former topic, "
        "so that keys of different tables differ.",
    )

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.regex is None) == (self.topic is None):
            raise ValueError("needs either regex or topic")
        if (self.regex is None) != (self.replacement is None):
            raise ValueError("regex and replacement must be set together")
        if self.regex is not None and self.replacement is not None:
            check_references(self.regex, self.replacement)
        return self


class RenameConfig(OfKeyAndRow):
    """Renames columns."""

    fields: Annotated[dict[Text, Text], Field(min_length=1)] = Field(
        description="New name by column name. A table without such a column stays unchanged."
    )


class DropFieldsConfig(OfRow):
    """Drops the named columns, or all others."""

    fields: Names | None = Field(default=None, description=FIELDS + " These are dropped.")
    keep: Names | None = Field(
        default=None, description=FIELDS + " Instead of `fields`: all others are dropped."
    )

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.fields is None) == (self.keep is None):
            raise ValueError("needs either fields or keep")
        return self


class MaskConfig(MaskOptions, OfKeyAndRow):
    """Masks the values of columns; NULL stays NULL."""

    fields: Names = Field(description=FIELDS)
    method: MaskMethod = Field(default="fixed", description=MaskOptions.model_fields["method"].description)


def _constant(value: object) -> object:
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("must be a whole number of 64 bits, or text: put it in quotes")
    is_number = isinstance(value, int | float) and math.isfinite(value)
    if not is_number and not isinstance(value, str | None):
        raise ValueError("must be text, a number, true, false or null: put other values in quotes")
    return value


class AddFieldsConfig(OfRow, WithExpressions):
    """Adds columns."""

    static: dict[Text, Annotated[bool | int | float | str | None, PlainValidator(_constant)]] = Field(
        default={}, description="Constant by column name."
    )
    metadata: dict[Text, Metadata] = Field(
        default={},
        description="Metadata of the change by column name: " + ", ".join(f"`{n}`" for n in METADATA) + ".",
    )
    computed: dict[Text, Expression] = Field(default={}, description="Expression by column name.")

    @model_validator(mode="after")
    def _complete(self) -> Self:
        names = [*self.static, *self.metadata, *self.computed]
        if not names:
            raise ValueError("needs static, metadata or computed")
        if len(set(names)) < len(names):
            raise ValueError("must not have a name twice")
        return self


class CastConfig(OfKeyAndRow):
    """Casts columns to other types."""

    fields: Annotated[dict[Text, TypeText], Field(min_length=1)] = Field(
        description="New type by column name: one of the types of casts in expressions."
    )


class FlattenConfig(TransformationConfig):
    """Replaces a change by its row after, as Debezium's new record state extraction does."""

    deletes: Literal["drop", "tombstone", "rewrite"] = Field(
        default="tombstone",
        description="`tombstone`: a delete has the value null; `drop`: it is dropped; `rewrite`: its value "
        "is the row before, and every record has a field `__deleted` with the text `true` or `false`.",
    )
    truncates: Literal["drop", "error"] = Field(
        default="drop", description="A truncate, which has no row, is dropped or stops the engine."
    )
    add_fields: tuple[RenamedMetadata, ...] = Field(
        default=(),
        description="Metadata that are added as fields, with the names of `add_fields.metadata`; "
        "`op:operation` sets another name. A dot becomes an underscore.",
    )
    add_fields_prefix: str = Field(default="__", description="Prefix of the names of these fields.")
    add_headers: tuple[RenamedMetadata, ...] = Field(
        default=(), description="Metadata that are added as headers, likewise."
    )
    add_headers_prefix: str = Field(default="__", description="Prefix of the names of these headers.")
    unavailable: Literal["placeholder", "null"] = Field(
        default="placeholder",
        description="Replacement for values that the source did not send: `placeholder`: the text of "
        "`source.unavailable_value_placeholder` in columns of text and bytes, NULL in others; `null`: NULL. "
        "`unchanged` has the names of these columns in any case.",
    )


def _placement(text: str) -> str:
    parts = text.split(":")
    if len(parts) not in (2, 3) or not all(parts) or parts[1] not in ("header", "envelope", "partition"):
        raise ValueError("must be column:header, column:envelope or column:partition, and may end in :alias")
    return text


class OutboxConfig(TransformationConfig):
    """Makes events from rows that are inserted into outbox tables."""

    tables: Patterns = Field(
        default=("*.outbox",), description="The outbox tables; records of other tables stay unchanged."
    )
    event_id: Text = Field(default="id", description="Column of the event's id, sent as the header `id`.")
    event_key: Text = Field(default="aggregateid", description="Column of the event's key.")
    payload: Text = Field(default="payload", description="Column of the event's value.")
    route_by: Text = Field(default="aggregatetype", description="Column from which the topic is derived.")
    route_topic_regex: Regex = Field(
        default="(?<routedByValue>.*)", description="Regular expression for the values of `route_by`."
    )
    route_topic_replacement: Text = Field(
        default="outbox.event.${routedByValue}",
        description="The topic; `$1` and `${name}` are groups of `route_topic_regex`. A value that does not "
        "match it is itself the topic.",
    )
    additional: tuple[Annotated[str, AfterValidator(_placement)], ...] = Field(
        default=(),
        description="More columns, each as `column:header`, `column:envelope` or `column:partition`, with an "
        "optional `:alias`. With an envelope the value has the field `payload` and these fields. "
        "`partition`: the number of the event's partition, for sinks `kafka` (null: by its key), and in the "
        "column `partition` of the records for handlers of columns.",
    )
    expand_json_payload: bool = Field(
        default=False, description="Whether a payload that is JSON is sent as JSON instead of as text."
    )
    tombstone_on_empty_payload: bool = Field(
        default=False, description="Whether an event with an empty payload is a tombstone."
    )
    on_update: Literal["warn", "error", "fatal"] = Field(
        default="warn",
        description="If a row of an outbox was updated: `warn` and `error` log and skip the update, `fatal` "
        "stops the engine.",
    )

    @model_validator(mode="after")
    def _refers(self) -> Self:
        check_references(self.route_topic_regex, self.route_topic_replacement)
        return self


class TimestampsConfig(OfKeyAndRow):
    """Converts columns of points in time to another form; all in UTC."""

    fields: Names = Field(description=FIELDS)
    to: Literal["unix_s", "unix_ms", "unix_us", "unix_ns", "string", "date", "time", "timestamp"] = Field(
        description="`unix_…`: time since 1970 in that unit; `string`: text in `format`; `date`; `time` of "
        "day; `timestamp` with time zone."
    )
    unit: Literal["s", "ms", "us", "ns"] = Field(
        default="ms", description="Unit of numbers that are read; they count from 1970."
    )
    read_format: Annotated[str, AfterValidator(_time_format)] | None = Field(
        default=None,
        description="Format of texts that are read, for `strptime`, such as `%d.%m.%Y`. Default: ISO 8601.",
    )
    format: Annotated[str, AfterValidator(_time_format)] | None = Field(
        default=None,
        description="Format of `string`, for `strftime`, to the second. Default: ISO 8601 with microseconds.",
    )


class SetHeadersConfig(TransformationConfig, WithExpressions):
    """Sets headers to the values of expressions; NULL sets none."""

    headers: Annotated[dict[Text, Expression], Field(min_length=1)] = Field(
        description="Expression by header name, such as `after.tenant` or a text in quotes."
    )
    operation: Literal["copy", "move"] = Field(
        default="copy", description="`move`: the expressions must be single columns, which are removed."
    )

    @model_validator(mode="after")
    def _movable(self) -> Self:
        for name, text in self.headers.items() if self.operation == "move" else ():
            from tailrace.expressions.computing import Expression as Computed

            path = Computed(text, ROOTS).path
            if path is None or len(path) != 2 or path[0] not in ROWS or "*" in text:
                raise ValueError(
                    f"moves only columns of the row, such as after.tenant, to the header {name!r}"
                )
        return self


class DropHeadersConfig(TransformationConfig):
    """Removes headers."""

    headers: Names = Field(description="Names of headers.")


class FieldsFromHeadersConfig(OfRow):
    """Copies or moves headers to columns."""

    fields: Annotated[dict[Text, Text], Field(min_length=1)] = Field(description="Header by column name.")
    operation: Literal["copy", "move"] = Field(default="copy", description="`move`: the headers are removed.")


class ValueToKeyConfig(TransformationConfig):
    """Makes the key from columns of the row."""

    fields: Names = Field(description="Names of columns, in the order of the key.")


class _OneField(TransformationConfig):
    field: Text = Field(description="Name of the field.")
    apply_to: Literal["key", "row"] = Field(
        default="key", description="`key`; or `row`: the value of a record that is no longer a change."
    )


class ExtractFieldConfig(_OneField):
    """Replaces the key, or the value, by one of its fields."""


class HoistFieldConfig(_OneField):
    """Wraps the key, or the value, in a field."""


class ThirdParty(TransformationConfig, Extension):
    """A transformation of another package."""


TRANSFORMATIONS: dict[str, type[TransformationConfig]] = {
    "filter": FilterConfig,
    "drop": DropConfig,
    "route": Route,
    "rename": RenameConfig,
    "drop_fields": DropFieldsConfig,
    "mask": MaskConfig,
    "add_fields": AddFieldsConfig,
    "cast": CastConfig,
    "flatten": FlattenConfig,
    "outbox": OutboxConfig,
    "timestamps": TimestampsConfig,
    "set_headers": SetHeadersConfig,
    "drop_headers": DropHeadersConfig,
    "fields_from_headers": FieldsFromHeadersConfig,
    "value_to_key": ValueToKeyConfig,
    "extract_field": ExtractFieldConfig,
    "hoist_field": HoistFieldConfig,
}

if TYPE_CHECKING:
    AnyTransformation = TransformationConfig
else:
    AnyTransformation = one_of(TRANSFORMATIONS, ThirdParty, GROUP)
