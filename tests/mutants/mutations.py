"""Which changes of a line are tried: found in the syntax tree, made in the text, so that other lines stay as they are.

Not changed are annotations, decorators, docstrings, assertions, texts of messages, and what only type checkers read.
"""

import ast
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: (r"\bis\b", "is not"),
    ast.IsNot: (r"\bis\s+not\b", "is"),
    ast.In: (r"\bin\b", "not in"),
    ast.NotIn: (r"\bnot\s+in\b", "in"),
}
_BOOLEAN: dict[type[ast.boolop], tuple[str, str]] = {ast.And: (r"\band\b", "or"), ast.Or: (r"\bor\b", "and")}
_ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: (r"\+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: (r"\*", "+"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.BitAnd: ("&", "|"),
}
_NO_CONTEXT = '__import__("contextlib").nullcontext()'
_FOR_TYPES = {"cast", "TypeVar", "NewType"}
_MESSAGES = {"warn", "debug", "info", "warning", "error", "exception"}  # what they are given is text for people


class Mutant(NamedTuple):
    """A change of one place of a file.

    Attributes:
        path: of the file, from the root.
        line: where the change begins.
        lines: those whose tests may notice it: of its statement, or of its head if it is a compound one. What only
            imports run is noticed where its name is used, and a default where its function is run.
        kind: what is done, such as "a call is left out".
        before, after: the text there.
        start: where that text begins, in bytes from the beginning of the file.
    """

    path: str
    line: int
    lines: tuple[int, ...]
    kind: str
    before: str
    after: str
    start: int

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.after.encode() + source[self.start + len(self.before.encode()) :]

    def __str__(self) -> str:
        before, after = (_short(" ".join(text.split())) for text in (self.before, self.after))
        change = "" if after in {"", "pass", "None", _NO_CONTEXT} else f" -> `{after}`"
        return f"{self.path}:{self.line}: {self.kind}: `{before}`{change}"


def mutants_of(path: str, source: bytes) -> list[Mutant]:
    """Return the mutants of a file. Of some the text may be no program, or the same one: see `differs`."""
    return list(_Finder(path, source).found_in(ast.parse(source)))


def differs(mutant: Mutant, source: bytes) -> bool:
    """Return whether a mutant is a program, and another one than the source."""
    try:
        return ast.dump(ast.parse(mutant.applied(source))) != ast.dump(ast.parse(source))
    except SyntaxError:  # such as an expression whose parentheses are not its own
        return False


