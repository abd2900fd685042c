"""Creates an archive of class data sharing with Spark's classes, for the tests.

Tests start Spark often. With the archive a start takes 2.6 s of CPU instead of 5.7, and the first table and
MERGE 10 s instead of 14. If Java can't create the archive, or it does not match (another class path, another
Java), Java loads classes as usual.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

#: Timeout of writing the archive, in seconds; it takes about 20 s.
TIMEOUT_S = 300
#: Writes Java's messages about an archive that does not match to standard error, not to standard output.
QUIET = "-Xlog:disable -Xlog:all=error:stderr"


def work(path: Path) -> None:
    """Start Spark, use the parts that pipelines use, and stop it."""
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
    java.stdin.close()  # Java ends, and writes the archive
    java.wait(TIMEOUT_S)


def main() -> None:
    """Write the archive to the path in the first argument."""
    wanted = Path(sys.argv[1]).resolve()
    wanted.parent.mkdir(parents=True, exist_ok=True)
    wanted.unlink(missing_ok=True)
    # With the options of tests/conftest.py.
    os.environ["SPARK_SUBMIT_OPTS"] = f"-XX:TieredStopAtLevel=1 -XX:ArchiveClassesAtExit={wanted} {QUIET}"
    with tempfile.TemporaryDirectory() as path:
        work(Path(path))
    print(f"{wanted.name}: {'ready' if wanted.exists() else 'not created; tests start Spark without it'}")


if __name__ == "__main__":
    main()
