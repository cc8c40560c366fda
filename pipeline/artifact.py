"""Artifacts: directories with a manifest, published whole or not at all. Only this module knows their layout."""

import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline.errors import PipelineError

SCHEMA = 1
KEY_LENGTH = 16  # hex digits of the key in a directory's name
MANIFEST = "manifest.json"
REPORT = "report.json"
REPORT_FOLDER = "report"  # plots and the like: measured, so neither digested nor packed


class Manifest(BaseModel):
    """What an artifact is. Deterministic facts only, so that the same key gives the same bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int
    stage: str
    key: str
    parent: str | None
    source: str  # digest of the code that made it
    config: dict[str, Any]  # the sections of the recipe that this stage reads, resolved
    versions: dict[str, str]
    data: dict[str, Any]  # data set, labels, preprocessing, digests of the splits
    models: dict[str, dict[str, Any]]  # name -> ModelSpec of each model in the files
    metrics: dict[str, float]
    files: dict[str, str]  # relative path -> sha256


@dataclass(frozen=True)
class StageResult:
    """What a stage hands back: facts for the manifest, and measurements for the report."""

    data: dict[str, Any]
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Artifact:
    """A published artifact: a directory and its parsed manifest."""

    path: Path
    manifest: Manifest

    def file(self, name: str) -> Path:
        """Return the path of a file that the manifest lists; `PipelineError` for any other name."""
        if name not in self.manifest.files:
            raise PipelineError(f"artifact {self.path.name} of stage {self.manifest.stage} has no file {name!r}")
        return self.path / name

    @property
    def report(self) -> dict[str, Any]:
        """Return the measurements that lie beside the manifest."""
        report: dict[str, Any] = json.loads((self.path / REPORT).read_text())
        return report

    @property
    def digest(self) -> str:
        """Return the sha256 of the manifest, which covers every file."""
        return sha256_file(self.path / MANIFEST)


def sha256_file(path: Path) -> str:
    """Return the sha256 of a file's bytes, as hex digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def canonical(value: object) -> str:
    """Return `value` as JSON that is equal for equal values: sorted keys, no spaces; NaN is a `ValueError`."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def key_of(facts: Mapping[str, Any]) -> str:
    """Return the key of a stage: the sha256 over everything that decides its outcome."""
    return hashlib.sha256(canonical(facts).encode()).hexdigest()


def artifact_path(root: Path, stage: str, key: str) -> Path:
    """Return where the artifact with this key stands, whether it is there or not."""
    return root / stage / key[:KEY_LENGTH]


def resume_path(root: Path, stage: str, key: str) -> Path:
    """Return the private folder in which a stage keeps what lets it continue after a kill."""
    return root / stage / f"{key[:KEY_LENGTH]}.resume"


def load_artifact(path: Path) -> Artifact:
    """Read the artifact at `path` and check every file's sha256.

    Raises `PipelineError` when the manifest is missing or unreadable, or when a file is missing or changed.
    """
    try:
        manifest = Manifest.model_validate_json((path / MANIFEST).read_bytes())
    except (FileNotFoundError, ValidationError) as error:
        state = "missing" if isinstance(error, FileNotFoundError) else "damaged"
        raise PipelineError(f"{path / MANIFEST} is {state}; delete {path} and run the stage again") from error
    for name, expected in manifest.files.items():
        file = path / name
        if not file.is_file() or sha256_file(file) != expected:
            raise PipelineError(f"{file} is missing or was changed; delete {path} and run the stage again")
    return Artifact(path, manifest)


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold a lock file, so that two runs take turns; the second says that it waits, and finds what the first made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting = f"waiting for another run that works on {path.parent.name}/{path.stem}"
            print(waiting, file=sys.stderr, flush=True)
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def publish(
    root: Path,
    *,
    stage: str,
    facts: Mapping[str, Any],
    work: Callable[[Path], StageResult],
) -> Artifact:
    """Run `work` in a private folder and publish what it wrote under the key of `facts`.

    The manifest is written last and the folder renamed once, so a crash at any instant leaves no artifact at all;
    what an earlier crash left in the private folder is removed first. `facts` has the keys source, config, parent,
    versions, data and whatever else decides the outcome. The lock must be held by the caller (`exclusive`).
    """
    key = key_of(facts)
    final = artifact_path(root, stage, key)
    partial, old = final.with_name(final.name + ".partial"), final.with_name(final.name + ".old")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        result = work(partial)
    except BaseException:  # refused or interrupted: only a run with the same key would remove what it left
        shutil.rmtree(partial, ignore_errors=True)
        raise
    digested = [
        p for p in sorted(partial.rglob("*")) if p.is_file() and REPORT_FOLDER not in p.relative_to(partial).parts
    ]
    files = {str(p.relative_to(partial)): sha256_file(p) for p in digested}
    manifest = Manifest(
        schema_version=SCHEMA,
        stage=stage,
        key=key,
        parent=facts["parent"],
        source=facts["source"],
        config=facts["config"],
        versions=facts["versions"],
        data=result.data,
        models=result.models,
        metrics=result.metrics,
        files=files,
    )
    _write_durably(partial / REPORT, json.dumps(result.report, indent=2, allow_nan=False))
    _write_durably(partial / MANIFEST, json.dumps(manifest.model_dump(), indent=2, sort_keys=True, allow_nan=False))
    if final.exists():  # --force: the old one stands until the new one is complete
        final.rename(old)
    partial.rename(final)
    shutil.rmtree(old, ignore_errors=True)
    shutil.rmtree(resume_path(root, stage, key), ignore_errors=True)
    return Artifact(final, manifest)


def _write_durably(path: Path, text: str) -> None:
    with path.open("w") as stream:
        stream.write(text + "\n")
        stream.flush()
        os.fsync(stream.fileno())
