"""Downloads against a server on the loopback interface: resumed, checked, made once."""

import gzip
import hashlib
import io
import multiprocessing
import pickle
import struct
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from torchvision import datasets

from pipeline.download import fetch, fetch_dataset
from pipeline.errors import PipelineError

CONTENT = bytes(range(256)) * 4000
MD5 = hashlib.md5(CONTENT).hexdigest()


@dataclass
class Server:
    """What the server does, and what it was asked: path and Range of each request."""

    address: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True
    cuts: list[int] = field(default_factory=list)  # after how many bytes the next answers break off
    statuses: list[int] = field(default_factory=list)  # of the next answers, instead of content
    asked: list[tuple[str, str | None]] = field(default_factory=list)

    def url(self, name: str) -> str:
        return f"{self.address}/{name}"


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server(files={"file": CONTENT})

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            state.asked.append((self.path, wanted))
            body = state.files.get(self.path.lstrip("/"))
            if state.statuses or body is None:
                self.send_error(state.statuses.pop(0) if state.statuses else 404)
                return
            begin = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and state.ranges else 0
            if begin and begin >= len(body):
                self.send_error(416)
                return
            self.send_response(206 if begin else 200)
            if begin:
                self.send_header("Content-Range", f"bytes {begin}-{len(body) - 1}/{len(body)}")
            self.send_header("Content-Length", str(len(body) - begin))
            self.end_headers()
            rest = body[begin:]
            self.wfile.write(rest[: state.cuts.pop(0)] if state.cuts else rest)

        def log_message(self, format: str, *args: object) -> None:
            """Stay quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        state.address = f"http://127.0.0.1:{http.server_address[1]}"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield state
        http.shutdown()
        thread.join()


def test_download_that_is_cut_off_is_continued_where_it_stopped(server: Server, tmp_path: Path) -> None:
    server.cuts = [300_000, 100_000]
    path = fetch([server.url("file")], tmp_path / "file", md5=MD5, pause_s=0)
    assert path.read_bytes() == CONTENT
    assert server.asked == [("/file", None), ("/file", "bytes=300000-"), ("/file", "bytes=400000-")]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "file.lock"]


def test_next_run_continues_what_the_last_one_left(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.part").write_bytes(CONTENT[:1000])
    assert fetch([server.url("file")], tmp_path / "file", md5=MD5).read_bytes() == CONTENT
    assert server.asked == [("/file", "bytes=1000-")]


def test_server_that_ignores_the_range_is_read_from_the_start(server: Server, tmp_path: Path) -> None:
    server.ranges = False
    server.cuts = [300_000]
    assert fetch([server.url("file")], tmp_path / "file", md5=MD5, pause_s=0).read_bytes() == CONTENT
    assert server.asked == [("/file", None), ("/file", "bytes=300000-")]


def test_complete_part_needs_no_further_byte(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.part").write_bytes(CONTENT)
    assert fetch([server.url("file")], tmp_path / "file", md5=MD5).read_bytes() == CONTENT
    assert server.asked == [("/file", f"bytes={len(CONTENT)}-")]


def test_wrong_part_is_thrown_away_and_fetched_from_the_start(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.part").write_bytes(b"something else")
    assert fetch([server.url("file")], tmp_path / "file", md5=MD5).read_bytes() == CONTENT
    assert server.asked == [("/file", "bytes=14-"), ("/file", None)]


def test_wrong_content_is_deleted_and_the_error_names_the_place_for_the_file(server: Server, tmp_path: Path) -> None:
    with pytest.raises(PipelineError) as caught:
        fetch([server.url("file")], tmp_path / "file", sha256="0" * 64, pause_s=0)
    message = str(caught.value)
    assert server.url("file") in message
    assert f"put the file at {tmp_path / 'file'}" in message
    assert "sha256" in message
    assert "\n" not in message
    assert [p.name for p in tmp_path.iterdir()] == ["file.lock"]
    assert len(server.asked) == 1


def test_file_that_is_there_is_not_asked_for(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(CONTENT)
    fetch([server.url("file")], tmp_path / "file", md5=MD5)
    assert server.asked == []


def test_damaged_file_is_replaced(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(CONTENT[:-1])
    assert fetch([server.url("file")], tmp_path / "file", md5=MD5).read_bytes() == CONTENT


def test_second_mirror_serves_when_the_first_has_nothing(server: Server, tmp_path: Path) -> None:
    urls = [server.url("missing"), server.url("file")]
    assert fetch(urls, tmp_path / "file", md5=MD5).read_bytes() == CONTENT
    assert [path for path, _ in server.asked] == ["/missing", "/file"]


def test_second_mirror_corrects_what_the_first_began_wrongly(server: Server, tmp_path: Path) -> None:
    server.files["bad"] = CONTENT[::-1]
    server.cuts = [500_000]
    urls = [server.url("bad"), server.url("file")]
    assert fetch(urls, tmp_path / "file", md5=MD5, pause_s=0).read_bytes() == CONTENT


def test_busy_server_is_asked_again(server: Server, tmp_path: Path) -> None:
    server.statuses = [503, 429]
    assert fetch([server.url("file")], tmp_path / "file", md5=MD5, pause_s=0).read_bytes() == CONTENT


def test_server_that_only_breaks_off_is_given_up(server: Server, tmp_path: Path) -> None:
    server.cuts = [0] * 10
    with pytest.raises(PipelineError, match="cannot download file"):
        fetch([server.url("file")], tmp_path / "file", md5=MD5, pause_s=0)
    assert len(server.asked) == 3


def test_unreachable_address_is_one_line_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(PipelineError) as caught:
        fetch(["http://127.0.0.1:9/x"], tmp_path / "x", md5=MD5, pause_s=0)
    assert str(caught.value).startswith("cannot download x (http://127.0.0.1:9/x: ")
    assert str(caught.value).endswith(f"put the file at {tmp_path / 'x'} and run again")
    assert "\n" not in str(caught.value)


def test_four_processes_download_once(server: Server, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    arguments = ([server.url("file")], tmp_path / "file")
    workers = [context.Process(target=fetch, args=arguments, kwargs={"md5": MD5}) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert server.asked == [("/file", None)]


def test_progress_is_told_on_stderr(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fetch([server.url("file")], tmp_path / "file", md5=MD5)
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "file: 1.0 of 1.0 MB\n")


def idx(array: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> bytes:
    """Return the array in the format of the MNIST files, compressed."""
    header = struct.pack(">BBBB", 0, 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    return gzip.compress(header + array.tobytes())


@pytest.mark.parametrize(("name", "kind"), [("mnist", datasets.MNIST), ("fashion-mnist", datasets.FashionMNIST)])
def test_torchvision_reads_the_idx_files_that_were_fetched(
    name: str, kind: type[datasets.MNIST], server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = np.random.default_rng(0).integers
    images, labels = draw(0, 256, (12, 28, 28), np.uint8), draw(0, 10, 12, np.uint8)
    parts = {
        "train-images-idx3-ubyte.gz": images[:8],
        "train-labels-idx1-ubyte.gz": labels[:8],
        "t10k-images-idx3-ubyte.gz": images[8:],
        "t10k-labels-idx1-ubyte.gz": labels[8:],
    }
    server.files = {part: idx(array) for part, array in parts.items()}
    resources = [(part, hashlib.md5(packed).hexdigest()) for part, packed in server.files.items()]
    monkeypatch.setattr(kind, "mirrors", [server.url("gone/"), server.url("")])
    monkeypatch.setattr(kind, "resources", resources)
    root = fetch_dataset(name, tmp_path)
    for archive in root.rglob("*.gz"):
        archive.unlink()  # what was unpacked is enough
    fetch_dataset(name, tmp_path)
    assert len(server.asked) == 8  # each file once at both mirrors
    train, test = kind(str(root), train=True, download=False), kind(str(root), train=False, download=False)
    np.testing.assert_array_equal(np.concatenate([train.data.numpy(), test.data.numpy()]), images)
    np.testing.assert_array_equal(np.concatenate([train.targets.numpy(), test.targets.numpy()]), labels)


def cifar_archive(pixels: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> tuple[bytes, dict[str, str]]:
    """Return a CIFAR-10 archive with one image in each batch, and the md5 of its members."""
    names = [*(name for name, _ in datasets.CIFAR10.train_list), "test_batch"]
    contents = {name: {"data": pixels[i : i + 1], "labels": [i]} for i, name in enumerate(names)}
    contents["batches.meta"] = {"label_names": list("abcdefghij")}
    packed, md5s = io.BytesIO(), {}
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, content in contents.items():
            member = pickle.dumps(content)
            md5s[name] = hashlib.md5(member).hexdigest()
            entry = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            entry.size = len(member)
            archive.addfile(entry, io.BytesIO(member))
    return packed.getvalue(), md5s


def test_torchvision_reads_the_cifar_archive_that_was_fetched(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 3072), np.uint8)
    archive, md5s = cifar_archive(pixels)
    kind = datasets.CIFAR10
    server.files = {kind.filename: archive}
    monkeypatch.setattr(kind, "url", server.url(kind.filename))
    monkeypatch.setattr(kind, "tgz_md5", hashlib.md5(archive).hexdigest())
    monkeypatch.setattr(kind, "train_list", [[name, md5s[name]] for name, _ in kind.train_list])
    monkeypatch.setattr(kind, "test_list", [["test_batch", md5s["test_batch"]]])
    monkeypatch.setattr(kind, "meta", {**kind.meta, "md5": md5s["batches.meta"]})
    for _ in range(2):
        root = fetch_dataset("cifar10", tmp_path)
    assert len(server.asked) == 1
    test = kind(str(root), train=False, download=False)
    np.testing.assert_array_equal(test.data[0].transpose(2, 0, 1).reshape(-1), pixels[5])
    (root / kind.base_folder / "test_batch").write_bytes(b"damaged")
    fetch_dataset("cifar10", tmp_path)
    assert kind(str(root), train=False, download=False).targets == [5]


def test_unknown_dataset_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=r"data\.name = 'imagenet'"):
        fetch_dataset("imagenet", tmp_path)
