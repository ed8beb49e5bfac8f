"""CUDA sources beside this file become kernels, compiled in this process by NVRTC, kept on disk and launched.

No nvcc, no C compiler, no torch extension. ctypes instead of a binding: a dozen C calls are needed, torch's packages
for CUDA bring the libraries and the headers, and a launch is two packs of bytes and one C call. Compiling needs neither
a GPU nor a driver, and NVRTC compiles several programs at once on threads (two big ones in 7.9 s where one took 7.3 s,
on two cores).

A cache entry is named by a hash of all that decides the machine code, written in one step, and checked when read. Ranks
that need the same one wait for the first (a lock of the operating system, freed when its owner dies). Where the folder
cannot be written, what is compiled lives as long as the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib
import importlib.util
import os
import re
import struct
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fp4ward.errors import UserError, one_line

HERE = Path(__file__).parent
# Modules here whose sources(sm) are all that the engine may launch on an SM
HOLDERS = ("cuda_linear", "cuda_experts", "cuda_norm", "cuda_gated_delta", "cuda_attention")
TARGETS = (80, 86, 89, 90, 100, 103, 120)  # every SM that the kernels are compiled for in the tests
FLAGS = ("-std=c++17", "-default-device", "-lineinfo", "--ptxas-options=-v")
folder: Path | None = None  # of the cache; None is ~/.cache/fp4ward. The command line sets it

_memory: dict[str, Binary] = {}


@dataclass(frozen=True)
class Source:
    """One kernel. file: a .cu in this folder (or a whole path). entry: its name there, extern "C"."""

    file: str
    defines: tuple[tuple[str, int | str], ...]
    entry: str


@dataclass(frozen=True)
class Binary:
    """Machine code. registers: a thread. spills: bytes of stack or spilled a thread; 0 where all is in registers."""

    code: bytes
    registers: int
    spills: int


def arch(sm: int) -> str:
    """The compiler's name of SM `sm`: with its own instructions (a) or its family's (f) where it has some."""
    return {90: "sm_90a", 100: "sm_100f", 103: "sm_103a", 120: "sm_120f", 121: "sm_120f"}.get(sm, f"sm_{sm}")


def rows(sm: int) -> list[Source]:
    """Every kernel that the engine may launch on SM `sm`, each once."""
    modules = [importlib.import_module(f"{__package__}.{name}") for name in HOLDERS]
    return list(dict.fromkeys(source for module in modules for source in module.sources(sm)))


# ---- compiling -------------------------------------------------------------------------------------------------------


def cubin(source: Source, arch: str) -> bytes:
    return binary(source, arch).code


def binary(source: Source, arch: str) -> Binary:
    """From memory, from disk, or compiled. UserError when NVRTC is missing or the source does not compile."""
    name = _name(source, arch)
    if name not in _memory:
        path = cache() / name
        with contextlib.ExitStack() as held:
            found = _read(path)
            if found is None:
                with contextlib.suppress(OSError, ImportError):  # read-only, or no locks here: each compiles
                    import fcntl

                    path.parent.mkdir(parents=True, exist_ok=True)
                    fcntl.flock(held.enter_context(open(f"{path}.lock", "wb")), fcntl.LOCK_EX)
                found = _read(path)
            if found is None:
                found = _compile(source, arch)
                _write(path, found)
        _memory[name] = found
    return _memory[name]


def warm(sources: Sequence[Source], arch: str, progress: Callable[[int, int, str], object] | None = None) -> int:
    """Compile what is not on disk yet, on all cores; how many are on disk afterwards. progress: done, all, name."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = {pool.submit(binary, source, arch): source for source in sources}
        try:
            for done, job in enumerate(as_completed(jobs), 1):
                job.result()
                if progress is not None:
                    progress(done, len(jobs), jobs[job].entry)
        except BaseException:  # an interrupt, or a source that does not compile: the rest is not waited for
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return sum((cache() / _name(s, arch)).is_file() for s in sources)


def cache() -> Path:
    try:
        return folder or Path.home() / ".cache" / "fp4ward"
    except RuntimeError:  # a user without a home
        return Path(os.devnull)  # nothing can be written below it


def _options(source: Source, arch: str) -> list[str]:
    # From 12.9 on NVRTC keeps results of its own where there is a driver, and then does not say registers and spills
    own = ("--no-cache",) if _nvrtc()[2] >= (12, 9) else ()
    return [f"--gpu-architecture={arch}", *FLAGS, *own, *(f"-D{name}={value}" for name, value in source.defines)]


def _name(source: Source, arch: str) -> str:
    """Of its cache entry: a hash of options, compiler and text."""
    said = [*_options(source, arch), *map(str, _nvrtc()[2]), *_texts(HERE / source.file).values()]
    return f"{source.entry}-{arch}-{hashlib.sha256(chr(0).join(said).encode()).hexdigest()[:32]}"