class _Finder:
    def __init__(self, path: str, source: bytes) -> None:
        self._path, self._source = path, source
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._lines = tuple[int, ...]()  # of the statement that is looked at
        self._in_function = False

    def found_in(self, node: ast.AST) -> Iterator[Mutant]:
        """Yield the mutants of a node and of what is below it."""
        if isinstance(node, ast.stmt):
            self._lines = _head_of(node) if self._in_function else self._uses_of(node)
        match node:
            case ast.arg() | ast.JoinedStr() | ast.Assert() | ast.Import() | ast.ImportFrom():
                return
            case ast.Raise():
                yield self._statement("a raise is left out", node)
                return  # what is below is the text of a message
            case ast.If(test=test, orelse=orelse) if "TYPE_CHECKING" in self._text(test):
                yield from self._found_in_all(orelse)
                return
            case ast.FunctionDef(args=arguments, body=body):
                self._lines = tuple(range(body[0].lineno, (node.end_lineno or 0) + 1))
                yield from self._found_in_all([*arguments.defaults, *filter(None, arguments.kw_defaults)])
                outside, self._in_function = self._in_function, True
                yield from self._found_in_all(body)
                self._in_function = outside
                return
            case ast.ClassDef(body=body):
                yield from self._found_in_all(body)
                return
            case ast.AnnAssign(target=target, value=value):
                if isinstance(target, ast.Attribute | ast.Subscript) and value is not None:
                    yield self._statement("an assignment is left out", node)
                yield from self._found_in_all([value] if value is not None else [])
                return
            case ast.Call(func=ast.Name(id=name)) if name in _FOR_TYPES:
                return
        yield from self._of(node)
        if isinstance(node, ast.Call) and _name_of(node.func) in _MESSAGES:
            return
        yield from self._found_in_all(ast.iter_child_nodes(node))

    def _found_in_all(self, nodes: Iterable[ast.AST]) -> Iterator[Mutant]:
        lines = self._lines
        for node in nodes:
            yield from self.found_in(node)
            self._lines = lines

    def _uses_of(self, node: ast.stmt) -> tuple[int, ...]:
        """Return the lines that use what a statement of a module or a class gives a name; all, if there are none."""
        names = [each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)]
        lines = self._source.decode().splitlines()
        head = _head_of(node)
        uses = [
            number
            for number, line in enumerate(lines, 1)
            if number not in head and any(re.search(rf"\b{name}\b", line) for name in names)
        ]
        return tuple(uses or range(1, len(lines) + 1))

    def _of(self, node: ast.AST) -> Iterator[Mutant]:
        match node:
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                yield from self._turned(test)
            case ast.comprehension(ifs=tests):
                for test in tests:
                    yield from self._turned(test)
            case ast.Compare(left=left, ops=[operator], comparators=[right]):
                yield from self._between(left, right, _COMPARISONS[type(operator)], "another comparison")
            case ast.BoolOp(op=operator, values=values):
                for left, right in itertools.pairwise(values):
                    yield from self._between(left, right, _BOOLEAN[type(operator)], "another operator")
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _ARITHMETIC:
                if not any(isinstance(each, ast.JoinedStr) or _is_text(each) for each in (left, right)):
                    yield from self._between(left, right, _ARITHMETIC[type(operator)], "another operator")
            case ast.Constant(value=bool(value)):
                yield self._replaced("another constant", node, str(not value))
            case ast.Constant(value=int(value)):
                yield self._replaced("another constant", node, str(value + 1))
            case ast.Constant(value=float(value)):
                yield self._replaced("another constant", node, str(2 * value + 1))
            case ast.Slice(lower=lower, upper=upper):
                for bound in (lower, upper):
                    if bound is not None and not isinstance(bound, ast.Constant):
                        yield self._replaced("a bound is moved", bound, f"({self._text(bound)}) + 1")
            case ast.Return(value=ast.expr() as value) if not _is_none(value):
                yield self._replaced("None is returned", value, "None")
            case ast.Break():
                yield self._replaced("continue for break", node, "continue")
            case ast.Continue():
                yield self._replaced("break for continue", node, "break")
            case ast.Expr(value=ast.Call() | ast.Await()):
                yield self._statement("a call is left out", node)
            case ast.Delete() | ast.AugAssign():
                yield self._statement("a statement is left out", node)
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                yield self._statement("an assignment is left out", node)
            case ast.withitem(context_expr=context, optional_vars=None):
                yield self._replaced("a context is left out", context, _NO_CONTEXT)
            case ast.Call(func=function, args=arguments, keywords=keywords):
                yield from self._of_arguments(function, arguments, keywords)

    def _of_arguments(
        self, function: ast.expr, arguments: list[ast.expr], keywords: list[ast.keyword]
    ) -> Iterator[Mutant]:
        for left, right in itertools.pairwise(arguments):
            first, second = self._text(left), self._text(right)
            if first != second and not any(isinstance(each, ast.Starred) for each in (left, right)):
                start, end = self._span(left)[0], self._span(right)[1]
                between = self._source[self._span(left)[1] : self._span(right)[0]].decode()
                yield self._changed("arguments are swapped", start, end, second + between + first)
        if _name_of(function) == "range" and not isinstance(arguments[-1], ast.Constant):
            yield self._replaced("a bound is moved", arguments[-1], f"({self._text(arguments[-1])}) - 1")
        for keyword in keywords:
            start, end = self._span(keyword)
            if comma := re.match(rb"\s*,\s*", self._source[end:]):
                yield self._changed("an argument is left out", start, end + comma.end(), "")
            elif comma := re.search(rb",\s*$", self._source[:start]):
                yield self._changed("an argument is left out", comma.start(), end, "")
            else:
                yield self._changed("an argument is left out", start, end, "")

    def _turned(self, test: ast.expr) -> Iterator[Mutant]:
        match test:
            case ast.Constant():
                return  # another constant says it
            case ast.Compare(ops=[ast.Eq() | ast.NotEq() | ast.Is() | ast.IsNot() | ast.In() | ast.NotIn()]):
                return  # another comparison is the same
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield self._replaced("a condition is turned", test, f"({self._text(operand)})")
            case _:
                yield self._replaced("a condition is turned", test, f"(not ({self._text(test)}))")

    def _between(self, left: ast.expr, right: ast.expr, change: tuple[str, str], kind: str) -> Iterator[Mutant]:
        """Yield another operator between two operands, which may have parentheses and comments beside it."""
        start, end = self._span(left)[1], self._span(right)[0]
        operator = re.search(change[0], self._source[start:end].decode())
        if operator is not None:
            at = start + len(self._source[start:end].decode()[: operator.start()].encode())
            yield self._changed(kind, at, at + len(operator[0]), change[1])

    def _statement(self, kind: str, node: ast.stmt) -> Mutant:
        return self._replaced(kind, node, "pass")

    def _replaced(self, kind: str, node: "ast.expr | ast.stmt", after: str) -> Mutant:
        return self._changed(kind, *self._span(node), after)

    def _changed(self, kind: str, start: int, end: int, after: str) -> Mutant:
        line = self._source.count(b"\n", 0, start) + 1
        return Mutant(self._path, line, self._lines, kind, self._source[start:end].decode(), after, start)

    def _span(self, node: "ast.expr | ast.stmt | ast.keyword") -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._starts[node.lineno - 1] + node.col_offset, self._starts[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.expr) -> str:
        start, end = self._span(node)
        return self._source[start:end].decode()


def _head_of(node: ast.stmt) -> tuple[int, ...]:
    """Return the lines of a statement; of a compound one, those before its body."""
    body = getattr(node, "body", None) or getattr(node, "cases", None)
    if not body:
        return tuple(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    first = body[0].pattern if isinstance(body[0], ast.match_case) else body[0]
    return tuple(range(node.lineno, max(node.lineno + 1, int(first.lineno))))


def _name_of(function: ast.expr) -> str:
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


def _short(text: str, most: int = 70) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
