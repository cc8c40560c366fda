"""The README: every command and every snippet in it is run, in its order, in a copy of the tree."""

import importlib
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipeline.config import describe_fields

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
RUN = {"bash", "python", "javascript"}
NOT_RUN = {"mermaid", "json", "text"}
# Commands that this file cannot run: the file that runs them, and the words by which it does.
RUN_ELSEWHERE = {"make test": (".ci/run", "make check test")}
# What is made shorter, not left out: the images that the test has are small.
SMALL = "--data.height 32 --data.width 32 --data.resize 32 --model.name resnet20 --train.batch_size 16"
BRIEF = "--train.epochs 4 --train.warmup_epochs 1 --compress.recover.epochs 2"
QUICK = "--choose.rounds 5"
SHORTER = {
    "--data.root photos": f"--data.root photos {SMALL} {BRIEF} {QUICK}",
    # The first block has already trained on all epochs and measured all rounds of the default recipe.
    "--model.name my_model:build": f"--model.name my_model:build {BRIEF} {QUICK}",
}
ADDRESS = "127.0.0.1:8080"
BLOCK_TIMEOUT_S = 900


@dataclass(frozen=True)
class Block:
    """A fenced block of the README."""

    language: str
    text: str

    @property
    def commands(self) -> list[str]:
        """Return the shell commands, continued lines joined, without comments."""
        joined = re.sub(r"(\\|\|)\n\s*", r"\1 ", self.text)
        return [line for line in joined.splitlines() if line and not line.startswith("#")]


BLOCKS = [Block(*found) for found in re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)]
COMMANDS = [command for block in BLOCKS if block.language == "bash" for command in block.commands]


@dataclass(frozen=True)
class Session:
    """A copy of the tree, as a reader's clone, with an environment and a port of its own."""

    folder: Path
    port: int
    run_dir: Path

    def run(self, command: list[str]) -> str:
        """Run `command` in the clone; return what it prints, and fail with that if it fails."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
        # PYTHON=true: the environment is there, so what would install it has nothing to do.
        environment |= {"PORT": str(self.port), "PYTHON": "true", "QUARTET_RUN_DIR": str(self.run_dir)}
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=BLOCK_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"{command[-1]}\n{done.stdout}"
        return done.stdout

    def here(self, text: str) -> str:
        """Return the block as this session runs it: on its own port, with the short settings."""
        for long, short in {ADDRESS: f"127.0.0.1:{self.port}", **SHORTER}.items():
            text = text.replace(long, short)
        return text


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    folder = tmp_path / "clone"
    list_files = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(list_files, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():  # a deleted file is listed until the deletion is committed
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(sys.prefix)
    put_photos(folder / "photos/train")
    put_mnist(folder / "artifacts/cache/downloads/MNIST/raw")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    run_dir = Path(f"/tmp/quartet-readme-{os.getpid()}")  # short: sockets lie in it
    made = Session(folder, port, run_dir)
    yield made
    made.run(["make", "stop"])
    shutil.rmtree(run_dir, ignore_errors=True)


def put_photos(folder: Path) -> None:
    """Write class folders with images that a network can tell apart: reddish and bluish noise."""
    draw = np.random.default_rng(0).integers
    for channel, name in ((0, "cat"), (2, "dog")):
        (folder / name).mkdir(parents=True)
        for number in range(40):
            pixels = draw(0, 120, (40, 48, 3), np.uint8)
            pixels[..., channel] += 120
            Image.fromarray(pixels).save(folder / name / f"{number}.jpg")


def put_mnist(folder: Path) -> None:
    """Write idx files in MNIST's place, as if they had been downloaded: a bright row tells the class."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng(0).integers
    for part, count in (("train", 500), ("t10k", 100)):
        labels = np.arange(count, dtype=np.uint8) % 10
        images = draw(0, 60, (count, 28, 28), np.uint8)
        images[np.arange(count), 4 + 2 * labels] = 255
        shape = struct.pack(">3I", count, 28, 28)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03" + shape + images.tobytes())
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01" + shape[:4] + labels.tobytes())


def named_endings(source: Path) -> set[str]:
    """Return what a module puts behind the key, as `.partial`."""
    return set(re.findall(r'(?:name \+ "|\]\})(\.[a-z]+)"', source.read_text()))


def test_every_block_is_run_or_of_a_kind_that_is_only_read() -> None:
    assert {block.language for block in BLOCKS} == RUN | NOT_RUN


