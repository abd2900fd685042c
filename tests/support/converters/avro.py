"""Avro's binary form, read by fastavro."""

from __future__ import annotations

import io
from typing import Any

import fastavro

from tailrace.converters.avro import binary


def decoded(value: bytes, schema: Any) -> Any:
    return fastavro.schemaless_reader(io.BytesIO(value[binary.HEADER_BYTES :]), schema)
