"""Folders of tables, whatever names the source's tables have."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.sinks import names as layout

NAMES = st.text(st.characters(exclude_characters="\0"), max_size=80) | st.text("./\\~_-%@ aA", max_size=12)


@pytest.mark.parametrize(
    ("schema", "table", "folder"),
    [
        ("public", "orders", "public.orders"),
        ("Sales", "Order_Items-2", "Sales.Order_Items-2"),
        ("public", "order items", "public.order~20items"),
        ("a.b", "c", "a~2eb.c"),
        ("a", "b.c", "a.b~2ec"),
        ("_hidden", "t", "~5fhidden.t"),
        ("public", "../../etc/passwd", "public.~2e~2e~2f~2e~2e~2fetc~2fpasswd"),
        ("", "", "~.~"),
        ("public", "grün", "public.gr~c3~bcn"),
    ],
)
def test_a_table_has_a_folder_of_the_same_name(schema, table, folder):
    assert layout.table_directory(schema, table) == folder


@given(NAMES, NAMES)
def test_no_folder_lies_outside_the_sink_or_is_hidden(schema, table):
    folder = layout.table_directory(schema, table)
    assert folder == os.path.basename(folder)
    assert folder not in (".", "..")
    assert not folder.startswith((".", "_"))
    assert len(folder.encode()) <= layout.TABLE_DIRECTORY_BYTES_MAX
    assert folder.isascii()
    assert folder.isprintable()


@given(NAMES, NAMES, NAMES, NAMES)
def test_different_tables_have_different_folders(schema, table, other_schema, other_table):
    same = (schema, table) == (other_schema, other_table)
    folders = layout.table_directory(schema, table), layout.table_directory(other_schema, other_table)
    assert (folders[0] == folders[1]) == same


def test_a_table_named_like_a_shortened_one_has_another_folder():
    long = layout.table_directory("public", "x" * 63 + "ü" * 60)
    schema, _, table = long.partition(".")
    assert layout.table_directory(schema, table) != long


def test_staged_names_fit_a_file_system():
    folder = layout.table_directory("ü" * 63, "ü" * 63)
    name = layout.file_name("0", 2**63, 2**63, 99999, 999, "parquet")
    assert len(layout.staged_name(folder, name)) + len(".12345678.tmp") <= 255
