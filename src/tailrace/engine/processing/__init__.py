"""Record processing: transformed and converted on a pool, delivered to a handler, then committed."""

from tailrace.engine.processing.flows import processor_for
from tailrace.engine.processing.handlers import Handler, Manual, manual, on_batch, on_record
from tailrace.engine.processing.terms import Order, Terms

__all__ = ["Handler", "Manual", "Order", "Terms", "manual", "on_batch", "on_record", "processor_for"]
