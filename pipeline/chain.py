"""The chain: the order of the stages, what decides each one's key, and how one is made when it is not there."""

import importlib
import importlib.util
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pipeline.artifact import (
    Artifact,
    StageResult,
    artifact_path,
    exclusive,
    key_of,
    load_artifact,
    publish,
    resume_path,
    sha256_file,
)
from pipeline.compression.bits import weight_bits
from pipeline.config import Recipe, section_facts
from pipeline.data import open_dataset, preprocessing_of
from pipeline.errors import PipelineError
from pipeline.launch import run_ranks
from pipeline.loader import open_images
from pipeline.machine import cpu_facts, gpu_names, library_versions, training_device, training_processes
from pipeline.source import source_digest
from pipeline.stage import Context
from serving.host import available_cpus


@dataclass(frozen=True)
class Stage:
    """A link of the chain. Everything here decides the key, so a change of any of it makes the stage run again."""

    name: str
    run: str  # module:function
    sections: tuple[str, ...]  # of the recipe
    facts: Callable[[Recipe], dict[str, Any]]  # of the machine
    ranked: bool = False  # runs in several processes

    @property
    def module(self) -> str:
        """Return the module of the stage's function."""
        return self.run.partition(":")[0]

    @property
    def function(self) -> Callable[..., StageResult]:
        """Import the stage's function: only a stage that runs costs the time of importing PyTorch."""
        name = self.run.partition(":")[2]
        return cast(Callable[..., StageResult], getattr(importlib.import_module(self.module), name))


