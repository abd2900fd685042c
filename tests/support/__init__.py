"""What tests share: servers, proxies, logs, builders of wire messages, references, the fault harness."""
