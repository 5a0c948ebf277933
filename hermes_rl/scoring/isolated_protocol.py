"""Define the wire protocol between tests and the code under test in another sandbox: messages, and the encoding of
values.

`Peer` is one end of the wire. Plain values are copied; lists, dicts, sets and bytearrays are shared, and each message
contains their changes. Everything else stays on its side: a numbered stand-in is sent instead, and each use of it is a
message to the other end. `isolated_import` is the end of the tests and trusts nothing that it reads; `isolated_server`
is the end of the code. All three are copied into sandboxes as one source, which runs on any Python from 3.8.

A message is four bytes of length and JSON: ``["q", forget, changes, dead, operation, arguments]`` is a request, and
``["v" or "x", changes, value, output]`` responds with a value or an exception. Between the two, the other end may send
its own requests. An end that receives an unknown request closes the wire, after which every call fails.
"""

# ruff: noqa: B905, SIM905, UP035  # Python 3.8, and no pathlib before the code runs

from __future__ import annotations

import builtins
import collections
import datetime
import decimal
import fractions
import json
import pathlib
import struct
import threading
import types
import uuid
import weakref
from typing import Any, Callable

BINARY = {
    f"__{side}{name}__"
    for name in "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift divmod".split()
    for side in ("", "r", "i")
}
COMPARISONS = {f"__{name}__" for name in "eq ne lt le gt ge contains".split()}
FREE = {
    f"__{name}__"
    for name in "call len iter next getitem setitem delitem enter exit aiter anext await bool int float index neg "
    "pos abs invert round hash reversed str repr format bytes fspath".split()
}
"""Special methods that a stand-in has where its object has them; others are never asked."""
EXACT: dict[str, type] = {
    **dict.fromkeys(COMPARISONS, bool),
    **{"__bool__": bool, "__len__": int, "__hash__": int, "__int__": int, "__index__": int, "__float__": float},
    **dict.fromkeys(("__str__", "__repr__", "__format__"), str),
}
"""What these may give, and nothing that derives from it."""
PLAIN_TYPES = (bool, int, float, str, bytes, tuple)
"""Types whose derivations carry their value, by which alone they are compared."""
CONTAINERS = {"list": list, "dict": dict, "set": set, "bytearray": bytearray}
NAMED = {name: value for name, value in vars(builtins).items() if isinstance(value, type)}
UNHARMED = (KeyboardInterrupt, GeneratorExit)
"""Exceptions that would end or bend the process of the tests."""
SAFE_INT = 2**53
MESSAGE_LIMIT, SHARED_LIMIT, SHARED_SIZE = 64 << 20, 300, 10_000
_LENGTH = struct.Struct("!I")

COPIED: dict[str, tuple[type, Callable[[Any], tuple[Any, ...]]]] = {
    "Decimal": (decimal.Decimal, lambda v: (str(v),)),
    "Fraction": (fractions.Fraction, lambda v: (v.numerator, v.denominator)),
    "date": (datetime.date, lambda v: (v.year, v.month, v.day)),
    "timedelta": (datetime.timedelta, lambda v: (v.days, v.seconds, v.microseconds)),
    "UUID": (uuid.UUID, lambda v: (str(v),)),
    "PosixPath": (pathlib.PosixPath, lambda v: (str(v),)),
    "PurePosixPath": (pathlib.PurePosixPath, lambda v: (str(v),)),
    "OrderedDict": (collections.OrderedDict, lambda v: (list(v.items()),)),
    "Counter": (collections.Counter, lambda v: (dict(v),)),
    "deque": (collections.deque, lambda v: (list(v), v.maxlen)),
    "complex": (complex, lambda v: (v.real, v.imag)),
    "range": (range, lambda v: (v.start, v.stop, v.step)),
    "slice": (slice, lambda v: (v.start, v.stop, v.step)),
    "frozenset": (frozenset, lambda v: (list(v),)),
}
"""Types whose values are recreated on the other side, each with its constructor arguments."""
BY_TEXT: dict[str, type] = {"datetime": datetime.datetime, "time": datetime.time}


class GoneError(RuntimeError):
    """The other end is gone, or has broken the rules."""


