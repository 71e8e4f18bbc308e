"""Every block of code of the guides is run, as its info string says.

````
```python                          run by itself; the blocks of a page share a folder
```python file="train.py"          written under that name, for a later block to run
```python run="hvdrun -np 2"       run by that command
```python run="after"              run behind the block before it, in one program
```python run="no: the reason"     compiled only
```bash                            run by bash; run="no: the reason" is not
````
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from ray_clusters import ray_folder

DOCS = Path(__file__).parents[2] / "docs"
#: Pages whose blocks tests of their own run.
ELSEWHERE = {"spark.md": "tests/spark", "estimators.md": "tests/estimators"}
ELSEWHERE |= {"keras-estimator.md": "tests/estimators", "lightning.md": "tests/lightning"}
PAGES = [page.name for page in sorted(DOCS.glob("*.md")) if page.name not in ELSEWHERE]
_BLOCK = re.compile(r"^```(python|bash)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A block of code and what its info string says."""

    language: str
    code: str
    file: str = ""
    run: str = ""

    @property
    def is_run(self) -> bool:
        return not self.run.startswith("no: ")


def blocks_of(page: str) -> list[Block]:
    found = []
    for language, info, code in _BLOCK.findall((DOCS / page).read_text()):
        options = dict(re.findall(r'(\w+)="([^"]*)"', info))
        assert re.sub(r'\w+="[^"]*"', "", info).strip() == "", f"{page}: {info!r}"
        found.append(Block(language, code, **options))
    return found


@pytest.mark.parametrize("page", PAGES)
def test_blocks_compile_and_say_how_they_are_run(page: str) -> None:
    blocks = blocks_of(page)
    for block in blocks:
        if block.language == "python":
            ast.parse(block.code)
        if block.file:
            assert any(block.file in other.code for other in blocks if other.language == "bash" and other.is_run)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", [page for page in PAGES if any(block.is_run for block in blocks_of(page))])
def test_blocks_run(page: str, tmp_path: Path) -> None:
    with ray_folder():
        run_blocks(page, tmp_path)


def run_blocks(page: str, tmp_path: Path) -> None:
    program = ""
    for number, block in enumerate(blocks_of(page)):
        if not block.is_run:
            continue
        if block.language == "bash":
            run(["bash", "-euo", "pipefail", "-c", block.code], tmp_path)
            continue
        program = program + block.code if block.run == "after" else block.code
        (tmp_path / (block.file or f"block{number}.py")).write_text(program)
        if not block.file:
            command = [] if block.run == "after" else shlex.split(block.run)
            run([*command, "python", f"block{number}.py"], tmp_path)


def run(command: list[str], folder: Path) -> None:
    environ = os.environ | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "CUDA_VISIBLE_DEVICES": "-1",
        "JAX_PLATFORMS": "cpu",
        "KERAS_BACKEND": "tensorflow",
        "RAY_AUTH_MODE": "disabled",  # else a cluster that a block starts leaves a token in the home folder
    }
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=200, check=False)
    shown = (folder / command[-1]).read_text() if command[0] != "bash" else command[-1]
    assert done.returncode == 0, f"{shown}\n{done.stdout}\n{done.stderr}"
