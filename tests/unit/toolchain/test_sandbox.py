"""Sandbox of compilers: files, network and lifetime. Every attack succeeds without the sandbox."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from reference_kernels import add, cuda_scale
from waiting import PATIENCE_S, wait_until

from roller_svc.errors import CompileError, KernelTimeoutError
from roller_svc.ir.kernel import Language
from roller_svc.toolchain import compile_cxx, confined, gcc, nvrtc, sandbox
from roller_svc.toolchain.confined import compile_sandboxed, readable_paths, run_sandboxed
from roller_svc.toolchain.limits import CompileLimits
from roller_svc.toolchain.nvrtc import pool as nvrtc_pool
from roller_svc.toolchain.source_check import check_source

ABI = sandbox.landlock_abi()
ROOT = Path(__file__).parents[3]
SH = "/bin/sh"
files_are_confined = pytest.mark.skipif(ABI < 1, reason="this kernel has no Landlock")
signals_are_confined = pytest.mark.skipif(ABI < 6, reason="this kernel has no Landlock of ABI 6")
calls_are_filtered = pytest.mark.skipif(
    os.uname().machine not in ("x86_64", "aarch64"), reason="there is no filter of system calls for this machine"
)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("hidden\n")
    return path


@pytest.fixture
def job(tmp_path: Path) -> Path:
    folder = tmp_path / "job"
    folder.mkdir()
    return folder


def shell(script: str, job: Path) -> tuple[int, str]:
    return run_sandboxed([SH, "-c", script], job, CompileLimits())


def python(code: str, *arguments: object, readable: tuple[str, ...] = ("/",), job: str = "/nowhere") -> str:
    """Return the output of a process that restricts itself and then runs the code."""
    program = f"""
import sys
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("sandbox", {sandbox.__file__!r})
sandbox = module_from_spec(spec)
spec.loader.exec_module(sandbox)
import ctypes, errno, os, socket, threading, subprocess, signal
layers = sandbox.restrict_self({readable!r}, ({job!r}, "/dev/null"))
{code}
"""
    command = [sys.executable, "-I", "-S", "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def processes_of(mark: str) -> list[int]:
    """Return processes, except zombies, with the mark in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:  # it has ended, or is another's
            continue
    return found


# what a compiler may open --------------------------------------------------------------------------------------------

READS = {
    "include": 'const char *add =\n#include "{}"\n;\n',
    "include next": 'const char *add =\n#include_next "{}"\n;\n',
    "incbin": 'void add(void) {{}}\nasm(".section .rodata\\n.incbin \\"{}\\"\\n.text");\n',
    "assembler's include": 'void add(void) {{}}\nasm(".include \\"{}\\"");\n',
    "raw string": 'void add(void) {{}}\nasm(R"(.incbin "{}")");\n',
    "name of a section": '__attribute__((section(".x,\\"a\\"\\n.incbin \\"{}\\"\\n#"))) int add = 1;\n',
    "built by macros": 'void add(void) {{}}\nasm(".macro m x\\n.inc\\\\x \\"{}\\"\\n.endm\\nm bin");\n',
    "line marker": '#line 1 "{}"\nvoid add(void) {{ return 1 + missing; }}\n',
}


def compiled_unchecked(text: str, job: Path) -> tuple[int, str, bytes]:
    """Compile C source without the source check. Return exit code, log and object."""
    (job / "kernel.c").write_text(text)
    code, log = run_sandboxed([*gcc.c_command(add()), "-c", "kernel.c", "-o", "kernel.o"], job, CompileLimits())
    output = job / "kernel.o"
    return code, log, output.read_bytes() if output.is_file() else b""


@files_are_confined
@pytest.mark.parametrize("kind", READS)
@pytest.mark.parametrize("path", ["absolute", "dotted", "link", "hard place"])
def test_a_compiler_reads_nothing_beyond_its_folder(kind: str, path: str, secret: Path, job: Path) -> None:
    (job / "link").symlink_to(secret)
    (job / "kernel.h").symlink_to(secret.parent)
    named = {"absolute": str(secret), "dotted": "../secret", "link": "link", "hard place": "kernel.h/secret"}[path]
    code, log, binary = compiled_unchecked(READS[kind].format(named), job)
    assert code != 0
    assert b"hidden" not in binary
    assert "hidden" not in log


