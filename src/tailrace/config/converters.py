"""Options of the converters that come with Tailrace: the keys next to `engine.converter.type`."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from tailrace.config.fields import Extension, FileName, Section, Setting
from tailrace.config.problems import from_pydantic, instead_of


def _url(text: str) -> str:
    if not re.fullmatch(r"https?://[^\s/@?#,]+(/[^\s@?#,]*)?", text):
        raise ValueError(
            "must be of the form http://host:port or https://host:port/path, without a user; "
            "several are a list"
        )
    return text


class _Named(Section):
    topic_prefix: str = Field(
        default="",
        max_length=249,
        description="Debezium's `topic.prefix`: the start of `source.name` and of the names of schemas. "
        "Default: the pipeline's name.",
    )
    event_time: Literal["commit", "processing"] = Field(
        default="commit",
        description="Time in the event's own `ts_ms`, `ts_us` and `ts_ns`: of the commit, so that a "
        "change always gives the same bytes; or of the conversion, as with Debezium.",
    )
    tombstones_on_delete: bool = Field(
        default=True, description="Whether an event with the key and no value follows each delete."
    )
    provide_transaction_metadata: bool = Field(
        default=False, description="Whether events have their transaction, and their place in it."
    )


class _InPart(_Named):
    rows_in_part: Literal["sent", "filled"] | None = Field(
        default=None,
        description="The row before a change if the server sent only its key: `sent`, with the columns "
        "that were sent; `filled`, with all columns, null or the type's zero in the others, as Debezium "
        "does. Default: `filled` with schemas, otherwise `sent`.",
    )


class JsonOptions(_InPart):
    """Debezium's JSON: `type: json`."""

    schemas_enable: bool = Field(
        default=False, description="Whether each key and value carries its schema: `{schema, payload}`."
    )


class CloudEventsOptions(_InPart):
    """CloudEvents 1.0 in JSON: `type: cloudevents`."""

    schemas_enable: bool = Field(
        default=False, description="Whether `data` carries its schema: `{schema, payload}`."
    )
    extension_attributes_enable: bool = Field(
        default=True, description="Whether the attributes `iodebezium…` are written."
    )


_Strategy = Literal["topic", "record", "topic_record"]
_STRATEGY = (
    "Subject under which schemas of {} are registered: `topic`, `<topic>-{}`; `record`, the schema's name; "
    "`topic_record`, `<topic>-<name>`."
)


_Url = Annotated[str, AfterValidator(_url)]
_Urls = Annotated[
    Annotated[_Url, Tag("<text>")] | Annotated[tuple[_Url, ...], Field(min_length=1), Tag("<list>")],
    Discriminator(lambda value: "<list>" if isinstance(value, list | tuple) else "<text>"),
]


class RegistryAddress(Section):
    """The address of a schema registry, and the credentials for it."""

    registry_url: _Urls = Field(description="Address of the schema registry, or a list of its addresses.")
    registry_username: Setting = Field(default="", description="User, for basic authentication.")
    registry_password: Setting = Field(default="", description="Its password: a reference.")
    registry_token: Setting = Field(default="", description="Bearer token instead of both: a reference.")
    registry_ca_file: FileName = Field(
        default="", validate_default=False, description="Root certificates for the registry's certificate."
    )
    registry_certificate_file: FileName = Field(
        default="", validate_default=False, description="Client certificate, for mutual TLS."
    )
    registry_key_file: FileName = Field(default="", validate_default=False, description="Its key.")
    registry_timeout_ms: int = Field(
        default=10_000,
        ge=1,
        le=600_000,
        description="Longest time for one request. It is made up to three times at each address; "
        "Kafka's transaction stays open meanwhile.",
    )

    @model_validator(mode="after")
    def _secrets_by_reference(self) -> Self:
        for name in ("registry_password", "registry_token"):
            if isinstance(value := getattr(self, name), str) and value:
                raise ValueError(f"{name} must be a reference, ${{env:NAME}} or ${{file:/path}}")
        return self

    @model_validator(mode="after")
    def _credentials_fit(self) -> Self:
        if self.registry_token and (self.registry_username or self.registry_password):
            raise ValueError("registry_token replaces a user and password: give either")
        if self.registry_password and not self.registry_username:
            raise ValueError("registry_password needs registry_username")
        if self.registry_key_file and not self.registry_certificate_file:
            raise ValueError("registry_key_file needs registry_certificate_file")
        return self

    @property
    def urls(self) -> tuple[str, ...]:
        """The addresses, in the order in which requests try them."""
        return (self.registry_url,) if isinstance(self.registry_url, str) else self.registry_url


