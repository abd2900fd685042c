"""Change data capture for Python and Spark.

The public names are imported when they are first used, so that `import tailrace` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tailrace.engine.contracts import Callbacks, RetriableError, StopEngine
    from tailrace.engine.engine import Engine
    from tailrace.errors import TailraceError

#: The only place that says it: package, command line and `source.version` of events take it from here.
__version__ = "0.1.0"

__all__ = ["Callbacks", "Engine", "RetriableError", "StopEngine", "TailraceError", "__version__"]

_PLACES = {
    "Callbacks": "tailrace.engine.contracts",
    "Engine": "tailrace.engine.engine",
    "RetriableError": "tailrace.engine.contracts",
    "StopEngine": "tailrace.engine.contracts",
    "TailraceError": "tailrace.errors",
}


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        found = getattr(importlib.import_module(_PLACES[name]), name)
        globals()[name] = found
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
