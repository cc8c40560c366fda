"""The compress stage: dense model -> candidates, each a plain model. Quantization comes before export."""

from dataclasses import asdict
from typing import Any

from pipeline.artifact import StageResult
from pipeline.compression.bits import weight_bits
from pipeline.compression.candidates import DENSE, DYNAMIC_OF, PRUNED, float_of
from pipeline.compression.dynamic import LayerChoice, choose_layers, quantized, why_none
from pipeline.compression.macs import count_macs
from pipeline.compression.rebuild import load_model
from pipeline.compression.recover import Splits, prune_and_recover, pruning_facts
from pipeline.compression.sparsity import compressed_bytes, size_facts
from pipeline.models import Classifier, save_weights
from pipeline.stage import Context
from pipeline.training.group import Group
from pipeline.training.loop import evaluate
from pipeline.training.stage import open_splits


def compress(context: Context, group: Group) -> StageResult | None:
    """Load, prune, recover, quantize, evaluate, save. Runs in every process; the leading one writes and returns."""
    recipe = context.recipe
    _, images, validation = open_splits(context)
    dense = load_model(context.parent, "dense")
    candidates = {DENSE: dense}
    if recipe.compress.prune.enabled:
        splits = Splits(images, validation)
        candidates[PRUNED] = prune_and_recover(dense, splits, context=context, group=group)
    int8_layers, notes = _add_dynamic(candidates, context=context, group=group)
    metrics: dict[str, float] = {}
    for name, model in candidates.items():
        metrics[f"{name}_val_top1"] = evaluate(model.to(group.device), validation, group=group).top1
        metrics[f"{name}_macs"] = (
            float(count_macs(model.cpu())) if not model.spec.int8 else metrics[f"{float_of(name)}_macs"]
        )
    if not group.leads:
        return None
    report: dict[str, Any] = {"int8_layers": int8_layers, "notes": notes, "compressed_bytes": {}}
    for name, model in candidates.items():
        weights = context.out / f"{name}.safetensors"
        save_weights(model, weights)
        metrics |= {f"{name}_{fact}": value for fact, value in size_facts(model, weights).items()}
        report["compressed_bytes"][name] = compressed_bytes(weights)
    if PRUNED in candidates:
        report["pruning"] = pruning_facts(dense, candidates[PRUNED], recipe.compress.prune)
    return StageResult(
        data=context.parent.manifest.data,
        models={name: model.spec.model_dump(mode="json") for name, model in candidates.items()},
        metrics=metrics,
        report=report,
    )


def _add_dynamic(
    candidates: dict[str, Classifier], *, context: Context, group: Group
) -> tuple[dict[str, list[dict[str, Any]]], list[str]]:
    """Add the int8 form of every candidate that has a layer to gain; return what became of each layer, and notes."""
    choice = context.recipe.compress.quantize
    bits = weight_bits(choice.bits)
    decided: dict[str, tuple[LayerChoice, ...]] = {}
    notes: list[str] = []
    for name, model in list(candidates.items()):
        int8 = DYNAMIC_OF[name]
        decided[int8] = choose_layers(model, bits=bits, min_gain=choice.min_gain, cache=context.cache, group=group)
        if any(layer.int8 for layer in decided[int8]):
            candidates[int8] = quantized(model, decided[int8], bits=bits)
        else:
            notes.append(why_none(int8, decided[int8]))
    return {name: [asdict(layer) for layer in layers] for name, layers in decided.items()}, notes
