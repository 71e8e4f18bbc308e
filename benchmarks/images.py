"""An epoch of JPEG files of 256 x 256 pixels from a local disk, decoded by Pillow into shuffled batches of 64 uint8
tensors, on two cores: `ParquetReader` with `preprocess` in two threads, against LitData, Mosaic Streaming and torch's
DataLoader over a folder of files, with two processes each. All have the same bytes, and take turns. The peers come
from `make .venv-loaders/.ready`; those that are not installed are left out.
"""

from __future__ import annotations

import importlib.util
import io
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

from benchmarks.measure import seconds
from benchmarks.report import Report
from hvd_cluster.data import ParquetReader
from hvd_cluster.data.preprocessing import Preprocess

NUM_IMAGES, SIDE, BATCH_SIZE, NUM_WORKERS = 4_000, 256, 64, 2
TURNS = 7

#: Opens a data set that :func:`written` has written, and returns an iterator over the batches of an epoch.
Loader = Callable[[Path, int], Iterator[torch.Tensor]]


def decoded(jpeg: bytes) -> torch.Tensor:
    """Shape (height, width, 3), uint8."""
    return torch.from_numpy(np.array(Image.open(io.BytesIO(jpeg)).convert("RGB")))


def jpegs(count: int) -> Iterator[bytes]:
    """Smooth pictures with some noise, about as large as photographs of this size."""
    random = np.random.default_rng(0)
    for _ in range(count):
        coarse = Image.fromarray(random.integers(0, 256, (16, 16, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((SIDE, SIDE), Image.Resampling.BICUBIC), dtype=np.int16)
        noisy = np.clip(smooth + random.integers(-12, 13, (SIDE, SIDE, 1)), 0, 255).astype(np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(noisy).save(buffer, "JPEG", quality=85)
        yield buffer.getvalue()


def write_lit(folder: str) -> None:
    """Write the files of a folder in LitData's format."""
    import litdata

    paths = [str(path) for path in Path(folder, "files").iterdir()]
    litdata.optimize(_sample, paths, output_dir=f"{folder}/litdata", chunk_bytes="8MB", num_workers=1)


def _sample(path: str) -> dict[str, Any]:
    return {"jpeg": Path(path).read_bytes()}


def written(folder: Path, count: int) -> dict[str, Loader]:
    """Write the pictures in the format of each loader that is installed; returns the loaders by name."""
    pictures = list(jpegs(count))
    (folder / "files").mkdir()
    for index, jpeg in enumerate(pictures):
        (folder / "files" / f"{index}.jpg").write_bytes(jpeg)
    table = pa.table({"jpeg": pa.array(pictures, pa.binary())})
    pq.write_table(table, folder / "images.parquet", row_group_size=256, compression="none", use_dictionary=False)
    loaders: dict[str, Loader] = {"hvd_cluster": ours, "torch DataLoader": torch_loader}
    if importlib.util.find_spec("litdata"):
        # In a process of its own: it leaves threads, and another start method of processes.
        code = "import sys; from benchmarks.images import write_lit; write_lit(sys.argv[1])"
        subprocess.run([sys.executable, "-c", code, str(folder)], check=True, stdout=subprocess.DEVNULL)
        loaders["LitData"] = lit_loader
    if importlib.util.find_spec("streaming"):
        # It imports torchvision, whose extension does not load without CUDA and which then misses these operations.
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        from streaming import MDSWriter

        with MDSWriter(out=str(folder / "mosaic"), columns={"jpeg": "bytes"}, size_limit=8 << 20) as writer:
            for jpeg in pictures:
                writer.write({"jpeg": jpeg})
        loaders["Mosaic Streaming"] = mosaic_loader
    return loaders


def _pixels(batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {"pixels": torch.stack([decoded(jpeg) for jpeg in batch["jpeg"]])}


def ours(folder: Path, epoch: int) -> Iterator[torch.Tensor]:
    with ParquetReader(
        str(folder / "images.parquet"),
        ["jpeg"],
        batch_size=BATCH_SIZE,
        num_threads=NUM_WORKERS,
        remainder="partial",
        epoch=epoch,
        num_epochs=1,
        preprocess=Preprocess(fn=_pixels, columns=("jpeg",)),
    ) as reader:
        for batch in reader:
            yield batch["pixels"]


class Files(torch.utils.data.Dataset[torch.Tensor]):
    """A folder of files."""

    def __init__(self, folder: Path) -> None:
        self._paths = sorted((folder / "files").iterdir())

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return decoded(self._paths[index].read_bytes())


def torch_loader(folder: Path, epoch: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(epoch)
    yield from torch.utils.data.DataLoader(
        Files(folder), BATCH_SIZE, shuffle=True, num_workers=NUM_WORKERS, generator=generator
    )


def _stacked(samples: list[dict[str, Any]]) -> torch.Tensor:
    return torch.stack([decoded(sample["jpeg"]) for sample in samples])


def lit_loader(folder: Path, epoch: int) -> Iterator[torch.Tensor]:
    import litdata

    data = litdata.StreamingDataset(str(folder / "litdata"), shuffle=True, seed=epoch)
    yield from litdata.StreamingDataLoader(
        data, batch_size=BATCH_SIZE, num_workers=NUM_WORKERS, collate_fn=_stacked, multiprocessing_context="fork"
    )


def mosaic_loader(folder: Path, epoch: int) -> Iterator[torch.Tensor]:
    from streaming import StreamingDataset

    data = StreamingDataset(local=str(folder / "mosaic"), shuffle=True, batch_size=BATCH_SIZE, shuffle_seed=epoch)
    yield from torch.utils.data.DataLoader(
        data, BATCH_SIZE, num_workers=NUM_WORKERS, collate_fn=_stacked, multiprocessing_context="fork"
    )


def measure() -> Report:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        loaders = written(folder, NUM_IMAGES)
        rates: dict[str, list[float]] = {name: [] for name in loaders}
        for turn in range(TURNS):
            for name, loader in loaders.items():
                began_s = time.perf_counter()
                count = sum(len(batch) for batch in loader(folder, turn))
                rates[name].append(count / (time.perf_counter() - began_s))
                if count != NUM_IMAGES:
                    raise AssertionError(f"{name} gave {count} of {NUM_IMAGES} images")
        jpeg = (folder / "files" / "0.jpg").read_bytes()
    began_s = time.perf_counter()
    for _ in range(200):
        decoded(jpeg)
    one_s = (time.perf_counter() - began_s) / 200
    rows = []
    for name in sorted(rates, key=lambda name: -statistics.median(rates[name])):
        ratios = sorted(ours / peer for ours, peer in zip(rates["hvd_cluster"], rates[name], strict=True))
        quarter = len(ratios) // 4
        spread = f"{statistics.median(ratios):.2f}x ({ratios[quarter]:.2f} to {ratios[-quarter - 1]:.2f})"
        rows.append((name, f"{statistics.median(rates[name]):,.0f}", "" if name == "hvd_cluster" else spread))
    title = f"{NUM_IMAGES:,} JPEGs of {SIDE} x {SIDE}, {len(jpeg) / 1024:.0f} KB each"
    notes = [f"One thread decodes one in {seconds(one_s)}, where nothing else runs."]
    return Report(title, ["loader", "images/s", "ours against it"], rows, notes)
