"""``python -m sparda.explore.cli``: the same as ``sparda``."""

from __future__ import annotations

import sys

from sparda.explore.cli import main

if __name__ == "__main__":
    sys.exit(main())
