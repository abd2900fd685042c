"""Work that goes to an executor, and what comes back: the side of the executors.

A function is pickled once for a life of a task, and unpickled once in each Python worker: what it keeps
(a connection, say) is there for the next call. What it raises is an outcome like others, so that Spark
does not try again what is ours to decide about.
"""

from __future__ import annotations

import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pyspark.serializers import CPickleSerializer

from tailrace.engine.failures import named, raised_elsewhere
from tailrace.errors import Kind, TailraceError

#: Of Spark's own connections between processes; nothing of it is kept.
wire: Any = CPickleSerializer()

#: Functions that a Python worker keeps.
_KEPT_MAX = 16

_kept: OrderedDict[str, Callable[[Any], Any]] = OrderedDict()


@dataclass(frozen=True, slots=True)
class ExecutorCall:
    """A function with a name of its own, as executors get it.

    :param name: no other function of any life has it.
    :param pickled: the function, of one argument.
    """

    name: str
    pickled: bytes

    def __call__(self, loads: Iterable[bytes]) -> Iterator[bytes]:
        """Call the function with each of `loads`; yield whether it returned, and what or why not."""
        for load in loads:
            try:
                outcome = (True, self._function()(wire.loads(load)))
                carried = wire.dumps(outcome)
            except BaseException as error:  # noqa: BLE001 - what it means is decided on the driver
                carried = wire.dumps((False, portable(error)))
            yield carried

    def _function(self) -> Callable[[Any], Any]:
        found = _kept.get(self.name)
        if found is None:
            found = _kept[self.name] = wire.loads(self.pickled)
            while len(_kept) > _KEPT_MAX:
                _kept.popitem(last=False)
        return found


def portable(error: BaseException) -> BaseException:
    """Return `error` as it can be carried to the driver, with where it was raised."""
    place = named(error)
    frames = "".join(traceback.format_tb(error.__traceback__))
    try:
        raised_elsewhere(error, place)
        error.add_note(f"raised on an executor:\n{frames}")
        found = wire.loads(wire.dumps(error))
        assert isinstance(found, type(error))
    except Exception:  # noqa: BLE001 - whatever its pickling does
        return TailraceError(
            Kind.TASK_FAILED,
            f"run on an executor: {place}, an error that can't be pickled",
            "let what handlers and transformations raise be picklable, so that it can be told whole",
        )
    return found
