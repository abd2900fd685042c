"""Creates an archive of class data sharing with the classes of Spark or Kafka, for the tests.

    python scripts/make_class_archive.py spark|kafka

Tests start both often. With the archive a start of Spark takes 2.6 s of CPU instead of 5.7, and the first
table and MERGE 10 s instead of 14; a new broker starts with 2.3 s instead of 4.2. If Java can't create the
archive, or it does not match (another class path, another Java), Java loads classes as usual.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: Timeout of writing Spark's archive, in seconds; it takes about 20 s.
TIMEOUT_S = 300
#: Writes Java's messages about an archive that does not match to standard error, not to standard output.
QUIET = "-Xlog:disable -Xlog:all=error:stderr"


def spark() -> Path:
    """Start Spark, use the parts that pipelines use, and stop it; return the archive's path."""
    archive = _removed(ROOT / ".cache" / "spark.jsa")
    # With the options of tests/conftest.py.
    os.environ["SPARK_SUBMIT_OPTS"] = f"-XX:TieredStopAtLevel=1 -XX:ArchiveClassesAtExit={archive} {QUIET}"
    with tempfile.TemporaryDirectory() as path:
        _use_spark(Path(path))
    return archive


def kafka() -> Path:
    """Start a broker, use a transaction, and stop it; return the archive's path."""
    from confluent_kafka import Producer

    from tailrace_servers.kafka import QUICK_JVM, EmbeddedKafka, class_archive, find_jars

    archive = _removed(class_archive(find_jars()))
    written = archive.with_suffix(".written")  # the tool that formats the storage writes one first
    settings = {"auto.create.topics.enable": "true"}
    jvm = (*QUICK_JVM, f"-XX:ArchiveClassesAtExit={written}")
    with EmbeddedKafka(find_jars(), settings=settings, jvm=jvm) as cluster:
        options = {"bootstrap.servers": cluster.bootstrap, "transactional.id": "one", "log_level": 0}
        producer = Producer(options)
        producer.init_transactions()
        producer.begin_transaction()
        producer.produce("rows", b"one")
        producer.commit_transaction()
        cluster.stop_node(1)  # Java ends, and writes the archive
    if written.exists():
        written.rename(archive)
    return archive


def _removed(archive: Path) -> Path:
    archive.parent.mkdir(parents=True, exist_ok=True)
    archive.unlink(missing_ok=True)
    return archive


def _use_spark(path: Path) -> None:
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
    """Write the archive that the first argument names."""
    name = sys.argv[1]
    archive = {"spark": spark, "kafka": kafka}[name]()
    print(f"{archive.name}: {'ready' if archive.exists() else f'not created; tests start {name} without it'}")


if __name__ == "__main__":
    main()
