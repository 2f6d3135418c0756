"""Random programs, each run with the plain module and with the wrapped one: `make fuzz`, or `python -m fuzz --help`.

`program` says what a program is, and draws one; `blocks` and `model` are what its module is made of, `actions` what it
does; `compare` runs it twice and compares; `shrink` makes it smaller while the difference stays; `servers` are the
processes in which programs run, one after the other.
"""
