"""Start a function in a process of its own, by exec.

A fork of a program with threads may wait for ever, or end threads of libraries here: OpenBLAS ends its own at a fork.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping

NICENESS = 19  # of what is built and tried while users call a model
PREPARE = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "  # what a program begins with


def start_program(program: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start a program of Python with this process's path of modules. Its second argument is the number of this process.

    Modules of the working directory are not in the path, unless they are in this process's.
    """
    folders = [os.fsdecode(each) for each in sys.path if isinstance(each, str | bytes | os.PathLike)]
    return subprocess.Popen(
        [sys.executable, "-P", "-c", program, json.dumps(folders), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,  # an interrupt of the terminal is not for it
    )
