"""Numbers of eight bits with four of exponent and three of mantissa, E4M3 (Micikevicius et al., "FP8 Formats for Deep
Learning", 2022, table 1): no infinities, and all ones are no number."""

import numpy as np


def _numbers() -> np.ndarray:
    code = np.arange(256)
    exponent, rest = code >> 3 & 15, code & 7
    values = np.where(exponent == 0, np.ldexp(rest / 8, -6), np.ldexp(1 + rest / 8, exponent - 7))
    values = np.where(code & 127 == 127, np.nan, values)
    return np.where(code > 127, -values, values).astype(np.float32)


NUMBERS = _numbers()  # [256] float32, by their codes
