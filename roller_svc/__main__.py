"""Run the `roller` command by `python -m roller_svc`."""

from __future__ import annotations

import sys

from roller_svc.cli import main

if __name__ == "__main__":
    sys.exit(main())
