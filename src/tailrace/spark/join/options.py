"""The options of `format("tailrace-join")`, checked as a whole before anything is read."""

from __future__ import annotations

import difflib
import importlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationError,
    model_validator,
)
from pydantic.alias_generators import to_camel

from tailrace.config.converters import RegistryAddress
from tailrace.config.fields import MIB, ByteCount, Name
from tailrace.config.kafka_clients import ClientOptions, TopicName
from tailrace.config.problems import from_pydantic
from tailrace.errors import Kind, TailraceError
from tailrace.join.connector import extraction_of
from tailrace.join.extraction import Extraction
from tailrace.join.options import JoinExpressions, JoinFields
from tailrace.join.planning import BatchLimits, Place

EARLIEST, LATEST = "earliest", "latest"

#: Before the names of librdkafka's own options.
_CLIENT = "kafka."


def _invalid(found: str, hint: str) -> TailraceError:
    return TailraceError(Kind.CONFIG_INVALID, f"join topics of Kafka in Spark: {found}", hint)


class GivenOffsets(BaseModel):
    """Places that are given: `{"data": {"orders": {"0": 12}}, "transactions": 7}`.

    :param data: by topic and partition; a partition that is not named begins with its first record.
    :param transactions: of the transaction topic; None: its first record, or its end.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    data: dict[str, dict[int, Annotated[int, Field(ge=0)]]]
    transactions: Annotated[int, Field(ge=0)] | None = None

    @property
    def places(self) -> dict[Place, int]:
        """Offsets by partition."""
        return {(topic, number): at for topic, found in self.data.items() for number, at in found.items()}


def _offsets(text: object) -> object:
    if isinstance(text, str) and text.lower() in (EARLIEST, LATEST):
        return text.lower()
    try:
        return GivenOffsets.model_validate_json(str(text))
    except ValidationError:
        raise ValueError(
            'must be earliest, latest, or JSON: {"data": {"orders": {"0": 12}}, "transactions": 7}'
        ) from None


Offsets = Annotated[str | GivenOffsets, BeforeValidator(_offsets)]


def _document(text: object) -> object:
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except ValueError:
        raise ValueError("must be JSON") from None


def _registry(text: object) -> object:
    if isinstance(text, str) and not text.lstrip().startswith("{"):
        return {"registry_url": text}
    return _document(text)


def _several(text: object) -> object:
    return [name.strip() for name in text.split(",")] if isinstance(text, str) else text


class JoinReadOptions(BaseModel):
    """What a query was asked for. A field's alias, else its name in camel case, is the option's spelling.

    `kafka` holds librdkafka's options: security, sockets; secrets as references, resolved where used.
    """

    model_config = ConfigDict(
        alias_generator=to_camel, frozen=True, extra="forbid", hide_input_in_errors=True
    )

    bootstrap_servers: str = Field(min_length=1)
    data: Annotated[tuple[TopicName, ...], BeforeValidator(_several)] = Field(min_length=1)
    transactions: TopicName
    starting: Offsets = Field(default=EARLIEST, alias="startingOffsets")
    ending: Offsets = Field(default=LATEST, alias="endingOffsets")
    offsets_max: PositiveInt | None = Field(default=None, alias="maxOffsetsPerTrigger")
    transaction_offsets_max: PositiveInt | None = Field(default=None, alias="maxTransactionOffsetsPerTrigger")
    group_id_prefix: Name = "tailrace-join"
    queue_records_max: Annotated[int, Field(ge=1, le=10_000_000)] = 100_000
    queue_bytes_max: ByteCount = 16 * MIB
    registry: Annotated[RegistryAddress | None, BeforeValidator(_registry)] = None
    fields: Annotated[JoinFields | None, BeforeValidator(_document)] = None
    expressions: Annotated[JoinExpressions | None, BeforeValidator(_document)] = None
    extraction: Annotated[str | None, AfterValidator(lambda name: name or None)] = None
    kafka: ClientOptions = {}

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> Self:
        """Return the options of a `load()`. Spark hands keys over in lower case, so case never matters.

        :raises TailraceError: `CONFIG_INVALID`, for an unknown option with the nearest known.
        """
        own = [field.alias or "" for name, field in cls.model_fields.items() if name != "kafka"]
        spellings = {name.lower(): name for name in own}
        found: dict[str, Any] = {"kafka": {}}
        for key, value in given.items():
            if key.lower().startswith(_CLIENT):
                found["kafka"][key.lower().removeprefix(_CLIENT)] = value
            elif (name := spellings.get(key.lower().replace("_", ""))) is not None:
                found[name] = value
            else:
                near = difflib.get_close_matches(key.lower(), spellings, n=1)
                hint = f"did you mean {spellings[near[0]]}?" if near else (
                    f"the options are {', '.join(own)}, and librdkafka's, with {_CLIENT} before their names"
                )  # fmt: skip
                raise _invalid(f"{key!r} is not an option", hint)
        try:
            return cls.model_validate(found)
        except ValidationError as error:
            problems = from_pydantic(error, cls, ())  # type: ignore[arg-type]
            raise _invalid(
                "; ".join(
                    f"the option {one.place}: {one.message}" if one.path else one.message for one in problems
                ),
                "correct the options, which docs/joins.md lists",
            ) from None

    @model_validator(mode="after")
    def _do_not_feed_themselves(self) -> Self:
        if self.transactions in self.data:
            raise ValueError("data: the topic of transactions can't be one of the data topics")
        given = (self.registry, self.fields, self.expressions, self.extraction)
        if sum(each is not None for each in given) > 1:
            raise ValueError("registry, fields, expressions, extraction: give one of them")
        if len(set(self.data)) < len(self.data):
            raise ValueError("data: a topic is named twice")
        if self.ending == EARLIEST:
            raise ValueError("endingOffsets: must be latest, or JSON")
        return self

    @property
    def limits(self) -> BatchLimits:
        """What a micro-batch may have."""
        return BatchLimits(self.offsets_max, self.transaction_offsets_max)

    def refuse_limits(self) -> None:
        """Refuse the options of a stream, which a batch would pass over in silence.

        :raises TailraceError: `CONFIG_INVALID`.
        """
        if self.limits != BatchLimits():
            raise _invalid(
                "maxOffsetsPerTrigger and maxTransactionOffsetsPerTrigger are options of streams",
                "leave them out, or use startingOffsets and endingOffsets",
            )

    def refuse_ending(self) -> None:
        """Refuse the option of a batch, which a stream would pass over in silence.

        :raises TailraceError: `CONFIG_INVALID`.
        """
        if self.ending != LATEST:
            raise _invalid(
                "endingOffsets is an option of batches, and this is a stream",
                "leave it out; .trigger(availableNow=True) stops at what is there now",
            )

    def made_extraction(self) -> Extraction:
        """Return what tells keys and orders.

        :raises TailraceError: `CONFIG_INVALID` if there is none of this name.
        """
        if self.extraction is None:
            return extraction_of(self)
        module, _, name = self.extraction.partition(":")
        try:
            found: Extraction = getattr(importlib.import_module(module), name)()
        except (ImportError, AttributeError, ValueError) as error:
            raise _invalid(
                f"the extraction {self.extraction!r} can't be made: {type(error).__name__}",
                "write it as package.module:Class, importable on the driver and the executors",
            ) from error
        return found
