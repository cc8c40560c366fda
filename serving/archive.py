"""An archive checked before anything is started: readable, complete, unchanged, nothing added."""

import hashlib
import json
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from serving.errors import UserError
from serving.worker.contents import GRAPH, PACKAGE, PackageError, read_listing

MANIFEST = "MAR-INF/MANIFEST.json"


@dataclass(frozen=True)
class ArchiveInfo:
    """A `.mar` whose files are those that were packed."""

    path: Path
    name: str
    version: str
    graph_digest: str  # sha256 of the ONNX file, as in every answer
    digest: str  # sha256 of the `.mar`
    image_shape: tuple[int, int, int] = (0, 0, 0)  # height, width, channels of the pixels that the graph takes
    classes: int = 0
    provider: str = "cpu"  # what the graph was measured with: cpu, cuda or tensorrt


def verify_archive(path: Path) -> ArchiveInfo:
    """Read every file of the archive and compare it with the list inside.

    Raises UserError, on one line, when the archive is missing, damaged, incomplete, changed or made by other tools.
    """
    if not path.is_file():
        raise UserError(f"no archive at {path}; build one with: make package")
    try:
        with zipfile.ZipFile(path) as archive:
            return _verify(path, archive)
    except PackageError as error:
        raise UserError(f"{path}: {error}; build it again with: make package") from error
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        raise UserError(f"{path} is not a readable archive ({error}); build it again with: make package") from error


def _verify(path: Path, archive: zipfile.ZipFile) -> ArchiveInfo:
    names = archive.namelist()
    for name in (PACKAGE, MANIFEST):
        if name not in names:
            raise PackageError(f"{name} is missing: this is no archive of this project")
    listing = read_listing(json.loads(archive.read(PACKAGE)))
    if missing := sorted(listing.files.keys() - set(names)):
        raise PackageError(f"{missing[0]} is missing")
    # Files given twice are caught here, too: which of the two would be used depends on the reader.
    if added := sorted(set(names) - listing.files.keys() - {PACKAGE, MANIFEST}) or _repeated(names):
        raise PackageError(f"{added[0]} was added")
    for name, expected in listing.files.items():
        with archive.open(name) as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != expected:  # type: ignore[arg-type]  # stub of ZipExtFile
                raise PackageError(f"{name} was changed")
    manifest = json.loads(archive.read(MANIFEST))
    model = manifest.get("model") if isinstance(manifest, dict) else None
    if not isinstance(model, dict):
        raise PackageError(f"{MANIFEST} describes no model")
    if (model.get("modelName"), model.get("modelVersion")) != (listing.name, listing.version):
        raise PackageError(f"{MANIFEST} and {PACKAGE} name different models")
    # The manifest itself is in no list: TorchServe must not be sent to a file that nobody checked.
    if str(handler := model.get("handler")) not in listing.files:
        raise PackageError(f"{MANIFEST} names the handler {handler!r}, which is none of the files in {PACKAGE}")
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return ArchiveInfo(
        path=path,
        name=listing.name,
        version=listing.version,
        graph_digest=listing.files[GRAPH],
        digest=digest,
        image_shape=listing.image_shape,
        classes=listing.classes,
        provider=listing.provider,
    )


def _repeated(names: list[str]) -> list[str]:
    return sorted({name for name in names if names.count(name) > 1})