class Meta(type):
    """The class of classes that stand for one of the other end; `_peer` and `_number` are theirs."""

    _peer: Any
    _number: int

    def __new__(cls, name: str, bases: Any, body: Any, **keywords: Any) -> Any:
        """Make a stand-in; a class of the tests cannot derive from one."""
        if bases and "_made" not in keywords:
            raise TypeError(f"{name} derives from a class of the code under test, which is not possible in isolation")
        return super().__new__(cls, name, bases, body)

    def __init__(cls, name: str, bases: Any, body: Any, **_: Any) -> None:
        super().__init__(name, bases, body)

    def __call__(cls, *args: Any, **more: Any) -> Any:
        return cls._peer.ask("call", cls, args, more)

    def __getattr__(cls, name: str) -> Any:
        return cls._peer.fetch(cls, name)

    def __setattr__(cls, name: str, value: Any) -> None:
        if name.startswith("__"):
            super().__setattr__(name, value)
        elif value is vars(cls).get(name):  # who has patched it puts back what was here
            cls._peer.ask("del", cls, name)
        else:
            cls._peer.ask("set", cls, name, value)

    def __delattr__(cls, name: str) -> None:
        cls._peer.ask("del", cls, name)

    def __iter__(cls) -> Any:
        return cls._peer.ask("special", cls, "__iter__", ())

    def __len__(cls) -> int:
        return int(cls._peer.ask("special", cls, "__len__", ()))

    def __bool__(cls) -> bool:
        return True

    def __getitem__(cls, key: Any) -> Any:
        return cls._peer.ask("item", cls, key)


