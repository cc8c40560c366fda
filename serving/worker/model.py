"""The unpacked archive as a loaded model: every file checked, the graph opened, the golden images answered.

Shape legend: B batch, H height, W width, C channels, K classes.
"""

import base64
import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from .contents import GOLDEN, GRAPH, PACKAGE, PROVIDERS, PackageError, read_listing
from .cpu import mismatch
from .preprocess import BadImage, Pixels, Preprocessing, decode

logger = logging.getLogger(__name__)

# Images in one run. ONNX Runtime keeps the memory of its largest run for ever: 128 images of 224 x 224 through a
# ResNet-18 keep 590 MB, in runs of 16 they keep 124 MB and cost the same CPU time.
MAX_RUN = 16
CODE_SUFFIXES = {".py", ".so", ".pyd"}  # what an import would find, before or instead of the packed file

Probabilities = NDArray[np.float32]


@dataclass(frozen=True)
class Model:
    """A graph that has earned its readiness, with what its answers need."""

    name: str
    version: str
    digest: str  # sha256 of model.onnx
    labels: tuple[str, ...]
    preprocessing: Preprocessing
    session: onnxruntime.InferenceSession

    def decode(self, image: bytes) -> Pixels:
        """Return uint8 [H, W, C] for an encoded image; raises BadImage."""
        return decode(image, self.preprocessing)

    def run(self, images_BHWC: NDArray[np.uint8]) -> Probabilities:
        """Return float32 [B, K], not necessarily finite; B is at least 1."""
        starts = range(0, len(images_BHWC), MAX_RUN)
        runs = [self.session.run(["probabilities"], {"images": images_BHWC[at : at + MAX_RUN]})[0] for at in starts]
        return cast(Probabilities, runs[0] if len(runs) == 1 else np.concatenate(runs))


def load_model(directory: Path, *, gpu_id: int | None = None) -> Model:
    """Check and open the archive unpacked in `directory` with the provider it was measured with, on GPU `gpu_id` or 0.

    Raises PackageError when a file is missing, changed or unlisted code, when the graph cannot be opened as asked, or
    when a golden image, alone or in a batch with the others, gets another answer than the packed one. Logs a line
    when the graph was made for another kind of CPU.
    """
    package = _read_json(directory / PACKAGE)
    listing = read_listing(package)
    digests = check_files(directory, listing.files)
    model = Model(
        name=listing.name,
        version=listing.version,
        digest=digests[GRAPH],
        labels=tuple(package["labels"]),
        preprocessing=Preprocessing.from_json(package["preprocessing"]),
        session=open_session(directory / GRAPH, provider=listing.provider, gpu_id=gpu_id),
    )
    if found := mismatch(model.session.get_modelmeta().custom_metadata_map):
        logger.log(logging.WARNING if found[0] else logging.INFO, "%s", found[1])
    check_golden(model, _read_json(directory / GOLDEN), tolerance=package["tolerance"])
    return model


def check_files(directory: Path, expected: Mapping[str, str]) -> dict[str, str]:
    """Return the sha256 of every file in `expected`; raises PackageError for a difference or for unlisted code."""
    digests: dict[str, str] = {}
    for name, digest in expected.items():
        try:
            with (directory / name).open("rb") as stream:
                digests[name] = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise PackageError(f"{name} is missing from the archive") from error
        if digests[name] != digest:
            raise PackageError(f"{name} was changed: sha256 {digests[name][:12]}, packed as {digest[:12]}")
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.suffix in CODE_SUFFIXES and name not in digests:
            raise PackageError(f"{name} was added to the archive: {PACKAGE} does not list it")
    return digests


def open_session(graph: Path, *, provider: str = "cpu", gpu_id: int | None = None) -> onnxruntime.InferenceSession:
    """Open `graph` with one thread that does not spin; raises PackageError when it or the provider cannot be used."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    wanted = PROVIDERS[provider]
    providers: list[Any] = [*((name, {"device_id": gpu_id or 0}) for name in wanted), "CPUExecutionProvider"]
    if wanted:
        onnxruntime.preload_dlls()
    # Of float16 weights that no GPU takes, this optimizer makes a crash instead of the error below (ONNX Runtime 1.31).
    without = ["NchwcTransformer"] if provider != "cpu" else []
    try:
        session = onnxruntime.InferenceSession(str(graph), options, providers=providers, disabled_optimizers=without)
    except Exception as error:  # onnxruntime's exceptions have no common base
        raise PackageError(f"{GRAPH} cannot be opened: {_one_line(error)}") from error
    # ONNX Runtime only warns when a provider cannot be loaded, and takes the next one.
    if missing := [name for name in wanted[:1] if name not in session.get_providers()]:
        raise PackageError(
            f"{provider} was asked for, but {missing[0]} cannot be used on GPU {gpu_id or 0}; only "
            f"{', '.join(session.get_providers())}"
        )
    return session


def check_golden(model: Model, golden: list[dict[str, Any]], *, tolerance: float) -> None:
    """Answer the golden images one by one and as one batch; raises PackageError when a probability is off."""
    try:
        images = [model.decode(base64.b64decode(entry["image"], validate=True)) for entry in golden]
        alone = np.concatenate([model.run(image[None]) for image in images])
        together = model.run(np.stack(images))
    except BadImage as error:
        raise PackageError(f"a golden image cannot be decoded: {error}") from error
    except Exception as error:  # onnxruntime's exceptions have no common base
        raise PackageError(f"{GRAPH} cannot be run: {_one_line(error)}") from error
    expected = np.asarray([entry["probabilities"] for entry in golden], np.float32)
    for way, answers in (("alone", alone), ("in a batch", together)):
        if answers.shape != (len(golden), len(model.labels)):
            raise PackageError(f"{GRAPH} gives {answers.shape[1:]} probabilities for {len(model.labels)} labels")
        distances = np.abs(answers - expected).max(axis=1)
        wrong = np.flatnonzero(~(distances <= tolerance))  # NaN is wrong, too
        if wrong.size:
            raise PackageError(
                f"golden image {wrong[0]}, {way}, is answered wrongly: a probability is off by "
                f"{distances[wrong[0]]:.3g}, more than {tolerance:.3g} ({wrong.size} of {len(golden)} images)"
            )


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise PackageError(f"{path.name} is missing from the archive or damaged") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
