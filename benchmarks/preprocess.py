"""Seconds per step of a tiny BERT that is fitted to a Parquet file of texts, which `preprocess` tokenises in the
reader's threads or in its process, against the same fit of the ids, tokenised before and written as Parquet; in turns,
one worker on two cores, so that the tokeniser has a core beside the step. The first epoch of each fit does not count.
What the machine itself asks for doing both at once is measured too: the fit of the ids while a process that has nothing
to do with it tokenises a batch per step.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.measure import row, seconds
from benchmarks.report import Report
from hvd_cluster.estimators import TorchEstimator

TURNS = 5
ROWS = 6_400
BATCH_SIZE = 64
EPOCHS = 4
#: Words of a text; with [CLS] and [SEP], 64 ids.
WORDS = 62
VOCABULARY = [f"word{index}" for index in range(2_000)]
#: A batch.
TEXTS = {"text": [" ".join(VOCABULARY[:WORDS])] * BATCH_SIZE}
BESIDE = "ids, while another process tokenises"


def tokenizer() -> Any:
    """One that splits words at whitespace, in BERT's format."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *VOCABULARY]
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]")


class Tokenize:
    """The `preprocess` of the texts."""

    def __init__(self) -> None:
        self.tokenizer = tokenizer()

    def __call__(self, batch: dict[str, Any]) -> Any:
        return self.tokenizer(list(batch["text"]), return_token_type_ids=False, return_tensors="np")


def write(folder: Path) -> dict[str, Path]:
    """The same rows as texts and as ids."""
    random = np.random.default_rng(0)
    texts = [" ".join(random.choice(VOCABULARY, WORDS)) for _ in range(ROWS)]
    encoded = tokenizer()(texts, return_tensors="np")
    labels = pa.array(random.integers(0, 2, ROWS))
    tables = {"texts": pa.table({"text": texts, "labels": labels})}
    ids = {
        name: pa.FixedSizeListArray.from_arrays(pa.array(encoded[name].reshape(-1)), encoded[name].shape[1])
        for name in ("input_ids", "attention_mask")
    }
    tables["ids"] = pa.table({**ids, "labels": labels})
    paths = {name: folder / f"{name}.parquet" for name in tables}
    for name, table in tables.items():
        pq.write_table(table, paths[name], row_group_size=800)
    return paths


def history(path: Path, features: list[str], preprocess: Any, pool: Any) -> list[dict[str, Any]]:
    """The records of the epochs that count."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 512,
    }
    net = BertForSequenceClassification(BertConfig(vocab_size=len(VOCABULARY) + 4, **sizes))
    fitted = TorchEstimator(
        model=net,
        optimizer=torch.optim.AdamW(net.parameters(), lr=1e-4),
        feature_cols=features,
        label_cols=["labels"],
        preprocess=preprocess,
        reader_pool_type=pool,
        output_fn=_logits,
        batch_size=BATCH_SIZE,
        epochs=EPOCHS,
        num_proc=1,
        verbose=0,
    ).fit(str(path))
    return list(fitted.getHistory()[1:])


def _logits(output: Any) -> torch.Tensor:
    logits: torch.Tensor = output.logits
    return logits


@contextlib.contextmanager
def _tokenising_beside(step_s: float) -> Iterator[None]:
    """Another process tokenises a batch every ``step_s`` seconds."""
    process = multiprocessing.get_context("spawn").Process(target=_tokenise, args=(step_s,), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.terminate()
        process.join()


def _tokenise(step_s: float) -> None:
    encode = Tokenize()
    while True:
        began_s = time.monotonic()
        encode(TEXTS)
        time.sleep(max(0.0, began_s + step_s - time.monotonic()))


def tokenising_s(turns: int) -> float:
    """Seconds that a batch's tokenisation takes alone."""
    encode, taken = Tokenize(), []
    for _ in range(turns):
        began_s = time.perf_counter()
        encode(TEXTS)
        taken.append(time.perf_counter() - began_s)
    return statistics.median(taken)


def measure() -> Report:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread, as OMP_NUM_THREADS=1 asks of torch
    ids = ["input_ids", "attention_mask"]
    contenders: dict[str, Any] = {
        "ids": ("ids", ids, None, "thread"),
        BESIDE: ("ids", ids, None, "thread"),
        "texts, tokenised in threads": ("texts", ["text"], Tokenize(), "thread"),
        "texts, tokenised in a process": ("texts", ["text"], Tokenize(), "process"),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    waits: dict[str, list[float]] = {name: [] for name in contenders}
    with tempfile.TemporaryDirectory() as folder:
        paths = write(Path(folder))
        for _ in range(TURNS):
            for name, (kind, features, preprocess, pool) in contenders.items():
                beside = _tokenising_beside(times["ids"][-1]) if name == BESIDE else contextlib.nullcontext()
                with beside:
                    records = history(paths[kind], features, preprocess, pool)
                steps = ROWS // BATCH_SIZE
                times[name].append(statistics.median(record["seconds"] / steps for record in records))
                waits[name].append(statistics.median(max(record["data_wait_share"]) for record in records))
    rows = []
    for name, taken in times.items():
        found = row("", {"ours": taken, "peer": times["ids"]})
        spread = "" if name == "ids" else f"{found.ratio:.3f} ({found.ratio_low:.3f} to {found.ratio_high:.3f})"
        rows.append((name, seconds(found.ours_s), spread, f"{statistics.median(waits[name]):.1%}"))
    columns = ["data", "step", "of the steps per second on ids", "share of the step spent waiting for data"]
    notes = [f"A batch is tokenised in {seconds(tokenising_s(20))} where nothing else runs."]
    title = f"A tiny BERT on {ROWS:,} texts of {WORDS} words, batches of {BATCH_SIZE}"
    return Report(title, columns, rows, notes)
