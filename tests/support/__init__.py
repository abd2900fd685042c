"""What tests share: servers, proxies, logs, builders of wire messages, reference models, fault injection."""
