"""Entry point of ``verl.plugins``: what must be there before any other module of VeRL is imported.

With ``VERL_PLATFORM=cpu``: the CPU platform and its process group. VeRL hides an entry point's exception; it is printed
here, and kept for :mod:`pat.verl.register` to raise.
"""

from __future__ import annotations

import os
import sys
import traceback

error: Exception | None = None

if os.environ.get("VERL_PLATFORM") == "cpu":
    try:
        from pat.verl.cpu import platform, process_group  # noqa: F401
    except Exception as failure:
        error = failure
        print("pat.verl: the CPU platform could not be registered in VeRL", file=sys.stderr)
        traceback.print_exc()
