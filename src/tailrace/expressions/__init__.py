"""SQL expressions over columns, parsed and computed by DuckDB: one call for a batch of rows.

`language` checks what DuckDB's parser makes of a text against a list of what an expression may hold. `sql`
writes SQL from that alone, so an expression computes values and can do nothing else. `database` runs it in
memory, without tables, files, network and extensions. Errors name a place in the text, never a row's value.
"""