@pytest.mark.parametrize("kind", READS)
def test_a_compiler_without_the_sandbox_reads_the_file(kind: str, secret: Path, job: Path) -> None:
    """The attacks are real: gcc without the sandbox shows the file."""
    (job / "kernel.c").write_text(READS[kind].format(secret))
    command = [*gcc.c_command(add()), "-c", "kernel.c", "-o", "kernel.o"]
    done = subprocess.run(command, cwd=job, capture_output=True, timeout=PATIENCE_S)
    shown = (job / "kernel.o").read_bytes() if (job / "kernel.o").is_file() else b""
    assert b"hidden" in shown + done.stderr


@files_are_confined
@pytest.mark.parametrize("path", ["/etc/passwd", "/etc/hostname", "/proc/self/environ", "/proc/1/environ", str(ROOT / "README.md")])
def test_files_of_the_system_that_are_none_of_a_compilers_concern(path: str, job: Path) -> None:
    code, log = shell(f"cat {path}", job)
    assert code != 0
    assert "Permission denied" in log


@files_are_confined
def test_a_compiler_does_not_read_its_parents_secrets(job: Path) -> None:
    code, log = shell(f"tr '\\0' '\\n' < /proc/{os.getpid()}/environ; ls /proc/{os.getpid()}/cwd/", job)
    assert code != 0
    assert "PATH=" not in log


@files_are_confined
def test_a_compiler_writes_only_to_its_folder(job: Path) -> None:
    outside = job.parent / "outside"
    code, _ = shell(f"echo x > {outside}", job)
    assert code != 0
    assert not outside.exists()
    code, _ = shell("mkdir made && echo x > made/inside && mv made/inside . && rmdir made && : > /dev/null", job)
    assert code == 0
    assert (job / "inside").read_text() == "x\n"


@files_are_confined
def test_a_file_is_not_moved_out_or_linked_in(secret: Path, job: Path) -> None:
    (job / "mine").write_text("x")
    for script in (f"mv mine {secret.parent}/moved", f"ln {secret} linked && cat linked"):
        code, log = shell(script, job)
        assert code != 0
        assert "hidden" not in log


def test_stdin_is_empty_and_the_environment_small(job: Path) -> None:
    os.environ["ROLLER_TEST_SECRET"] = "SECRET"
    try:
        code, log = shell("cat; env", job)
    finally:
        del os.environ["ROLLER_TEST_SECRET"]
    names = {line.partition("=")[0] for line in log.splitlines()}
    assert code == 0
    assert names <= {"PATH", "LC_ALL", "HOME", "TMPDIR", "PWD", "SHLVL", "_", "OLDPWD"}


@files_are_confined
def test_cxx_is_confined_too(secret: Path) -> None:
    text = f'#include "{secret}"\n'.encode()
    with pytest.raises(CompileError, match=r"C\+\+ compiler failed"):
        compile_cxx("t", {"t.cpp": text}, ("-c", "t.cpp", "-o", "output"))
    assert compile_cxx("t", {"t.h": b"", "t.cpp": b'#include "t.h"\n'}, ("-c", "t.cpp", "-o", "output"))


@files_are_confined
def test_nvrtc_reads_nothing_beyond_its_library(secret: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header that can be opened compiles."""
    monkeypatch.setattr(nvrtc, "check_source", lambda _: None)
    secret.write_text("namespace secret {}\n")
    text = f'#include "{secret}"\nusing namespace secret;\n{cuda_scale().text}'
    with pytest.raises(CompileError, match=r"cannot open source file .*Permission denied"):
        nvrtc.compile_cuda(dataclasses.replace(cuda_scale(), text=text))
    monkeypatch.setattr(nvrtc_pool, "_WORKER", unconfined_worker(secret.parent))
    assert nvrtc.compile_cuda(dataclasses.replace(cuda_scale(), text=text), CompileLimits(memory_bytes=7 << 30)).binary


def unconfined_worker(folder: Path) -> Path:
    """Return a copy of the NVRTC worker with a sandbox that does nothing."""
    worker = folder / "nvrtc" / "worker.py"
    worker.parent.mkdir()
    worker.write_text(Path(nvrtc_pool.__file__).with_name("worker.py").read_text())
    (folder / "sandbox.py").write_text("def die_with_pipe(_): pass\ndef restrict_self(*_): pass\n")
    return worker


# what it may reach ---------------------------------------------------------------------------------------------------


@calls_are_filtered
def test_no_sockets() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = """
for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, socket.AF_NETLINK):
    try:
        socket.socket(family).connect(("127.0.0.1", int(sys.argv[1])))
        print("reached")
    except OSError as error:
        print(error.errno == errno.EPERM)
