"""Code and tests that go through the wire of `apart` unchanged: small functions, and all kinds of odder things."""

# ruff: noqa: E501

FUNCTIONS = r"""
def add(a, b): return a + b
def factorial(n): return 1 if n < 2 else n * factorial(n - 1)
def fibonacci(n):
    a, b = 0, 1
    for _ in range(n): a, b = b, a + b
    return a
def is_prime(n): return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))
def primes(n): return [k for k in range(2, n + 1) if is_prime(k)]
def gcd(a, b): return a if b == 0 else gcd(b, a % b)
def reverse(text): return text[::-1]
def is_palindrome(text):
    kept = [c.lower() for c in text if c.isalnum()]
    return kept == kept[::-1]
def count_words(text):
    counts = {}
    for word in text.split(): counts[word] = counts.get(word, 0) + 1
    return counts
def most_common(items): return max(sorted(set(items)), key=items.count)
def unique(items): return list(dict.fromkeys(items))
def flatten(items): return [x for each in items for x in (flatten(each) if isinstance(each, list) else [each])]
def chunks(items, size): return [items[i:i + size] for i in range(0, len(items), size)]
def rotate(items, k): return items[-k % len(items):] + items[:-k % len(items)] if items else []
def transpose(rows): return [list(column) for column in zip(*rows)]
def mean(xs): return sum(xs) / len(xs)
def median(xs):
    s, n = sorted(xs), len(xs)
    return s[n // 2] if n % 2 else (s[n // 2 - 1] + s[n // 2]) / 2
def clamp(x, low, high): return max(low, min(x, high))
def binary_search(xs, x):
    low, high = 0, len(xs)
    while low < high:
        middle = (low + high) // 2
        if xs[middle] < x: low = middle + 1
        else: high = middle
    return low if low < len(xs) and xs[low] == x else -1
def bubble(xs):
    for i in range(len(xs)):
        for j in range(len(xs) - 1 - i):
            if xs[j] > xs[j + 1]: xs[j], xs[j + 1] = xs[j + 1], xs[j]
def merge(a, b): return sorted(a + b)
def balanced(text):
    depth = 0
    for c in text:
        depth += {"(": 1, ")": -1}.get(c, 0)
        if depth < 0: return False
    return depth == 0
def caesar(text, k): return "".join(chr((ord(c) - 97 + k) % 26 + 97) if c.isalpha() else c for c in text)
def to_roman(n):
    out = ""
    for value, sign in ((10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I")):
        while n >= value: out, n = out + sign, n - value
    return out
def to_binary(n): return bin(n)[2:]
def digits(n): return [int(c) for c in str(n)]
def collatz(n):
    while n != 1:
        yield n
        n = n // 2 if n % 2 == 0 else 3 * n + 1
    yield 1
def power_set(items): return [[x for i, x in enumerate(items) if n >> i & 1] for n in range(2 ** len(items))]
def invert(d): return {v: k for k, v in d.items()}
def common(a, b): return set(a) & set(b)
def anagrams(a, b): return sorted(a) == sorted(b)
def longest(words): return max(words, key=len) if words else None
def run_lengths(text):
    out = []
    for c in text:
        if out and out[-1][0] == c: out[-1] = (c, out[-1][1] + 1)
        else: out.append((c, 1))
    return out
def dot(a, b): return sum(x * y for x, y in zip(a, b))
def distance(p, q): return sum((a - b) ** 2 for a, b in zip(p, q)) ** 0.5
def triangle(n): return [[1] if i == 0 else None for i in range(0)] or _rows(n)
def _rows(n):
    rows = [[1]]
    while len(rows) < n: rows.append([1, *map(sum, zip(rows[-1], rows[-1][1:])), 1])
    return rows
def divide(a, b):
    if b == 0: raise ZeroDivisionError("no")
    return a / b
def parse(text):
    if not text.isdigit(): raise ValueError(f"{text} is no number")
    return int(text)
def compose(*fs):
    def composed(x):
        for f in reversed(fs): x = f(x)
        return x
    return composed
def mapped(f, xs): return [f(x) for x in xs]
def title(text): return " ".join(word.capitalize() for word in text.split())
"""
CHECKS = r"""
add(2, 3) == 5|add(0.1, 0.2) - 0.3 < 1e-9
factorial(20) == 2432902008176640000|factorial(30) % 31 == 30
fibonacci(100) == 354224848179261915075
is_prime(97) is True|is_prime(1) is False
primes(20) == [2, 3, 5, 7, 11, 13, 17, 19]
gcd(12, 18) == 6
reverse("abc") == "cba"|reverse("") == ""
is_palindrome("A man, a plan, a canal: Panama")|not is_palindrome("ab")
count_words("a b a") == {"a": 2, "b": 1}
most_common([1, 2, 2, 3]) == 2
unique([3, 1, 3]) == [3, 1]
flatten([1, [2, [3, []]]]) == [1, 2, 3]
chunks([1, 2, 3], 2) == [[1, 2], [3]]
rotate([1, 2, 3], 1) == [3, 1, 2]|rotate([], 4) == []
transpose([[1, 2], [3, 4]]) == [[1, 3], [2, 4]]
abs(mean([1, 2]) - 1.5) < 1e-9
median([3, 1, 2]) == 2|median([1, 2]) == 1.5
clamp(5, 0, 3) == 3
binary_search([1, 3, 5], 3) == 1|binary_search([], 1) == -1
merge([1, 3], [2]) == [1, 2, 3]
balanced("(())")|not balanced(")(")
caesar("xyz", 3) == "abc"
to_roman(14) == "XIV"
to_binary(10) == "1010"
digits(907) == [9, 0, 7]
list(collatz(6)) == [6, 3, 10, 5, 16, 8, 4, 2, 1]
len(power_set([1, 2, 3])) == 8
invert({"a": 1}) == {1: "a"}
common([1, 2], [2, 3]) == {2}
anagrams("listen", "silent")
longest([]) is None|longest(["a", "bcd"]) == "bcd"
run_lengths("aab") == [("a", 2), ("b", 1)]
dot([1, 2], [3, 4]) == 11
abs(distance((0, 0), (3, 4)) - 5.0) < 1e-9
triangle(3) == [[1], [1, 1], [1, 2, 1]]
divide(1, 2) == 0.5|raises(ZeroDivisionError, divide, 1, 0)
parse("12") == 12|raises(ValueError, parse, "x")
compose(lambda x: x + 1, lambda x: x * 2)(5) == 11
mapped(str, [1, 2]) == ["1", "2"]
title("a bc") == "A Bc"
sorting([3, 1, 2]) == [1, 2, 3]
"""