class Remote(metaclass=Meta):
    """Stand-in for an object of the other end; `_number` is in its own dictionary."""

    def __getattr__(self, name: str) -> Any:
        return type(self)._peer.fetch(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__"):
            object.__setattr__(self, name, value)
        else:
            type(self)._peer.ask("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        type(self)._peer.ask("del", self, name)

    def __del__(self) -> None:
        if "_number" in vars(self):
            type(self)._peer.dead.add(vars(self)["_number"])

    def __copy__(self) -> Any:
        return type(self)._peer.ask("copy", self, False)

    def __deepcopy__(self, _: Any) -> Any:
        return type(self)._peer.ask("copy", self, True)

    def __reduce_ex__(self, _: Any) -> Any:
        raise TypeError("objects of isolated code cannot be pickled")


def special(name: str) -> Callable[..., Any]:
    """Return the special method of a stand-in."""

    def method(self: Any, *args: Any, **more: Any) -> Any:
        return type(self)._peer.operate(self, name, args, more)

    method.__name__ = name
    return method


def forwarded(name: str) -> Callable[..., Any]:
    """Return the method of a stand-in, which asks in one message instead of two."""

    def method(self: Any, *args: Any, **more: Any) -> Any:
        return type(self)._peer.ask("method", self, name, args, more)

    method.__name__ = name
    return method


class Stub(types.ModuleType):
    """A module of the code, in the process of the tests."""

    _peer: Any

    def __getattr__(self, name: str) -> Any:
        return self._peer.fetch(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__") or isinstance(value, Stub):
            super().__setattr__(name, value)
        else:
            self._peer.ask("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._peer.ask("del", self, name)


class Peer:
    """One end of the wire. Subclasses define the objects that it passes on, and the requests that it accepts."""

    def __init__(self, wire: Any, first: int) -> None:
        self.wire = wire
        self.next = first
        self.mine: dict[int, Any] = {}
        self.numbers: dict[int, int] = {}
        self.theirs: Any = weakref.WeakValueDictionary()
        self.classes: dict[int, Any] = {}
        self.dead: set[int] = set()
        self.shared: dict[int, tuple[Any, list[Any]]] = {}
        self.shared_ids: dict[int, int] = {}
        self.lock = threading.RLock()
        self.depth = 0
        self.gone_reason: Any = None
        self.base: Any = Meta("Apart", (Remote,), {"_peer": self}, _made=True)

    # ---- messages

    def send(self, message: Any) -> None:
        data = json.dumps(message).encode()
        self.wire.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> Any:
        (length,) = _LENGTH.unpack(self.exactly(_LENGTH.size))
        if length > MESSAGE_LIMIT:
            raise GoneError("a message is too long")
        return json.loads(self.exactly(length))

    def exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            chunk = self.wire.recv(min(size - len(data), 1 << 20))
            if not chunk:
                raise EOFError("the peer closed the connection")
            data += chunk
        return bytes(data)

    def ask(self, operation: str, *args: Any) -> Any:
        """Ask the other end, answer what it asks meanwhile, and return its value or raise its exception."""
        with self.lock:
            if self.gone_reason is not None:
                raise GoneError(self.gone_reason)
            forget = self.depth == 0 and len(self.shared) > SHARED_LIMIT
            if forget:
                self.forget()
            encoded = [self.encode(arg) for arg in args]
            try:
                dead, self.dead = self.dead, set()
                self.send(["q", forget, self.changes(), sorted(dead), operation, encoded])
                answer = self.receive()
                while answer[0] == "q":
                    self.serve(answer)
                    answer = self.receive()
                kind, changes, value, output = answer
                self.apply(changes)
                self.show(output)
                decoded = self.decode(value)
                if kind == "x" and not isinstance(decoded, BaseException):
                    raise GoneError("it raised a value that is not an exception")
            except Exception as error:  # noqa: BLE001 - whatever the other end has sent
                self.end(error)
                raise GoneError(self.gone_reason) from None
        if kind == "x":
            raise decoded
        return decoded

    def end(self, error: BaseException) -> None:
        """Close the wire permanently."""
        if self.gone_reason is None:
            self.gone_reason = f"the code under test is gone, or broke the rules: {type(error).__name__}: {error}"[:300]
        self.wire.close()

    def serve(self, message: Any) -> None:
        """Answer what the other end asks."""
        _, forget, changes, dead, operation, args = message
        if forget:
            self.forgets()
        for object_id in dead:
            value = self.mine.pop(object_id, None)
            self.numbers.pop(id(value), None)
        self.apply(changes)
        arguments = [self.decode(arg) for arg in args]
        self.depth += 1
        try:
            kind, value = "v", self.perform(operation, *arguments)
        except GoneError:
            raise
        except BaseException as error:  # noqa: BLE001 - the other end is who asked
            kind, value = "x", error
        finally:
            self.depth -= 1
        first = self.changes()
        try:
            encoded = self.encode(value)
        except Exception as error:  # noqa: BLE001 - such as a description that fails
            kind, encoded = "x", self.encode(TypeError(str(error)[:200]))
        self.send([kind, first + self.changes(), encoded, self.output()])

    def forget(self) -> None:
        """Stop sharing all shared containers."""
        self.shared.clear()
        self.shared_ids.clear()

    # ---- what either end decides for itself

    def perform(self, operation: str, *args: Any) -> Any:
        raise NotImplementedError

    def fetch(self, owner: Any, name: str) -> Any:
        return self.ask("get", owner, name)

    def operate(self, this: Any, name: str, args: Any, more: Any) -> Any:
        return self.ask("special", this, name, args, more)

    def require_given(self, value: Any) -> None:
        """Raise TypeError where the other end must not get a handle of this value."""

    def forgets(self) -> None:
        self.forget()

    def show(self, output: Any) -> None:
        """Show what the other end has printed."""

    def output(self) -> list[Any]:
        return []

    # ---- containers that both ends see

    def share(self, value: Any, object_id: int) -> None:
        if len(value) <= SHARED_SIZE:
            self.shared[object_id] = (value, self.items(value))
            self.shared_ids[id(value)] = object_id

    def items(self, value: Any) -> list[Any]:
        return [each for pair in value.items() for each in pair] if type(value) is dict else list(value)

    def changes(self) -> list[Any]:
        """Return the changes in shared containers since the last message to the other end."""
        changed = []
        for object_id, (value, before) in list(self.shared.items()):
            now = self.items(value)
            if len(now) != len(before) or any(new is not old for new, old in zip(now, before)):
                self.shared[object_id] = (value, now)
                changed.append([object_id, [self.encode(each) for each in now]])
        return changed

    def apply(self, changes: Any) -> None:
        for object_id, items in changes:
            value = self.shared[object_id][0]
            self.fill(value, [self.decode(each) for each in items])
            self.shared[object_id] = (value, self.items(value))

    def fill(self, value: Any, items: list[Any]) -> None:
        value.clear()
        if type(value) is dict:
            value.update(zip(items[::2], items[1::2]))
        elif type(value) is set:
            value.update(items)
        else:
            value.extend(items)

    # ---- values

    def encode(self, value: Any) -> Any:  # noqa: C901 - a list
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if -SAFE_INT < value < SAFE_INT else ["int", hex(value)]
        if kind is float:
            return value if value - value == 0 else ["float", repr(value)]
        if kind is tuple:
            return ["tuple", [self.encode(each) for each in value]]
        if kind is bytes:
            return ["bytes", value.decode("latin-1")]
        if CONTAINERS.get(kind.__name__) is kind:
            return self.encode_container(value)
        if value is Ellipsis or value is NotImplemented:
            return ["constant", repr(value)]
        if COPIED.get(kind.__name__, (None,))[0] is kind:
            return ["copy", kind.__name__, [self.encode(each) for each in COPIED[kind.__name__][1](value)]]
        if BY_TEXT.get(kind.__name__) is kind:
            return ["text", kind.__name__, value.isoformat()]
        if kind is collections.defaultdict:
            return ["default", self.encode(value.default_factory), self.encode(dict(value))]
        if kind is types.TracebackType:
            return None
        if isinstance(value, type) and NAMED.get(value.__name__) is value:
            return ["named", value.__name__]
        remote_id = vars(value).get("_number") if isinstance(value, (Meta, Remote, Stub)) else None
        return self.encode_handle(value) if remote_id is None else ["yours", remote_id]

    def encode_container(self, value: Any) -> Any:
        if id(value) in self.shared_ids:
            return ["shared", self.shared_ids[id(value)]]
        object_id = self.number()
        self.share(value, object_id)
        return ["container", type(value).__name__, object_id, [self.encode(each) for each in self.items(value)]]

    def number(self) -> int:
        self.next += 2
        return self.next

    def encode_handle(self, value: Any) -> Any:
        self.require_given(value)
        object_id = self.numbers.get(id(value))
        is_known = object_id is not None and self.mine.get(object_id) is value
        if not is_known:
            object_id = self.number()
            self.numbers[id(value)], self.mine[object_id] = object_id, value
        kind = type(value)
        if isinstance(value, type):
            return ["class", object_id, None if is_known else self.description(value)]
        if isinstance(value, types.ModuleType):
            return ["module", object_id, value.__name__]
        if kind is types.CoroutineType:
            return ["awaitable", object_id]
        if isinstance(value, BaseException):
            details = [str(value), [self.encode(each) for each in value.args], self.encode(value.__cause__)]
            return ["exception", object_id, self.encode(kind), details]
        builtin_base: Any = next((base for base in PLAIN_TYPES if isinstance(value, base)), None)
        carried = (
            None
            if builtin_base is None
            else self.encode(tuple(value) if builtin_base is tuple else builtin_base.__new__(builtin_base, value))
        )
        if isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):
            return ["function", object_id, str(value.__name__), value.__doc__ if type(value.__doc__) is str else None]
        return ["object", object_id, self.encode(kind), carried]

    def description(self, kind: type) -> list[Any]:
        """Return the description from which the other end builds its stand-in for this class."""
        has = [name for name in sorted(FREE | BINARY | COMPARISONS) if self.overrides(kind, name)]
        methods = {
            name
            for each in kind.__mro__
            for name, value in vars(each).items()
            if type(value) is types.FunctionType and not name.startswith("__")
        }
        bases = [base for base in kind.__bases__ if base is not object and base.__module__ not in ("typing", "abc")]
        names = [str(kind.__name__), str(kind.__module__), str(kind.__qualname__)]
        return [names, [self.encode(base) for base in bases], has, sorted(methods), kind.__hash__ is None]

    def overrides(self, kind: type, name: str) -> bool:
        method = getattr(kind, name, None)
        return method is not None and method is not getattr(object, name, None)

    def decode(self, value: Any) -> Any:
        if type(value) is not list:
            return value
        return getattr(self, f"decode_{value[0]}")(*value[1:])

    def decode_int(self, text: str) -> int:
        return int(text, 16)

    def decode_float(self, text: str) -> float:
        return float(text)

    def decode_tuple(self, items: list[Any]) -> Any:
        return tuple(self.decode(each) for each in items)

    def decode_bytes(self, text: str) -> bytes:
        return text.encode("latin-1")

    def decode_constant(self, name: str) -> Any:
        return {"Ellipsis": Ellipsis, "NotImplemented": NotImplemented}[name]

    def decode_copy(self, name: str, parts: list[Any]) -> Any:
        return COPIED[name][0](*[self.decode(part) for part in parts])

    def decode_text(self, name: str, text: str) -> Any:
        return BY_TEXT[name].fromisoformat(text)  # type: ignore[attr-defined]

    def decode_default(self, factory: Any, items: Any) -> Any:
        return collections.defaultdict(self.decode(factory), self.decode(items))

    def decode_named(self, name: str) -> Any:
        return NAMED[name]

    def decode_shared(self, object_id: int) -> Any:
        return self.shared[object_id][0]

    def decode_container(self, name: str, object_id: int, items: list[Any]) -> Any:
        value: Any = CONTAINERS[name]()
        self.shared[object_id] = (value, [])  # it may hold itself
        self.fill(value, [self.decode(each) for each in items])
        del self.shared[object_id]
        self.share(value, object_id)
        return value

    def decode_yours(self, object_id: int) -> Any:
        return self.mine[object_id]

    def decode_awaitable(self, object_id: int) -> Any:
        awaitable = self.known(object_id)
        if awaitable is None:
            awaitable = self.stand_in(object_id, self.base)

        async def awaited() -> Any:
            return self.ask("await", awaitable)

        return awaited()

    def decode_module(self, object_id: int, name: str) -> Any:
        stub = self.known(object_id)
        if stub is None:
            stub = Stub(str(name))
            vars(stub).update(_number=object_id, _peer=self)
            self.classes[object_id] = stub
        return stub

    def decode_function(self, object_id: int, name: str, doc: Any) -> Any:
        function = self.known(object_id)
        if function is None:
            function = self.stand_in(object_id, self.functions())
            vars(function).update(__name__=str(name), __qualname__=str(name), __doc__=doc)
        return function

    def functions(self) -> Any:
        """Return the class of stand-ins for functions, which are bound where a class has them."""
        if 0 not in self.classes:

            def bound(self: Any, instance: Any, _: Any = None) -> Any:
                return self if instance is None else types.MethodType(self, instance)

            body = {"__call__": special("__call__"), "__get__": bound, "__module__": "apart"}
            self.classes[0] = Meta("function", (self.base,), body, _made=True)
        return self.classes[0]

    def known(self, object_id: int) -> Any:
        """Return the stand-in of this number, or None if there is none."""
        self.dead.discard(object_id)
        return self.classes[object_id] if object_id in self.classes else self.theirs.get(object_id)

    def stand_in(self, object_id: int, kind: Any, value: Any = None) -> Any:
        builtin_base: Any = next((base for base in PLAIN_TYPES if issubclass(kind, base)), None)
        instance = object.__new__(kind) if builtin_base is None else builtin_base.__new__(kind, value)
        vars(instance)["_number"] = object_id
        try:
            self.theirs[object_id] = instance
        except TypeError:  # integers and tuples have no weak references
            self.classes[object_id] = instance
        return instance

    def decode_object(self, object_id: int, kind: Any, carried: Any) -> Any:
        proxy = self.known(object_id)
        if proxy is None:
            proxy = self.stand_in(object_id, self.require_class(self.decode(kind)), self.decode(carried))
        return proxy

    def require_class(self, kind: Any) -> Any:
        if not isinstance(kind, Meta):
            raise GoneError("an object has no class")
        return kind

    def decode_exception(self, object_id: int, kind: Any, details: list[Any]) -> Any:
        proxy = self.theirs.get(object_id)
        if proxy is not None:
            return proxy
        cls = self.decode(kind)
        if not (isinstance(cls, type) and issubclass(cls, BaseException)) or issubclass(cls, UNHARMED):
            cls = GoneError  # it would end the process of the tests
        args = [self.decode(each) for each in details[1]]
        error = cls.__new__(cls, *args)
        if isinstance(cls, Meta):
            vars(error).update(_number=object_id, _text=str(details[0]))
            self.theirs[object_id] = error
        else:
            error.__init__(*args)
        cause = self.decode(details[2])
        error.__cause__ = cause if isinstance(cause, BaseException) else None
        return error

    def decode_class(self, object_id: int, description: Any) -> Any:
        if object_id not in self.classes:
            self.classes[object_id] = self.made_class(object_id, *description)
        return self.classes[object_id]

    def made_class(self, object_id: int, names: Any, bases: Any, has: Any, methods: Any, unhashable: bool) -> Any:
        """Return a stand-in for a class of the other end; it keeps only harmless built-in bases."""
        above = [self.decode(base) for base in bases]
        inherited = [base for base in above if isinstance(base, Meta)]
        for base in above:
            harmless = base in PLAIN_TYPES or (isinstance(base, type) and issubclass(base, BaseException))
            if harmless and not issubclass(base, UNHARMED) and not isinstance(base, Meta):
                inherited.append(base)
        has_builtin_base = any(issubclass(base, PLAIN_TYPES) for base in inherited)
        body: dict[str, Any] = {str(name): forwarded(str(name)) for name in methods if not str(name).startswith("_")}
        body.update({"__module__": str(names[1]), "__qualname__": str(names[2]), "_number": object_id, "_peer": self})
        if any(issubclass(base, BaseException) for base in inherited):
            body["__str__"] = lambda self: vars(self).get("_text", "")
        elif not has_builtin_base:
            body.update({name: special(name) for name in has if name in FREE | BINARY | COMPARISONS})
            if unhashable or ("__eq__" in body and "__hash__" not in body):
                body["__hash__"] = None
        if not any(isinstance(base, Meta) for base in inherited):
            inherited.append(self.base)
        try:
            return Meta(str(names[0]), tuple(inherited), body, _made=True)
        except TypeError:  # bases that do not go together here
            return Meta(str(names[0]), (self.base,), body, _made=True)


def is_special(name: Any) -> bool:
    """Return True if this is the name of a special method that may be called."""
    return name in FREE or name in BINARY or name in COMPARISONS
