"""Every public class has an example in docs/ that the tests run; the reference links to those in the guides."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "tests" / "house" / "public_api.txt"
#: Classes of the same name in several modules that are not the same class.
DIFFERENT = {"Compression"}
#: Classes of the modules below the packages that no guide shows yet, and why that may be.
WITHOUT = {
    "bases of classes with an example": {"LoaderBase", "PredicateBase", "RowGroupCache", "RowGroupSelectorBase"},
    "the type of the reader's other arguments": {"ReaderOptions"},
    "used as in petastorm, whose documentation shows them; tests/petastorm runs each": {
        "CompressedImageCodec",
        "CompressedNdarrayCodec",
        "DataframeColumnCodec",
        "DecodeFieldError",
        "InMemBatchedDataLoader",
        "IntersectIndexSelector",
        "LocalDiskCache",
        "PetastormMetadataError",
        "PetastormMetadataGenerationError",
        "ScalarCodec",
        "SingleIndexSelector",
        "UnionIndexSelector",
        "in_intersection",
        "in_pseudorandom_split",
        "in_reduce",
    },
    "used as on Databricks; tests/spark/test_horovod_runner.py runs it": {"LogCallback"},
}


def public_classes() -> set[str]:
    """Dotted names."""
    found, module = set(), ""
    for line in RECORD.read_text().splitlines():
        if heading := re.fullmatch(r"\[(.+)\]", line):
            module = heading[1]
        elif named := re.match(r"class (\w+)", line):
            found.add(f"{module}.{named[1]}")
    return found


def shown() -> set[str]:
    """The dotted names that examples use, and the last parts of those that mean one class everywhere."""
    names = set(runpy.run_path(str(ROOT / "docs" / "hooks.py"))["examples"](ROOT / "docs"))
    return names | {name.rpartition(".")[2] for name in names} - DIFFERENT


def test_every_public_class_has_an_example() -> None:
    classes, examples = public_classes(), shown()
    assert {"hvd_cluster.estimators.TorchEstimator", "hvd_cluster.torch.Compression"} <= classes & examples
    missing = {path for path in classes if not {path, path.rpartition(".")[2]} & examples}
    exempt = set[str]().union(*WITHOUT.values())
    assert sorted(path for path in missing if path.rpartition(".")[2] not in exempt) == [], (
        "show each in a block of docs/ that is run"
    )
    assert sorted(exempt - {path.rpartition(".")[2] for path in missing}) == [], "these have one, or are gone"


def test_a_block_that_is_not_run_is_not_an_example(tmp_path: Path) -> None:
    block = "import hvd_cluster.torch as hvd\nhvd.{}()\n```\n"
    (tmp_path / "page.md").write_text(
        "# Title\n\n## Part `one`\n\n```bash\n# no heading\n```\n\n```python\n"
        + block.format("run")
        + '\n```python run="no: it hangs"\n'
        + block.format("not_run")
        + "\n<!--\n```python\n"
        + block.format("hidden")
        + "-->\n"
    )
    places = runpy.run_path(str(ROOT / "docs" / "hooks.py"))["examples"](tmp_path)
    assert places["hvd_cluster.torch.run"] == ("page.md", "Part `one`")
    assert not {"hvd_cluster.torch.not_run", "hvd_cluster.torch.hidden"} & set(places)
