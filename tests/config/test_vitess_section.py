"""The section `source` of the type vitess: valid settings, refused ones, and their effects."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from tailrace.config import load
from tailrace.config.patterns import table_expression
from tailrace.config.source.vitess import VitessSource

GIVEN = {"hosts": ["127.0.0.1:15991"], "keyspace": "shop"}


def _source(**settings: object) -> VitessSource:
    return VitessSource.model_validate({**GIVEN, **settings})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"hosts": []}, "hosts"),
        ({"hosts": ["vtgate.example.org"]}, "must be host:port"),
        ({"hosts": ["vtgate.example.org:0"]}, "must be host:port"),
        ({"hosts": ["https://vtgate:15991"]}, "must be host:port"),
        ({"keyspace": "a.b"}, "must be the name of a keyspace"),
        ({"user": "me"}, "user and password belong together"),
        ({"user": "me", "password": "plain"}, "must be a reference"),
        ({"tls_key": "/k.pem"}, "tls_certificate and tls_key belong together"),
        ({"tls": "disable", "tls_ca": "/ca.pem"}, "take one of them out"),
        ({"tablet_type": "master"}, "primary"),
        ({"receive_timeout_s": 5}, "must be larger than heartbeat_interval_s"),
    ],
)
def test_wrong_settings_are_reported(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        _source(**settings)


def test_plain_text_is_used_only_on_this_machine_unless_configured() -> None:
    assert not _source().uses_tls
    assert not _source(hosts=["localhost:1", "[::1]:2"]).uses_tls
    assert _source(hosts=["localhost:1", "vtgate.example.org:2"]).uses_tls
    assert not _source(hosts=["vtgate.example.org:2"], tls="disable").uses_tls
    assert _source(tls="verify-full").uses_tls
    assert _source(tls_ca="/ca.pem").uses_tls


def test_tables_are_given_with_their_keyspace() -> None:
    source = _source(tables=["shop.order*", "/shop\\.a|shop\\.b/"], tables_exclude=["shop.orders_old"])
    captured = [name for name in ("orders", "orders_old", "a", "c") if source.captures(source.keyspace, name)]
    assert captured == ["orders", "a"]


def test_a_pattern_becomes_a_pattern_of_the_server_if_possible() -> None:
    assert table_expression("shop.order*", "shop") == "^order.*$"
    assert table_expression("*.*", "shop") == "^.*$"
    assert table_expression('shop."a.b"', "shop") == "^a\\.b$"
    assert table_expression("other.orders", "shop") == ""
    assert table_expression("/shop\\.a/", "shop") is None


def test_a_pipeline_file_may_have_the_section(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.yaml"
    file.write_text(
        "name: shop\n"
        "source: {type: vitess, hosts: ['127.0.0.1:15991'], keyspace: shop, tables: [shop.orders]}\n"
        "log: {path: ./log}\n"
        "sinks:\n  - {type: jsonl, path: ./lines}\n"
    )
    source = load(file).source
    assert isinstance(source, VitessSource)
    assert source.address == "127.0.0.1:15991/shop"
    assert source.partition == {"keyspace": "shop"}
