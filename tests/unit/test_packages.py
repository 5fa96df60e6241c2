"""GGUF files in Python packages, whole or split over several."""

from __future__ import annotations

import hashlib
import importlib
import os
from pathlib import Path

import pytest

from kvferry.runtime.errors import CorruptModel, NotFound
from kvferry.runtime.model.packages import find_in_package

pytestmark = pytest.mark.core
CONTENT = bytes(range(256)) * 100
NAME = "tiny-q4.gguf"


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where packages are found, and a cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


def put(site: Path, package: str) -> None:
    (site / package / "data").mkdir(parents=True)
    (site / package / "__init__.py").write_text("raise RuntimeError('models are data, not code to run')")
    importlib.invalidate_caches()


def put_split(site: Path, package: str, num_parts: int = 12) -> None:
    """More than ten, so that their order is not the alphabet's."""
    put(site, package)
    (site / package / "data" / "SHA256SUMS").write_text(f"{hashlib.sha256(CONTENT).hexdigest()}  {NAME}\n")
    size = -(-len(CONTENT) // num_parts)
    for i in range(num_parts):
        put(site, f"{package}_part{i + 1}")
        part = site / f"{package}_part{i + 1}" / "data" / f"{NAME}.part{i:02d}"
        part.write_bytes(CONTENT[i * size : (i + 1) * size])


def test_parts_are_joined_once(site: Path, tmp_path: Path) -> None:
    """Every process of a deployment asks; all but the first must find the file ready."""
    put_split(site, "kvf_split")
    found = find_in_package("kvf_split")
    assert (found.name, found.read_bytes()) == (NAME, CONTENT)
    assert found.is_relative_to(tmp_path / "cache" / "kvferry")
    os.utime(found, ns=(0, 0))
    assert find_in_package("kvf_split") == found
    assert found.stat().st_mtime_ns == 0
    found.write_bytes(CONTENT[:-1])  # a disk that was full, a copy that broke off
    assert find_in_package("kvf_split").read_bytes() == CONTENT
    assert [path.name for path in found.parent.iterdir()] == [NAME]


def test_another_release_is_another_file(site: Path) -> None:
    """A cache that is found by name serves last year's weights."""
    put_split(site, "kvf_release")
    first = find_in_package("kvf_release")
    part = site / "kvf_release_part1" / "data" / f"{NAME}.part00"
    changed = part.read_bytes()[::-1]
    part.write_bytes(changed)
    digest = hashlib.sha256(changed + CONTENT[len(changed) :]).hexdigest()
    (site / "kvf_release" / "data" / "SHA256SUMS").write_text(f"{digest}  {NAME}\n")
    second = find_in_package("kvf_release")
    assert second != first
    assert second.read_bytes()[: len(changed)] == changed


def test_what_is_missing_is_named(site: Path) -> None:
    """Half a model that loads, or an error that does not say what to install."""
    put_split(site, "kvf_gap")
    (site / "kvf_gap_part3" / "data" / f"{NAME}.part02").unlink()
    with pytest.raises(NotFound, match=r"kvf_gap_part1 and on.*\[0, 1, 3, .*install all of them"):
        find_in_package("kvf_gap")
    put_split(site, "kvf_bare")
    for path in site.glob("kvf_bare_part*"):
        path.rename(site / f"away_{path.name}")
    importlib.invalidate_caches()
    with pytest.raises(NotFound, match=r"found parts \[\]"):
        find_in_package("kvf_bare")
    with pytest.raises(NotFound, match="no Python package 'kvf_none' is installed"):
        find_in_package("kvf_none")
    with pytest.raises(NotFound, match="no Python package"):
        find_in_package("not an identifier")


def test_wrong_content_is_refused_and_leaves_nothing(site: Path, tmp_path: Path) -> None:
    """A lost last part shows in the hash only."""
    put_split(site, "kvf_short")
    (site / "kvf_short_part12" / "data" / f"{NAME}.part11").unlink()
    with pytest.raises(CorruptModel, match=r"SHA-256 is .*is a part missing"):
        find_in_package("kvf_short")
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []
    put_split(site, "kvf_sums")
    (site / "kvf_sums" / "data" / "SHA256SUMS").write_text("no sum at all\n")
    with pytest.raises(CorruptModel, match=r"SHA256SUMS: expected one line .*, found 0"):
        find_in_package("kvf_sums")


def test_a_cache_that_cannot_be_written_is_named(site: Path, tmp_path: Path) -> None:
    put_split(site, "kvf_full")
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(NotFound, match=r"cannot be joined in .*XDG_CACHE_HOME"):
        find_in_package("kvf_full")


def test_whole_files(site: Path) -> None:
    put(site, "kvf_whole")
    path = site / "kvf_whole" / "data" / NAME
    path.write_bytes(CONTENT)
    assert find_in_package("kvf_whole") == path
    (site / "kvf_whole" / "other.gguf").touch()
    with pytest.raises(NotFound, match=r"expected exactly one \.gguf file, found tiny-q4\.gguf, other\.gguf"):
        find_in_package("kvf_whole")
