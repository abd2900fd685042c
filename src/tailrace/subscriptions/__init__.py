"""Subscriptions: committed changes for other processes, by Server-Sent Events and WebSocket on loopback.

One thread follows the log and decodes each new part once (`feed`), for all who are at the log's head
(`head`, pure). Who is behind reads the log by itself, in bounded parts on a pool of threads (`served_log`).
`hub` brings the two together, `app` speaks HTTP, `server` listens.
"""
