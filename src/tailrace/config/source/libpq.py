"""Connection options of libpq under their own names, checked against the list of the installed libpq.

PostgreSQL's manual describes the options. Declared here are only those that Tailrace reads, documents or
gives another default.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from tailrace.config.fields import Section, Text, file_name, text_or_reference
from tailrace.secrets import REFUSAL, Secret, is_reference

#: Options whose value is a secret, in addition to those that libpq itself marks as passwords.
_SECRETS = {"password", "sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key"}

#: Options whose value is the name of a file or directory; a relative one is relative to the configuration.
_FILES = {"passfile", "servicefile", "sslcert", "sslkey", "sslrootcert", "sslcrl", "sslcrldir"}

#: Those of them that libpq leaves out if the file is missing: it would check no revocation list.
OPTIONAL_FILES = ("sslcert", "sslcrl", "sslcrldir", "passfile")

#: Options that users can't set, and why.
OWN_OPTIONS = {
    "replication": "capture decides which of its connections replicate",
    "client_encoding": "capture reads UTF-8",
    "fallback_application_name": "set application_name instead",
    "sslkeylogfile": "everyone who can read the file can read the connection",
}


@functools.cache
def known_options() -> frozenset[str]:
    """Return the names of the installed libpq's options, without `OWN_OPTIONS`."""
    from psycopg.pq import Conninfo

    return frozenset(option.keyword.decode() for option in Conninfo.get_defaults()) - OWN_OPTIONS.keys()


@functools.cache
def secret_options() -> frozenset[str]:
    """Return the names of the options whose value is a secret."""
    from psycopg.pq import Conninfo

    marked = {option.keyword.decode() for option in Conninfo.get_defaults() if option.dispchar == b"*"}
    return frozenset(marked | _SECRETS)


def parse_dsn(text: str) -> dict[str, str] | None:
    """Return the options in a connection string; None if libpq does not understand it."""
    # psycopg's own message quotes the string, so it must not be shown.
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    try:
        return {name: str(value) for name, value in conninfo_to_dict(text).items()}
    except psycopg.Error:
        return None


class _Given(NamedTuple):
    # An option that is not a field: pydantic does not pass the name of such a value to its validator.
    name: str
    value: object


def _option(given: _Given, info: ValidationInfo) -> str | Secret:
    name, value = given
    if name in OWN_OPTIONS:
        raise ValueError(f"can't be set: {OWN_OPTIONS[name]}")
    if name not in known_options():
        raise PydanticCustomError("extra_forbidden", "unknown key")
    referred = isinstance(value, Secret) or (isinstance(value, str) and is_reference(value))
    if name in secret_options() and not referred:
        raise ValueError(REFUSAL)
    if name in _FILES:
        return file_name(value, info)
    # libpq's flags are 1 and 0.
    return text_or_reference(str(int(value)) if isinstance(value, int) else value, info)


_Option = Annotated[str | Secret, BeforeValidator(_option), PlainSerializer(str, return_type=str)]


class LibpqOptions(Section):
    """Connection options of libpq: the fields below, and all others under libpq's names."""

    model_config = ConfigDict(extra="allow")

    __pydantic_extra__: dict[str, _Option] = Field(init=False)

    host: Text | None = Field(
        default=None, description="Name or address of the server, or the directory of its socket."
    )
    port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        default=None, description="Port; libpq's default is 5432."
    )
    dbname: Text | None = Field(default=None, description="Name of the database.")
    user: Text | None = Field(default=None, description="Role to connect as; it needs `REPLICATION`.")
    password: Secret | None = Field(default=None, description="Password, by reference only.")
    connect_timeout: int = Field(default=10, ge=1, le=3600, description="Seconds to wait for a connection.")
    application_name: Text = Field(default="tailrace", description="Name shown in `pg_stat_activity`.")
    sslmode: Literal["disable", "allow", "prefer", "require", "verify-ca", "verify-full"] | None = Field(
        default=None,
        description="How TLS is used. Default: `verify-full`; for sockets and loopback addresses `prefer`.",
    )

    @model_validator(mode="before")
    @classmethod
    def _with_names(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {
            name: value if name in cls.model_fields else _Given(str(name), value)
            for name, value in values.items()
            if value is not None or name not in known_options()
        }

    @classmethod
    def key_names(cls) -> set[str]:
        return super().key_names() | known_options()

    def option(self, name: str) -> str | Secret | int | None:
        """Return the value of an option of libpq in the file, or the field's default; None: not given."""
        found: str | Secret | int | None = getattr(self, name, None)
        return found

    @property
    def given_options(self) -> dict[str, str | Secret | int]:
        """All options with a value, including defaults of fields."""
        names = [*LibpqOptions.model_fields, *(self.__pydantic_extra__ or {})]
        return {name: value for name in names if (value := self.option(name)) is not None}
