"""Record processing: transformed and converted on a pool, delivered to a handler, then committed."""

from tailrace.engine.processing.flows import Order, processor_for
from tailrace.engine.processing.handlers import Handler, Manual, manual, on_batch, on_record

__all__ = ["Handler", "Manual", "Order", "manual", "on_batch", "on_record", "processor_for"]