class RegistryOptions(RegistryAddress, _Named):
    """The common options of converters whose schemas are in a registry."""

    auto_register_schemas: bool = Field(
        default=True,
        description="Whether new schemas are registered; if not, one that is missing stops the sink.",
    )
    key_subject: _Strategy = Field(default="topic", description=_STRATEGY.format("keys", "key"))
    value_subject: _Strategy = Field(default="topic", description=_STRATEGY.format("values", "value"))
    keys: Literal["same", "json"] = Field(
        default="same", description="Form of the keys: that of the values, or JSON without a schema."
    )


class AvroOptions(RegistryOptions):
    """Avro with a schema registry: `type: avro`."""

    name_adjustment: Literal["avro", "avro_unicode", "none"] = Field(
        default="avro",
        description="Names that Avro does not allow: `avro`, `_` for each wrong character; `avro_unicode`, "
        "`_u` and its code (also for `_`), so that names stay different; `none`, refused.",
    )
    logical_types: Literal["connect", "avro"] = Field(
        default="connect",
        description="Avro's logical types: `connect`, those that Confluent's converter writes (decimals, and "
        "times under `time_precision_mode: connect`); `avro`, for Debezium's dates, times and UUIDs, too.",
    )


class JsonSchemaOptions(RegistryOptions):
    """JSON with a schema registry: `type: json_schema`."""


class NativeOptions(Section):
    """Arrow and Python objects, `type: arrow` and `type: python`: no options."""


#: Options by the converter's name. Converters of other packages check their options themselves.
OPTIONS: dict[str, type[Section]] = {
    "json": JsonOptions,
    "cloudevents": CloudEventsOptions,
    "avro": AvroOptions,
    "json_schema": JsonSchemaOptions,
    "arrow": NativeOptions,
    "python": NativeOptions,
}


def _checked(converter: Extension, info: ValidationInfo) -> Extension:
    model = OPTIONS.get(converter.type)
    if model is None:
        return converter
    try:
        options = model.model_validate(converter.options, context=info.context)
    except ValidationError as error:
        raise ValueError(f"{converter.type}: {problems_of(error, model)}") from None
    # As given, except that names of files are absolute: they stay valid wherever the options are used.
    given = options.model_dump(mode="json", exclude_unset=True)
    return Extension.model_validate({"type": converter.type, **given})


def problems_of(error: ValidationError, model: type[Section]) -> str:
    """Return the problems of the options of `model`, each with its option's name and without its value."""
    found = from_pydantic(error, model, ())
    removed = [instead_of(("converter", *one.path)) for one in found]
    return "; ".join(
        str(replace(one, message=words or one.message)) for one, words in zip(found, removed, strict=True)
    )


#: A converter's section; options of converters that come with Tailrace are checked with the file.
ConverterSection = Annotated[Extension, AfterValidator(_checked)]


def in_bytes(converter: Extension) -> Extension:
    """Return a converter whose keys and values can be written to a topic.

    :raises ValueError: keys and values are objects.
    """
    if converter.type in ("arrow", "python"):
        raise ValueError(
            f"{converter.type} gives objects, not bytes: take json, avro, json_schema or cloudevents"
        )
    return converter
