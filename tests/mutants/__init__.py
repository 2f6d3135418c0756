"""Mutants: which changes of a line does no test notice? `make mutants`, or `python -m mutants --help`.

`mutations` finds the changes; `recording` which tests run a line; `trials` runs tests against a change; `table` is
what is written at the end; `command` is the command. Tests run in copies of the tree (`workers`), forked by a `server`.
"""
