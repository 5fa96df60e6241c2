"""No wait without a deadline: reads the source and names every wait on a peer, a queue, an event, a future, a thread, a
process or a socket that nothing bounds. Part of `make check`.

Bounded is an `await` inside `async with asyncio.timeout(…)`, one of a coroutine of this tree (which is read as well),
and a blocking call with a timeout. What is left must stand in `tests/waits_allowed.py` with the reason why it ends; an
entry that matches nothing is a fault, too.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("kernels", "runtime", "cluster")
VIRTUAL = ("cluster", "sim")
"""Its time does not pass by itself: a wait that nothing ends stops the loop, which reports it."""
GENERATED = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")
QUEUES = {"Queue", "LifoQueue", "PriorityQueue", "SimpleQueue"}
SOCKET_CALLS = {"accept", "recv", "recv_into", "recvfrom", "recvmsg", "recv_fds", "sendall", "connect"}
LOCAL_CALLS = {"abort", "enter_async_context"}
"""`abort` of a gRPC context queues a status; entering a context runs coroutines of this tree."""
PROCESS_CALLS = {"run", "call", "check_call", "check_output"}
AnyFunction = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Wait:
    path: str
    line: int
    function: str
    what: str
    """The call or the awaited expression, without its arguments."""

    @property
    def key(self) -> str:
        return f"{self.path} {self.function} {self.what}"


@dataclass
class Scope:
    """One function, and what has been seen in it so far."""

    name: str
    is_async: bool = False
    optional: set[str] = field(default_factory=set)
    """Its parameters that may be `None`."""
    assigned: dict[str, ast.expr] = field(default_factory=dict)
    """What its variables were last set to."""
    has_socket_timeout: bool = False
    has_cancelled: bool = False
    num_timeouts: int = 0
    """Blocks of `asyncio.timeout` around the present line."""


def name_of(node: ast.AST) -> str:
    """`a.b.c` of a name or a call; `…` for what has none."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr):
            return f"{name_of(value)}.{attr}"
        case ast.Call(func=func):
            return f"{name_of(func)}()"
        case ast.Await(value=value):
            return name_of(value)
    return "…"


def last(node: ast.AST) -> str:
    return name_of(node).rpartition(".")[2]


def is_none(node: ast.AST | None) -> bool:
    return node is None or (isinstance(node, ast.Constant) and node.value is None)


def optional_parameters(node: AnyFunction) -> set[str]:
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return {a.arg for a in arguments if a.annotation is not None and "None" in ast.unparse(a.annotation).split(" | ")}


def coroutines(trees: list[ast.Module]) -> set[str]:
    """Names of the coroutine functions of this tree that have a body, or are ports filled by others here."""
    return {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef)}


