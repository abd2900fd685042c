"""The section `engine`."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from tailrace.config import EngineOptions, load_engine
from tailrace.errors import Kind, TailraceError
from tailrace.pipeline.run import Run


def test_defaults_are_as_documented():
    options = EngineOptions()
    assert (options.errors_retries_max, options.errors_retry_delay_initial_ms) == (-1, 300)
    assert (options.errors_retry_delay_max_ms, options.on_task_failure) == (10_000, "stop")
    processing = options.record_processing
    assert (processing.order, processing.shutdown_timeout_ms) == ("ordered", 1000)
    assert processing.thread_count >= 1
    commit = options.offset_commit
    assert (commit.policy, commit.interval_ms, commit.timeout_ms) == ("periodic", 60_000, 5000)
    assert options.offset_storage is None


def test_extensions_keep_the_options_of_their_type():
    options = EngineOptions.model_validate({"converter": {"type": "mine", "schemas": True}})
    assert options.converter is not None
    assert options.converter.options == {"schemas": True}


def test_options_of_included_converters_are_checked_with_the_file(tmp_path):
    file = tmp_path / "shop.yaml"
    text = "name: shop\nsource:\n  type: postgresql\n  dsn: postgresql://db/shop\nlog:\n  path: ./log\n"
    converter = "{type: avro, registry_url: 'https://r:1', registry_ca_file: roots.pem%s}"
    file.write_text(f"{text}engine: {{converter: {converter % ''}}}\n")
    found = load_engine(file).engine.converter
    assert found is not None
    assert found.options == {"registry_url": "https://r:1", "registry_ca_file": str(tmp_path / "roots.pem")}
    wrong = ", registry_pasword: canary, registry_token: canary"
    section = converter % wrong
    for place in (f"engine: {{converter: {section}}}",
                  f"sinks: [{{type: kafka, bootstrap_servers: k, converter: {section}}}]"):  # fmt: skip
        file.write_text(f"{text}{place}\n")
        with pytest.raises(TailraceError) as caught:
            load_engine(file)
        assert "registry_pasword: unknown key; did you mean 'registry_password'?" in caught.value.message
        assert "canary" not in str(caught.value)


def test_a_registry_without_an_address_is_refused():
    with pytest.raises(ValidationError, match="registry_url: must have at least 1 entries"):
        EngineOptions.model_validate({"converter": {"type": "avro", "registry_url": []}})


@pytest.mark.parametrize(
    ("section", "word"),
    [
        ({"errors_retry_delay_initial_ms": 20_000}, "errors_retry_delay_max_ms"),
        ({"offset_storage": {"type": "file"}}, "path"),
        ({"record_processing": {"threads": 0}}, "threads"),
        ({"errors_retries_max": -2}, "errors_retries_max"),
    ],
)
def test_invalid_values_are_refused(section, word):
    with pytest.raises(ValidationError, match=word):
        EngineOptions.model_validate(section)


def test_problems_of_the_section_in_a_file_are_reported(tmp_path):
    file = tmp_path / "shop.yaml"
    text = "name: shop\nsource:\n  type: postgresql\n  dsn: postgresql://db/shop\nlog:\n  path: ./log\n"
    file.write_text(text + "engine:\n  on_task_failure: restart\n  offset_storage: {type: file, path: o}\n")
    options = load_engine(file).engine
    assert options.on_task_failure == "restart"
    assert options.offset_storage is not None
    assert options.offset_storage.path == tmp_path / "o"
    file.write_text(text + "engine:\n  on_task_failure: sleep\n  retries: 3\n")
    with pytest.raises(TailraceError) as caught:
        load_engine(file)
    assert "engine.on_task_failure (line 8): must be one of" in caught.value.message
    assert "engine.retries (line 9): unknown key" in caught.value.message


def test_records_into_kafka_are_for_engines_and_not_for_tailrace_run(tmp_path):
    file = tmp_path / "shop.yaml"
    file.write_text(
        "name: shop\nsource: {host: a}\nlog: {path: ./log}\n"
        "engine: {atomic_source_offset_commit: true, kafka: {bootstrap_servers: 'k:1'}}\n"
    )
    found = load_engine(file)
    assert not found.is_atomic_for_nothing
    with pytest.raises(TailraceError, match="type: kafka") as caught:
        Run(found).run()
    assert caught.value.kind is Kind.CONFIG_INVALID
