"""Which failure an error of somebody else's is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tailrace.config import PipelineConfig
from tailrace.errors import Kind, Policy
from tailrace.pipeline.background import as_failure
from tailrace.pipeline.spark_host import SparkHost


def met(function: Any) -> BaseException:
    with pytest.raises(AttributeError) as caught:
        function()
    return caught.value


def code_in(module: str) -> Any:
    """Return a function of a module that takes a context for alive which is not."""
    place: dict[str, Any] = {"__name__": module}
    exec("def parallelize():\n    return jsc.sc()\njsc = None", place)  # noqa: S102 - written here
    return place["parallelize"]


def test_a_spark_that_is_gone_under_its_user_is_tried_again_and_a_slip_of_ours_is_not() -> None:
    found = as_failure(met(code_in("pyspark.core.context")))
    assert (found.kind, found.policy) == (Kind.SPARK_FAILED, Policy.RETRY)
    assert as_failure(met(code_in("tailrace.sinks.kafka.sink"))).kind is Kind.INTERNAL
    assert as_failure(AttributeError("raised nowhere")).kind is Kind.INTERNAL


def test_jobs_of_a_spark_that_is_gone_need_no_cancelling() -> None:
    config: PipelineConfig = SimpleNamespace(name="shop", spark=None)  # type: ignore[assignment]
    host = SparkHost(config)
    host.cancel_jobs(["one"])
    gone = code_in("pyspark.core.context")
    host._session = SimpleNamespace(  # type: ignore[assignment]
        sparkContext=SimpleNamespace(cancelJobsWithTag=lambda _: gone())
    )
    host.cancel_jobs(["one"])
