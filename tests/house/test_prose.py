"""Words that are banned from the package, its documentation and scripts, and the names of tests."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("benchmarks", "examples", "deploy", "demo", "notebooks", ".github")
TEXTS = {"", ".bsub", ".def", ".ipynb", ".md", ".py", ".sbatch", ".sh", ".yaml", ".yml"}

#: What must not be written, and what to write.
BANNED = {
    r"told (?:of|to)": "reported to, asked to, must",
    r"tells?": "says, reports or returns; a program does not tell",
    r"whoever": "name the subject",
    r"nobody": "no rank, no user, nothing",
    r"amid": "during, in the middle of",
    r"anew": "again",
    r"for ever": "forever, never returns",
    # "There is no file" and "is no longer" are how it is said.
    r"(?<!there\s)(?:is|are|was|were) no (?!longer|more|less|later|earlier|other|different)": "is not a",
    r"of (?:its|their) own accord": "by itself",
    r"besides": "also, in addition to",
    r"(?:goes|go|going|went|gone) on": "continues, happens",
    r"lets? go of": "releases",
    r"beforehand": "before",
    r"so many": "this many",
    r"as it stands": "as is",
}
# A line may end within a phrase, and the next begin with a comment's sign.
PATTERN = re.compile(
    "|".join(rf"(?P<b{i}>\b(?:{banned})\b)".replace(" ", r"[\s#]+") for i, banned in enumerate(BANNED)), re.IGNORECASE
)


def found_in(text: str) -> Iterator[tuple[int, str, str]]:
    """Line, words and remedy of each banned phrase, also of one that a line break cuts."""
    for match in PATTERN.finditer(text):
        assert match.lastgroup is not None
        yield text.count("\n", 0, match.start()) + 1, match.group(), list(BANNED.values())[int(match.lastgroup[1:])]


def texts() -> Iterator[tuple[Path, str]]:
    """What people read: sources, scripts, manifests and pages in full, and of the tests the names."""
    pages = [
        ROOT / "Makefile",
        *ROOT.glob("*.md"),
        *(ROOT / "hvd_cluster").rglob("*.py"),
        *(ROOT / "docs").rglob("*.md"),
    ]
    for path in [ROOT / "Makefile", *pages, *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))]:
        if path.suffix in TEXTS and path.is_file():
            yield path.relative_to(ROOT), path.read_text()
    for path in (ROOT / "tests").rglob("test_*.py"):
        # As many lines as the file has, so that what is found is found where it stands.
        names = [(re.match(r"\s*def (test_\w+)", line) or [""])[0] for line in path.read_text().splitlines()]
        yield path.relative_to(ROOT), "\n".join(name.replace("_", " ") for name in names)


def test_a_banned_phrase_is_found_across_lines() -> None:
    assert [
        (line, words) for line, words, _ in found_in("The rank\nis no\nleader: there is no other.\nIt goes on.")
    ] == [
        (2, "is no\n"),
        (4, "goes on"),
    ]


def test_no_text_has_banned_words() -> None:
    found = [
        f"{path}:{line}: {words!r} (write: {remedy})"
        for path, text in texts()
        for line, words, remedy in found_in(text)
    ]
    assert not found, "\n".join(found)
