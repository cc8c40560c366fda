"""What a stage is handed, and the facts about the data that every manifest carries."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.artifact import Artifact
from pipeline.config import Recipe
from pipeline.data import DataSet
from serving.worker.preprocess import Preprocessing


@dataclass(frozen=True)
class Context:
    """Everything a stage may read, and the folders in which it may write."""

    recipe: Recipe
    source: Artifact | None  # what the stage before published
    out: Path  # what is written here is published
    resume: Path  # private: survives a kill, goes when the artifact is published
    cache: Path  # downloads, digests, decoded pixels: anything that may be deleted at any time
    telemetry: Path  # TensorBoard and metrics.jsonl

    @property
    def parent(self) -> Artifact:
        """Return the artifact of the stage before."""
        assert self.source is not None
        return self.source


def data_facts(dataset: DataSet, spec: Preprocessing) -> dict[str, Any]:
    """Return labels, preprocessing and digests, as the manifest records them."""
    return {**dataset.fingerprint(), "preprocessing": asdict(spec)}
