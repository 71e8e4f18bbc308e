"""Runs where petastorm is installed: reads a data set with its own API, and writes what it gave.

python read.py URL RESULT.npz
"""

import decimal
import sys
import warnings

warnings.simplefilter("ignore")

import numpy as np  # noqa: E402
from petastorm import make_reader  # noqa: E402


def main():
    url, result = sys.argv[1:]
    values = {}
    with make_reader(url, reader_pool_type="dummy", shuffle_row_groups=False) as reader:
        for name, field in reader.schema.fields.items():
            dtype = getattr(field.numpy_dtype, "__name__", str(field.numpy_dtype))
            scalar = type(field.codec).__name__ == "ScalarCodec"
            codec = f"ScalarCodec({field.codec.spark_dtype()!r})" if scalar else str(field.codec)
            values[f"schema/{name}"] = np.array([dtype, repr(field.shape), codec, str(field.nullable)])
        for row in reader:
            for name, value in row._asdict().items():
                if value is not None:
                    values[f"{name}/{row.id}"] = np.array(str(value)) if isinstance(value, decimal.Decimal) else value
    np.savez_compressed(result, **values)


if __name__ == "__main__":
    main()