def checks_of_functions() -> str:
    """A test for each line, of which the parts have to be true."""
    lines = ["import unittest", "from solution import *", "def raises(error, f, *args):", "    try: f(*args)"]
    lines += [
        "    except error: return True",
        "    return False",
        "def sorting(xs):",
        "    bubble(xs)",
        "    return xs",
    ]
    lines += ["class Functions(unittest.TestCase):"]
    for number, line in enumerate(CHECKS.strip().split("\n")):
        lines += [f"    def test_{number}(self):", *(f"        self.assertTrue({part})" for part in line.split("|"))]
    return "\n".join(lines) + "\n"


SHAPES = r"""
import warnings, sys
from dataclasses import dataclass
from enum import Enum, IntEnum
from collections import namedtuple, Counter, OrderedDict, defaultdict, deque
from decimal import Decimal
class MyError(ValueError):
    def __init__(self, code): super().__init__(f"code {code}"); self.code = code
class Plain(Exception): pass
def fail(code): raise MyError(code)
def builtin(): raise KeyError("x")
def sort(xs): xs.sort(); return None
def fill(d, k, v): d.setdefault(k, []).append(v); return d
class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x)
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __getitem__(self, i): return self.items[i]
    def __contains__(self, x): return x in self.items
    @property
    def top(self): return self.items[-1]
    @staticmethod
    def kind(): return "stack"
    @classmethod
    def of(cls, *xs):
        s = cls()
        for x in xs: s.push(x)
        return s
    def __enter__(self): return self
    def __exit__(self, *a): self.items.clear(); return False
@dataclass
class Point:
    x: int
    y: int
    def __add__(self, o): return Point(self.x + o.x, self.y + o.y)
@dataclass(frozen=True, order=True)
class Money:
    n: int
    def __eq__(self, o): return self.n == (o.n if isinstance(o, Money) else o)
    __hash__ = None
class Color(Enum):
    RED = 1
    BLUE = 2
class Level(IntEnum):
    LOW = 1
    HIGH = 2
Pair = namedtuple("Pair", "a b")
def gen(n):
    for i in range(n): yield i * i
def apply(f, xs): return [f(x) for x in xs]
def say(x): print("hello", x); return x
def warn(): warnings.warn("old", DeprecationWarning); return 1
async def wait(x): return x + 1
def kinds(): return [1.5, 2**80, float("inf"), b"x\xff", (1, (2,)), {1: [2]}, {3}, frozenset([4]), 1j, range(3), None, ..., Decimal("1.1"), Counter("aab"), OrderedDict(a=1), defaultdict(list, a=[1]), deque([1], 3)]
CONST = [1, 2]
def uses_const(): return CONST[0]
def memo(x, cache={}): cache[x] = x; return len(cache)
class Base:
    def name(self): return "base"
class Derived(Base):
    def name(self): return "derived " + super().name()
def compose(f, g): return lambda x: f(g(x))
class Node:
    def __init__(self, v): self.v, self.next = v, None
def cycle(): a = []; a.append(a); return a
def end(): sys.exit(3)
"""
"""Classes, errors, generators, coroutines, callbacks, values of all kinds."""
TESTS_OF_SHAPES = r"""
import asyncio, io, unittest, contextlib, warnings, copy
from unittest import mock
from decimal import Decimal
from collections import Counter, OrderedDict, defaultdict, deque
import solution
from solution import *
from solution import Stack, MyError

class T(unittest.TestCase):
    def test_errors(self):
        with self.assertRaises(MyError) as c: fail(7)
        self.assertEqual(c.exception.code, 7); self.assertEqual(str(c.exception), "code 7")
        with self.assertRaises(ValueError): fail(7)
        with self.assertRaisesRegex(KeyError, "x"): builtin()
        with self.assertRaises(SystemExit): end()
    def test_mutation(self):
        xs = [3, 1, 2]; sort(xs); self.assertEqual(xs, [1, 2, 3])
        d = {}; self.assertIs(fill(d, "a", 1), d); fill(d, "a", 2); self.assertEqual(d, {"a": [1, 2]})
        d["a"].append(3); fill(d, "a", 4); self.assertEqual(d["a"], [1, 2, 3, 4])
    def test_stack(self):
        s = Stack(); s.push(1); s.push(2)
        self.assertEqual(len(s), 2); self.assertEqual(list(s), [1, 2]); self.assertEqual(s[0], 1)
        self.assertEqual(s.top, 2); self.assertEqual(Stack.kind(), "stack"); self.assertEqual(s.pop(), 2)
        self.assertEqual(s.items, [1]); s.items.append(9); self.assertEqual(s.pop(), 9)
        self.assertIsInstance(Stack.of(1, 2), Stack)
        self.assertFalse(Stack()); self.assertTrue(s)
        with Stack.of(1) as t: self.assertEqual(len(t), 1)
        self.assertEqual(len(t), 0)
        with self.assertRaises(IndexError): t.pop()
    def test_points(self):
        self.assertEqual(Point(1, 2), Point(1, 2)); self.assertNotEqual(Point(1, 2), Point(1, 3))
        self.assertEqual(Point(1, 2) + Point(1, 1), Point(2, 3)); p = Point(1, 2); p.x = 5; self.assertEqual(p.x, 5)
        self.assertIn("Point", repr(p)); q = copy.deepcopy(p); q.x = 1; self.assertEqual(p.x, 5)
    def test_enum(self):
        self.assertIs(Color(1), Color.RED); self.assertEqual(Color["BLUE"].value, 2); self.assertEqual(len(list(Color)), 2)
        self.assertEqual(Level.LOW, 1); self.assertLess(Level.LOW, Level.HIGH); self.assertEqual(Color.RED.name, "RED")
    def test_tuple(self):
        p = Pair(1, 2); self.assertEqual(p, (1, 2)); self.assertEqual(p.a, 1)
    def test_gen(self):
        self.assertEqual(list(gen(4)), [0, 1, 4, 9]); g = gen(2); self.assertEqual(next(g), 0); next(g)
        with self.assertRaises(StopIteration): next(g)
    def test_callbacks(self):
        self.assertEqual(apply(lambda x: x + 1, [1, 2]), [2, 3]); m = mock.Mock(return_value=4); self.assertEqual(apply(m, [1]), [4]); m.assert_called_once_with(1)
        def bad(x): raise RuntimeError("mine")
        with self.assertRaisesRegex(RuntimeError, "mine"): apply(bad, [1])
        self.assertEqual(compose(lambda x: x * 2, lambda x: x + 1)(3), 8)
        self.assertEqual(apply(str, [1]), ["1"])
    def test_output(self):
        out = io.StringIO()
        with contextlib.redirect_stdout(out): say(3)
        self.assertEqual(out.getvalue(), "hello 3\n")
        with self.assertWarns(DeprecationWarning): self.assertEqual(warn(), 1)
    def test_async(self):
        self.assertEqual(asyncio.run(wait(1)), 2)
        async def go(): return await wait(4)
        self.assertEqual(asyncio.run(go()), 5)
    def test_kinds(self):
        self.assertEqual(kinds(), [1.5, 2**80, float("inf"), b"x\xff", (1, (2,)), {1: [2]}, {3}, frozenset([4]), 1j, range(3), None, ..., Decimal("1.1"), Counter("aab"), OrderedDict(a=1), defaultdict(list, a=[1]), deque([1], 3)])
        a = cycle(); self.assertIs(a[0], a)
    def test_module(self):
        with mock.patch.object(solution, "CONST", [9]): self.assertEqual(uses_const(), 9)
        self.assertEqual(uses_const(), 1); self.assertEqual(solution.CONST, [1, 2])
        with mock.patch("solution.uses_const", return_value=3): self.assertEqual(solution.uses_const(), 3)
        self.assertEqual(solution.uses_const(), 1)
        with mock.patch.object(Base, "name", lambda self: "patched"): self.assertEqual(Derived().name(), "derived patched")
        self.assertEqual(Derived().name(), "derived base"); self.assertIsInstance(Derived(), Base); self.assertTrue(issubclass(Derived, Base))
        with self.assertRaises(AttributeError): solution.nothing
        self.assertEqual(memo(1), 1); self.assertEqual(memo(2), 2)
        n = Node(1); n.next = Node(2); self.assertEqual(n.next.v, 2)
    def test_money(self):
        self.assertNotEqual(Money(5), 6)
    def test_needs(self):
        self.assertEqual(Money(5), 5)
    def test_in(self):
        self.assertIn(1, Stack.of(1, 2))
"""
