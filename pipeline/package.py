"""The archive: ONNX, handler, labels, preprocessing and golden images in one `.mar`; same input, same bytes."""

import base64
import json
import math
import os
import subprocess
import sys
import tempfile
import zipfile
from importlib.resources import files
from pathlib import Path
from typing import Any

import serving.worker
from pipeline.artifact import sha256_file
from pipeline.errors import PipelineError
from pipeline.names import validate_name
from serving.worker.contents import GOLDEN, GRAPH, PACKAGE, SCHEMA, PackageError
from serving.worker.model import load_model
from serving.worker.preprocess import Preprocessing

CODE = "quartet_worker"  # not `serving.worker`: a worker would import the installed checkout instead of the archive
ENTRY = "quartet_entry.py"
ENTRY_SOURCE = f'''"""What TorchServe loads by name: the one class defined here."""

from {CODE}.handler import Handler


class Entry(Handler):
    """The handler of this archive."""
'''
MANIFEST = "MAR-INF/MANIFEST.json"
ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)


def build_archive(
    out: Path,
    *,
    name: str,
    version: str,
    onnx: Path,
    labels: list[str],
    preprocessing: Preprocessing,
    golden: list[tuple[bytes, list[float]]],
    tolerance: float,
    provenance: dict[str, str],
    provider: str = "cpu",
) -> Path:
    """Write `out`/`name`.mar, whole or not at all, and return its path.

    `golden` pairs an encoded image with the probabilities [K] that the graph must give for it, within `tolerance`, run
    by `provider` (cpu, cuda or tensorrt); the archive has answered them once when it is returned. Raises
    `PipelineError`.
    """
    validate_name(name, field="package.name")
    validate_name(version, field="package.version")
    _check(out, onnx=onnx, labels=labels, golden=golden, tolerance=tolerance)
    with tempfile.TemporaryDirectory(dir=out, prefix=".package-") as folder:
        work = Path(folder)
        contents = work / "contents"
        _write_code(contents)
        (contents / GRAPH).write_bytes(onnx.read_bytes())
        (contents / GOLDEN).write_text(_json([_golden(image, answer) for image, answer in golden]))
        package = {
            "schema": SCHEMA,
            "name": name,
            "version": version,
            "labels": labels,
            "preprocessing": preprocessing.to_json(),
            "tolerance": tolerance,
            "provenance": provenance,
            "provider": provider,
            "files": {str(path.relative_to(contents)): sha256_file(path) for path in _files(contents)},
        }
        (contents / PACKAGE).write_text(_json(package))
        try:
            load_model(contents)
        except PackageError as error:
            raise PipelineError(f"the archive of {onnx} would not start: {error}", exit_status=1) from error
        normal = work / "normal.mar"
        _normalise(_run_archiver(work, name=name, version=version), normal)
        return normal.replace(out / f"{name}.mar")


def _check(
    out: Path, *, onnx: Path, labels: list[str], golden: list[tuple[bytes, list[float]]], tolerance: float
) -> None:
    if not out.is_dir() or not os.access(out, os.W_OK):
        raise PipelineError(f"{out} is no folder that can be written to; create it or choose another one")
    if not onnx.is_file():
        raise PipelineError(f"there is no ONNX file {onnx}; run the choose stage first")
    if not labels or len(set(labels)) != len(labels):
        raise PipelineError(f"the {len(labels)} labels must be at least one and all different")
    if not golden:
        raise PipelineError("at least one golden image is needed; raise package.golden")
    if not 0 < tolerance < 1:
        raise PipelineError(f"the tolerance of a golden probability must lie between 0 and 1, not {tolerance}")
    for position, (_, answer) in enumerate(golden):
        if len(answer) != len(labels):
            raise PipelineError(f"golden image {position} has {len(answer)} probabilities for {len(labels)} labels")
        if not all(math.isfinite(p) for p in answer):
            raise PipelineError(f"the model answers golden image {position} with a non-finite probability")


def _write_code(contents: Path) -> None:
    (contents / CODE).mkdir(parents=True)
    for source in files(serving.worker).iterdir():
        if source.name.endswith(".py"):
            (contents / CODE / source.name).write_bytes(source.read_bytes())
    (contents / ENTRY).write_text(ENTRY_SOURCE)


def _golden(image: bytes, answer: list[float]) -> dict[str, Any]:
    return {"image": base64.b64encode(image).decode(), "probabilities": answer}


def _json(value: object) -> str:
    return json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n"


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _run_archiver(work: Path, *, name: str, version: str) -> Path:
    """Run torch-model-archiver on `work`/contents and return the `.mar` that it wrote.

    It deletes <TMPDIR>/<name> before and after, and reads commas and wildcards in paths: so it gets a TMPDIR of its
    own and relative paths only.
    """
    temporary, export = work / "tmp", work / "export"
    temporary.mkdir()
    export.mkdir()
    command = [sys.executable, "-m", "model_archiver.model_packaging"]
    command += ["--model-name", name, "--version", version, "--export-path", "export"]
    command += ["--serialized-file", f"contents/{GRAPH}", "--handler", f"contents/{ENTRY}"]
    # No model-config.yaml: with one, TorchServe 0.12 lets its own default response time-out (120 s) win over what the
    # registration asks for, and turns a batch delay of 0 into 100 ms.
    command += ["--extra-files", "contents"]
    environment = os.environ | {"TMPDIR": str(temporary.resolve())}
    result = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, check=False)
    archive = export / f"{name}.mar"
    if result.returncode != 0 or not archive.is_file():
        last = (result.stderr.strip() or "no output").splitlines()[-1]
        raise PipelineError(f"torch-model-archiver failed: {last}", exit_status=1)
    return archive


def _normalise(source: Path, target: Path) -> None:
    """Copy an archive without what changes from run to run: order, times, permissions, compression, creation time."""
    with zipfile.ZipFile(source) as given, zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as normal:
        for name in sorted(given.namelist()):
            content = given.read(name)
            if name == MANIFEST:
                manifest = json.loads(content)
                del manifest["createdOn"]
                content = _json(manifest).encode()
            entry = zipfile.ZipInfo(name, ZIP_EPOCH)
            entry.create_system = 3  # Unix
            entry.external_attr = 0o100644 << 16
            normal.writestr(entry, content)
