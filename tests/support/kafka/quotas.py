"""Quotas of a real broker: it accepts little from one client, and as much as ever from all others."""

from __future__ import annotations

import subprocess

from tailrace_servers.kafka import EmbeddedKafka


def limit(kafka: EmbeddedKafka, client_id: str, bytes_per_s: int) -> None:
    """Limit producers of the client `client_id` to so many bytes a second, after compression."""
    command = [
        *kafka._java(), "kafka.admin.ConfigCommand", "--bootstrap-server", kafka.bootstrap, "--alter",
        "--add-config", f"producer_byte_rate={bytes_per_s}", "--entity-type", "clients",
        "--entity-name", client_id,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
