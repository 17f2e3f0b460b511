"""Every test runs captured steps strictly, in child processes too: what a real graph would freeze raises."""

from __future__ import annotations

import os

os.environ.setdefault("MSTAR_GRAPH_STRICT", "1")
