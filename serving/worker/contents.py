"""The names and the list of files by which an archive can be checked, before it is unpacked and after."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SCHEMA = 1
PACKAGE = "package.json"  # lists every other file with its sha256
GRAPH = "model.onnx"
GOLDEN = "golden.json"
# What runs the graph, in the order in which ONNX Runtime asks them; the CPU takes what none of them does.
PROVIDERS: dict[str, tuple[str, ...]] = {
    "cpu": (),
    "cuda": ("CUDAExecutionProvider",),
    "tensorrt": ("TensorrtExecutionProvider", "CUDAExecutionProvider"),
}


class PackageError(Exception):
    """The archive is not what was packed, or does not give the answers that it was packed with."""


@dataclass(frozen=True)
class Listing:
    """What package.json says about the archive as a whole."""

    name: str
    version: str
    files: Mapping[str, str]  # path in the archive -> sha256
    image_shape: tuple[int, int, int]  # height, width, channels
    classes: int
    provider: str  # what the graph was measured with: cpu, cuda or tensorrt


def read_listing(package: Any) -> Listing:
    """Return the listing in a parsed package.json; raises PackageError when it has another schema or shape."""
    if not isinstance(package, dict) or package.get("schema") != SCHEMA:
        schema = package.get("schema") if isinstance(package, dict) else None
        raise PackageError(f"{PACKAGE} has schema {schema!r}, schema {SCHEMA} is needed")
    try:
        size = package["preprocessing"]
        listing = Listing(
            name=str(package["name"]),
            version=str(package["version"]),
            files=dict(package["files"]),
            image_shape=(int(size["height"]), int(size["width"]), int(size["channels"])),
            classes=len(package["labels"]),
            provider=str(package.get("provider", "cpu")),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise PackageError(f"{PACKAGE} lacks name, version, files, labels or preprocessing") from error
    if missing := {GRAPH, GOLDEN} - listing.files.keys():
        raise PackageError(f"{PACKAGE} does not list {', '.join(sorted(missing))}")
    if listing.provider not in PROVIDERS:
        raise PackageError(f"{PACKAGE} has provider {listing.provider!r}, one of {', '.join(PROVIDERS)} is needed")
    return listing