a, b = socket.socketpair()
a.send(b"paired")
print(b.recv(9).decode())
try:
    socket.socketpair(socket.AF_INET)
except OSError as error:
    print(error.errno == errno.EPERM)
"""
        assert python(code, server.getsockname()[1]).split() == ["True"] * 4 + ["paired", "True"]


@calls_are_filtered
@pytest.mark.parametrize("name", sorted(sandbox._DENIED_CALLS))
def test_invalid_calls_are_rejected(name: str) -> None:
    number = sandbox._DENIED_CALLS[name][0 if os.uname().machine == "x86_64" else 1]
    code = f"""
libc = ctypes.CDLL(None, use_errno=True)
print(libc.syscall({number}, -1, 0, 0, 0, 0, 0), ctypes.get_errno() == errno.EPERM)
"""
    assert python(code) == "-1 True"


@calls_are_filtered
def test_no_namespace_by_clone_and_no_limits_of_others() -> None:
    clone, prlimit = (56, 302) if os.uname().machine == "x86_64" else (220, 261)
    code = f"""
libc = ctypes.CDLL(None, use_errno=True)
print(libc.syscall({clone}, 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0), ctypes.get_errno() == errno.EPERM)
print(libc.syscall({prlimit}, os.getppid(), 7, 0, 0), ctypes.get_errno() == errno.EPERM)
print(libc.syscall({prlimit}, 0, 7, 0, 0))
"""
    assert python(code).splitlines() == ["-1 True", "-1 True", "0"]


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="x32 calls are of x86-64")
def test_calls_of_another_abi_kill() -> None:
    code = """
child = os.fork()
if not child:
    ctypes.CDLL(None).syscall(0x40000000 + 39)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert python(code) == str(-signal.SIGSYS)


@signals_are_confined
def test_no_signals_to_others(job: Path) -> None:
    with subprocess.Popen(["sleep", "600"]) as victim:
        try:
            for target in (os.getpid(), victim.pid):
                code, log = shell(f"kill -0 {target}", job)
                assert code != 0
                assert "not permitted" in log
            shell(f"kill -9 {victim.pid}", job)
            assert victim.poll() is None
        finally:
            victim.kill()


def test_threads_and_children_still_work() -> None:
    code = """
thread = threading.Thread(target=lambda: print("thread"))
thread.start()
thread.join()
print(subprocess.run(["/bin/echo", "child"], capture_output=True, text=True, start_new_session=True).stdout.strip())
print(layers)
inner = sandbox.restrict_self(("/usr", "/lib", "/lib64"), ())
try:
    open("/etc/passwd").close()
    print("open")
except PermissionError:
    print("closed")
print(inner == layers)
"""
    words = python(code).splitlines()
    assert words[:2] == ["thread", "child"]
    if ABI:
        assert words[2:] == [repr((f"landlock-{ABI}", "seccomp")), "closed", "True"]


def test_a_process_with_threads_is_not_half_confined() -> None:
    code = """
threading.Thread(target=signal.pause, daemon=True).start()
try:
    sandbox.restrict_self(("/",), ())
except RuntimeError as error:
    print(error)
os._exit(0)
"""
    assert "1 more: call it before they start" in python(code.replace("os._exit", "sys.stdout.flush(); os._exit"))


def test_without_the_kernels_help_nothing_is_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_syscall", lambda *_: -1)
    monkeypatch.setattr(sandbox, "_prctl", lambda *_: False)
    monkeypatch.setattr(sandbox, "_other_threads", lambda: 0)
    assert sandbox.landlock_abi() == 0
    assert sandbox.restrict_self(("/",), ()) == ()


# what it may outlive -------------------------------------------------------------------------------------------------

