"""Rows of sampling settings from the few that a test cares about."""

import torch

from mstar.kernels.sampling import RowSettings

DEFAULTS = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "top_p_first": False,
    "top_p_min_keep": 1,
    "seed": 42,
    "offset": 0,
}
_DTYPES = {"temperature": torch.float32, "top_p": torch.float32, "min_p": torch.float32, "top_p_first": torch.bool}


def rows_of(*rows):
    """One row per mapping, the rest by default."""
    rows = [DEFAULTS | row for row in rows]
    return RowSettings(
        *(torch.tensor([row[n] for row in rows], dtype=_DTYPES.get(n, torch.int64)) for n in RowSettings._fields)
    )
