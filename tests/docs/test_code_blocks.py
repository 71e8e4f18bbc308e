"""Every block of code of the guides is run, as its info string says.

````
```python                          run by itself; the blocks of a page share a folder
```python file="train.py"          written under that name, for a later block to run
```python run="hvdrun -np 2"       run by that command
```python run="after"              run behind the block before it, in one program, by the same command
```python run="after sweep"        run behind the block that says name="sweep"
```python run="no: the reason"     compiled only
```bash                            run by bash; run="no: the reason" is not
```bash run="background"           run by bash while the blocks below it run; it has to end with them
```yaml                            read as a --config-file of hvdrun
```text                            no code
````

What a block needs and no reader wants to see stands before it in a comment, which docs/hooks.py leaves out of the HTML.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from ray_clusters import ray_folder

from benchmarks.__main__ import NAMES as BENCHMARKS
from hvd_cluster.launch.cli.config import apply_config
from hvd_cluster.launch.cli.main import parse_args

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(str(page.relative_to(DOCS)) for pattern in ("*.md", "api/*.md") for page in DOCS.glob(pattern))
#: Pages whose blocks tests of their own run.
ELSEWHERE = {"spark.md": "tests/spark", "estimators.md": "tests/estimators"}
ELSEWHERE |= {"keras-estimator.md": "tests/estimators", "lightning.md": "tests/lightning"}
#: Pages whose blocks need an environment of their own: a row of `make test-matrix`.
NEEDS = {"mxnet.md": "mxnet"}


@dataclass(frozen=True)
class Block:
    """A block of code and what its info string says."""

    language: str
    code: str
    file: str = ""
    run: str = ""
    name: str = ""

    @property
    def is_run(self) -> bool:
        return self.language in ("python", "bash") and not self.run.startswith("no: ")


def blocks_of(text: str) -> list[Block]:
    """The fenced blocks of a page.

    Raises:
        ValueError: a fence is open, is indented, or has a language or options that nothing here knows.
    """
    found: list[Block] = []
    opened: tuple[str, dict[str, str]] | None = None
    lines: list[str] = []
    for line in text.splitlines():
        if not line.lstrip().startswith("```"):
            lines.append(line)
        elif opened is not None and line == "```":
            found.append(Block(opened[0], "".join(f"{each}\n" for each in lines), **opened[1]))
            opened = None
        else:
            match = re.fullmatch(r'```(python|bash|yaml|text)((?: (?:file|run|name)="[^"]*")*)', line)
            if match is None or opened is not None:
                raise ValueError(f"{line!r} opens no block that is tested")
            opened, lines = (match[1], dict(re.findall(r'(\w+)="([^"]*)"', match[2]))), []
    if opened is not None:
        raise ValueError(f"a block of {opened[0]} is not closed")
    return found


@pytest.mark.parametrize("page", PAGES)
def test_blocks_are_right_in_themselves(page: str, tmp_path: Path) -> None:
    text = (DOCS / page).read_text()
    # A reader who copies what is shown must not miss the beginning of the program.
    assert re.findall(r'^```\n-->\n+(```python.*run="after.*)', text, re.MULTILINE) == []
    blocks = blocks_of(text)
    for block in blocks:
        if block.language == "python":
            ast.parse(block.code)
        elif block.language == "bash":
            check_commands(block.code)
        elif block.language == "yaml":
            (tmp_path / "config.yaml").write_text(block.code)
            apply_config(parse_args(["-np", "1", "train"]), str(tmp_path / "config.yaml"))
        if block.file:
            assert any(block.file in other.code for other in blocks if other.language == "bash" and other.is_run)


def check_commands(code: str) -> None:
    """Ask the programs that are ours whether they know what the lines give them, without running the lines."""
    for line in code.splitlines():
        words = shlex.split(line, comments=True)
        if "hvdrun" in words and "timeline" not in words:
            assert parse_args(words[words.index("hvdrun") + 1 :]).command, line
        if words[:1] == ["make"]:
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), line
        if "benchmarks" in words:
            assert set(words[words.index("benchmarks") + 1 :]) <= set(BENCHMARKS), line
        if words[:2] == ["pip", "install"]:
            table = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
            extras = re.findall(r"^(\w+) = \[", table.partition("\n[")[0], re.MULTILINE)
            assert set(",".join(re.findall(r"\[([\w,]+)\]", line)).split(",")) <= {*extras, ""}, line


@pytest.mark.parametrize(
    "text",
    [
        "```\nhvdrun -np 2 python train.py\n```",
        "```ruby\nputs\n```",
        '```python runs="never"\n```',
        "  ```python\n  ```",
        "```python\n",
        "```python\n```python\n```",
    ],
)
def test_a_block_that_nothing_tests_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="block"):
        blocks_of(text)


@pytest.mark.parametrize(
    "line", ["hvdrun -np 2 --min-procs 1 python t.py", "hvdrun -np 2", "make bnech", "pip install '.[sparc]'"]
)
def test_a_command_that_does_not_exist_is_an_error(line: str) -> None:
    with pytest.raises((AssertionError, SystemExit)):
        check_commands(line)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page not in ELSEWHERE and any(b.is_run for b in blocks_of((DOCS / page).read_text()))],
)
def test_blocks_run(page: str, tmp_path: Path) -> None:
    if (needed := NEEDS.get(page)) and importlib.util.find_spec(needed) is None:
        pytest.skip(f"needs {needed}: make matrix-{needed}")
    with ray_folder(), Programs(tmp_path).background() as programs:
        for block in blocks_of((DOCS / page).read_text()):
            if block.is_run:
                programs.run(block)


@dataclass
class Programs:
    """What the blocks of a page have become, in one folder."""

    folder: Path
    #: The programs so far and the commands that run them; under its name, what a block with a name has become.
    done: list[tuple[str, str]] = field(default_factory=list)
    named: dict[str, tuple[str, str]] = field(default_factory=dict)
    waiting: list[subprocess.Popen[str]] = field(default_factory=list)

    def run(self, block: Block) -> None:
        if block.language == "bash":
            command = ["bash", "-euo", "pipefail", "-c", block.code]
            if block.run == "background":
                process = subprocess.Popen(
                    command, cwd=self.folder, env=environment(), start_new_session=True, text=True
                )
                self.waiting.append(process)
            else:
                run(command, self.folder)
            return
        program, runner = block.code, block.run
        if block.run.startswith("after"):
            before = block.run.removeprefix("after").strip()
            begun, runner = self.named[before] if before else self.done[-1]
            program = begun + program
        self.done.append((program, runner))
        self.named |= {block.name: self.done[-1]} if block.name else {}
        file = self.folder / (block.file or f"block{len(self.done)}.py")
        file.write_text(program)
        if not block.file:
            run([*shlex.split(runner), "python", file.name], self.folder)

    @contextlib.contextmanager
    def background(self) -> Iterator[Programs]:
        """At the end, what runs in the background has to end as well."""
        try:
            yield self
            for process in self.waiting:
                assert process.wait(timeout=60) == 0
        finally:
            for process in self.waiting:
                if process.poll() is None:
                    process.terminate()
                    process.wait()


def run(command: list[str], folder: Path) -> None:
    done = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=400, check=False
    )
    shown = (folder / command[-1]).read_text() if command[0] != "bash" else command[-1]
    assert done.returncode == 0, f"{shown}\n{done.stdout}\n{done.stderr}"


def environment() -> dict[str, str]:
    return os.environ | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "CUDA_VISIBLE_DEVICES": "-1",
        "JAX_PLATFORMS": "cpu",
        "KERAS_BACKEND": "tensorflow",
        "RAY_AUTH_MODE": "disabled",  # else a cluster that a block starts leaves a token in the home folder
    }
