"""The environment: checks the machine, then makes `.venv` with the pinned dependencies, once. Standard library only.

Run as a file by make, with whatever Python the user has, before anything is installed. So that an old Python gets a
sentence and no SyntaxError, what stands here also parses on Python 3.6: annotations are strings.
"""

import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
INPUTS = ("pyproject.toml", "pipeline/constraints.txt")
STAMP = ".quartet-installed.json"
UNFINISHED = ".quartet-unfinished"
PYTHONS = ((3, 11), (3, 12), (3, 13))
GLIBC = (2, 28)  # the wheels of torch and onnxruntime-gpu are manylinux_2_28
INSTALLED_GB = 7.0
DOWNLOAD_GB = 3.3  # the wheels: they lie beside .venv until they are unpacked, and stay in pip's cache
EXIT_REFUSED = 2


class Machine(NamedTuple):
    """What an installation depends on."""

    system: str
    machine: str
    libc: "tuple[str, str]"  # name and version
    python: "tuple[int, int]"
    executable: str
    missing_modules: "tuple[str, ...]"
    free_gb: float
    needed_gb: float
    other_pythons: "tuple[str, ...]"  # on PATH, and of a version that would do


def inspect_machine(venv: Path) -> Machine:
    """Return the facts of this machine and of the Python that runs this file."""
    parent = _existing(venv.absolute())
    names = ["python{}.{}".format(*version) for version in reversed(PYTHONS)]
    return Machine(
        system=platform.system(),
        machine=platform.machine(),
        libc=platform.libc_ver(),
        python=sys.version_info[:2],
        executable=sys.executable,
        missing_modules=tuple(name for name in ("venv", "ensurepip") if importlib.util.find_spec(name) is None),
        free_gb=shutil.disk_usage(str(parent)).free / 1e9,
        needed_gb=INSTALLED_GB + DOWNLOAD_GB * (2 if _pip_cache().stat().st_dev == parent.stat().st_dev else 1),
        other_pythons=tuple(name for name in names if shutil.which(name)),
    )


def refusal(machine: Machine) -> "str | None":
    """Return the one line that says why Quartet cannot be installed here, or None when it can."""
    if (machine.system, machine.machine) != ("Linux", "x86_64"):
        return f"Quartet runs on Linux x86_64; this is {machine.system} {machine.machine}"
    if machine.libc[0] != "glibc" or _version(machine.libc[1]) < GLIBC:
        found = " ".join(machine.libc).strip() or "another C library"
        return f"Quartet's wheels need glibc {GLIBC[0]}.{GLIBC[1]} or newer; this system has {found}"
    if machine.python not in PYTHONS:
        remedy = machine.other_pythons[0] if machine.other_pythons else "/path/to/python3.11"
        found = "{}.{} ({})".format(*machine.python, machine.executable)
        return f"Quartet needs Python 3.11, 3.12 or 3.13; this is {found}; use: make PYTHON={remedy}"
    if machine.missing_modules:
        package = "python{}.{}-venv".format(*machine.python)
        names = " and ".join(machine.missing_modules)
        return f"{machine.executable} has no module {names}; on Debian or Ubuntu: sudo apt-get install {package}"
    if machine.free_gb < machine.needed_gb:
        return f"the installation needs {machine.needed_gb:.1f} GB of disk; {machine.free_gb:.1f} GB are free"
    return None


def occupied(venv: Path) -> "str | None":
    """Return the one line that says why no environment may be made in `venv`, or None: what was cut off is deleted."""
    marks = ("pyvenv.cfg", STAMP, UNFINISHED)
    if not venv.exists() or (venv.is_dir() and not any(venv.iterdir())):
        return None
    if any((venv / name).exists() for name in marks):
        return None
    return f"VENV={venv} is there and is no Python environment; name another folder, a new or an empty one"


def fingerprint(venv: Path, *, root: Path = ROOT) -> "dict[str, str]":
    """Return what a complete environment's stamp says: what went in, and where it stands (a moved one is broken)."""
    digest = hashlib.sha256()
    for name in INPUTS:
        digest.update((root / name).read_bytes() + b"\0")
    return {"inputs": digest.hexdigest(), "location": str(venv.resolve())}


