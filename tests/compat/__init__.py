"""The test suite with other releases of Python and torch: `make compat`. See __main__.py."""
