"""The tree: what no file may hold, and that every source file has its tests."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 400
MACHINE_PATH = re.compile(r"(?<![\w.~/-])/(?:work|home|root)/\w")
PICKLE = re.compile(r"\bimport pickle\b|\bpickle\.|\btorch\.(?:load|save)\(|\bjoblib\.|\ballow_pickle=True")
RESUME = "pipeline/training/checkpoint.py"  # torch.distributed.checkpoint pickles its metadata; private to training

# Source files without a test file of their own name, and where their behaviour is tested instead.
TESTED_ELSEWHERE = {
    "pipeline/commands.py": "tests/e2e/test_served.py",
    "pipeline/compression/stage.py": "tests/e2e/test_chain.py",
    "pipeline/errors.py": "tests/pipeline/test_make.py",  # its exit status, at the edge
    "pipeline/stage.py": "tests/pipeline/test_chain.py",
    "pipeline/training/checkpoint.py": "tests/pipeline/training/test_loop.py",
    "pipeline/training/group.py": "tests/pipeline/training/test_loop.py",
    "pipeline/training/parallel.py": "tests/pipeline/training/test_loop.py",
    "pipeline/training/stage.py": "tests/e2e/test_chain.py",
    "pipeline/training/telemetry.py": "tests/pipeline/training/test_loop.py",
}


def tracked() -> list[str]:
    """Return the paths of the files that git tracks and that are there."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def lines_of(name: str) -> list[str]:
    """Return the lines of a text file; none for a binary one."""
    try:
        return (ROOT / name).read_text().splitlines()
    except UnicodeDecodeError:
        return []


def found(pattern: re.Pattern[str], names: list[str]) -> list[str]:
    """Return `file:line` wherever the pattern occurs."""
    return [f"{name}:{n}" for name in names for n, line in enumerate(lines_of(name), 1) if pattern.search(line)]


def sources() -> list[str]:
    """Return the Python files of the two packages that hold code."""
    return [n for n in tracked() if re.fullmatch(r"(pipeline|serving)/.*\.py", n) and not n.endswith("__init__.py")]


def test_no_file_is_longer_than_four_hundred_lines() -> None:
    generated = {"LICENSE"}
    assert [n for n in tracked() if n not in generated and len(lines_of(n)) > MAX_LINES] == []


def test_no_committed_file_names_a_path_of_one_machine() -> None:
    assert found(MACHINE_PATH, [n for n in tracked() if n != "tests/test_tree.py"]) == []


def test_nothing_between_stages_is_pickled() -> None:
    assert found(PICKLE, [n for n in sources() if n != RESUME]) == []


@pytest.mark.parametrize(
    ("line", "pattern", "caught"),
    [
        ('open("/home/ann/x")', MACHINE_PATH, True),
        ("cd /work/ann", MACHINE_PATH, True),
        ("https://example.org/home/page", MACHINE_PATH, False),
        ("./work/ann", MACHINE_PATH, False),
        ("torch.save(model, path)", PICKLE, True),
        ("np.load(path, allow_pickle=True)", PICKLE, True),
        ("import pickle", PICKLE, True),
        ("# No pickles anywhere", PICKLE, False),
    ],
)
def test_patterns_catch_what_they_are_for(line: str, pattern: re.Pattern[str], caught: bool) -> None:
    assert bool(pattern.search(line)) is caught


def test_no_file_is_called_utils() -> None:
    assert [n for n in tracked() if Path(n).stem in {"utils", "util", "helpers", "misc", "common"}] == []


def test_top_level_is_the_one_that_the_readme_describes() -> None:
    allowed = {"pyproject.toml", "README.md", "Makefile", "LICENSE", "CHANGELOG.md"}
    allowed |= {"pipeline", "serving", "tests", "artifacts"}
    top = {Path(n).parts[0] for n in tracked()}
    assert {n for n in top if not n.startswith(".")} == allowed


def test_artifacts_holds_nothing_but_its_readme() -> None:
    assert [n for n in tracked() if n.startswith("artifacts/")] == ["artifacts/README.md"]


def test_every_source_file_has_a_test_file_of_its_name() -> None:
    names = set(tracked())
    missing = {
        source
        for source in sources()
        if f"tests/{Path(source).parent}/test_{Path(source).stem.strip('_')}.py" not in names
    }
    assert sorted(missing - set(TESTED_ELSEWHERE)) == []
    assert sorted(set(TESTED_ELSEWHERE) - missing) == []  # an exemption that is no longer needed


def test_every_exemption_names_a_test_file_that_is_there() -> None:
    assert set(TESTED_ELSEWHERE.values()) <= set(tracked())


def test_every_file_of_code_and_of_tests_opens_with_a_sentence_of_what_it_owns() -> None:
    tests = [n for n in tracked() if re.fullmatch(r"tests/.*\.py", n) and not n.endswith("__init__.py")]
    wordless = [n for n in [*sources(), *tests] if not re.match(r'(#!.*\n)?"""\S.*[.:)]', (ROOT / n).read_text())]
    assert wordless == []
