"""Subscriptions: committed changes for other processes, by Server-Sent Events and WebSocket on loopback.

One thread follows the log and decodes each new part once (`feed`), for all subscriptions at the log's head
(`head`, pure). A subscription that is behind reads the log separately, in bounded parts on a thread pool
(`served_log`). `hub` combines the two, `app` implements HTTP, `server` listens.
"""
