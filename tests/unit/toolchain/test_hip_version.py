"""The version of hipcc, as the service reports it."""

from __future__ import annotations

from pathlib import Path

import pytest

from roller_svc.toolchain.hip import compiler_version

PRINTED = """Traceback (most recent call last):
  File "/usr/bin/rocm_agent_enumerator", line 257, in <module>
FileNotFoundError: [Errno 2] No such file or directory: '/sys/class/kfd/kfd/topology/nodes/'
HIP version: 5.2.21153-0
Debian clang version 15.0.6
Target: x86_64-pc-linux-gnu
"""


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        (PRINTED, "HIP version: 5.2.21153-0, Debian clang version 15.0.6"),
        ("Target: none\n", "{path} --version fails"),
    ],
)
def test_only_lines_with_versions_count(tmp_path: Path, printed: str, expected: str) -> None:
    (tmp_path / "printed").write_text(printed)
    hipcc = tmp_path / "hipcc"
    hipcc.write_text(f"#!/bin/sh\ncat {tmp_path / 'printed'}\n")
    hipcc.chmod(0o755)
    assert compiler_version(str(hipcc)) == expected.format(path=hipcc)
