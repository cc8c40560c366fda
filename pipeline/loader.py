"""Pixels in the order in which training and evaluation want them: decoding, caching, sampling, augmentation, sharding.

Everything random is a function of (seed, epoch, image), so it is the same on any number of processes and after any
interruption. Shape legend: N images of a split, B images of a batch, H height, W width, C channels.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import serving.worker.preprocess
from pipeline.artifact import canonical, sha256_file
from pipeline.data import Ints, Split
from pipeline.errors import PipelineError
from serving.worker.preprocess import BadImage, Preprocessing, decode

Pixels = NDArray[np.uint8]

CACHE_LIMIT_BYTES = 8 << 30  # a larger split is decoded anew in every epoch
MAX_NAMED = 5  # bad files named in a message
AHEAD = 2  # batches prepared while the model works


@dataclass(frozen=True)
class Images:
    """A split as pixels. `cached` is uint8 [N, H, W, C] in a memory-mapped file, or None for a large split."""

    split: Split
    spec: Preprocessing
    cached: Pixels | None

    def __len__(self) -> int:
        return len(self.split)

    def batch(self, positions: Ints) -> Pixels:
        """Return uint8 [B, H, W, C] for positions [B]."""
        if self.cached is not None:
            return np.ascontiguousarray(self.cached[positions])
        with ThreadPoolExecutor() as pool:  # Pillow decodes without holding the interpreter's lock
            return np.stack(list(pool.map(self._decode, positions.tolist())))

    def batches(self, size: int) -> Iterator[Pixels]:
        """Yield all images in order, `size` at a time: uint8 [B, H, W, C]."""
        for start in range(0, len(self), size):
            yield self.batch(np.arange(start, min(start + size, len(self))))

    def _decode(self, position: int) -> Pixels:
        try:
            return decode(self.split.encoded(position), self.spec)
        except BadImage as error:
            raise PipelineError(f"{self.split.describe(position)}: {error}; remove the file") from error


def open_images(split: Split, spec: Preprocessing, *, cache: Path) -> Images:
    """Return the split as pixels, decoded once into `cache` if it is not too large.

    Raises `PipelineError` that counts the undecodable files and names the first of them.
    """
    size_bytes = len(split) * spec.height * spec.width * spec.channels
    if size_bytes > CACHE_LIMIT_BYTES:
        return Images(split, spec, None)
    code = [sha256_file(Path(serving.worker.preprocess.__file__)), version("pillow"), version("numpy")]
    name = hashlib.sha256(canonical([split.digest, asdict(spec), code]).encode()).hexdigest()[:16]
    path = cache / f"pixels-{name}.npy"
    if not path.is_file():
        _fill_cache(path, split, spec)
    return Images(split, spec, np.load(path, mmap_mode="r"))


def _fill_cache(path: Path, split: Split, spec: Preprocessing) -> None:
    def attempt(position: int) -> Pixels | str:
        try:
            return decode(split.encoded(position), spec)
        except BadImage as error:
            return f"{split.describe(position)} ({error})"

    pixels = np.empty((len(split), spec.height, spec.width, spec.channels), np.uint8)
    bad: list[str] = []
    with ThreadPoolExecutor() as pool:
        for position, outcome in enumerate(pool.map(attempt, range(len(split)))):
            if isinstance(outcome, str):
                bad.append(outcome)
            else:
                pixels[position] = outcome
    if bad:
        more = f", and {len(bad) - MAX_NAMED} more" if len(bad) > MAX_NAMED else ""
        raise PipelineError(f"{len(bad)} image(s) cannot be decoded, remove them: {'; '.join(bad[:MAX_NAMED])}{more}")
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}.partial")
    with scratch.open("wb") as stream:
        np.save(stream, pixels)
    scratch.rename(path)


def steps_per_epoch(count: int, batch_size: int) -> int:
    """Return how many full batches an epoch has: a shorter last one is left out, unless there is no other."""
    return max(1, count // batch_size)


@lru_cache(maxsize=2)
def _order(count: int, seed: int, epoch: int) -> Ints:
    return np.random.default_rng([seed, epoch]).permutation(count)


@lru_cache(maxsize=2)
def _draws(count: int, padding: int, seed: int, epoch: int) -> Ints:
    """Return [N, 3]: flip or not, and the shift down and right, of every image in this epoch."""
    return np.random.default_rng([seed, epoch, 1]).integers(0, [2, 2 * padding + 1, 2 * padding + 1], (count, 3))


def batch_positions(count: int, batch_size: int, *, seed: int, epoch: int, step: int) -> Ints:
    """Return the positions [B] of the global batch `step` of `epoch`: a new order in every epoch, given the seed."""
    return _order(count, seed, epoch)[step * batch_size : (step + 1) * batch_size]


def shard(positions: Ints, *, rank: int, world_size: int) -> Ints:
    """Return this rank's part. The parts are disjoint and cover: nothing is padded, nothing is counted twice."""
    return positions[rank::world_size]


def augment(images_BHWC: Pixels, draws_B3: Ints, *, kinds: Sequence[str], padding: int) -> Pixels:
    """Return the batch with each image flipped (`flip`) and shifted over black (`crop`) as its draws say."""
    out = images_BHWC.copy()
    height, width = images_BHWC.shape[1:3]
    if "crop" in kinds:
        around = ((0, 0), (padding, padding), (padding, padding), (0, 0))
        padded_BHWC = np.pad(images_BHWC, around)
        for row, (_, down, right) in enumerate(draws_B3.tolist()):
            out[row] = padded_BHWC[row, down : down + height, right : right + width]
    if "flip" in kinds:
        chosen = draws_B3[:, 0] == 1
        out[chosen] = out[chosen, :, ::-1]
    return out


@dataclass(frozen=True)
class Batch:
    """One rank's part of a step."""

    step: int  # counted from the start of training
    positions: Ints  # [B]
    images_BHWC: Pixels
    labels_B: Ints
    global_size: int  # images of this step over all ranks


@dataclass(frozen=True)
class Sampling:
    """How an epoch is cut into steps."""

    batch_size: int  # over all ranks
    seed: int
    augment: tuple[str, ...]
    padding: int


def _prefetched(load: Iterator[Future[Batch]]) -> Iterator[Batch]:
    """Yield results while the next `AHEAD` are being prepared."""
    waiting: list[Future[Batch]] = []
    for future in load:
        waiting.append(future)
        if len(waiting) > AHEAD:
            yield waiting.pop(0).result()
    for future in waiting:
        yield future.result()


def training_batches(
    images: Images, sampling: Sampling, *, first_step: int, last_step: int, rank: int, world_size: int
) -> Iterator[Batch]:
    """Yield this rank's batches for the steps [first_step, last_step), prepared ahead in a thread."""
    per_epoch = steps_per_epoch(len(images), sampling.batch_size)

    def prepare(step: int) -> Batch:
        epoch, within = divmod(step, per_epoch)
        positions = batch_positions(len(images), sampling.batch_size, seed=sampling.seed, epoch=epoch, step=within)
        mine = shard(positions, rank=rank, world_size=world_size)
        draws = _draws(len(images), sampling.padding, sampling.seed, epoch)[mine]
        pixels = augment(images.batch(mine), draws, kinds=sampling.augment, padding=sampling.padding)
        return Batch(step, mine, pixels, images.split.labels[mine], len(positions))

    with ThreadPoolExecutor(max_workers=1) as pool:
        yield from _prefetched(pool.submit(prepare, step) for step in range(first_step, last_step))
