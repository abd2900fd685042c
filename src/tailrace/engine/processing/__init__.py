"""Record processing: transforms and converts records on a pool, delivers them to a handler, commits them."""

from tailrace.engine.processing.context import Order, ProcessingConfig
from tailrace.engine.processing.handlers import Handler, Manual, manual, on_batch, on_record
from tailrace.engine.processing.processors import processor_for

__all__ = [
    "Handler",
    "Manual",
    "Order",
    "ProcessingConfig",
    "manual",
    "on_batch",
    "on_record",
    "processor_for",
]
