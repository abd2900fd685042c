"""SQL expressions over columns, parsed and computed by DuckDB, with one call for a batch of rows.

`language` checks the tree of DuckDB's parser against a list of allowed nodes. `sql` writes SQL from the
checked tree only, so that an expression can do nothing but compute values. `database` runs it in memory,
without tables, files, network and extensions. Errors name a place in the text, never a row's value.
"""
