"""native/cuda_api.h and native/hip_api.h against the vendors' own headers, at compile time.

For every entry point a function with our parameters calls the vendor's: gcc refuses it where number, kind or width of
a parameter differ. Enumerators, structures and offsets are static assertions. Building pyxdev needs no vendor header.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).resolve().parents[2] / "native"

# ---- where the headers are ----


def cuda_headers() -> Path | None:
    """Those of the wheel nvidia-cuda-runtime, or of a toolkit."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(root) / "cu13" / "include" for root in (spec.submodule_search_locations or [])] if spec else []
    return next(
        (folder for folder in [*folders, Path("/usr/local/cuda/include")] if has(folder, "cudaTypedefs.h")), None
    )


def hip_headers() -> Path | None:
    """Those of Debian's libamdhip64-dev, or of ROCm."""
    folders = (Path("/opt/rocm/include"), Path("/usr/include"))
    return next((folder for folder in folders if has(folder, "hip/hip_runtime_api.h")), None)


def has(folder: Path, name: str) -> bool:
    return (folder / name).is_file()


needs_cuda = pytest.mark.skipif(cuda_headers() is None, reason="no CUDA headers: pip install nvidia-cuda-runtime")
needs_hip = pytest.mark.skipif(hip_headers() is None, reason="no HIP headers: apt-get install libamdhip64-dev")

# ---- our side ----


def entry_points(api: str) -> list[tuple[str, ...]]:
    """The arguments of every X(...) in the header, parameters last, as lists of types."""
    text = (NATIVE / f"{api}_api.h").read_text().replace("\\\n", " ")
    listed = re.search(rf"#define {api.upper()}_ENTRY_POINTS\(X\)(.*)", text)
    assert listed
    found = re.findall(r"X\(([^()]*), *\(([^()]*)\)\)", listed[1])
    return [(*(part.strip() for part in head.split(",")), parameters) for head, parameters in found]


def enumerators(api: str) -> set[str]:
    """Every name of an enum in the header."""
    text = (NATIVE / f"{api}_api.h").read_text()
    return set(re.findall(r"\b([A-Z][A-Z0-9_]+) = (?:0x)?[0-9a-fA-F]+", text))


def call(name: str, result: str, parameters: str, callee: str, structures: set[str]) -> str:
    """A function with our parameters that calls the vendor's. Pointers to our structures pass as void *: the structures
    are compared on their own."""
    types = [] if parameters == "void" else [each.strip() for each in parameters.split(",")]
    declared = ", ".join(f"{each} a{index}" for index, each in enumerate(types)) or "void"
    passed = ", ".join(
        f"(void *)a{index}" if each.replace("const", "").strip(" *") in structures else f"a{index}"
        for index, each in enumerate(types)
    )
    return f"{result} check_{name}({declared});\n{result} check_{name}({declared}) {{ return {callee}({passed}); }}\n"


def compile_c(source: str, folder: Path, ours: Path = NATIVE) -> subprocess.CompletedProcess[str]:
    """folder: of the vendor's headers; ours: of ours."""
    warnings = ["-Wall", "-Wextra", "-Wconversion", "-Werror", "-Wno-discarded-qualifiers", "-Wno-cast-qual"]
    return subprocess.run(
        ["gcc", "-std=c11", "-fsyntax-only", *warnings, f"-I{ours}", "-isystem", str(folder), "-xc", "-"],
        input=source,
        capture_output=True,
        text=True,
        timeout=60,
    )


def same(pairs: dict[str, str]) -> str:
    return "".join(f'_Static_assert((long)({ours}) == (long)({theirs}), "{ours}");\n' for ours, theirs in pairs.items())


def same_members(ours: str, theirs: str, members: dict[str, str]) -> str:
    offsets = {f"offsetof({ours}, {mine})": f"offsetof({theirs}, {other})" for mine, other in members.items()}
    return same({f"sizeof({ours})": f"sizeof({theirs})"} | offsets)


