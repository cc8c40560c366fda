"""Downloads: checksummed, resumed where they were cut off, and made once however many processes ask."""

import gzip
import hashlib
import shutil
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from pipeline.artifact import exclusive
from pipeline.errors import PipelineError

TIMEOUT_S = 30.0  # without a byte
IDLE_ROUNDS = 3  # rounds over all addresses without a new byte before it is given up
PAUSE_S = 1.0  # before the next round, doubled each time
PROGRESS_S = 2.0
MNIST_LIKE = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST"}


class _WrongContent(Exception):
    """What an address sent from its first byte to its last does not have the checksum."""


@dataclass(frozen=True)
class Checksum:
    """The digest that a file must have."""

    algorithm: str
    digest: str

    def matches(self, path: Path) -> bool:
        """Tell whether the file at `path` has this digest."""
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, self.algorithm).hexdigest() == self.digest


def fetch_dataset(name: str, root: Path, *, timeout_s: float = TIMEOUT_S) -> Path:
    """Bring mnist, fashion-mnist or cifar10 to where `torchvision.datasets` looks below `root`; return `root`.

    Addresses and checksums are torchvision's own. Raises `PipelineError` when no address has the file.
    """
    from torchvision import datasets  # slow to import, and needed for these data sets only

    if name in MNIST_LIKE:
        kind = getattr(datasets, MNIST_LIKE[name])
        folder = root / kind.__name__ / "raw"
        for filename, md5 in kind.resources:
            _fetch_unzipped([mirror + filename for mirror in kind.mirrors], folder / filename, md5, timeout_s)
        return root
    if name == "cifar10":
        kind = datasets.CIFAR10
        members = [*kind.train_list, *kind.test_list, (kind.meta["filename"], kind.meta["md5"])]
        if not _has_members(root / kind.base_folder, members):
            archive = fetch([kind.url], root / kind.filename, md5=kind.tgz_md5, timeout_s=timeout_s)
            _unpack(archive, root / kind.base_folder)
        return root
    raise PipelineError(f"data.name = {name!r} is not a data set that can be downloaded")


def fetch(
    urls: Sequence[str],
    path: Path,
    *,
    md5: str | None = None,
    sha256: str | None = None,
    timeout_s: float = TIMEOUT_S,
    pause_s: float = PAUSE_S,
) -> Path:
    """Return `path`, downloaded from the first of `urls` that has it, unless it is there with its checksum.

    What arrives is kept in `path.part` and continued by the next address, the next round or the next run; the file gets
    its name only with the right checksum. Concurrent callers take turns. Exactly one of `md5` and `sha256` is given.
    Raises `PipelineError` with every address and what was wrong with it, and where to put the file by hand.
    """
    assert (md5 is None) != (sha256 is None), "one checksum"
    checksum = Checksum("md5", md5) if md5 else Checksum("sha256", str(sha256))
    with exclusive(path.with_name(path.name + ".lock")):
        if path.is_file():
            if checksum.matches(path):
                return path
            print(f"{path} does not have its checksum; downloading it again", file=sys.stderr)
        part = path.with_name(path.name + ".part")
        failures = _fill(part, urls, checksum, timeout_s=timeout_s, pause_s=pause_s)
        if failures:
            tried = "; ".join(f"{url}: {reason}" for url, reason in failures.items())
            raise PipelineError(
                f"cannot download {path.name} ({tried}); put the file at {path} and run again", exit_status=1
            )
        part.rename(path)
    return path


def _fill(part: Path, urls: Sequence[str], checksum: Checksum, *, timeout_s: float, pause_s: float) -> dict[str, str]:
    """Complete `part`; return nothing on success, or what was wrong with each address.

    An address that refuses or sends wrong content is asked no more; one that breaks off is asked again, until no
    address has sent a new byte for `IDLE_ROUNDS` rounds.
    """
    failures: dict[str, str] = {}
    remaining, idle = list(urls), 0
    while remaining and idle < IDLE_ROUNDS:
        before = _size(part)
        for url in tuple(remaining):
            try:
                _transfer(url, part, checksum, timeout_s=timeout_s)
                return {}
            except (httpx.HTTPError, httpx.InvalidURL, _WrongContent) as error:
                failures[url] = str(error).splitlines()[0] if str(error) else type(error).__name__
                if not _may_pass(error):
                    remaining.remove(url)
        idle = 0 if _size(part) > before else idle + 1
        if remaining and idle < IDLE_ROUNDS:
            time.sleep(pause_s * 2**idle)
    return failures