def is_installed(venv: Path, *, root: Path = ROOT) -> bool:
    """Tell whether the environment is complete, in place and made from the present pins."""
    if not (venv / "bin" / "python").exists():
        return False
    try:
        stamp = json.loads((venv / STAMP).read_text())
    except (FileNotFoundError, ValueError):
        return False
    return bool(stamp == fingerprint(venv, root=root))


def install(venv: Path, *, root: Path = ROOT) -> None:
    """Create or update the environment; raises `subprocess.CalledProcessError` when venv or pip fails.

    A first installation that was cut off starts again: pip takes a half-unpacked package for an installed one.
    Wheels that were fetched come from pip's cache.
    """
    python = venv / "bin" / "python"
    if (venv / UNFINISHED).exists() or _was_moved(venv):
        shutil.rmtree(str(venv))
    if not python.exists():
        venv.mkdir(parents=True, exist_ok=True)
        (venv / UNFINISHED).touch()
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    stamp = venv / STAMP
    if stamp.exists():
        stamp.unlink()
    _pip_install(python, root=root, unpack=venv / "tmp")
    stamp.write_text(json.dumps(fingerprint(venv, root=root)))
    if (venv / UNFINISHED).exists():
        (venv / UNFINISHED).unlink()


def main(venv: Path) -> int:
    """Install when needed; return the exit status. One installation at a time: the lock is on pyproject.toml."""
    if is_installed(venv):
        return 0
    with (ROOT / INPUTS[0]).open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_installed(venv):
            return 0
        reason = occupied(venv) or refusal(inspect_machine(venv))
        if reason:
            print(reason, file=sys.stderr)
            return EXIT_REFUSED
        place = venv.absolute()
        if (venv / STAMP).exists() and not _was_moved(venv):
            print(f"The pins changed: updating {place}.", file=sys.stderr)
        else:
            size = f"about {INSTALLED_GB} GB, of which {DOWNLOAD_GB} GB are downloaded"
            print(f"Installing the pinned dependencies into {place}: {size}; once.", file=sys.stderr)
        try:
            install(venv)
        except subprocess.CalledProcessError as error:
            print(f"the installation failed ({error}); run make install again to go on", file=sys.stderr)
            return EXIT_REFUSED
    print(f"{place} is complete.", file=sys.stderr)
    return 0


def describe(line: str) -> str:
    """Return what of a line of pip's talk helps while one waits: what is fetched and how large it is; or nothing."""
    fetched = re.match(r"\s*(?:Downloading|Using cached) ([^-]+)-([^-]+)-\S+\.whl (\(.+\))", line)
    if fetched:
        return " ".join(fetched.groups())
    unpacked = re.match(r"Installing collected packages: (.*)", line)
    return "unpacking {} packages".format(len(unpacked.group(1).split(","))) if unpacked else ""


def _pip_cache() -> Path:
    """Return the folder of pip's cache, or the nearest one above it that exists."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    return _existing(Path(os.environ.get("PIP_CACHE_DIR") or cache))


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def _pip_install(python: Path, *, root: Path, unpack: Path) -> None:
    """Run pip. Its temporary files lie beside the environment, because /tmp is often a small part of the memory."""
    unpack.mkdir(exist_ok=True)
    constraints = root / "pipeline" / "constraints.txt"
    command = [str(python), "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
    command += ["-c", str(constraints), "-e", f"{root}[dev]"]
    environment = {**os.environ, "TMPDIR": str(unpack)}
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, universal_newlines=True, env=environment) as pip:
            assert pip.stdout is not None  # it is a pipe
            for line in pip.stdout:
                if describe(line):
                    print(f"  {describe(line)}", file=sys.stderr)
        if pip.returncode:
            raise subprocess.CalledProcessError(pip.returncode, command[1:4])
    finally:
        shutil.rmtree(str(unpack), ignore_errors=True)


def _was_moved(venv: Path) -> bool:
    try:
        stamp = json.loads((venv / STAMP).read_text())
    except (FileNotFoundError, ValueError):
        return False
    return bool(stamp.get("location") != str(venv.resolve()))


def _version(text: str) -> "tuple[int, ...]":
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
