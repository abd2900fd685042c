"""A mirror refuses changed masks, keys and forms of values, also if an earlier version recorded them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pydantic import TypeAdapter

from tailrace.changelog import durable
from tailrace.config.source.column_policy import ColumnPolicy
from tailrace.config.transformations.options import AnyTransformation
from tailrace.decode.postgres_types import OIDS
from tailrace.errors import Kind, TailraceError
from tailrace.model import ValueModes
from tailrace.sinks.delta.mirror.sink import DeltaMirror
from tailrace.sinks.delta.sink import DeltaSink
from tailrace.sinks.write_job import SinkInput
from tailrace.transforms.tables import NO_STEPS, TableChain, table_chain
from tests.support.sinks.rig import relation, write
from tests.support.spark.wire import INT8, TEXT, HandmadeLog, insert

#: The file of each part in earlier versions.
FORMER = {"masks": "masks.json", "key": "keys.json", "forms": "forms.json"}
BASE: dict[str, Any] = {
    "message_keys": {"public.t": ["id"], "public.u": ["id"]},
    "masks": [{"columns": ["public.t.secret"], "method": "fixed"}],
}
#: Settings that differ from those under which the mirror was made, and what the hint says to restore.
CHANGED: dict[str, tuple[dict[str, Any], str]] = {
    "masks": (
        {"rules": {"masks": [{"columns": ["public.t.secret"], "method": "null"}]}},
        "the mask and its salt",
    ),
    "key": ({"rules": {"message_keys": {"public.t": ["note"]}}}, "source.message_keys"),
    "forms": ({"modes": ValueModes(binary="hex")}, "the source's handling modes"),
}


def settings(lake: Path) -> dict[str, Any]:
    content = durable.decode_state((lake / "_tailrace" / "settings.json").read_bytes())
    assert content is not None
    return content


def as_an_earlier_version(lake: Path) -> None:
    """Lay out the recorded settings as earlier versions did: a file for each part."""
    content = settings(lake)
    for part, name in FORMER.items():
        kept = {oid: parts[part] for oid, parts in content.items() if part in parts}
        if kept:
            (lake / "_tailrace" / name).write_bytes(durable.encode_state(kept))
    (lake / "_tailrace" / "settings.json").unlink()


def sink(lake: Path, rules: dict[str, Any] | None = None, modes: ValueModes | None = None) -> DeltaSink:
    disclosure = ColumnPolicy.model_validate(BASE | (rules or {}))
    given = SinkInput(rules=disclosure, modes=modes or ValueModes(binary="base64"))
    return DeltaSink("lake", lake, DeltaMirror(), given)


@pytest.mark.parametrize("earlier", [False, True], ids=["now", "earlier"])
@pytest.mark.parametrize("part", CHANGED)
def test_other_settings_than_those_of_the_existing_rows_stop_a_mirror(
    part: str, earlier: bool, tmp_path: Path
) -> None:
    lake = tmp_path / "lake"
    shape = relation(
        1, "public.t", {"id": INT8, "note": TEXT, "secret": TEXT, "raw": OIDS["bytea"]}, key=(), identity="f"
    )
    with HandmadeLog(tmp_path / "log") as log:
        at = log.commit(shape, insert(1, 1, "one", "s", "\\x01"))
        made = sink(lake)
        made.open(log.directory.identity, "shop")
        write(made, log, 0, at)
        made.close()
        assert set(settings(lake)["1"]) == {"masks", "key", "forms", "since"}
        if earlier:
            as_an_earlier_version(lake)
        end = log.commit(insert(1, 2, "two", "s", "\\x02"))
        given, restored = CHANGED[part]
        other = sink(lake, **given)
        other.open(log.directory.identity, "shop")
        with pytest.raises(TailraceError) as raised:
            write(other, log, at, end)
        other.close()
        assert raised.value.kind is Kind.SINK_SCHEMA_REFUSED
        assert restored in raised.value.hint
        # With the old settings restored the mirror goes on, and records new tables.
        again = log.commit(relation(2, "public.u", {"id": INT8}, key=(), identity="f"), insert(2, 1))
        made.open(log.directory.identity, "shop")
        write(made, log, at, again)
        made.close()
        assert set(settings(lake)) == {"1", "2"}


#: Types of keys, with a mode under which different values are equal in typed columns, and such values.
ROUNDED = [
    ("numeric", 20 << 16 | 4, {"decimal": "double"}, ("9007199254740992", "9007199254740993")),
    ("numeric", -1, {"decimal": "double"}, ("0.1", "0.10000000000000000001")),
    ("_numeric", -1, {"decimal": "double"}, ("{0.1}", "{0.10000000000000000001}")),
    ("money", -1, {"decimal": "double"}, ("$92,233,720,368,547,758.06", "$92,233,720,368,547,758.07")),
    ("time", -1, {"time": "connect"}, ("00:00:00.000001", "00:00:00.000002")),
    ("timetz", -1, {"time": "isostring"}, ("12:00:00+02", "10:00:00+00")),
    ("interval", -1, {"interval": "numeric"}, ("1 mon", "30 days 10:30:00")),
]
EXACT = [
    ("numeric", (15 << 16 | 2) + 4, {"decimal": "double"}, ("9999999999999.98", "9999999999999.99")),
    ("numeric", -1, {"decimal": "precise"}, ("0.1", "0.10000000000000000001")),
    ("time", -1, {"time": "adaptive"}, ("00:00:00.000001", "00:00:00.000002")),
    ("time", 3, {"time": "connect"}, ("00:00:00.001", "00:00:00.002")),
    ("interval", -1, {"interval": "string"}, ("1 mon", "30 days 10:30:00")),
]


@pytest.mark.parametrize(("name", "modifier", "modes", "texts"), [*ROUNDED, *EXACT])
def test_no_two_rows_of_a_mirror_become_one_by_a_handling_mode(
    name: str, modifier: int, modes: dict[str, Any], texts: tuple[str, str], tmp_path: Path
) -> None:
    with HandmadeLog(tmp_path / "log") as log:
        shape = relation(1, "public.t", {"id": (OIDS[name], modifier)})
        end = log.commit(shape, *(insert(1, text) for text in texts))

        def mirror(folder: str, steps: TableChain = NO_STEPS) -> int:
            made = DeltaSink(
                "lake", tmp_path / folder, DeltaMirror(), SinkInput(modes=ValueModes(**modes), chain=steps)
            )
            made.open(log.directory.identity, "shop")
            write(made, log, 0, end)
            return len(DeltaTable(tmp_path / folder / "public.t").to_pyarrow_table())

        if (name, modifier, modes, texts) in ROUNDED:
            with pytest.raises(TailraceError, match=r"rounds its key column 'id'") as raised:
                mirror("lake")
            assert raised.value.kind is Kind.SINK_SCHEMA_REFUSED
            # as the hint says
            steps = TypeAdapter(list[AnyTransformation]).validate_python(
                [{"type": "cast", "fields": {"id": "text"}}]
            )
            assert mirror("other", table_chain(steps, {}, keeps_keys=True)) == 2
        else:
            assert mirror("lake") == 2
