"""Have Java keep Spark's classes ready for the tests, in an archive of shared class data.

Tests start Spark often. With the archive a start takes 2.6 s of CPU instead of 5.7, and what comes first, a
table and a MERGE, 10 instead of 14. Where Java makes none, or finds that it does not fit (another class
path, another Java), it loads classes as always.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

#: Writing the archive takes Java some 20 s.
TIMEOUT_S = 300
#: Says what does not fit, on the standard output.
QUIET = "-Xlog:disable -Xlog:all=error:stderr"


def work(path: Path) -> None:
    """Start Spark, use what pipelines use of it, and end it."""
    from pyspark import SparkContext

    from tailrace.config import SparkConfig
    from tailrace.spark.session import session

    spark = session(SparkConfig(master="local[2]", conf={"spark.sql.warehouse.dir": str(path)}))
    spark.sparkContext.parallelize([1, 2], 2).mapPartitions(list).collect()
    table = str(path / "table")
    spark.range(100).write.format("delta").save(table)
    spark.range(50, 150).createOrReplaceTempView("changes")
    spark.sql(
        f"merge into delta.`{table}` t using changes c on t.id = c.id "
        "when matched then update set * when not matched then insert *"
    ).collect()
    frame = spark.read.format("delta").load(table)
    frame.groupBy().count().collect()
    frame.toArrow()
    frame.write.parquet(str(path / "files"))
    java = SparkContext._gateway.proc  # type: ignore[union-attr]  # noqa: SLF001 - no public way to it
    spark.stop()
    java.stdin.close()  # it ends, and writes the archive
    java.wait(TIMEOUT_S)


def main() -> None:
    """Write the archive to where the argument says."""
    wanted = Path(sys.argv[1]).resolve()
    wanted.parent.mkdir(parents=True, exist_ok=True)
    wanted.unlink(missing_ok=True)
    # As tests/conftest.py has Spark started.
    os.environ["SPARK_SUBMIT_OPTS"] = f"-XX:TieredStopAtLevel=1 -XX:ArchiveClassesAtExit={wanted} {QUIET}"
    with tempfile.TemporaryDirectory() as path:
        work(Path(path))
    print(
        f"{wanted.name}: {'ready' if wanted.exists() else 'Java has made none; tests start Spark without it'}"
    )


if __name__ == "__main__":
    main()
