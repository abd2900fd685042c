"""A connection to a real vtgate: queries, hosts tried in turn, and errors."""

from __future__ import annotations

import pytest

from tailrace.config.source.vitess import VitessSource
from tailrace.errors import Kind, TailraceError
from tailrace.sources.vitess.connection.vtgate import Vtgate
from tailrace_servers.ports import free_port
from tailrace_servers.vitess import EmbeddedVitess

pytestmark = [pytest.mark.vitess, pytest.mark.ci]


def _source(cluster: EmbeddedVitess, **settings: object) -> VitessSource:
    given = {"hosts": [cluster.address], "keyspace": cluster.keyspace, **settings}
    return VitessSource.model_validate(given)


def test_a_query_returns_rows_as_text(vitess: EmbeddedVitess, orders: str) -> None:
    vitess.execute(f"insert into {orders} (id, what) values (1, 'Ñ'), (2, null)")
    vtgate = Vtgate.connect(_source(vitess))
    try:
        found = vtgate.query(f"select id, what from {orders} order by id", "read rows")
        assert found == [("1", "Ñ"), ("2", None)]
        shard = vtgate.query("select @@global.gtid_executed", "ask a shard", f"{vitess.keyspace}:-80@primary")
        assert len(shard) == 1
    finally:
        vtgate.close()


def test_the_next_host_is_used_when_one_does_not_answer(vitess: EmbeddedVitess) -> None:
    hosts = [f"127.0.0.1:{free_port()}", vitess.address]
    vtgate = Vtgate.connect(_source(vitess, hosts=hosts, connect_timeout=1))
    assert vtgate.address == vitess.address
    vtgate.close()


def test_hosts_that_do_not_answer_are_reported(vitess: EmbeddedVitess) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    with pytest.raises(TailraceError, match=nobody) as refused:
        Vtgate.connect(_source(vitess, hosts=[nobody], connect_timeout=1))
    assert refused.value.kind is Kind.SOURCE_UNREACHABLE


def test_an_unknown_keyspace_is_reported(vitess: EmbeddedVitess) -> None:
    vtgate = Vtgate.connect(_source(vitess, keyspace="nowhere"))
    with pytest.raises(TailraceError) as refused:
        vtgate.query("show tables", "list the tables")
    assert refused.value.kind is Kind.SOURCE_MISCONFIGURED, refused.value
    vtgate.close()
