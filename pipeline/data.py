"""Data sets: which images there are, what they show, and which split each belongs to.

Shape legend: N images of a split, H height, W width, C channels.
"""

import hashlib
import io
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from pipeline.artifact import canonical, sha256_file
from pipeline.config import DataConfig
from pipeline.download import fetch_dataset
from pipeline.errors import PipelineError
from serving.worker.preprocess import Preprocessing

SPLITS = ("train", "val", "test")
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"})

Ints = NDArray[np.int64]


class Source(Protocol):
    """Where encoded images come from."""

    def __len__(self) -> int: ...

    def encoded(self, index: int) -> bytes:
        """Return the image file's bytes, as a client would send them."""

    def describe(self, index: int) -> str:
        """Return a name for messages and listings."""

    def digests(self) -> list[str]:
        """Return each image's sha256."""


@dataclass(frozen=True)
class Arrays:
    """Images that come as pixels: uint8 [N, H, W] or [N, H, W, 3]. Encoded as PNG, which loses nothing."""

    images: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.images)

    def encoded(self, index: int) -> bytes:
        """Return image `index` as a PNG file."""
        buffer = io.BytesIO()
        Image.fromarray(self.images[index]).save(buffer, format="PNG")
        return buffer.getvalue()

    def describe(self, index: int) -> str:
        """Return the position in the published data set."""
        return f"image {index}"

    def digests(self) -> list[str]:
        """Return the sha256 of each image's pixels: unlike a PNG's, it does not depend on the encoder."""
        return [hashlib.sha256(np.ascontiguousarray(image).tobytes()).hexdigest() for image in self.images]


@dataclass(frozen=True)
class Files:
    """Images that are files below `root`."""

    root: Path
    names: tuple[str, ...]
    cache: Path

    def __len__(self) -> int:
        return len(self.names)

    def encoded(self, index: int) -> bytes:
        """Return the bytes of file `index`."""
        return (self.root / self.names[index]).read_bytes()

    def describe(self, index: int) -> str:
        """Return the path below the data set's folder."""
        return self.names[index]

    def digests(self) -> list[str]:
        """Return each file's sha256, from the cache where size and modification time are unchanged."""
        memory = self.cache / f"digests-{hashlib.sha256(str(self.root.resolve()).encode()).hexdigest()[:16]}.json"
        known: dict[str, list[Any]] = json.loads(memory.read_text()) if memory.is_file() else {}
        fresh: dict[str, list[Any]] = {}
        for name in self.names:
            path = self.root / name
            stat = path.stat()
            stamp = [stat.st_size, stat.st_mtime_ns]
            old = known.get(name)
            fresh[name] = old if old and old[:2] == stamp else [*stamp, sha256_file(path)]
        if fresh != known:
            self.cache.mkdir(parents=True, exist_ok=True)
            scratch = memory.with_suffix(f".{os.getpid()}.partial")
            scratch.write_text(json.dumps(fresh))
            scratch.rename(memory)
        return [str(fresh[name][2]) for name in self.names]


@dataclass(frozen=True)
class Split:
    """Some images of a source, in a fixed order."""

    source: Source
    indices: Ints  # [N], into the source
    labels: Ints  # [N], class numbers
    digest: str  # over content and labels, in order

    def __len__(self) -> int:
        return len(self.indices)

    def encoded(self, position: int) -> bytes:
        """Return the encoded image at `position` of the split."""
        return self.source.encoded(int(self.indices[position]))

    def describe(self, position: int) -> str:
        """Return the name of the image at `position` of the split."""
        return self.source.describe(int(self.indices[position]))


@dataclass(frozen=True)
class DataSet:
    """Three disjoint splits and the names of the classes."""

    labels: tuple[str, ...]
    train: Split
    val: Split
    test: Split

    def fingerprint(self) -> dict[str, Any]:
        """Return what identifies the content: labels, and digest and size of each split."""
        splits = {name: getattr(self, name) for name in SPLITS}
        return {
            "labels": list(self.labels),
            "splits": {name: {"digest": split.digest, "images": len(split)} for name, split in splits.items()},
        }


def preprocessing_of(config: DataConfig) -> Preprocessing:
    """Return the numbers by which an encoded image becomes pixels for the model."""
    return Preprocessing(
        height=config.height,
        width=config.width,
        channels=config.channels,
        resize=config.shorter_side,
        background=config.background,
        max_pixels=config.max_pixels,
    )


def open_dataset(config: DataConfig, *, cache: Path) -> DataSet:
    """Find (or download) the images and cut them into splits. `cache` holds downloads and digests.

    Raises `PipelineError` for a missing folder, an empty class, or a split whose classes are not those of train/.
    """
    if config.name == "imagefolder":
        return _imagefolder(config, cache)
    images, labels, names, published_test = _published(config.name, cache)
    source = Arrays(images)
    digests = source.digests()
    everything = np.arange(len(labels)) if published_test is None else np.arange(published_test)
    if published_test is None:
        rest, test = _stratified(everything, labels, config.test, config.split_seed)
        share = config.validation / (1 - config.test)
    else:
        rest, test, share = everything, np.arange(published_test, len(labels)), config.validation
    train, val = _stratified(rest, labels, share, config.split_seed)
    return DataSet(names, *(_split(source, part, labels[part], digests) for part in (train, val, test)))


