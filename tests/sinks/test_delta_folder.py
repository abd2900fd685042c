"""A Delta table as the driver changes it, read back by delta-rs."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaError

from tailrace.errors import Kind, TailraceError
from tailrace.sinks.delta import folder as delta_folder
from tailrace.sinks.delta.folder import DeltaFolder, _set_properties
from tailrace.sinks.delta.sink import require_path

STATISTICS = "delta.dataSkippingStatsColumns"


def table(*columns: tuple[str, pa.DataType]) -> pa.Schema:
    return pa.schema([pa.field(*each, metadata={"tailrace.column": f"1.{n}.25.-1"})
                      for n, each in enumerate(columns)])  # fmt: skip


def test_a_table_gets_no_feature_that_its_columns_do_not_need(tmp_path: Path) -> None:
    folder = DeltaFolder(tmp_path / "t", "lake", "public.t", "app")
    folder.create(table(("id", pa.int64()), ("at", pa.timestamp("us")), ("b", pa.string())), [], 1)
    folder.committed()
    after = table(("id", pa.int64()), ("at", pa.timestamp("us")))
    folder.reshape([], after)
    # column metadata and the columns with statistics are those of the table as it is now
    found = DeltaTable(str(tmp_path / "t"))
    assert found.protocol().reader_features == ["timestampNtz"]
    assert found.metadata().configuration[STATISTICS] == "id"
    assert found.transaction_version("app") == 1
    assert [field.metadata for field in found.schema().fields] == [
        {"tailrace.column": "1.0.25.-1"},
        {"tailrace.column": "1.1.25.-1"},
    ]
    # the table can be changed again
    folder.reshape([], table(("id", pa.int64()), ("c", pa.string())))
    assert DeltaTable(str(tmp_path / "t")).metadata().configuration[STATISTICS] == "id,c"


def test_columns_with_statistics_that_a_user_chose_are_kept_while_they_exist(tmp_path: Path) -> None:
    folder = DeltaFolder(tmp_path / "t", "lake", "public.t", "app")
    folder.create(table(("id", pa.int64()), ("b", pa.string())), [], 1)
    DeltaTable(str(tmp_path / "t")).alter.set_table_properties({STATISTICS: "b"})
    folder.committed()
    folder.reshape([], table(("id", pa.int64()), ("b", pa.string()), ("c", pa.string())))
    assert DeltaTable(str(tmp_path / "t")).metadata().configuration[STATISTICS] == "b"
    folder.reshape([], table(("id", pa.int64()), ("c", pa.string())))
    assert DeltaTable(str(tmp_path / "t")).metadata().configuration[STATISTICS] == "id,c"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (pa.decimal128(38, 3), "12345678901234567890.12"),
        (pa.decimal128(38, 38), "0." + "9" * 38),
        (pa.decimal128(16, 2), "99999999999999.99"),
        (pa.decimal128(15, 2), "9999999999999.99"),
    ],
    ids=str,
)
def test_readers_that_use_statistics_find_every_decimal(kind: pa.DataType, text: str, tmp_path: Path) -> None:
    folder = DeltaFolder(tmp_path / "t", "lake", "public.t", "app")
    folder.create(table(("id", pa.int64()), ("d", kind)), [], 1)
    rows = pa.table({"id": [1], "d": pa.array([Decimal(text)], kind)})
    write_deltalake(tmp_path / "t", rows, mode="append")
    found = DeltaTable(tmp_path / "t").to_pyarrow_dataset()
    assert found.count_rows(filter=ds.field("d") == pa.scalar(Decimal(text), kind)) == 1


@pytest.mark.parametrize("kind", [pa.string(), pa.timestamp("us")], ids=str)
def test_a_commit_of_others_while_a_table_is_rewritten_is_not_overwritten(
    kind: pa.DataType, tmp_path: Path
) -> None:
    folder = DeltaFolder(tmp_path / "t", "lake", "public.t", "app")
    folder.create(table(("id", pa.int64()), ("c", kind)), [], 1)
    folder.committed()
    folder.data_files()
    theirs = pa.table({"id": [7], "c": pa.nulls(1, kind)})
    write_deltalake(str(tmp_path / "t"), theirs, mode="append")
    with pytest.raises(TailraceError) as refused:
        folder.reshape([], table(("id", pa.int64()), ("c", kind), ("d", kind)))
    assert refused.value.kind is Kind.SINK_WRITE_FAILED
    assert DeltaTable(str(tmp_path / "t")).to_pyarrow_table()["id"].to_pylist() == [7]


def test_the_columns_of_a_table_are_not_noted_again_because_of_a_users_comment(tmp_path: Path) -> None:
    folder = DeltaFolder(tmp_path / "t", "lake", "public.t", "app")
    schema = table(("id", pa.int64()), ("b", pa.string()))
    folder.create(schema, [], 1)
    DeltaTable(str(tmp_path / "t")).alter.set_column_metadata("b", {"comment": "theirs"})
    folder.committed()
    folder.note_columns(schema)
    later = table(("b", pa.string()), ("id", pa.int64()))
    assert [field.name for field in folder.unnoted(schema)] == []
    folder.note_columns(later)
    found = DeltaTable(str(tmp_path / "t"))
    assert found.version() == 3
    assert found.schema().fields[1].metadata == {"comment": "theirs", "tailrace.column": "1.0.25.-1"}


def test_an_error_of_delta_rs_is_reported_with_its_cause(tmp_path: Path, monkeypatch) -> None:
    folder = DeltaFolder(tmp_path / "t", "lake", "public.t", "app")
    folder.create(table(("id", pa.int64())), [], 1)
    # As delta-rs says it of a folder in which nothing may be made; for root there is none.
    said = (
        "Generic error\n    \x1b[31m↳\x1b[0m Unable to open file a b\n     \x1b[31m↳\x1b[0m Not permitted\n"
    )
    monkeypatch.setattr(DeltaTable, "create_write_transaction", lambda *_, **__: _raise(DeltaError(said)))
    folder.committed()
    with pytest.raises(TailraceError) as refused:
        folder.append([], 2)
    assert refused.value.message.endswith(": Generic error: Unable to open file a b: Not permitted")


def _raise(error: Exception) -> None:
    raise error


def test_properties_are_not_set_over_another_commit(tmp_path: Path) -> None:
    folder = DeltaFolder(tmp_path / "t", "lake", "public.t", "app")
    folder.create(table(("id", pa.int64())), [], 1)
    early = DeltaTable(str(tmp_path / "t"))
    DeltaTable(str(tmp_path / "t")).alter.set_table_description("theirs")
    with pytest.raises(CommitFailedError):
        _set_properties(early, tmp_path / "t", {STATISTICS: ""})
    found = DeltaTable(str(tmp_path / "t"))
    assert (found.version(), found.metadata().description) == (1, "theirs")
    assert not [*(tmp_path / "t" / "_delta_log").glob(".*")]


def test_commits_of_others_that_delta_has_removed_are_not_synced(tmp_path: Path, monkeypatch) -> None:
    synced: list[str] = []

    def sync_file(path: Path) -> None:
        path.stat()
        synced.append(path.name)

    monkeypatch.setattr(delta_folder, "sync_file", sync_file)
    path = tmp_path / "t"
    folder = DeltaFolder(path, "lake", "public.t", "app")
    folder.create(table(("id", pa.int64())), [], 1)
    folder.make_durable(0)
    for number in range(3):
        DeltaTable(str(path)).alter.set_table_description(f"theirs {number}")
    folder.append([], 2)
    DeltaTable(str(path)).create_checkpoint()
    for version in range(4):  # as Delta's retention does
        (path / "_delta_log" / f"{version:020d}.json").unlink()
    synced.clear()
    folder.make_durable(1)
    # The checkpoint as well: older versions are removed now.
    assert synced == [f"{4:020d}.checkpoint.parquet", "_last_checkpoint", f"{4:020d}.json"]
    synced.clear()
    folder.append([], 3)
    folder.make_durable(2)
    assert synced == [f"{5:020d}.json"]


def test_all_files_of_a_commit_are_synced(tmp_path: Path, monkeypatch) -> None:
    path, synced = tmp_path / "t", []
    monkeypatch.setattr(delta_folder, "sync_file", lambda file: synced.append(file.relative_to(path)))
    folder = DeltaFolder(path, "lake", "public.t", "app")
    folder.create(table(("id", pa.int64())), [], 1)
    DeltaTable(str(path)).alter.set_table_properties({"delta.enableDeletionVectors": "true"})
    folder.make_durable(1)
    (path / "deletion_vector_d2c639aa-8816-431a-aaf6-d3fe2512ff61.bin").touch()
    file = {"partitionValues": {}, "size": 1, "modificationTime": 1, "dataChange": True}
    vector = {"storageType": "u", "pathOrInlineDv": "ab^-aqEH.-t@S}K{vb[*k^", "offset": 4, "sizeInBytes": 40}
    actions = [
        {"add": {**file, "path": "a%20b.parquet", "deletionVector": {**vector, "cardinality": 6}}},
        {"cdc": {**file, "path": "_change_data/c.parquet", "dataChange": False}},
        {"txn": {"appId": "app", "version": 2}},
    ]
    commit = path / "_delta_log" / f"{2:020d}.json"
    commit.write_text("".join(f"{json.dumps(action)}\n" for action in actions))
    synced.clear()
    folder.make_durable(1)
    assert set(map(str, synced)) >= {
        "_change_data/c.parquet",
        f"_delta_log/{2:020d}.json",
        "a b.parquet",
        "deletion_vector_d2c639aa-8816-431a-aaf6-d3fe2512ff61.bin",
    }


@pytest.mark.parametrize("name", ["50%", "a\\b"])
def test_a_path_that_delta_rs_takes_for_another_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(TailraceError) as refused:
        require_path("lake", tmp_path / name)
    assert refused.value.kind is Kind.CONFIG_INVALID
