"""The table of faults in docs/ against the tree: what it promises must be there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.core
ROOT = Path(__file__).resolve().parents[2]
TABLE = (ROOT / "docs" / "faults.md").read_text()
NUM_FAULTS = 41
BINDS = {"create_server": 0, "bind": 0, "add_insecure_port": 0}
"""Calls that take a port, and where the address stands."""


def names_in(path: Path) -> set[str]:
    """Tests at the top of a file: functions, and what a state machine is called."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def test_every_fault_has_a_test_that_exists() -> None:
    """Fault: a test is renamed or dropped, and the table goes on to promise it."""
    rows = re.findall(r"^\| (\d+) \|(.*)$", TABLE, flags=re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, NUM_FAULTS + 1))
    for number, row in rows:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", row)
        assert named, f"fault {number} names no test"
        for file, name in named:
            path = ROOT / "tests" / file
            assert path.exists(), f"fault {number}: tests/{file} does not exist"
            assert name in names_in(path), f"fault {number}: {name} is not in tests/{file}"


def test_nothing_is_unpickled() -> None:
    """Fault 40: whoever can send a pickle runs code here."""
    for folder in ("runtime", "cluster", "kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            imports = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Import | ast.ImportFrom)]
            modules = {alias.name for n in imports for alias in n.names} | {getattr(n, "module", None) for n in imports}
            assert not modules & {"pickle", "cloudpickle", "marshal", "shelve", "dill"}, path


def test_no_port_is_fixed() -> None:
    """Fault 33: two workers on one host collide on a port. Only the door that users name has a number."""
    for folder in ("runtime", "cluster"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in BINDS:
                    address = node.args[BINDS[node.func.attr]]
                    numbers = [c.value for c in ast.walk(address) if isinstance(c, ast.Constant)]
                    fixed = [n for n in numbers if (isinstance(n, int) and n > 0) or re.search(r":[1-9]\d*$", str(n))]
                    assert not fixed, f"{path.relative_to(ROOT)}:{node.lineno} binds port {fixed}"
