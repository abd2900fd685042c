"""Record processing: transformed and converted on a pool, delivered to a handler, then committed."""

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
