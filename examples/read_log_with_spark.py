"""A Spark job that reads a change log, first as a batch and then as a stream.

    python read_log_with_spark.py LOG TABLE        TABLE as in public.account

Any Spark 4.2 session will do: PySpark finds the format by itself where Tailrace is installed.
The stream stops at the log's present end; without `availableNow` it would go on for ever.
"""

import sys

from pyspark.sql import SparkSession
from pyspark.sql import functions as f


def main(log: str, table: str) -> None:
    """Print what a log contains, and how one of its tables changed."""
    spark = SparkSession.builder.master("local[2]").appName("read-log").getOrCreate()
    spark.conf.set("spark.sql.shuffle.partitions", "2")

    # Every change of every table, as text: which tables change how often?
    changes = spark.read.format("tailrace").option("path", log).load()
    changes.groupBy("table", "op").count().orderBy("table", "op").show()

    # One table with its own columns and types, as a stream: batches end between transactions.
    rows = (
        spark.readStream.format("tailrace")
        .option("path", log)
        .option("table", table)
        .option("maxRowsPerTrigger", 10_000)
        .load()
    )
    query = (
        rows.groupBy("_op")
        .agg(f.count("*").alias("changes"), f.max("_commit_ts").alias("newest"))
        .writeStream.outputMode("complete")
        .format("console")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