def _published(name: str, cache: Path) -> tuple[NDArray[np.uint8], Ints, tuple[str, ...], int | None]:
    """Return images, labels, class names, and the position of the first test image where a test split is published."""
    if name == "digits":
        from sklearn.datasets import load_digits  # slow to import, and needed for this data set only

        bunch = load_digits()
        pixels = np.round(bunch.images * (255 / 16)).astype(np.uint8)  # the data set counts from 0 to 16
        return pixels, bunch.target.astype(np.int64), tuple("0123456789"), None
    from torchvision import datasets

    root = fetch_dataset(name, cache / "downloads")
    kind = {"mnist": datasets.MNIST, "fashion-mnist": datasets.FashionMNIST, "cifar10": datasets.CIFAR10}[name]
    parts = [kind(str(root), train=train, download=False) for train in (True, False)]
    images = np.concatenate([np.asarray(part.data) for part in parts])
    labels = np.concatenate([np.asarray(part.targets) for part in parts]).astype(np.int64)
    names = tuple(part.split(" - ")[0] if name == "mnist" else part for part in parts[0].classes)
    return images, labels, names, len(parts[0].targets)


def _imagefolder(config: DataConfig, cache: Path) -> DataSet:
    """Read class folders. Class numbers come from train/; the other splits are mapped to them by name."""
    if config.root is None:
        raise PipelineError("data.root is not set; pass --data.root DIR, the folder that holds train/")
    root = config.root.expanduser()
    if not root.is_dir():
        raise PipelineError(f"data.root = {str(config.root)!r} is no folder; give the one that holds train/")
    if not (root / "train").is_dir():
        raise PipelineError(f"data.root = {str(config.root)!r} has no folder train/ with one folder for each class")
    names = tuple(folder.name for folder in _class_folders(root / "train"))
    if len(names) < 2:
        held = f"{len(names)} class(es) ({', '.join(names) or 'no folder in train/'})"
        raise PipelineError(
            f"data.root = {str(config.root)!r} holds {held}; a classifier needs two or more: train/CLASS/*.jpg"
        )
    found = {part: _listing(root, part, names) for part in SPLITS if (root / part).is_dir()}
    files = tuple(name for listing in found.values() for name, _ in listing)
    labels = np.array([label for listing in found.values() for _, label in listing], dtype=np.int64)
    source = Files(root, files, cache)
    digests = source.digests()
    ends = np.cumsum([len(listing) for listing in found.values()])
    parts = {part: np.arange(end - len(found[part]), end) for part, end in zip(found, ends, strict=True)}
    share = {"val": config.validation, "test": config.test}
    for part in ("test", "val"):
        if part not in parts:
            parts["train"], parts[part] = _stratified(parts["train"], labels, share[part], config.split_seed)
    return DataSet(names, *(_split(source, parts[part], labels[parts[part]], digests) for part in SPLITS))


def _listing(root: Path, part: str, names: Sequence[str]) -> list[tuple[str, int]]:
    numbers = {name: number for number, name in enumerate(names)}
    listing: list[tuple[str, int]] = []
    for folder in _class_folders(root / part):
        if folder.name not in numbers:
            raise PipelineError(
                f"{part}/{folder.name} is a class that train/ does not have; rename or remove the folder"
            )
        images = _images(folder)
        if not images and part == "train":
            raise PipelineError(f"train/{folder.name} holds no image; add images or remove the folder")
        listing += [(str(p.relative_to(root)), numbers[folder.name]) for p in images]
    if not listing:
        raise PipelineError(f"{part}/ holds no image ({', '.join(sorted(SUFFIXES))}) in class folders")
    return listing


def _class_folders(folder: Path) -> list[Path]:
    """Return the folders in it. Names with a dot in front belong to tools (.ipynb_checkpoints), not to people."""
    return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def _images(folder: Path) -> list[Path]:
    """Return the image files anywhere below. A Mac's `._x.jpg` is none. A link that leads nowhere is an error."""
    found = [p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES]
    found = sorted(p for p in found if not any(part.startswith(".") for part in p.relative_to(folder).parts))
    if broken := [p for p in found if p.is_symlink() and not p.exists()]:
        raise PipelineError(f"{broken[0]} is a link to nothing ({len(broken)} such); mend or remove it")
    return [p for p in found if p.is_file()]


def _stratified(indices: Ints, labels: Ints, share: float, seed: int) -> tuple[Ints, Ints]:
    """Cut off `share` of every class, at least one image where a class has two; both parts are sorted."""
    generator = np.random.default_rng(seed)
    taken: list[Ints] = []
    for label in np.unique(labels[indices]):
        members = generator.permutation(indices[labels[indices] == label])
        count = max(1, round(share * len(members))) if len(members) > 1 else 0
        taken.append(members[:count])
    second = np.sort(np.concatenate(taken))
    if not len(second):
        raise PipelineError(
            "no class has enough images for train/, validation and test: give three of each class or more, or add "
            "folders val/ and test/"
        )
    return np.setdiff1d(indices, second), second


def _split(source: Source, indices: Ints, labels: Ints, digests: Sequence[str]) -> Split:
    lines = canonical([[digests[i], int(label)] for i, label in zip(indices, labels, strict=True)])
    return Split(source, indices, labels, hashlib.sha256(lines.encode()).hexdigest())
