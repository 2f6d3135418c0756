"""The parser of a command of the tests: its help is the docstring of its module."""

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")  # one line: the usage is in --help


def parser_for(prog: str, docstring: str | None) -> Parser:
    """Return a parser whose help begins with the first line of a docstring, and ends with the others."""
    first, _, others = (docstring or "").partition("\n")
    formatter = argparse.RawDescriptionHelpFormatter
    return Parser(prog=prog, description=first, epilog=others, formatter_class=formatter)
