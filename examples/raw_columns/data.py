"""Small Spark DataFrames of raw columns, and a tokenizer made here: nothing is downloaded."""

from __future__ import annotations

import datetime as dt
import decimal
import io
import random
from typing import Any

import numpy as np
from PIL import Image
from pyspark.sql import DataFrame, SparkSession
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

GOOD, BAD = ["good", "great", "lovely"], ["bad", "awful", "dull"]
OTHERS = ["the", "film", "was", "really", "a", "book"]


def spark() -> SparkSession:
    """The active session, or a small one on this machine."""
    return SparkSession.getActiveSession() or SparkSession.builder.master("local[2]").getOrCreate()


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of the words of the reviews, in BERT's format."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *GOOD, *BAD, *OTHERS]
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]")


def reviews(rows: int = 400) -> tuple[DataFrame, DataFrame]:
    """``text`` (string), and ``label`` (int): 1 if the text praises; to train on, and to test."""
    chooser = random.Random(0)

    def review(label: int) -> str:
        words = [*chooser.choices(OTHERS, k=chooser.randrange(2, 8)), chooser.choice([BAD, GOOD][label])]
        chooser.shuffle(words)
        return " ".join(words)

    return _parts([(review(row % 2), row % 2) for row in range(rows)], "text string, label int")


def pictures(rows: int = 300) -> tuple[DataFrame, DataFrame]:
    """``jpeg`` (binary): a bright square on noise, and ``corner`` (int), where it is."""
    random_numbers = np.random.default_rng(0)

    def picture(corner: int) -> bytes:
        pixels = random_numbers.integers(0, 90, (16, 16, 3), dtype=np.uint8)
        top, left = 8 * (corner // 2), 8 * (corner % 2)
        pixels[top : top + 8, left : left + 8] += 120
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG", quality=95)
        return file.getvalue()

    return _parts([(bytearray(picture(row % 4)), row % 4) for row in range(rows)], "jpeg binary, corner int")


def shop(rows: int = 400) -> tuple[DataFrame, DataFrame]:
    """Forty columns, five of each of eight kinds, many with nulls; and ``spent`` (double), which depends on some."""
    chooser = random.Random(0)
    kinds = {
        "city": ("string", lambda: chooser.choice(["Rome", "Oslo", "Lima", None])),
        "plan": ("string", lambda: chooser.choice(["free", "basic", "pro"])),
        "age": ("int", lambda: chooser.choice([None, *range(18, 80)])),
        "rate": ("double", lambda: chooser.random()),
        "price": ("decimal(8,2)", lambda: decimal.Decimal(chooser.randrange(10000)) / 100),
        "active": ("boolean", lambda: chooser.choice([True, False, None])),
        "since": ("date", lambda: chooser.choice([None, dt.date(2020 + chooser.randrange(5), 1, 1)])),
        "visits": ("bigint", lambda: chooser.randrange(50)),
    }
    columns = {f"{kind}{number}": (kinds[kind], kind) for kind in kinds for number in range(5)}

    def row() -> tuple[Any, ...]:
        values = {name: draw() for name, ((_, draw), _) in columns.items()}
        spent = 3.0 * (values["city0"] == "Rome") + 2.0 * (values["plan0"] == "pro") + values["rate0"]
        return (*values.values(), spent)

    types = ", ".join(f"{name} {sql_type}" for name, ((sql_type, _), _) in columns.items())
    return _parts([row() for _ in range(rows)], f"{types}, spent double")


def _parts(rows: list[tuple[Any, ...]], types: str) -> tuple[DataFrame, DataFrame]:
    held_out = len(rows) // 5
    return spark().createDataFrame(rows[held_out:], types), spark().createDataFrame(rows[:held_out], types)
