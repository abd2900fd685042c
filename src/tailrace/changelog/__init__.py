"""The durable change log: one writer, any number of readers in any process.

`format` describes the files, `writer` writes them, `reader` reads them.
"""
