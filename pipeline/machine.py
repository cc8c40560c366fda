"""The machine this runs on: what decides speed, what decides how many processes and threads to start."""

import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError

SPEED_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm")
LIBRARIES = (
    "numpy",
    "onnx",
    "onnxruntime",
    "onnxscript",
    "pillow",
    "torch",
    "torch-model-archiver",
    "torch-pruning",
    "torchvision",
)


def cpu_facts() -> dict[str, Any]:
    """Return the CPU's name and the instruction sets that decide which model is the fastest."""
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())  # the first CPU's: all are alike
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    return {"name": fields.get("model name", platform.machine()), "flags": [f for f in SPEED_FLAGS if f in flags]}


def gpu_names() -> list[str]:
    """Return the names of the GPUs that CUDA_VISIBLE_DEVICES leaves; none where there is no NVIDIA driver.

    CUDA reads that list up to the first entry that is no GPU: `-1` hides all.
    """
    import pynvml  # finds the driver's library when it is used, so a machine without one has it too

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    gpus = [(str(pynvml.nvmlDeviceGetUUID(handle)), str(pynvml.nvmlDeviceGetName(handle))) for handle in handles]
    pynvml.nvmlShutdown()
    return visible_names(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))


def visible_names(gpus: Sequence[tuple[str, str]], visible: str | None) -> list[str]:
    """Return the names of those of `gpus` (UUID, name) that CUDA_VISIBLE_DEVICES = `visible` leaves, in its order."""
    if visible is None:
        return [name for _, name in gpus]
    names: list[str] = []
    for entry in (part.strip() for part in visible.split(",")):
        by_number = gpus[int(entry)][1] if entry.isdecimal() and int(entry) < len(gpus) else None
        by_uuid = next((name for uuid, name in gpus if entry.startswith("GPU-") and uuid.startswith(entry)), None)
        name = by_number or by_uuid
        if name is None:
            break
        names.append(name)
    return names


def library_versions() -> dict[str, str]:
    """Return the versions that a result may depend on."""
    runtime = {"onnxruntime": "onnxruntime-gpu" if platform.machine() == "x86_64" else "onnxruntime"}
    return {name: version(runtime.get(name, name)) for name in LIBRARIES}


def training_device(asked: str) -> str:
    """Return `cuda` or `cpu` for the recipe's train.device; `PipelineError` when CUDA is asked for and missing."""
    found = bool(gpu_names())
    if asked == "cuda" and not found:
        raise PipelineError("train.device = 'cuda', but there is no NVIDIA GPU; use --train.device cpu")
    return ("cuda" if found else "cpu") if asked == "auto" else asked


def training_processes(asked: int, device: str) -> int:
    """Return the number of training processes: as asked, else one for each GPU, or 2 on a CPU.

    Raises `PipelineError` when more processes than GPUs are asked for.
    """
    if device == "cpu":
        return asked or 2
    gpus = len(gpu_names())
    if asked > gpus:
        raise PipelineError(f"train.nproc = {asked}, but this machine has {gpus} GPU(s), and each takes one process")
    return asked or gpus
