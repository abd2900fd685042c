"""The data source `tailrace-join`: a data topic and the topic of its transactions as rows of Spark."""