def functions(trees: list[ast.Module]) -> set[str]:
    return {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def queues(tree: ast.Module) -> set[str]:
    """Names and attributes that are bound to a queue."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if last(node.value.func) in QUEUES:
                found |= {last(target) for target in targets}
    return found


class Reader(ast.NodeVisitor):
    """Collects the unbounded waits of one file."""

    def __init__(self, path: str, tree: ast.Module, own_coroutines: set[str], own_functions: set[str]) -> None:
        self.waits: list[Wait] = []
        self._path = path
        self._coroutines = own_coroutines
        self._functions = own_functions
        self._queues = queues(tree)
        self._scopes = [Scope("")]
        self._awaited: set[int] = set()
        self.visit(tree)

    @property
    def _scope(self) -> Scope:
        return self._scopes[-1]

    def _add(self, node: ast.expr, what: str) -> None:
        names = [scope.name for scope in self._scopes if scope.name]
        self.waits.append(Wait(self._path, node.lineno, ".".join(names) or "module", what))

    # ------------------------------------------------------------ scopes
    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._enter(node, Scope(node.name))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._enter(node, Scope(node.name, optional=optional_parameters(node)))

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._enter(node, Scope(node.name, is_async=True, optional=optional_parameters(node)))

    def _enter(self, node: ast.AST, scope: Scope) -> None:
        self._scopes.append(scope)
        self.generic_visit(node)
        self._scopes.pop()

    def visit_AsyncWith(self, node: ast.AsyncWith) -> None:
        bounds = [item.context_expr for item in node.items if self._is_timeout(item.context_expr)]
        for item in node.items:
            self.visit(item)
        self._scope.num_timeouts += len(bounds)
        for statement in node.body:
            self.visit(statement)
        self._scope.num_timeouts -= len(bounds)

    def _is_timeout(self, node: ast.expr) -> bool:
        if not isinstance(node, ast.Call) or name_of(node.func) not in ("asyncio.timeout", "asyncio.timeout_at"):
            return False
        return not self._may_be_none(node.args[0] if node.args else None)

    def _may_be_none(self, node: ast.AST | None) -> bool:
        return is_none(node) or (isinstance(node, ast.Name) and node.id in self._scope.optional)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            if isinstance(target, ast.Name):
                self._scope.assigned[target.id] = node.value
        self.generic_visit(node)

    # ------------------------------------------------------------ asynchronous waits
    def visit_AsyncFor(self, node: ast.AsyncFor) -> None:
        if not self._scope.num_timeouts and not self._is_bounded_await(node.iter):
            self._add(node.iter, f"async for {name_of(node.iter)}")
        self.generic_visit(node)

    def visit_Await(self, node: ast.Await) -> None:
        self._awaited |= {id(inner) for inner in ast.walk(node.value)}
        if not self._scope.num_timeouts and not self._is_bounded_await(node.value):
            self._add(node, f"await {name_of(node.value)}")
        self.generic_visit(node)

    def _is_bounded_await(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Name) and node.id in self._scope.assigned:
            node = self._scope.assigned[node.id]
        if not isinstance(node, ast.Call):
            return False
        name = name_of(node.func)
        if name == "cast":
            return self._is_bounded_await(node.args[1])
        if name in ("asyncio.sleep", "asyncio.wait_for", "asyncio.wait"):
            return name == "asyncio.sleep" or self._has_timeout(node, 1 if name == "asyncio.wait_for" else 99)
        if name == "asyncio.shield":
            return self._is_bounded_await(node.args[0])
        if name == "asyncio.to_thread":  # the function itself is read where it stands
            return last(node.args[0]) in self._functions or self._has_timeout(node, 99)
        if name == "asyncio.gather":
            ends = self._scope.has_cancelled and any(k.arg == "return_exceptions" for k in node.keywords)
            return ends or all(self._is_bounded_await(argument) for argument in map(_element, node.args))
        return last(node.func) in self._coroutines | LOCAL_CALLS or self._has_timeout(node, 99)

    def _has_timeout(self, node: ast.Call, position: int) -> bool:
        """By keyword, at `position`, or as an argument that is called so."""
        named = [k.value for k in node.keywords if k.arg is not None and "timeout" in k.arg]
        placed = node.args[position : position + 1]
        told = [a for a in node.args if last(a).lower().endswith(("timeout_s", "timeout"))]
        return any(not self._may_be_none(value) for value in (*named, *placed, *told))

    # ------------------------------------------------------------ blocking waits
    def visit_Call(self, node: ast.Call) -> None:
        name = last(node.func)
        if name == "settimeout" and node.args:
            self._scope.has_socket_timeout = not self._may_be_none(node.args[0])
        if name == "cancel":
            self._scope.has_cancelled = True
        if id(node) not in self._awaited and self._blocks(node, name):
            self._add(node, name_of(node.func))
        self.generic_visit(node)

    def _blocks(self, node: ast.Call, name: str) -> bool:
        """Whether it may wait for ever."""
        if not isinstance(node.func, ast.Attribute):
            return name == "create_connection" and not self._has_timeout(node, 1)
        owner = name_of(node.func.value)
        if name == "create_connection":
            return not self._has_timeout(node, 1)
        if name == "wait" and owner != "asyncio":
            return self._wait_blocks(node)
        if name == "wait_for" and owner != "asyncio":
            return not self._has_timeout(node, 1)
        if name in ("join", "acquire", "communicate"):
            return not node.args and not self._has_timeout(node, 0)
        if name == "result":  # of a task it does not wait
            return not self._scope.is_async and not node.args and not self._has_timeout(node, 0)
        if owner.rpartition(".")[2] in self._queues and name in ("get", "put"):
            return not self._has_timeout(node, 2 if name == "put" else 1)
        if name in SOCKET_CALLS and ("sock" in owner.lower() or "listener" in owner.lower()):
            return not self._scope.has_socket_timeout
        if owner == "subprocess" and name in PROCESS_CALLS:
            return not self._has_timeout(node, 99)
        return owner == "ray" and name in ("get", "wait") and not self._has_timeout(node, 99)

    def _wait_blocks(self, node: ast.Call) -> bool:
        """`event.wait(t)`, `store.wait([keys], t)`; an asyncio event's coroutine counts where it is awaited."""
        places = [a for a in node.args if not isinstance(a, ast.List | ast.Tuple)]
        return not any(not self._may_be_none(a) for a in places) and not self._has_timeout(node, 99)


def _element(node: ast.expr) -> ast.expr:
    """What a starred comprehension awaits."""
    if isinstance(node, ast.Starred):
        node = node.value
    return node.elt if isinstance(node, ast.GeneratorExp | ast.ListComp) else node


def read(sources: dict[str, str]) -> list[Wait]:
    """The unbounded waits of the files `{path: text}`."""
    trees = {path: ast.parse(text) for path, text in sources.items()}
    own_coroutines, own_functions = coroutines(list(trees.values())), functions(list(trees.values()))
    return [w for path, tree in trees.items() for w in Reader(path, tree, own_coroutines, own_functions).waits]


def files() -> Iterator[Path]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).parts
            if not path.name.endswith(GENERATED) and "__pycache__" not in parts and parts[:2] != VIRTUAL:
                yield path


def faults(waits: list[Wait], allowed: dict[str, str]) -> list[str]:
    found = {wait.key for wait in waits}
    unbounded = [f"{w.path}:{w.line}: {w.function}: {w.what} has no deadline" for w in waits if w.key not in allowed]
    stale = [f"tests/waits_allowed.py: {key!r} matches nothing" for key in sorted(allowed) if key not in found]
    return unbounded + stale


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from tests.waits_allowed import ALLOWED

    result = faults(read({str(p.relative_to(ROOT)): p.read_text() for p in files()}), ALLOWED)
    for line in result:
        print(line)
    sys.exit(bool(result))