def _ranks(recipe: Recipe) -> dict[str, Any]:
    device = training_device(recipe.train.device)
    processes = training_processes(recipe.train.nproc, device)
    return {"device": device, "processes": processes, "threads": max(1, available_cpus() // processes)}


def _training(recipe: Recipe) -> dict[str, Any]:
    return _ranks(recipe) | own_network(recipe.model.name)


def own_network(name: str) -> dict[str, str]:
    """Return the digest of the file that defines a user's `module:callable`; nothing for a network of ours."""
    module, colon, _ = name.partition(":")
    if not colon:
        return {}
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        found = None
    if found is None or found.origin is None or not Path(found.origin).is_file():
        raise PipelineError(f"model.name = {name!r}: there is no module {module!r} on PYTHONPATH")
    return {"network": sha256_file(Path(found.origin))}


def _compression(recipe: Recipe) -> dict[str, Any]:
    """Which layers gain from int8 is measured, so a compressed network belongs to a kind of CPU."""
    return _ranks(recipe) | {"weight_bits": weight_bits(recipe.compress.quantize.bits), "cpu": cpu_facts()}


def _calibration(recipe: Recipe) -> dict[str, Any]:
    """Ranges are what this CPU's float arithmetic gives, and saturation is tested on it."""
    return {"weight_bits": weight_bits(recipe.compress.quantize.bits), "cpu": cpu_facts()}


def _given(recipe: Recipe) -> dict[str, Any]:
    """Read the file's digest: weights that lie beside it count, where it lies does not."""
    from pipeline.imported.file import digest_of  # takes 0.3 s, and few recipes name a file

    assert recipe.onnx is not None
    facts = {"graph": digest_of(recipe.onnx.file), "weight_bits": weight_bits(recipe.onnx.bits)}
    return facts | {"cpu": cpu_facts()}


def _hardware(_recipe: Recipe) -> dict[str, Any]:
    return {"cpu": cpu_facts(), "gpus": gpu_names()}


def _nothing(_recipe: Recipe) -> dict[str, Any]:
    return {}


CHAIN = (
    Stage(
        "train",
        run="pipeline.training.stage:train",
        sections=("data", "model", "train"),
        facts=_training,
        ranked=True,
    ),
    Stage(
        "compress",
        run="pipeline.compression.stage:compress",
        sections=("data", "train", "compress"),
        facts=_compression,
        ranked=True,
    ),
    Stage(
        "export",
        run="pipeline.export:export",
        sections=("data", "export", "static"),
        facts=_calibration,
    ),
    Stage(
        "choose",
        run="pipeline.choose:choose",
        sections=("data", "export", "choose"),
        facts=_hardware,
    ),
    Stage(
        "package",
        run="pipeline.package_stage:package",
        sections=("data", "export", "package"),
        facts=_nothing,
    ),
)
IMPORT = Stage(
    "import",
    run="pipeline.imported.stage:import_graph",
    sections=("data", "onnx", "static"),
    facts=_given,
)
STAGES = {stage.name: stage for stage in (*CHAIN, IMPORT)}
FOR_GRAPH = {"compress": "choose", "export": "import"}  # what asking for them means where nothing is trained


def stages_of(recipe: Recipe) -> tuple[Stage, ...]:
    """Return the stages that a recipe goes through, in order: a finished graph is imported, and nothing trained."""
    return CHAIN if recipe.onnx is None else (IMPORT, STAGES["choose"], STAGES["package"])


def stages_until(target: str, recipe: Recipe) -> tuple[Stage, ...]:
    """Return the stages up to `target`; `PipelineError` when the recipe does not go through it."""
    stages = stages_of(recipe)
    names = [stage.name for stage in stages]
    last = target if recipe.onnx is None else FOR_GRAPH.get(target, target)
    if last not in names:
        why = "names no ONNX file; pass --onnx FILE" if recipe.onnx is None else "names a finished ONNX file"
        raise PipelineError(f"there is no stage {target} for a recipe that {why}: it has {', '.join(names)}")
    return stages[: names.index(last) + 1]


def materialize(target: str, recipe: Recipe, *, root: Path, force: bool = False) -> list[Artifact]:
    """Return the artifacts of every stage up to `target`, running those that are not there yet.

    `force` runs `target` again even if it is there; the old artifact stands until the new one takes its place.
    """
    stages, cache = stages_until(target, recipe), root / "cache"
    if recipe.export.provider != "cpu" and any("export" in stage.sections for stage in stages):
        from pipeline.session import require_provider  # before hours of training; and most recipes ask for no GPU

        require_provider(recipe.export.provider)
    data = open_dataset(recipe.data, cache=cache).fingerprint()
    made: list[Artifact] = []
    for stage in stages:
        source = made[-1] if made else None
        made.append(_make(stage, recipe, source, data, root=root, force=force and stage is stages[-1]))
    return made


def _make(
    stage: Stage, recipe: Recipe, source: Artifact | None, data: dict[str, Any], *, root: Path, force: bool
) -> Artifact:
    facts = {
        "stage": stage.name,
        "source": source_digest(stage.module),
        "config": section_facts(recipe, stage.sections) | stage.facts(recipe),
        "parent": source.manifest.key if source else None,
        "parent_digest": source.digest if source else None,  # what a parent that measures has published may differ
        "data": data,
        "versions": library_versions(),
    }
    key = key_of(facts)
    path = artifact_path(root, stage.name, key)
    with exclusive(path.with_name(path.name + ".lock")):
        if path.exists() and not force:
            shutil.rmtree(resume_path(root, stage.name, key), ignore_errors=True)
            artifact = load_artifact(path)
            say(f"{stage.name}: already done, {_shown(path)}")
            _tell(artifact)
            return artifact
        say(f"{stage.name}: running")
        context_of = _context_maker(recipe, source, root=root, stage=stage, key=key)
        artifact = publish(root, stage=stage.name, facts=facts, work=lambda out: _work(stage, context_of(out)))
    say(f"{stage.name}: done, {_shown(path)}")
    _tell(artifact)
    return artifact


def _context_maker(
    recipe: Recipe, source: Artifact | None, *, root: Path, stage: Stage, key: str
) -> Callable[[Path], Context]:
    resume = resume_path(root, stage.name, key)
    telemetry = root / "runs" / f"{stage.name}-{resume.stem}"
    return lambda out: Context(recipe, source, out, resume, root / "cache", telemetry)


def _work(stage: Stage, context: Context) -> StageResult:
    if not stage.ranked:
        return stage.function(context)
    _decode_once(context)
    ranks = _ranks(context.recipe)
    processes, threads, device = ranks["processes"], ranks["threads"], ranks["device"]
    if (batch_size := context.recipe.train.batch_size) < processes:
        raise PipelineError(
            f"train.batch_size = {batch_size} is less than one image for each of {processes} processes; "
            "raise it or lower train.nproc"
        )
    say(f"{stage.name}: {processes} process(es) on {device}, {threads} thread(s) each")
    return run_ranks(stage.run, context, nproc=processes, device=device, threads=threads)


def _decode_once(context: Context) -> None:
    """Fill the cache before there are several processes that would each decode everything."""
    dataset = open_dataset(context.recipe.data, cache=context.cache)
    for split in (dataset.train, dataset.val):
        open_images(split, preprocessing_of(context.recipe.data), cache=context.cache)


def say(line: str) -> None:
    """Tell the user how the chain proceeds: on stderr, because stdout is for what was asked for."""
    print(line, file=sys.stderr, flush=True)


def _tell(artifact: Artifact) -> None:
    """Repeat what the stage wants to be known, each time that its artifact is used."""
    for note in artifact.report.get("notes", []):
        say(f"{artifact.manifest.stage}: {note}")


def _shown(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
