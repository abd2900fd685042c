"""Transformations, which change records before they are converted, and predicates, which choose records."""

from tailrace.records.group import Group
from tailrace.records.record import Record
from tailrace.transforms.chain import Chain
from tailrace.transforms.contract import Predicate, RecordTransformation, Transformation
from tailrace.transforms.factory import build

__all__ = ["Chain", "Group", "Predicate", "Record", "RecordTransformation", "Transformation", "build"]
