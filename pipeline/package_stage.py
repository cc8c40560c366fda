"""The package stage: the chosen graph -> a `.mar`, and one held-out image to try it with."""

import re

import numpy as np

from pipeline.artifact import StageResult
from pipeline.compression.candidates import float_of
from pipeline.data import Ints, Split, open_dataset, preprocessing_of
from pipeline.package import build_archive
from pipeline.session import open_session, probabilities
from pipeline.stage import Context, data_facts
from serving.worker.preprocess import decode, sniff

# Of a golden probability on another machine of the kind: fp32 and the others (7- and 8-bit sums differ, fp16 rounds).
TOLERANCE = {True: 1e-3, False: 2e-2}


def package(context: Context) -> StageResult:
    """Answer the golden images with the chosen graph, and pack it with handler, labels and preprocessing."""
    recipe, source = context.recipe, context.parent
    dataset = open_dataset(recipe.data, cache=context.cache)
    spec = preprocessing_of(recipe.data)
    (chosen,) = source.manifest.models
    graph = source.file("model.onnx")
    session = open_session(graph, provider=recipe.export.provider)
    golden: list[tuple[bytes, list[float]]] = []
    for position in spread_over_classes(dataset.val, recipe.package.golden).tolist():
        encoded = dataset.val.encoded(position)
        answer = probabilities(session, decode(encoded, spec)[None])[0]
        golden.append((encoded, [float(p) for p in answer]))
    archive = build_archive(
        context.out,
        name=recipe.package.name,
        version=recipe.package.version,
        onnx=graph,
        labels=list(dataset.labels),
        preprocessing=spec,
        golden=golden,
        tolerance=TOLERANCE[chosen == float_of(chosen)],
        provenance={"candidate": chosen, "choose": source.manifest.key, "data": dataset.test.digest},
        provider=recipe.export.provider,
    )
    (first,) = spread_over_classes(dataset.test, 1).tolist()
    held_out = dataset.test.encoded(first)
    label = re.sub(r"[^A-Za-z0-9_.-]", "_", dataset.labels[dataset.test.labels[first]])
    (context.out / f"held-out-{label}.{(sniff(held_out) or 'image').lower()}").write_bytes(held_out)
    return StageResult(
        data=data_facts(dataset, spec),
        models=source.manifest.models,
        metrics={"mar_bytes": float(archive.stat().st_size)},
    )


def spread_over_classes(split: Split, count: int) -> Ints:
    """Return positions of `count` images (or all), taken from the classes in turn."""
    turn = np.zeros(len(split), np.int64)
    for label in np.unique(split.labels):
        members = np.flatnonzero(split.labels == label)
        turn[members] = np.arange(len(members))
    return np.lexsort((split.labels, turn))[:count]