PARENT = """
import sys
from pathlib import Path
from roller_svc.toolchain.confined import run_sandboxed
from roller_svc.toolchain.limits import CompileLimits
script, folder, mark = sys.argv[1:]
run_sandboxed(["/bin/sh", "-c", script], Path(folder), CompileLimits(timeout_s=300), environment={"MARK": mark})
"""


@pytest.fixture
def mark() -> Iterator[str]:
    """A variable in the environment of a job's processes; the remaining ones are killed at the end."""
    word = f"MARK=roller-test-{os.urandom(8).hex()}"
    yield word
    for process in processes_of(word):
        os.kill(process, signal.SIGKILL)


def test_a_compiler_and_what_it_started_die_with_their_parent(mark: str, job: Path) -> None:
    script = "sleep 200 & sleep 200 & touch begun; sleep 200"
    command = [sys.executable, "-c", PARENT, script, str(job), mark.removeprefix("MARK=")]
    with subprocess.Popen(command, cwd=ROOT) as parent:
        try:
            wait_until((job / "begun").exists)
            wait_until(lambda: len(processes_of(mark)) >= 4)
        finally:
            parent.kill()
    wait_until(lambda: not processes_of(mark))


def test_a_timeout_kills_the_whole_group(mark: str, job: Path) -> None:
    value = mark.removeprefix("MARK=")
    with pytest.raises(KernelTimeoutError) as raised:
        run_sandboxed([SH, "-c", "sleep 200 & sleep 200"], job, CompileLimits(timeout_s=1.0), environment={"MARK": value})
    assert raised.value.code == "compile-timeout"
    wait_until(lambda: not processes_of(mark))


@calls_are_filtered
@pytest.mark.parametrize("daemon", ["sleep 200 > /dev/null 2>&1 &", "setsid sleep 200 &", "(sleep 200 &);"])
def test_no_daemon_is_left_behind(daemon: str, mark: str, job: Path) -> None:
    """The compiler does not wait for it either, although it holds the pipe of the log."""
    environment = {"MARK": mark.removeprefix("MARK=")}
    code, _ = run_sandboxed([SH, "-c", f"{daemon} exit 3"], job, CompileLimits(), environment=environment)
    assert code == 3
    wait_until(lambda: not processes_of(mark))


def test_a_long_log_is_cut_and_does_not_block(job: Path) -> None:
    code, log = shell("yes | head -c 40000000; exit 4", job)
    assert code == 4
    assert "characters left out" in log


def test_a_command_that_is_not_there_fails(job: Path) -> None:
    code, log = run_sandboxed(["/no/such/compiler"], job, CompileLimits())
    assert code == sandbox.LAUNCH_FAILED
    assert "/no/such/compiler cannot be started" in log


def test_no_descriptors_and_no_folders_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gcc.tempfile, "tempdir", str(tmp_path))
    gcc.compile_c(add())
    open_before = len([*Path("/proc/self/fd").iterdir()])
    gcc.compile_c(add())
    with pytest.raises(CompileError):
        gcc.compile_c(dataclasses.replace(add(), text="nonsense\n"))
    with pytest.raises(KernelTimeoutError):
        gcc.compile_c(add(), CompileLimits(timeout_s=1e-9))
    assert len([*Path("/proc/self/fd").iterdir()]) == open_before
    assert not list(tmp_path.glob("roller-*"))


def test_openmp_still_compiles() -> None:
    text = "void add(float *c) {\n  #pragma omp parallel for\n  for (int i = 0; i < 24; i++) c[i] = i;\n}\n"
    assert gcc.compile_c(dataclasses.replace(add(options=("-fopenmp",)), text=text)).binary


def test_a_compiler_installed_elsewhere_reads_its_prefix_and_not_a_home(tmp_path: Path) -> None:
    for name in ("bin", "lib", "include", "share", "x86_64-foreign-linux-gnu"):
        (tmp_path / name).mkdir()
    readable = readable_paths(str(tmp_path / "bin/cc"))
    assert set(readable) - set(confined.SYSTEM_PATHS) == {
        str(tmp_path / name) for name in ("bin", "lib", "include", "x86_64-foreign-linux-gnu")
    }
    assert readable_paths("/usr/bin/gcc") == confined.SYSTEM_PATHS


