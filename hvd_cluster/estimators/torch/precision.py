"""The dtypes of ``mixed_precision=``."""

from __future__ import annotations

import torch

HALF_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
