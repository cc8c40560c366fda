"""The machine this runs on: what decides speed, what decides how many processes and threads to start."""

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError

SPEED_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm")
LIBRARIES = ("numpy", "onnx", "onnxruntime", "onnxscript", "pillow", "torch", "torch-pruning", "torchvision")


def available_cpus() -> int:
    """Return how many CPUs this process may use: affinity and cgroup quota respected, at least 1."""
    cpus = len(os.sched_getaffinity(0))
    limit = Path("/sys/fs/cgroup/cpu.max")
    if limit.is_file():
        quota, period = limit.read_text().split()
        if quota != "max":
            cpus = min(cpus, max(1, int(quota) // int(period)))
    return cpus


def cpu_facts() -> dict[str, Any]:
    """Return the CPU's name and the instruction sets that decide which model is the fastest."""
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())  # the first CPU's: all are alike
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    return {"name": fields.get("model name", platform.machine()), "flags": [f for f in SPEED_FLAGS if f in flags]}


def gpu_names() -> list[str]:
    """Return the names of the GPUs that CUDA_VISIBLE_DEVICES leaves; none where there is no NVIDIA driver."""
    import pynvml  # finds the driver's library when it is used, so a machine without one has it too

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    names = [
        str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(i))) for i in range(pynvml.nvmlDeviceGetCount())
    ]
    pynvml.nvmlShutdown()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return names if visible is None else names[: len([part for part in visible.split(",") if part.strip()])]


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
