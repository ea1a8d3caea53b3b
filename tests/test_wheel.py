"""A wheel has every room; an installation from the source tree, as tests have, would not notice that one is missing."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "lightning_fxpipe"


def test_a_wheel_has_every_file_of_the_package(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(ROOT / PACKAGE, source / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(source)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if "No matching distribution found for setuptools" in built.stderr:
        pytest.skip("pip finds no setuptools to build with")
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith(f"{PACKAGE}/")}
    expected = {path.relative_to(source).as_posix() for path in (source / PACKAGE).rglob("*") if path.is_file()}
    assert len(expected) > 100
    assert packed == expected
