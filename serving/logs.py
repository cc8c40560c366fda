"""Reading the logs of a stack: the last lines of each file, then whatever is added."""

import time
from pathlib import Path

READ_BYTES = 1024 * 1024


def log_files(run_dir: Path) -> list[Path]:
    """Return every current log below `run_dir`, rotated ones left out."""
    return sorted((*run_dir.glob("logs/*.log"), *run_dir.glob("logs/*/model.log"), *run_dir.glob("logs/*/ts.log")))


def tail(path: Path, *, lines: int) -> list[str]:
    """Return the last `lines` lines of `path` without reading a large file whole."""
    with path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - READ_BYTES))
        return stream.read().decode(errors="replace").splitlines()[-lines:]


def show(run_dir: Path, *, lines: int, follow: bool) -> None:
    """Print the last lines of every log, each under its name; with `follow`, go on until interrupted."""
    sizes: dict[Path, int] = {}
    for path in log_files(run_dir):
        sizes[path] = path.stat().st_size
        if shown := tail(path, lines=lines):
            print(f"==> {path.relative_to(run_dir)} <==", *shown, sep="\n", flush=True)
    while follow:
        time.sleep(0.5)
        for path in log_files(run_dir):
            sizes[path] = _print_added(path, run_dir, known=sizes.get(path, 0))


def _print_added(path: Path, run_dir: Path, *, known: int) -> int:
    size = path.stat().st_size
    if size < known:  # rotated
        known = 0
    if size > known:
        with path.open("rb") as stream:
            stream.seek(known)
            added = stream.read(size - known).decode(errors="replace").splitlines()
        print(*(f"{path.relative_to(run_dir)}: {line}" for line in added), sep="\n", flush=True)
    return size
