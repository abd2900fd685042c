"""Options of the converters that come with Tailrace: what stands beside `engine.converter.type`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tailrace.config.fields import Section


class _Named(Section):
    topic_prefix: str = Field(
        default="",
        max_length=249,
        description="Debezium's `topic.prefix`: what `source.name` and the names of schemas begin with. "
        "Default: the pipeline's name.",
    )
    event_time: Literal["commit", "processing"] = Field(
        default="commit",
        description="What the event's own `ts_ms`, `ts_us` and `ts_ns` are: the commit's time, so that a "
        "change always gives the same bytes; or the time of conversion, as with Debezium.",
    )
    tombstones_on_delete: bool = Field(
        default=True, description="Whether an event with the key and no value follows each delete."
    )
    provide_transaction_metadata: bool = Field(
        default=False, description="Whether events tell their transaction, and their place in it."
    )
    rows_in_part: Literal["sent", "filled"] | None = Field(
        default=None,
        description="The row before a change where the server sent its key alone: `sent`, with the columns "
        "that were sent; `filled`, with all columns, null or the type's zero in the others, as Debezium "
        "does. Default: `filled` with schemas, else `sent`.",
    )


class JsonOptions(_Named):
    """Debezium's JSON: `type: json`."""

    schemas_enable: bool = Field(
        default=False, description="Whether each key and value carries its schema: `{schema, payload}`."
    )


class CloudEventsOptions(_Named):
    """CloudEvents 1.0 in JSON: `type: cloudevents`."""

    mode: Literal["structured", "binary"] = Field(
        default="structured",
        description="`structured`: the value is the whole event; `binary`: the value is its data, and its "
        "attributes are headers (`ce_id`, …).",
    )
    schemas_enable: bool = Field(
        default=False, description="Whether `data` carries its schema: `{schema, payload}`."
    )
    extension_attributes_enable: bool = Field(
        default=True, description="Whether the attributes `iodebezium…` are written."
    )


class NativeOptions(Section):
    """Arrow and Python objects, `type: arrow` and `type: python`: no options."""
