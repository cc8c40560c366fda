"""Which layers of what ships compute in float32, and why: the file says which, the reports of the stages say why."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipeline.artifact import KEY_LENGTH, MANIFEST, Artifact, load_artifact
from pipeline.compression.candidates import DYNAMIC_OF, STATIC_OF, is_int8
from pipeline.graph import float_layers, layer_of_node

KIND = {
    **dict.fromkeys(DYNAMIC_OF.values(), "dynamic int8 is for linear layers"),
    **dict.fromkeys(STATIC_OF.values(), "static int8 found no way to take it in"),
}


def reports_behind(artifact: Artifact) -> list[dict[str, Any]]:
    """Return the reports of the artifact and of those that it was made from, as far as they still lie there."""
    parent = artifact.manifest.parent
    stages = artifact.path.parent.parent
    found = next(stages.glob(f"*/{parent[:KEY_LENGTH]}/{MANIFEST}"), None) if parent else None
    return [artifact.report, *(reports_behind(load_artifact(found.parent)) if found else [])]


def kept_in_float(name: str, path: Path, reports: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the layers of an int8 candidate that stayed float32, grouped as [{"reason", "layers"}]."""
    if not is_int8(name):
        return []
    reasons = why_kept(name, path, reports)
    grouped: dict[str, list[str]] = {}
    for layer in float_layers(path):
        grouped.setdefault(reasons.get(layer, KIND[name]), []).append(layer)
    return [{"reason": reason, "layers": layers} for reason, layers in grouped.items()]


def why_kept(name: str, path: Path, reports: Iterable[dict[str, Any]]) -> dict[str, str]:
    """Return the reason of each layer that the reports name: measured gains of `compress`, errors of calibration."""
    homes = layer_of_node(path)
    reasons: dict[str, str] = {}
    for report in reports:
        for row in report.get("int8_layers", {}).get(name, []):
            if not row["int8"]:
                reasons[row["layer"]] = f"int8 would gain too little: {row['reason']}" if row["gain"] else row["reason"]
        for row in report.get("static", {}).get(name, {}).get("given_back", []):
            layer = homes.get(row["layer"], row["layer"])
            reasons[layer] = "given back by static int8: alone it changes an answer by more than the others"
    return reasons
