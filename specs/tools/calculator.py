"""A calculator for arithmetic."""

import ast
import operator

LONGEST = 1_000
"""Characters: while Python parses a text, nothing else has its turn."""
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


def calculate(expression: str) -> float:
    """Work out an arithmetic expression.

    Args:
        expression: such as (3 + 4) * 2.
    """
    if len(expression) > LONGEST:
        raise ValueError(f"an expression has {LONGEST} characters at most")
    return _value(ast.parse(expression, mode="eval").body)


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value)
    if isinstance(node, ast.BinOp):
        return float(_OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    if isinstance(node, ast.UnaryOp):
        return float(_OPERATORS[type(node.op)](_value(node.operand)))
    raise ValueError("only + - * / and numbers")
