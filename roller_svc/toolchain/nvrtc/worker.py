"""NVRTC worker process: requests on stdin, cubins on stdout.

NVRTC compilations cannot be interrupted and may crash, so they run in a process that the parent can kill. The worker is
run by path under `python -I -S` and uses only the standard library, so that it starts in milliseconds. Once the library
is loaded it reads only the library's directory, writes nothing, and ends when its parent's pipe closes.

Every frame is a 4-byte and an 8-byte big-endian length, a JSON document and bytes of those lengths.
Requests: {name, text, options, want: "cubin"|"ptx", timeout_s}. Responses: {ok, error, log}, and the bytes.
The worker starts with one frame: {version, archs}, or {error} if the library cannot be used.
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
GRACE_S = 10.0  # beyond the parent's own limit, in case the parent has ended


class Nvrtc:
    """The NVRTC functions that are needed, from the library at `path`."""

    def __init__(self, path: str) -> None:
        self._api = ctypes.CDLL(path)
        self._api.nvrtcGetErrorString.restype = ctypes.c_char_p

    def version(self) -> list[int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._api.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        return [major.value, minor.value]

    def archs(self) -> list[int]:
        count = ctypes.c_int()
        self._check(self._api.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
        archs = (ctypes.c_int * count.value)()
        self._check(self._api.nvrtcGetSupportedArchs(archs))
        return list(archs)

    def compile(self, request: dict[str, object]) -> tuple[dict[str, object], bytes]:
        program = ctypes.c_void_p()
        text, name = str(request["text"]).encode(), str(request["name"]).encode()
        self._check(self._api.nvrtcCreateProgram(ctypes.byref(program), text, name, 0, None, None))
        try:
            arguments = request["options"]
            assert isinstance(arguments, list)
            options = (ctypes.c_char_p * len(arguments))(*(str(option).encode() for option in arguments))
            code = self._api.nvrtcCompileProgram(program, len(arguments), options)
            log = self._text(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if code != 0:
                return {"ok": False, "error": self._message(code), "log": log}, b""
            kind = "CUBIN" if request["want"] == "cubin" else "PTX"
            return {"ok": True, "error": "", "log": log}, self._text(program, kind)
        finally:
            self._api.nvrtcDestroyProgram(ctypes.byref(program))

    def _text(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(self._api[f"nvrtcGet{what}Size"](program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(self._api[f"nvrtcGet{what}"](program, buffer))
        return buffer.raw

    def _check(self, code: int) -> None:
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


def serve(nvrtc: Nvrtc, requests: BinaryIO, responses: BinaryIO) -> None:
    """Respond to requests until the parent closes its end."""
    while True:
        try:
            text_size, data_size = HEADER.unpack(read_exactly(requests, HEADER.size))
            request = json.loads(read_exactly(requests, text_size))
            read_exactly(requests, data_size)
        except EOFError:
            return
        # The alarm's default action ends the process, even inside NVRTC.
        signal.setitimer(signal.ITIMER_REAL, float(request["timeout_s"]) + GRACE_S)
        try:
            document, data = nvrtc.compile(request)
        except RuntimeError as error:
            document, data = {"ok": False, "error": str(error), "log": ""}, b""
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        send(responses, document, data)


def load_sandbox() -> ModuleType:
    """Load `toolchain/sandbox.py` by its path, because `-I -S` disables the search for modules."""
    spec = spec_from_file_location("sandbox", Path(__file__).parents[1] / "sandbox.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def confine(library: str) -> None:
    """Preload what NVRTC loads when it compiles, then forbid opening other files."""
    directory = Path(library).resolve().parent
    for builtins in sorted(directory.glob("libnvrtc-builtins.so*")):
        ctypes.CDLL(str(builtins))
    load_sandbox().restrict_self((str(directory),), ())


def main(library: str, memory_bytes: int, lifetime_pipe: int) -> int:
    load_sandbox().die_with_pipe(lifetime_pipe)
    # Output of the library must not mix with the frames.
    responses = os.fdopen(os.dup(1), "wb")
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
        send(responses, {"error": str(error)})
        return 1
    try:
        send(responses, hello)
        serve(nvrtc, sys.stdin.buffer, responses)
    except BrokenPipeError:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