def test_commands_left_to_others_are_in_the_readme_and_run_there() -> None:
    assert set(RUN_ELSEWHERE) <= set(COMMANDS)
    for name, words in RUN_ELSEWHERE.values():
        assert words in (ROOT / name).read_text()


def test_block_that_is_left_out_holds_nothing_else() -> None:
    left_out = [block for block in BLOCKS if set(block.commands) & set(RUN_ELSEWHERE)]
    assert [command for block in left_out for command in block.commands if command not in RUN_ELSEWHERE] == []


def test_what_is_made_shorter_is_in_the_readme() -> None:
    assert [words for words in (*SHORTER, ADDRESS) if words not in README] == []


def test_every_target_of_the_makefile_is_in_the_table_in_the_same_words_as_in_the_text() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert "test-kill" in targets
    assert set(re.findall(r"^\| `make ([a-z-]+)` \|", README, re.MULTILINE)) == targets
    named = re.findall(r"\bmake ((?:[a-z-]+ )*[a-z-]+)", " ".join([*re.findall(r"`(make [^`]*)`", README), *COMMANDS]))
    assert {word for words in named for word in words.split()} - {"make"} <= targets


def test_every_environment_variable_that_serving_reads_is_in_the_readme() -> None:
    sources = [path.read_text() for folder in ("pipeline", "serving") for path in (ROOT / folder).rglob("*.py")]
    read = {name for text in sources for name in re.findall(r'os\.environ\.get\("(QUARTET_\w+)"', text)}
    assert set(re.findall(r"^\| `(QUARTET_\w+)` \|", README, re.MULTILINE)) == read


def test_every_field_and_function_that_the_readme_names_is_there() -> None:
    fields = {line.split()[0] for line in describe_fields()}
    assert set(re.findall(r"--[a-z_]+(?:\.[a-z_]+)+", README)) <= fields
    for module, name in re.findall(r"`((?:pipeline|serving)(?:\.[a-z_]+)*)\.([a-z_]+)`", README):
        assert hasattr(importlib.import_module(module), name), f"{module}.{name}"


def test_page_about_artifacts_names_every_kind_of_folder_that_the_code_makes() -> None:
    page = (ROOT / "artifacts/README.md").read_text()
    endings = {e for name in ("artifact", "chain", "launch") for e in named_endings(ROOT / f"pipeline/{name}.py")}
    assert {".partial", ".launch", ".resume", ".lock"} <= endings
    assert [ending for ending in endings if not re.search(rf"`<stage>/<key>[a-z.]*\{ending}/?`", page)] == []


def test_every_path_in_the_readme_is_there() -> None:
    named = set(re.findall(r"`((?:pipeline|serving|tests)/[\w/.]*)`", README)) | set(
        re.findall(r"\]\(([\w/.]+)\)", README)
    )
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_recipe_is_in_the_table() -> None:
    recipes = {path.stem for path in (ROOT / "pipeline/recipes").glob("*.toml")}
    assert recipes == set(re.findall(r"^\| `([a-z0-9]+)`(?: \(default\))? \|", README, re.MULTILINE))


@pytest.mark.e2e
def test_reader_who_types_everything_gets_what_the_readme_says(session: Session) -> None:
    printed = ""
    for block in BLOCKS:
        text = session.here(block.text)
        if block.language == "bash" and not set(block.commands) <= set(RUN_ELSEWHERE):
            printed += session.run(["bash", "-euo", "pipefail", "-c", text])
        elif block.language == "python" and text.startswith("# my_"):
            (session.folder / text.splitlines()[0].removeprefix("# ")).write_text(text)
        elif block.language == "python":
            assert re.fullmatch(r"\d [01]\.\d+\n", session.run([sys.executable, "-c", text]))
        elif block.language == "javascript" and shutil.which("node"):
            assert re.fullmatch(r"\d\n", session.run(["node", "--input-type=module", "--eval", text]))
    assert "already done" in printed
    check_answers(printed)


def check_answers(printed: str) -> None:
    """Check that make, raw bytes, a form and base64 got one answer, and that it has the shape that the README shows."""
    shown = json.loads(next(block.text for block in BLOCKS if block.language == "json"))
    decode = json.JSONDecoder().raw_decode
    answers = [decode(printed, found.start())[0] for found in re.finditer(r'\{"predictions"', printed)]
    assert len(answers) >= 5  # make serve, make predict, and three times curl: of one image
    assert [answer["predictions"] for answer in answers[1:5]] == [answers[0]["predictions"]] * 4
    assert {tuple(answer) for answer in answers} == {tuple(shown)}
    assert set(answers[0]["predictions"][0]) == set(shown["predictions"][0])