def compile_changed(api: str, source: str, folder: Path, old: str, new: str, into: Path) -> str:
    """What gcc says with one place of our header changed; fails if it has nothing to say."""
    text = (NATIVE / f"{api}_api.h").read_text()
    assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in {api}_api.h"
    (into / f"{api}_api.h").write_text(text.replace(old, new))
    done = compile_c(source, folder, into)
    assert done.returncode != 0
    return done.stderr


# ---- CUDA ----

CUDA_NAMES = {
    "CU_SUCCESS": "CUDA_SUCCESS",
    "CU_ATTRIBUTE_INTEGRATED": "CU_DEVICE_ATTRIBUTE_INTEGRATED",
    "CU_ATTRIBUTE_COPY_ENGINES": "CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT",
    "CU_ATTRIBUTE_MAJOR": "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR",
    "CU_ATTRIBUTE_MINOR": "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR",
    "CU_PORTABLE": "CU_MEMHOSTALLOC_PORTABLE",
    "CU_REGISTER_PORTABLE": "CU_MEMHOSTREGISTER_PORTABLE",
    "CU_NON_BLOCKING": "CU_STREAM_NON_BLOCKING",
    "CU_PER_THREAD": "(long)CU_STREAM_PER_THREAD",
    "CU_WITHOUT_TIMING": "CU_EVENT_DISABLE_TIMING",
    "CU_MEMORY_HOST": "CU_MEMORYTYPE_HOST",
    "CU_MEMORY_DEVICE": "CU_MEMORYTYPE_DEVICE",
    "CU_CAPTURE_THREAD_LOCAL": "CU_STREAM_CAPTURE_MODE_THREAD_LOCAL",
    "CU_CAPTURE_NONE": "CU_STREAM_CAPTURE_STATUS_NONE",
}


def side(ours: str, theirs: str, *, peer: bool) -> dict[str, str]:
    """The members of one side of a copy: "src" and "src"."""
    members = {"x": "XInBytes", "y": "Y", "type": "MemoryType", "host": "Host", "device": "Device", "array": "Array"}
    members["pitch"] = "Pitch"
    if peer:
        members |= {"z": "Z", "lod": "LOD", "context": "Context", "height": "Height"}
    return {f"{ours}_{mine}": f"{theirs}{other}" for mine, other in members.items()}


def cuda_source(entries: list[tuple[str, ...]]) -> str:
    names = {name: CUDA_NAMES.get(name, name.replace("CU_", "CUDA_ERROR_", 1)) for name in sorted(enumerators("cuda"))}
    whole = {"width": "WidthInBytes", "height": "Height"}
    flat = side("src", "src", peer=False) | side("dst", "dst", peer=False) | whole
    peer = side("src", "src", peer=True) | side("dst", "dst", peer=True) | whole | {"depth": "Depth"}
    calls = [
        call(
            name,
            "cu_result",
            parameters,
            f"(cu_result)((PFN_{name}_v{version})0)",
            {"cu_uuid", "cu_copy_2d", "cu_copy_3d_peer"},
        )
        for name, version, _, parameters in entries
    ]
    return (
        "#include <cuda.h>\n#include <cudaTypedefs.h>\n"
        "#define cu_context_s CUctx_st\n#define cu_stream_s CUstream_st\n#define cu_event_s CUevent_st\n"
        "#define cu_graph_s CUgraph_st\n#define cu_graph_exec_s CUgraphExec_st\n"
        '#include "cuda_api.h"\n'
        + same(names)
        + same_members("cu_copy_2d", "CUDA_MEMCPY2D", flat)
        + same_members("cu_copy_3d_peer", "CUDA_MEMCPY3D_PEER", peer)
        + same({"sizeof(cu_uuid)": "sizeof(CUuuid)"})
        + "".join(calls)
    )


@needs_cuda
def test_cuda_api_agrees_with_the_vendors_headers() -> None:
    folder, entries = cuda_headers(), entry_points("cuda")
    assert folder and len(entries) > 35
    done = compile_c(cuda_source(entries), folder)
    assert done.returncode == 0, done.stderr


