"""A Spark job on complete transactions, from the topics that Debezium or Tailrace's Kafka sink writes.

    python whole_transactions.py BOOTSTRAP DATA,DATA TRANSACTIONS CHECKPOINT OUT

A micro-batch never has a part of a transaction, so a plain groupBy gets each transaction completely: without
state or waiting. Each line of the files in OUT is a transaction. If it is killed and run again, it writes the
same micro-batch again, over the files of the first time.
"""

import sys

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f


def main(bootstrap: str, data: str, transactions: str, checkpoint: str, out: str) -> None:
    """Write a line for each transaction in the topics, and stop."""
    spark = SparkSession.builder.master("local[2]").appName("whole-transactions").getOrCreate()
    spark.conf.set("spark.sql.shuffle.partitions", "2")
    changes = (
        spark.readStream.format("tailrace-join")
        .option("bootstrapServers", bootstrap)
        .option("data", data)
        .option("transactions", transactions)
        .option("maxTransactionOffsetsPerTrigger", 10_000)
        .load()
    )

    def write(batch: DataFrame, number: int) -> None:
        whole = (
            batch.where("transaction_id is not null")
            .groupBy("transaction_id", "transaction_timestamp", "transaction_event_count")
            .agg(f.count("*").alias("changes"), f.array_sort(f.collect_set("topic")).alias("topics"))
        )
        whole.write.mode("overwrite").json(f"{out}/batch={number}")

    query = (
        changes.writeStream.foreachBatch(write)
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
