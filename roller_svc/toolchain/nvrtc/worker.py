"""The process that holds NVRTC: requests on stdin, cubins on stdout.

A compilation inside NVRTC cannot be interrupted and a compiler may crash, so it happens here, where the parent can end
it. Run by path under `python -I -S`: standard library only, so that starting takes milliseconds. It reads nothing but
the library's folder once the library is there, writes nothing, and ends when the pipe of its starter closes.

Every frame is a 4-byte and an 8-byte big-endian length, a JSON document and bytes of those lengths.
Requests: {name, text, options, want: "cubin"|"ptx", timeout_s}. Answers: {ok, error, log}, and the bytes.
The first frame goes out unasked: {version, archs}, or {error} where the library cannot be used.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import struct
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import BinaryIO

HEADER = struct.Struct(">IQ")
GRACE_S = 10.0  # the parent's own limit comes first; this one is for a parent that is gone


class Nvrtc:
    """The few functions of NVRTC that are needed, from the library at `path`."""

    def __init__(self, path: str) -> None:
        self._api = ctypes.CDLL(path)
        self._api.nvrtcGetErrorString.restype = ctypes.c_char_p

    def version(self) -> list[int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._must(self._api.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        return [major.value, minor.value]

    def archs(self) -> list[int]:
        count = ctypes.c_int()
        self._must(self._api.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
        archs = (ctypes.c_int * count.value)()
        self._must(self._api.nvrtcGetSupportedArchs(archs))
        return list(archs)

    def compile(self, request: dict[str, object]) -> tuple[dict[str, object], bytes]:
        program = ctypes.c_void_p()
        text, name = str(request["text"]).encode(), str(request["name"]).encode()
        self._must(self._api.nvrtcCreateProgram(ctypes.byref(program), text, name, 0, None, None))
        try:
            given = request["options"]
            assert isinstance(given, list)
            options = (ctypes.c_char_p * len(given))(*(str(option).encode() for option in given))
            code = self._api.nvrtcCompileProgram(program, len(given), options)
            log = self._text(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if code != 0:
                return {"ok": False, "error": self._message(code), "log": log}, b""
            kind = "CUBIN" if request["want"] == "cubin" else "PTX"
            return {"ok": True, "error": "", "log": log}, self._text(program, kind)
        finally:
            self._api.nvrtcDestroyProgram(ctypes.byref(program))

    def _text(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._must(self._api[f"nvrtcGet{what}Size"](program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._must(self._api[f"nvrtcGet{what}"](program, buffer))
        return buffer.raw

    def _must(self, code: int) -> None:
        if code != 0:
            raise RuntimeError(self._message(code))

    def _message(self, code: int) -> str:
        text: bytes = self._api.nvrtcGetErrorString(code)
        return text.decode(errors="replace")


def read_exactly(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    if len(data) != size:
        raise EOFError
    return data


def send(stream: BinaryIO, document: dict[str, object], data: bytes = b"") -> None:
    text = json.dumps(document).encode()
    stream.write(HEADER.pack(len(text), len(data)) + text + data)
    stream.flush()


def serve(nvrtc: Nvrtc, requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer until the parent closes its end."""
    while True:
        try:
            text_size, data_size = HEADER.unpack(read_exactly(requests, HEADER.size))
            request = json.loads(read_exactly(requests, text_size))
            read_exactly(requests, data_size)
        except EOFError:
            return
        # The default action of the alarm ends the process, inside NVRTC too.
        signal.setitimer(signal.ITIMER_REAL, float(request["timeout_s"]) + GRACE_S)
        try:
            document, data = nvrtc.compile(request)
        except RuntimeError as error:
            document, data = {"ok": False, "error": str(error), "log": ""}, b""
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        send(answers, document, data)


def load_sandbox() -> ModuleType:
    """Load `toolchain/sandbox.py` by its path: `-I` searches no folder for modules and `-S` installs no package."""
    spec = spec_from_file_location("sandbox", Path(__file__).parents[1] / "sandbox.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def confine(library: str) -> None:
    """What NVRTC loads when it compiles is loaded now, and no other file opened from here on."""
    folder = Path(library).resolve().parent
    for builtins in sorted(folder.glob("libnvrtc-builtins.so*")):
        ctypes.CDLL(str(builtins))
    load_sandbox().restrict_self((str(folder),), ())


def main(library: str, memory_bytes: int, life: int) -> int:
    load_sandbox().die_with_pipe(life)
    # A stray print by the library must not end up among the frames.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        nvrtc = Nvrtc(library)
        confine(library)
        hello: dict[str, object] = {"version": nvrtc.version(), "archs": nvrtc.archs()}
    except (OSError, AttributeError, RuntimeError) as error:
        send(answers, {"error": str(error)})
        return 1
    try:
        send(answers, hello)
        serve(nvrtc, sys.stdin.buffer, answers)
    except BrokenPipeError:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