@needs_cuda
@pytest.mark.parametrize(
    ("name", "version", "parameters"),
    [
        ("cuLaunchHostFunc", "13010", None),  # has one parameter more
        ("cuMemAlloc", None, "(int *, size_t)"),  # narrower than CUdeviceptr
        ("cuMemcpyHtoDAsync", None, "(cu_address, const void *, cu_stream)"),
        ("cuStreamQuery", None, "(cu_event)"),
        ("cuMemsetD8Async", None, "(cu_address, unsigned char, size_t, cu_event)"),
        ("cuDeviceGetName", None, "(char *, size_t, cu_device)"),  # wider than int
    ],
)
def test_a_wrong_cuda_line_is_seen(name: str, version: str | None, parameters: str | None) -> None:
    folder = cuda_headers()
    entries = [
        (each[0], version or each[1], each[2], (parameters or f"({each[3]})")[1:-1]) if each[0] == name else each
        for each in entry_points("cuda")
    ]
    assert folder and entries != entry_points("cuda")
    done = compile_c(cuda_source(entries), folder)
    assert done.returncode != 0 and name in done.stderr


@needs_cuda
@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("CU_NOT_READY = 600", "CU_NOT_READY = 601", "CU_NOT_READY"),
        ("enum { CU_PORTABLE = 1 }", "enum { CU_PORTABLE = 2 }", "CU_PORTABLE"),
        ("size_t dst_pitch, dst_height;", "size_t dst_height, dst_pitch;", "offsetof(cu_copy_3d_peer, dst_pitch)"),
        ("char bytes[16];", "char bytes[17];", "sizeof(cu_uuid)"),
    ],
)
def test_a_wrong_cuda_number_is_seen(old: str, new: str, named: str, tmp_path: Path) -> None:
    folder = cuda_headers()
    assert folder
    assert named in compile_changed("cuda", cuda_source(entry_points("cuda")), folder, old, new, tmp_path)


# ---- HIP ----

HIP_NAMES = {
    "HIP_SUCCESS": "hipSuccess",
    "HIP_INVALID_PITCH": "hipErrorInvalidPitchValue",
    "HIP_INVALID_DIRECTION": "hipErrorInvalidMemcpyDirection",
    "HIP_ECC_UNCORRECTABLE": "hipErrorECCNotCorrectable",
    "HIP_LAUNCH_TIMEOUT": "hipErrorLaunchTimeOut",
    "HIP_LAUNCH_FAILED": "hipErrorLaunchFailure",
    "HIP_ATTRIBUTE_COPY_ENGINES": "hipDeviceAttributeAsyncEngineCount",
    "HIP_ATTRIBUTE_INTEGRATED": "hipDeviceAttributeIntegrated",
    "HIP_ATTRIBUTE_MAJOR": "hipDeviceAttributeComputeCapabilityMajor",
    "HIP_ATTRIBUTE_MINOR": "hipDeviceAttributeComputeCapabilityMinor",
    "HIP_PORTABLE": "hipHostMallocPortable",
    "HIP_COHERENT": "hipHostMallocCoherent",
    "HIP_NON_BLOCKING": "hipStreamNonBlocking",
    "HIP_WITHOUT_TIMING": "hipEventDisableTiming",
    "HIP_HOST_TO_DEVICE": "hipMemcpyHostToDevice",
    "HIP_DEVICE_TO_HOST": "hipMemcpyDeviceToHost",
    "HIP_DEVICE_TO_DEVICE": "hipMemcpyDeviceToDevice",
    "HIP_CAPTURE_THREAD_LOCAL": "hipStreamCaptureModeThreadLocal",
    "HIP_CAPTURE_NONE": "hipStreamCaptureStatusNone",
}


