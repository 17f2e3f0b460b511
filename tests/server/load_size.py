"""How large the tests of load are: the size that CI has time for, or with FULL_LOAD_TESTS=1 all that is promised."""

from __future__ import annotations

import os
from typing import TypeVar

Size = TypeVar("Size")

IS_FULL = os.environ.get("FULL_LOAD_TESTS") == "1"


def sized(usual: Size, *, full: Size) -> Size:
    return full if IS_FULL else usual
