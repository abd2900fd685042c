"""Runs the preflight of a pipeline's file."""

from __future__ import annotations

from tailrace.pipeline.preflight.preflight import preflight
from tailrace.sources.findings import Severity


def pipeline_file(directory, server, database, *, user="postgres", source="", sinks=""):
    file = directory / "pipeline.yaml"
    file.write_text(
        f"name: {database}\n"
        f"source:\n  host: 127.0.0.1\n  port: {server.port}\n  user: {user}\n  dbname: {database}\n{source}"
        f"log: {{path: ./log}}\n"
        f"sinks: [{sinks}]\n"
    )
    return file


def found(file):
    return {(finding.kind, finding.table): finding for finding in preflight(file)}


def errors(file):
    return [finding for finding in preflight(file) if finding.severity is Severity.ERROR]