def hip_source(entries: list[tuple[str, ...]]) -> str:
    names = {
        name: HIP_NAMES.get(name, "hipError" + name.removeprefix("HIP_").title().replace("_", ""))
        for name in sorted(enumerators("hip"))
    }
    newer = "hipGetDevicePropertiesR0600"
    calls = [
        (f"#if HIP_VERSION_MAJOR >= 6\n{text}#endif\n" if name == newer else text)
        for result, name, _, parameters in entries
        for text in [
            call(
                name,
                result,
                parameters,
                name if "*" in result else f"(hip_result){name}",
                {"hip_uuid", "hip_properties"},
            )
        ]
    ]
    return (
        "#define __HIP_PLATFORM_AMD__\n#include <stddef.h>\n"
        "#include <hip/hip_runtime_api.h>\n#include <hip/hip_version.h>\n"
        "#define hip_stream_s ihipStream_t\n#define hip_event_s ihipEvent_t\n"
        "#define hip_graph_s ihipGraph\n#define hip_graph_exec_s hipGraphExec\n"
        "#define HIP_SUCCESS our_success\n"  # they have one, too
        '#include "hip_api.h"\n'
        + same(names)
        + same({"sizeof(hip_uuid)": "sizeof(hipUUID)"})
        + "#if HIP_VERSION_MAJOR >= 6\n"
        + same({"offsetof(hip_properties, r0600.arch)": "offsetof(hipDeviceProp_t, gcnArchName)"})
        + "#else\n"
        + same({"offsetof(hip_properties, r0000.arch)": "offsetof(hipDeviceProp_t, gcnArchName)"})
        + "#endif\n"
        + '_Static_assert(sizeof(hip_properties) >= 2 * sizeof(hipDeviceProp_t), "room");\n'
        + "".join(calls)
    )


@needs_hip
def test_hip_api_agrees_with_the_vendors_headers() -> None:
    folder, entries = hip_headers(), entry_points("hip")
    assert folder and len(entries) > 35
    done = compile_c(hip_source(entries), folder)
    assert done.returncode == 0, done.stderr


@needs_hip
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("hipDeviceTotalMem", "unsigned *, int"),  # narrower than size_t
        ("hipMemcpyPeerAsync", "void *, void *, const void *, void *, size_t, hip_stream"),  # CUDA's contexts
        ("hipEventRecord", "hip_stream, hip_event"),
        ("hipStreamCreateWithPriority", "hip_stream *, unsigned"),
        ("hipDeviceGetPCIBusId", "char *, size_t, int"),  # wider than int
    ],
)
def test_a_wrong_hip_line_is_seen(name: str, parameters: str) -> None:
    folder = hip_headers()
    entries = [(*each[:3], parameters) if each[1] == name else each for each in entry_points("hip")]
    assert folder and entries != entry_points("hip")
    done = compile_c(hip_source(entries), folder)
    assert done.returncode != 0 and name in done.stderr


@needs_hip
@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("HIP_NOT_READY = 600", "HIP_NOT_READY = 34", "HIP_NOT_READY"),
        ("HIP_COHERENT = 0x40000000", "HIP_COHERENT = 0x20000000", "HIP_COHERENT"),
        ("char bytes[16];", "char bytes[32];", "sizeof(hip_uuid)"),
        # One of the two is that of the headers here.
        ("char before[396];", "char before[400];", "offsetof(hip_properties, r0000.arch)"),
        ("char before[1160];", "char before[1168];", "offsetof(hip_properties, r0600.arch)"),
    ],
)
def test_a_wrong_hip_number_is_seen(old: str, new: str, named: str, tmp_path: Path) -> None:
    folder = hip_headers()
    assert folder
    if "before" in old and ("r0600" in named) != is_hip_6(folder):
        pytest.skip(f"the HIP headers here have no layout to compare {named} with")
    assert named in compile_changed("hip", hip_source(entry_points("hip")), folder, old, new, tmp_path)


def is_hip_6(folder: Path) -> bool:
    """Whether hipDeviceProp_t is that of HIP 6.0 and later."""
    found = re.search(r"define HIP_VERSION_MAJOR ([0-9]+)", (folder / "hip" / "hip_version.h").read_text())
    assert found
    return int(found[1]) >= 6
