"""The durable change log: one writer, any number of readers in any process.

Read `format` for what is on disk, `writer` for how it comes there, `reader` for how it is read.
"""