def _texts(path: Path, seen: dict[Path, str] | None = None) -> dict[Path, str]:
    """A source and all that it includes in quotes."""
    seen = {} if seen is None else seen
    if path not in seen:
        seen[path] = path.read_text()
        for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', seen[path], re.M):
            _texts(path.parent / name, seen)
    return seen


def _read(path: Path) -> Binary | None:
    """An entry, or None when there is none or it is not what was written."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) <= 40 or hashlib.sha256(data[32:]).digest() != data[:32]:
        return None
    return Binary(data[40:], *struct.unpack("<II", data[32:40]))


def _write(path: Path, made: Binary) -> None:
    body = struct.pack("<II", made.registers, made.spills) + made.code
    with contextlib.suppress(OSError):
        file, temporary = tempfile.mkstemp(dir=path.parent)
        try:
            with open(file, "wb") as f:
                f.write(hashlib.sha256(body).digest() + body)
            os.replace(temporary, path)
        except OSError:  # no room, say
            os.unlink(temporary)


def _places() -> list[tuple[Path, Path]]:
    """Where libraries and headers may be: torch's or pip's packages, a toolkit. The packages for CUDA 12 come first:
    beside those for 13 they are there for a torch, and so a driver, of CUDA 12."""
    found = importlib.util.find_spec("nvidia")
    homes = [Path(p) for p in found.submodule_search_locations or ()] if found else []
    pairs = [(h / "cuda_nvrtc/lib", h / "cuda_runtime/include") for h in homes]
    pairs += [(h / "cu13/lib", h / "cu13/include") for h in homes]
    return [*pairs, (Path("/usr/local/cuda/lib64"), Path("/usr/local/cuda/include"))]


@functools.cache
def _nvrtc() -> tuple[ctypes.CDLL, Path, tuple[int, int]]:
    """The library, the folder of the headers (those beside it, else any), and its version."""
    places = _places()
    for libraries, headers in places:
        usable = [h for h in (headers, *(h for _, h in places)) if (h / "cuda_bf16.h").is_file()]
        candidates = sorted(libraries.glob("libnvrtc.so.1[2-9]"))
        with contextlib.suppress(OSError):  # broken, or of another kind of machine: the next
            for part in libraries.glob("libnvrtc-builtins.so.*"):  # it does not look beside itself for this one
                ctypes.CDLL(str(part))
            if candidates and usable:
                library = ctypes.CDLL(str(candidates[-1]))
                library.nvrtcGetErrorString.restype = ctypes.c_char_p
                major, minor = ctypes.c_int(), ctypes.c_int()
                library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
                return library, usable[0], (major.value, minor.value)
    raise UserError(
        "NVRTC, which compiles the CUDA kernels, or its headers were not found; pip install 'fp4ward[cuda]' brings them"
    )


def _compile(source: Source, arch: str) -> Binary:
    library, headers, version = _nvrtc()
    path = HERE / source.file

    def call(name: str, *args: object) -> int:
        code: int = getattr(library, name)(*args)
        if code and name != "nvrtcCompileProgram":
            raise RuntimeError(f"{name}: {library.nvrtcGetErrorString(code).decode()}")
        return code

    def text(what: str) -> bytes:
        size = ctypes.c_size_t()
        call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        data = ctypes.create_string_buffer(size.value)
        call(f"nvrtcGet{what}", program, data)
        return data.raw

    program = ctypes.c_void_p()
    call("nvrtcCreateProgram", ctypes.byref(program), path.read_bytes(), os.fsencode(path), 0, None, None)
    try:
        options = [o.encode() for o in _options(source, arch)]
        options += [b"-I" + os.fsencode(place) for place in (path.parent, headers)]
        code = call("nvrtcCompileProgram", program, len(options), (ctypes.c_char_p * len(options))(*options))
        report = text("ProgramLog").decode(errors="replace").strip("\0")
        used = re.search(
            rf"properties for {source.entry}\s.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill "
            r"loads.*?Used (\d+) registers", report, re.S,
        )  # fmt: skip
        if code or not used:
            reason = next((line for line in report.splitlines() if "error" in line), "no such kernel in it")
            fault = UserError(
                f"{path.name} ({source.entry}) does not compile for {arch} with NVRTC {version[0]}.{version[1]}: "
                f"{one_line(reason)}"
            )
            fault.add_note(report)
            raise fault
        stack, stores, loads, registers = map(int, used.groups())
        return Binary(text("CUBIN"), registers, max(stack, stores, loads))
    finally:
        call("nvrtcDestroyProgram", ctypes.byref(program))


# ---- launching -------------------------------------------------------------------------------------------------------

INVALID_CONTEXT, MAX_SHARED = 201, 8  # CUDA_ERROR_INVALID_CONTEXT; CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


@functools.cache
def _driver() -> ctypes.PyDLL:
    library = ctypes.PyDLL("libcuda.so.1")  # keeps the interpreter's lock: releasing it costs as much as the launch
    library.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    return library


def _ok(code: int, name: str) -> None:
    if code:
        words = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(words))
        raise RuntimeError(f"{name}: {words.value.decode() if words.value else 'unknown'} (CUDA error {code})")


class Kernel:
    """A loaded kernel of one device; see `kernel`. registers, spills: as Binary's."""

    def __init__(self, source: Source, index: int) -> None:
        torch.cuda.init()
        major, minor = torch.cuda.get_device_capability(index)
        made = binary(source, arch(10 * major + minor))
        self.registers, self.spills, self.index, self.entry = made.registers, made.spills, index, source.entry
        self._lock = threading.Lock()
        self._arguments: struct.Struct | None = None
        self._shared = 0
        self._context, self._module, self._function = (ctypes.c_void_p() for _ in range(3))
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), index)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)  # torch's own
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            self._call("cuModuleLoadData", ctypes.byref(self._module), made.code)
            function = ctypes.byref(self._function)
            self._call("cuModuleGetFunction", function, self._module, source.entry.encode())
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        # CUlaunchConfig: grid, block, shared bytes, stream, attributes and how many. One CUlaunchAttribute: 6 is
        # programmatic stream serialization, and its value 1 allows it.
        self._config = struct.Struct("@7IPPI")
        self._config_at = ctypes.create_string_buffer(56)
        self._attribute = ctypes.create_string_buffer(struct.pack("@i4xi60x", 6, 1))
        places = ctypes.addressof(self._config_at), ctypes.addressof(self._attribute)
        self._addresses = (*places, self._function.value)
        self._pdl = major >= 9
        self._launch = _driver().cuLaunchKernelEx

    def _call(self, name: str, *args: object) -> None:
        _ok(getattr(_driver(), name)(*args), f"{self.entry}: {name}")

    def __call__(
        self, grid: tuple[int, int, int], block: int, shared_bytes: int, *args: Any, pdl: bool = False
    ) -> None:
        """Launch on torch's current stream of the kernel's device; a CUDA graph may capture it.

        grid: blocks. block: threads. shared_bytes: dynamic shared memory. args: tensors or None (a pointer), ints
        (int32), floats (float), of the same kinds at every call. pdl: may start before the kernel ahead of it ends
        (programmatic dependent launch; before SM 90 no effect). RuntimeError with the driver's words; struct.error for
        an int that is not an int32.
        """
        if torch._C._cuda_getDevice() != self.index:
            with torch.cuda.device(self.index):
                return self(grid, block, shared_bytes, *args, pdl=pdl)
        stream = torch._C._cuda_getCurrentRawStream(self.index)
        config, attribute, function = self._addresses
        with self._lock:
            if self._arguments is None:
                self._lay_out(args)
            if shared_bytes > self._shared:
                self._call("cuFuncSetAttribute", self._function, MAX_SHARED, shared_bytes)
                self._shared = shared_bytes
            values = [a if n else 0 if a is None else a.data_ptr() for a, n in zip(args, self._numbers, strict=True)]
            self._arguments.pack_into(self._buffer, 0, *values)  # type: ignore[union-attr]
            self._config.pack_into(
                self._config_at, 0, *grid, block, 1, 1, shared_bytes, stream, attribute, pdl and self._pdl
            )
            code = self._launch(config, function, self._pointers, None)
            if code == INVALID_CONTEXT:  # a thread's first call
                self._call("cuCtxSetCurrent", self._context)
                code = self._launch(config, function, self._pointers, None)
        if code:
            _ok(code, f"{self.entry}: a launch of {grid} blocks, {block} threads, {shared_bytes} bytes shared")

    def _lay_out(self, args: tuple[Any, ...]) -> None:
        kinds = "@" + "".join({int: "i", bool: "i", float: "f"}.get(type(a), "P") for a in args)
        self._numbers = [kind != "P" for kind in kinds[1:]]
        self._arguments = struct.Struct(kinds)
        self._buffer = ctypes.create_string_buffer(self._arguments.size + 1)
        start = ctypes.addressof(self._buffer)
        ends = [struct.calcsize(kinds[: i + 2]) for i in range(len(args))]  # an argument's end less its own size
        places = [end - struct.calcsize(kind) for end, kind in zip(ends, kinds[1:], strict=True)]
        self._places = (ctypes.c_void_p * len(args))(*(start + place for place in places))
        self._pointers = ctypes.addressof(self._places)


def kernel(source: Source, device: torch.device) -> Kernel:
    """The kernel on this GPU: compiled or read once, loaded once a process. The first call must not be captured."""
    return _kernel(source, torch.cuda.current_device() if device.index is None else device.index)


_kernel = functools.cache(Kernel)
