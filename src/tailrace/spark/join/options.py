"""The options of `format("tailrace-join")`, checked as a whole before anything is read."""

from __future__ import annotations

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
    field_validator,
    model_validator,
)
from pydantic.alias_generators import to_camel

from tailrace.config.fields import Name
from tailrace.config.problems import from_pydantic
from tailrace.errors import Kind, TailraceError
from tailrace.join.connector import extraction_of
from tailrace.join.extraction import Extraction
from tailrace.join.options import JoinedTopics
from tailrace.join.planning import BatchLimits, Place
from tailrace.spark.options import by_spelling

EARLIEST, LATEST = "earliest", "latest"

#: Prefix of librdkafka's own options.
_CLIENT = "kafka."


def _invalid(found: str, hint: str) -> TailraceError:
    return TailraceError(Kind.CONFIG_INVALID, f"join topics of Kafka in Spark: {found}", hint)


class GivenOffsets(BaseModel):
    """Offsets in an option: `{"data": {"orders": {"0": 12}}, "transactions": 7}`.

    :param data: by topic and partition; a partition that is not named starts at its first record.
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


def _spelled(place: str) -> str:
    """Return a place in the settings as the name of an option."""
    section, _, name = place.partition(".")
    return f"{_CLIENT}{name or '*'}" if section == "options" else place


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


class JoinReadOptions(JoinedTopics):
    """The options of a query, spelled as a field's alias, or else as its name in camel case.

    `options` contains librdkafka's options, which are spelled with the prefix `kafka.`.
    """

    model_config = ConfigDict(alias_generator=to_camel)

    starting: Offsets = Field(default=EARLIEST, alias="startingOffsets")
    ending: Offsets = Field(default=LATEST, alias="endingOffsets")
    offsets_max: PositiveInt | None = Field(default=None, alias="maxOffsetsPerTrigger")
    transaction_offsets_max: PositiveInt | None = Field(default=None, alias="maxTransactionOffsetsPerTrigger")
    group_id_prefix: Name = "tailrace-join"
    extraction: Annotated[str | None, AfterValidator(lambda name: name or None)] = None

    _names = field_validator("data", mode="before")(_several)
    _address = field_validator("registry", mode="before")(_registry)
    _parts = field_validator("fields", "expressions", mode="before")(_document)

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> Self:
        """Return the options of a `load()`.

        :raises TailraceError: `CONFIG_INVALID`; for an unknown option with the nearest known one.
        """
        of_client = {key for key in given if key.lower().startswith(_CLIENT)}
        own = {key: value for key, value in given.items() if key not in of_client}
        also = f", and librdkafka's with the prefix {_CLIENT}"
        found: dict[str, Any] = {
            **by_spelling(cls, own, _invalid, also=also, but={"options"}),
            "options": {key.lower().removeprefix(_CLIENT): given[key] for key in of_client},
        }
        try:
            return cls.model_validate(found)
        except ValidationError as error:
            problems = from_pydantic(error, cls, ())
            raise _invalid(
                "; ".join(
                    f"the option {_spelled(one.place)}: {one.message}" if one.path else one.message
                    for one in problems
                ),
                "correct the options, which docs/joins.md lists",
            ) from None

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.extraction is not None and any((self.registry, self.fields, self.expressions)):
            raise ValueError("registry, fields, expressions, extraction: give one of them")
        if self.ending == EARLIEST:
            raise ValueError("endingOffsets: must be latest, or JSON")
        return self

    @property
    def limits(self) -> BatchLimits:
        """The limits of a micro-batch."""
        return BatchLimits(self.offsets_max, self.transaction_offsets_max)

    def refuse_limits(self) -> None:
        """Refuse the options of a stream, which a batch would ignore.

        :raises TailraceError: `CONFIG_INVALID`.
        """
        if self.limits != BatchLimits():
            raise _invalid(
                "maxOffsetsPerTrigger and maxTransactionOffsetsPerTrigger are options of streams",
                "leave them out, or use startingOffsets and endingOffsets",
            )

    def refuse_ending(self) -> None:
        """Refuse the option of a batch, which a stream would ignore.

        :raises TailraceError: `CONFIG_INVALID`.
        """
        if self.ending != LATEST:
            raise _invalid(
                "endingOffsets is an option of batches, and this is a stream",
                "leave it out; .trigger(availableNow=True) stops at the topics' current end",
            )

    def made_extraction(self) -> Extraction:
        """Return the extraction of keys and orders that the options choose.

        :raises TailraceError: `CONFIG_INVALID` if the named class can't be imported or created.
        """
        if self.extraction is None:
            return extraction_of(self)
        module, _, name = self.extraction.partition(":")
        try:
            found: object = getattr(importlib.import_module(module), name)()
            if not isinstance(found, Extraction):
                raise TypeError
        except Exception as error:
            raise _invalid(
                f"the extraction {self.extraction!r} can't be created: {type(error).__name__}",
                "write it as package.module:Class, importable on the driver and the executors, created "
                "without arguments, and with the methods of tailrace.join.extraction.Extraction",
            ) from error
        return found
