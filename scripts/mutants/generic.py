"""Small changes of the code itself, made at every place where one can be made.

The libraries that do this start a process for each change, and importing torch there takes longer than most trials.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from scripts.mutants.mutant import contract
from scripts.mutants.trial import ROOT, Trial

PACKAGE = ROOT / "src" / "innerloop"
OPERATORS: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
COMPARISONS: dict[type, tuple[type, ...]] = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
DROPPED = set("abs clamp clone contiguous detach double exp masked_fill requires_grad_ square to tril triu".split())
"""Methods that return something like what they are called on."""

SOON = "chunk_equals_recurrent step_equals_the_executed_recipe"
LATER = "packed_equals_separate options_do_what_they_say step_loop_equals_whole heads_are_shared nothing_in_nothing_out"
LAST = "edges_are_exact every_precision_meets_its_bar derivatives_are_right transforms_compose"
BETWEEN = ("tests/rules/test_theorems.py", "tests/kernels/test_operator.py", "tests/rules/test_ragged.py")


def _suite(rules: str, *more: str) -> tuple[str, ...]:
    """Return what is likely to notice first, then the rest that concerns some rules, the dear part for the first."""
    first = rules.split()[0]
    return (*contract(rules, SOON), *contract(rules, LATER), *contract(first, LAST), *BETWEEN, *more)


RULES = (
    "mamba2 linear_attention retention normalized_linear_attention gated_delta_rule delta_rule longhorn "
    "momentum_delta_rule recursive_least_squares softmax_attention gla kda gdn2 rwkv7 "
    "delta_product longhorn_diagonal mesa"
)
SOME = "gated_delta_rule recursive_least_squares softmax_attention normalized_linear_attention"
TYPICAL = ("gated_delta_rule", "softmax_attention")
ERRORS, COMPILE, DERIVATIVES = "tests/ops", "tests/kernels/test_compile.py", "tests/kernels/test_derivatives.py"
COMPILER = (
    *(f"{COMPILE}::test_operators_pass_the_frameworks_own_check[{rule}]" for rule in TYPICAL),
    *(f"{COMPILE}::test_autocast_keeps_arithmetic_and_state_wide[{rule}]" for rule in TYPICAL),
    *(f"{COMPILE}::test_half_inputs_with_wide_gates_give_half_outputs_and_a_wide_state[{rule}]" for rule in TYPICAL),
    f"{COMPILE}::test_compiled_step_equals_eager[{TYPICAL[0]}]",
    f"{COMPILE}::test_compiled_equals_eager_at_any_length_without_recompiling[chunk-{TYPICAL[0]}]",
    f"{COMPILE}::test_exported_program_runs_at_another_length[recurrent-{TYPICAL[1]}]",
    f"{COMPILE}::test_packed_calls_compile_without_a_break_or_a_length_of_their_own[chunk-{TYPICAL[0]}]",
    *(f"{DERIVATIVES}::test_hessians_agree_in_every_order_of_modes[{rule}]" for rule in TYPICAL),
)
"""What a compiler and ``torch.func`` ask of two rules: one with gates, one whose state grows and counts."""
FILES: dict[str, tuple[str, ...]] = {
    "algebra/additive.py": _suite("mamba2 linear_attention recursive_least_squares"),
    "algebra/attention.py": _suite("softmax_attention"),
    "algebra/channel.py": _suite("gla kda gdn2 rwkv7", "tests/rules/test_channel_decay.py"),
    "algebra/chunks.py": _suite("gated_delta_rule linear_attention"),
    "algebra/conjugate_gradients.py": ("tests/recipe/test_conjugate_gradients.py", "tests/recipe/test_closed_forms.py"),
    "algebra/decay.py": _suite("mamba2 momentum_delta_rule recursive_least_squares"),
    "algebra/delta.py": (*_suite("gated_delta_rule delta_rule longhorn"), *contract("longhorn", LAST)),
    "algebra/diagonal.py": _suite("longhorn_diagonal"),
    "algebra/implicit.py": _suite("mesa recursive_least_squares"),
    "algebra/mesa.py": _suite("mesa"),
    "algebra/momentum.py": _suite("momentum_delta_rule"),
    "algebra/packing.py": (*contract(SOME, "packed_equals_separate"), *BETWEEN),
    "algebra/ridge.py": _suite("recursive_least_squares"),
    "kernels/families.py": _suite(SOME),
    "kernels/loop.py": _suite("gated_delta_rule linear_attention"),
    "kernels/operator.py": _suite(" ".join(TYPICAL), "tests/rules/test_packing.py", *COMPILER),
    "kernels/portable.py": _suite(" ".join((*TYPICAL, "rwkv7")), "tests/rules/test_packing.py", *COMPILER),
    **{f"rules/{rule}.py": _suite(rule, ERRORS) for rule in RULES.split()},
    "dispatch.py": _suite(SOME, ERRORS, *COMPILER),
    "checks.py": (ERRORS, *_suite(" ".join(TYPICAL)), *COMPILER),
    "shapes.py": (ERRORS, *_suite(SOME)),
}
"""Each file that is changed, and the tests that are run against its changes."""


@dataclass(frozen=True)
class Change:
    """One node of a file, written anew."""

    file: str
    line: int
    before: str
    after: str
    text: str
    """The whole file with the change."""

    def trial(self, tests: tuple[str, ...]) -> Trial:
        """Return the change and the tests of its file."""
        return Trial(f"{self.file}:{self.line}: {self.before}  ->  {self.after}", {self.file: self.text}, tests)


def changes(file: str) -> Iterator[Change]:
    """Yield every change of a file of the package that still compiles."""
    source = (PACKAGE / file).read_text(encoding="utf-8")
    tree = ast.parse(source)
    for node in _code(tree):
        for variant in _variants(node):
            if ast.unparse(variant) == ast.unparse(node):
                continue
            before = ast.get_source_segment(source, node) or ""
            after = ast.unparse(variant)
            if isinstance(variant, ast.expr):
                after = f"({after})"
            text = _replaced(source, node, after)
            try:
                compile(text, file, "exec")
            except SyntaxError:
                continue
            yield Change(file, node.lineno, _short(before), _short(after), text)


def _short(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) < 70 else words[:66] + " ..."


def _replaced(source: str, node: ast.AST, text: str) -> str:
    lines = source.encode().splitlines(keepends=True)
    first, last = node.lineno - 1, node.end_lineno - 1  # pyright: ignore
    before = b"".join(lines[:first]) + lines[first][: node.col_offset]  # pyright: ignore
    after = lines[last][node.end_col_offset :] + b"".join(lines[last + 1 :])  # pyright: ignore
    return (before + text.encode() + after).decode()


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """Walk over what runs: no annotation, no import, no text, no message of an error, no ``strict=True``."""
    if isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom):
        return
    if isinstance(node, ast.keyword) and node.arg == "strict":
        return
    if isinstance(node, ast.Raise):
        yield node
        return
    if hasattr(node, "lineno"):
        yield node
    skipped = {"annotation", "returns", "decorator_list"}
    for name, value in ast.iter_fields(node):
        if name in skipped:
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _code(child)


def _variants(node: ast.AST) -> Iterator[ast.AST]:
    for kind, make in _MAKERS.items():
        if isinstance(node, kind):
            yield from make(node)


def _with(node: ast.AST, **fields: object) -> ast.AST:
    kept = {name: value for name, value in ast.iter_fields(node)}
    return ast.fix_missing_locations(ast.copy_location(type(node)(**{**kept, **fields}), node))


def _operation(node: ast.BinOp) -> Iterator[ast.AST]:
    if type(node.op) in OPERATORS:
        yield _with(node, op=OPERATORS[type(node.op)]())
    if isinstance(node.op, ast.MatMult | ast.Sub | ast.Div):
        yield _with(node, left=node.right, right=node.left)
    if isinstance(node.op, ast.Add | ast.Sub | ast.Mult):
        yield node.left


def _logic(node: ast.BoolOp) -> Iterator[ast.AST]:
    yield _with(node, op=OPERATORS[type(node.op)]())
    for index in range(len(node.values)):
        rest = node.values[:index] + node.values[index + 1 :]
        yield rest[0] if len(rest) == 1 else _with(node, values=rest)


def _comparison(node: ast.Compare) -> Iterator[ast.AST]:
    for place, operator in enumerate(node.ops):
        for other in COMPARISONS[type(operator)]:
            yield _with(node, ops=[*node.ops[:place], other(), *node.ops[place + 1 :]])


def _sign(node: ast.UnaryOp) -> Iterator[ast.AST]:
    if isinstance(node.operand, ast.Constant) and isinstance(node.operand.value, int):
        node.operand.signed = True  # pyright: ignore  # it is changed here, together with its sign
        # An axis counted from behind: without the sign it would often be the same axis.
        yield _with(node, operand=ast.Constant(2 if node.operand.value == 1 else node.operand.value - 1))
    else:
        yield node.operand


def _number(node: ast.Constant) -> Iterator[ast.AST]:
    if getattr(node, "signed", False):
        return
    if isinstance(node.value, bool):
        yield _with(node, value=not node.value)
    elif isinstance(node.value, int):
        yield _with(node, value=node.value + 1)
    elif isinstance(node.value, float):
        yield _with(node, value=node.value * 2 + (node.value == 0))


def _condition(node: ast.If) -> Iterator[ast.AST]:
    for value in (True, False):
        yield _with(node, test=ast.Constant(value))


def _choice(node: ast.IfExp) -> Iterator[ast.AST]:
    yield node.body
    yield node.orelse


def _call(node: ast.Call) -> Iterator[ast.AST]:
    if isinstance(node.func, ast.Attribute) and node.func.attr in DROPPED:
        yield node.func.value
    if getattr(node.func, "id", "") == "call":
        return  # a rule's own function hands its arguments on by name: without one it could not be called
    if getattr(node.func, "id", "") in ("max", "min", "isinstance"):
        return
    if len(node.args) > 1 and all(isinstance(x, ast.Name | ast.Attribute | ast.Subscript) for x in node.args[:2]):
        yield _with(node, args=[node.args[1], node.args[0], *node.args[2:]])
    for keyword in node.keywords:
        if keyword.arg in ("strict", "device"):  # our own invariant: lists of one length; and there is one device here
            continue
        yield _with(node, keywords=[other for other in node.keywords if other is not keyword])


def _attribute(node: ast.Attribute) -> Iterator[ast.AST]:
    if node.attr == "mT":
        yield node.value


def _nothing(node: ast.AST) -> Iterator[ast.AST]:
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        yield ast.copy_location(ast.Pass(), node)


_MAKERS: dict[type, Callable[..., Iterator[ast.AST]]] = {
    ast.BinOp: _operation,
    ast.BoolOp: _logic,
    ast.Compare: _comparison,
    ast.UnaryOp: _sign,
    ast.Constant: _number,
    ast.If: _condition,
    ast.IfExp: _choice,
    ast.Call: _call,
    ast.Attribute: _attribute,
    ast.Expr: _nothing,
    ast.AugAssign: _nothing,
    ast.Raise: _nothing,
}