def test_an_nvrtc_worker_dies_with_its_pipe() -> None:
    """As when its server is killed during a compilation."""
    library = nvrtc.library_for(cuda_scale().arch)
    reader, writer = os.pipe()
    command = [sys.executable, "-I", "-S", str(Path(nvrtc_pool.__file__).with_name("worker.py"))]
    with subprocess.Popen(
        [*command, str(library.path), str(8 << 30), str(reader)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(reader,),
        start_new_session=True,
        env={"LD_LIBRARY_PATH": str(library.path.parent)},
    ) as worker:
        assert worker.stdout is not None
        assert worker.stdout.read(1)
        os.close(writer)
        worker.wait(PATIENCE_S)
        assert worker.returncode == -signal.SIGKILL
    os.close(reader)


# what a text may say -------------------------------------------------------------------------------------------------

ATTACKS = (
    '#include "/etc/passwd"', "#include </etc/passwd>", "#include <stdio.h>",
    '#include_next "x"', '#import "x"',
    "#define X <stdint.h>\n#include X", "# /* */ include <x>", "/* */ # include <x>", "#inc\\\nlude <x>",
    "#inc\\ \nlude <x>", "??=include <x>", "%:include <x>", "#if __has_include(<x>)\n#endif", "#embed <x>",
    '#line 1 "/etc/passwd"', '# 1 "/etc/passwd"', "#pragma GCC poison x", '#pragma GCC dependency "x"',
    '_Pragma("GCC poison x")', '_Pragma ( "clang module x" )', '#ident "x"', "#define S(x) #x", "#define C(x, y) x##y",
    'asm(".incbin \\"x\\"");', 'asm(".in" "cbin");', 'asm("\\x2eincbin");', 'asm("\\56incbin");', 'asm(R"(x)");',
    'asm(u8"x");', 'asm(R"x(" .incbin y ")x");', '__attribute__((section(".x,y"))) int z;', 'asm("nop\nnop");',
    "int x = '\"'; asm(\".incbin\"); int y = '\"';", "/* open", '"open', "int caf\u00e9;", "a\rb", "a\fb",
    '/\\\n* */ asm(".incbin"); /* */', "// \\\n x\nasm(\"a.b\");",
)  # fmt: skip
HARMLESS = (
    "#include <stdint.h>", "#if 0\n#error words, of a kernel: no more\n#endif",
    "  #  pragma omp parallel for", "#pragma unroll 4", "#pragma clang fp contract(off)",
    '_Pragma("omp simd")', '__asm__ volatile("" : "+x"(a) :: "memory");',
    '__asm__("vpdpbusd %2, %1, %0" : "+v"(s));',
    "/* .incbin '\" */", "// #include <x>", "#define A(x) \\\n  (x)", "int import, asm_, a = 4 % b;",
    "x = c ? d : e / f;",
)  # fmt: skip


@pytest.mark.parametrize("language", [Language.C, Language.HIP])
@pytest.mark.parametrize("attack", ATTACKS)
def test_source_that_no_generator_writes_is_rejected(attack: str, language: Language) -> None:
    source = dataclasses.replace(add(), language=language, text=f"int a;\n{attack}\nint b;\n")
    with pytest.raises(CompileError) as raised:
        check_source(source)
    assert raised.value.code == "refused-source"


@pytest.mark.parametrize("text", HARMLESS)
def test_generated_source_is_accepted(text: str) -> None:
    check_source(dataclasses.replace(add(), text=f"int a;\n{text}\nint b;\n"))
    check_source(cuda_scale())


def test_rejected_source_reaches_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a compiler was started")

    monkeypatch.setattr(subprocess, "Popen", never)
    for source, compiler in ((add(), gcc.compile_c), (cuda_scale(), nvrtc.compile_cuda), (cuda_scale(), nvrtc.ptx)):
        with pytest.raises(CompileError) as raised:
            compiler(dataclasses.replace(source, text=f'#include "/etc/passwd"\n{source.text}'))
        assert raised.value.code == "refused-source"


PIECES = st.lists(
    st.sampled_from(
        [
            "#",
            "include",
            " ",
            "\n",
            "\\",
            "\\\n",
            "/",
            "*",
            "/*",
            "*/",
            "//",
            '"',
            "'",
            "<",
            ">",
            "stdint.h",
            "asm",
            "(",
            ")",
            ".",
            "incbin",
            "R",
            "?",
            "??/",
            "%:",
            "_Pragma",
            "omp ",
            "define",
            "x",
            "'\"'",
            "\t",
            "__has_include",
        ]
    ),
    max_size=24,
).map("".join)


@given(PIECES)
@example('/*"*/asm(".incbin \\"x\\"")//"')
@example('""stdint.h')
def test_accepted_source_gives_gcc_no_file_to_open(text: str) -> None:
    """After preprocessing, accepted source has no string with a dot and only known includes."""
    try:
        check_source(dataclasses.replace(add(), text=text))
    except CompileError:
        return
    read = preprocessed_tokens(text)
    assert not any(token.startswith('"') and "." in token for token in read)
    assert all("stdint.h" in token for token in read if "include" in token and token.startswith("#"))


def preprocessed_tokens(text: str) -> list[str]:
    """Return directives and string literals, by a reader independent of the one under test."""
    text = text.replace("\\\n", "")
    text += "\n"
    found, at, line = [], 0, ""
    while at < len(text):
        two = text[at : at + 2]
        if two in ("//", "/*"):
            end = text.find("\n" if two == "//" else "*/", at + 2)
            at = len(text) if end < 0 else end + (0 if two == "//" else 2)
            line += " "
            continue
        if text[at] == '"':
            end = at + 1
            while end < len(text) and text[end] not in '"\n':
                end += 2 if text[end] == "\\" else 1
            found.append(text[at : end + 1])
            line += text[at : end + 1]
            at = end + 1
            continue
        if text[at] == "\n":
            if line.strip().startswith("#"):
                found.append(line.strip())
            line = ""
        else:
            line += text[at]
        at += 1
    return found


# where there is no Landlock ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["absolute", "dotted", "link"])
def test_without_landlock_the_list_of_dependencies_is_looked_at(
    how: str, secret: Path, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confined.sandbox, "landlock_abi", lambda: 0)
    # Nothing confines the compiler.
    monkeypatch.setattr(confined, "_launch_command", lambda *given: ["/usr/bin/env", f"PATH={given[3]['PATH']}"])
    (job / "link").symlink_to(secret)
    named = {"absolute": str(secret), "dotted": "../secret", "link": "link"}[how]
    (job / "kernel.c").write_text(f'#include <stdint.h>\n#include "own.h"\n#include "{named}"\n;\n')
    (job / "own.h").write_text("")
    secret.write_text("int add\n")
    command = [*gcc.c_command(add()), "kernel.c", "-o", "kernel.so"]
    with pytest.raises(CompileError, match=r"read .*, expected files of its own directory") as raised:
        compile_sandboxed("add", command, job / "kernel.so", CompileLimits())
    assert raised.value.code == "refused-source"
    (job / "kernel.c").write_text('#include <stdint.h>\n#include "own.h"\nint add;\n')
    assert compile_sandboxed("add", command, job / "kernel.so", CompileLimits()) == ""


def test_who_runs_without_rights_is_confined_too(job: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("this process has no rights to give up")
    code = "os.setgid(65534); os.setuid(65534); print(sandbox.restrict_self(('/usr', '/lib', '/lib64'), ()))"
    program = f"import os, sys; sys.path.insert(0, {str(Path(sandbox.__file__).parent)!r}); import sandbox; {code}"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout.strip() == repr((f"landlock-{ABI}", "seccomp") if ABI else ("seccomp",)), done.stderr


@files_are_confined
def test_the_launcher_does_not_run_unrestricted() -> None:
    """The kernel allows 16 rulesets: beyond that a compiler is not started."""
    code = f"""
for _ in range(20):
    sandbox.restrict_self(("/",), ("/dev/null",))
reader, writer = os.pipe()
os.set_inheritable(reader, True)
done = subprocess.run([sys.executable, "-I", "-S", {sandbox.__file__!r}, f"parent={{os.getpid()}}", f"pipe={{reader}}",
    "readable=/", "--", "/bin/echo", "ran"], capture_output=True, text=True, pass_fds=(reader,))
print(done.returncode, done.stdout, done.stderr)
"""
    said = python(code)
    assert said.startswith(f"{sandbox.LAUNCH_FAILED}  the kernel has Landlock, but cannot")