def _may_pass(error: Exception) -> bool:
    """Tell whether to ask the same address again: a connection that broke, a server that is busy or restarting."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.is_server_error or error.response.status_code == httpx.codes.TOO_MANY_REQUESTS
    return isinstance(error, httpx.TransportError)


def _transfer(url: str, part: Path, checksum: Checksum, *, timeout_s: float) -> None:
    """Continue `part` from `url` and check it; content that was begun by somebody else gets one try from its start."""
    begun = _size(part)
    _append(url, part, timeout_s=timeout_s)
    if checksum.matches(part):
        return
    part.unlink()
    if begun:
        _append(url, part, timeout_s=timeout_s)
        if checksum.matches(part):
            return
        part.unlink()
    raise _WrongContent(f"the content does not have the {checksum.algorithm} {checksum.digest}; it was deleted")


def _append(url: str, part: Path, *, timeout_s: float) -> None:
    """Ask for what is missing in `part` and write it. A server that ignores the range sends all: begin anew."""
    begun = _size(part)
    headers = {"Accept-Encoding": "identity"}  # the checksum is of the bytes as they are stored
    if begun:
        headers["Range"] = f"bytes={begun}-"
    with httpx.stream("GET", url, headers=headers, timeout=timeout_s, follow_redirects=True) as response:
        if response.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
            return  # nothing is missing; whether it is right, the checksum says
        response.raise_for_status()
        continues = response.headers.get("Content-Range", "").startswith(f"bytes {begun}-")
        with part.open("ab" if begun and continues else "wb") as stream:
            total = stream.tell() + int(response.headers.get("Content-Length", 0))
            for chunk in _with_progress(response.iter_raw(), part.stem, stream.tell(), total):
                stream.write(chunk)


def _with_progress(chunks: Iterator[bytes], name: str, done: int, total: int) -> Iterator[bytes]:
    """Pass the chunks on; tell on stderr how far it is, every `PROGRESS_S` seconds and at the end."""
    line = "\r{}: {:.1f} of {:.1f} MB" if sys.stderr.isatty() else "{}: {:.1f} of {:.1f} MB\n"
    told = time.monotonic()
    for chunk in chunks:
        yield chunk
        done += len(chunk)
        if time.monotonic() - told > PROGRESS_S:
            told = time.monotonic()
            print(line.format(name, done / 1e6, max(done, total) / 1e6), end="", file=sys.stderr, flush=True)
    print(line.format(name, done / 1e6, done / 1e6).rstrip(), file=sys.stderr)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _fetch_unzipped(urls: Sequence[str], archive: Path, md5: str, timeout_s: float) -> None:
    """Fetch `archive` (.gz) and unpack it beside itself under its name without the suffix, whole or not at all."""
    plain = archive.with_suffix("")
    if plain.is_file():
        return
    fetch(urls, archive, md5=md5, timeout_s=timeout_s)
    with exclusive(archive.with_name(archive.name + ".lock")):
        scratch = plain.with_name(plain.name + ".part")
        with gzip.open(archive, "rb") as packed, scratch.open("wb") as stream:
            shutil.copyfileobj(packed, stream)
        scratch.rename(plain)


def _unpack(archive: Path, folder: Path) -> None:
    """Unpack the tar file flat into `folder`, which appears whole or not at all."""
    with exclusive(archive.with_name(archive.name + ".lock")):
        scratch = folder.with_name(folder.name + ".part")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        with tarfile.open(archive) as packed:
            for member in packed:
                content = packed.extractfile(member)
                if content:  # a folder has none
                    with (scratch / Path(member.name).name).open("wb") as stream:
                        shutil.copyfileobj(content, stream)
        shutil.rmtree(folder, ignore_errors=True)
        scratch.rename(folder)


def _has_members(folder: Path, members: Sequence[Sequence[str]]) -> bool:
    return all((folder / name).is_file() and Checksum("md5", md5).matches(folder / name) for name, md5 in members)
