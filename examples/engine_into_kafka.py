"""A custom source into Kafka, each record once: python engine_into_kafka.py FOLDER BOOTSTRAP TASKS

Each text file of a folder is a partition, each of its lines a record. Records and the line reached are
committed in one transaction: kill it at any time, start it again with any number of tasks, and a consumer
with isolation.level=read_committed sees each line once.
"""

import sys
from pathlib import Path

import tailrace
from tailrace.records.batch import Batch
from tailrace.records.making import SourceRecord


class Files:
    """A connector whose tasks share the files."""

    def start(self, context):
        self.paths = sorted(map(str, Path(context.settings["folder"]).glob("*.txt")))

    def task_settings(self, tasks_max):
        return [{"paths": self.paths[n::tasks_max]} for n in range(min(tasks_max, len(self.paths)))]

    def create_task(self):
        return FilesTask()

    def stop(self):
        pass


class FilesTask:
    """Reads some of the files, each from the line of its offset."""

    def start(self, context):
        self.context = context
        self.paths = [Path(path) for path in context.settings["paths"]]
        found = context.offsets.read([{"file": path.name} for path in self.paths])
        self.done = [found.get(number, {"line": 0})["line"] for number in range(len(self.paths))]

    def poll(self, timeout_s):
        for number, path in enumerate(self.paths):
            first = self.done[number]
            lines = path.read_text().splitlines()[first : first + 1000]
            if lines:
                self.done[number] += len(lines)
                records = [
                    SourceRecord(
                        topic="lines", key=path.name, value={"text": text}, offset={"line": first + place + 1}
                    )
                    for place, text in enumerate(lines)
                ]
                return Batch.of_records(records, {"file": path.name})
        self.context.finish()
        return None

    def commit(self, partition, offset):
        print(partition["file"], offset["line"], flush=True)

    def stop(self):
        pass


if __name__ == "__main__":
    folder, bootstrap, tasks = sys.argv[1:]
    tailrace.Engine(
        connector=Files,
        settings={"folder": folder},
        tasks_max=int(tasks),
        name="lines",
        options={"kafka": {"bootstrap_servers": bootstrap}, "atomic_source_offset_commit": True},
    ).run()
