"""Which files decide what a stage computes: its module and every module of ours that it imports, in turn."""

import ast
import hashlib
from pathlib import Path

from pipeline.artifact import sha256_file

ROOT = Path(__file__).parent.parent
PACKAGES = ("pipeline", "serving")
# What these say is in the key by value (the resolved recipe, the parent), or decides nothing of what is computed.
PLUMBING = frozenset(
    {
        "pipeline/artifact.py",
        "pipeline/chain.py",
        "pipeline/config.py",
        "pipeline/errors.py",
        "pipeline/launch.py",
        "pipeline/machine.py",
        "pipeline/stage.py",
        "pipeline/training/telemetry.py",
    }
)


def source_digest(module: str) -> str:
    """Return the digest of the names and contents of the files that `module` computes with."""
    digest = hashlib.sha256()
    for file in source_files(module):
        digest.update(f"{file} {sha256_file(ROOT / file)}\n".encode())
    return digest.hexdigest()


def source_files(module: str) -> list[str]:
    """Return the files of `module` and of all it imports, relative to the project's root, without the plumbing."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        for file in _files(waiting.pop()):
            if file not in found:
                found.add(file)
                waiting += _imports(file) if file not in PLUMBING else []
    return sorted(found - PLUMBING)


def _files(module: str) -> list[str]:
    """Return the file of a dotted name; for a package all of its files, because a package is taken whole."""
    path = ROOT / module.replace(".", "/")
    if path.with_suffix(".py").is_file():
        return [str(path.with_suffix(".py").relative_to(ROOT))]
    if (path / "__init__.py").is_file() and module == "serving.worker":
        return [str(file.relative_to(ROOT)) for file in sorted(path.glob("*.py"))]
    return []


def _imports(file: str) -> list[str]:
    names: list[str] = []
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, file)
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return [name for name in names if name.partition(".")[0] in PACKAGES]


def _absolute(node: ast.ImportFrom, file: str) -> str:
    """Return the module of a `from` import; those in serving/worker are relative."""
    if not node.level:
        return node.module or ""
    package = ".".join(Path(file).parts[: -node.level])
    return f"{package}.{node.module}" if node.module else package
