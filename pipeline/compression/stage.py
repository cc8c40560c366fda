"""The compress stage: dense model -> candidates, each a plain model. Quantization comes before export."""

from typing import Any

from pipeline.artifact import StageResult
from pipeline.compression.bits import weight_bits
from pipeline.compression.candidates import DENSE, DYNAMIC_OF, PRUNED, float_of
from pipeline.compression.macs import count_macs
from pipeline.compression.quantize import quantize_linears
from pipeline.compression.rebuild import load_model, rebuild
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
    bits = weight_bits(recipe.compress.quantize.bits)
    candidates = {DENSE: dense, DYNAMIC_OF[DENSE]: quantized(dense, bits=bits)}
    if recipe.compress.prune.enabled:
        pruned = prune_and_recover(dense, Splits(images, validation), context=context, group=group)
        candidates |= {PRUNED: pruned, DYNAMIC_OF[PRUNED]: quantized(pruned, bits=bits)}
    metrics: dict[str, float] = {}
    for name, model in candidates.items():
        metrics[f"{name}_val_top1"] = evaluate(model.to(group.device), validation, group=group).top1
        metrics[f"{name}_macs"] = (
            float(count_macs(model.cpu())) if not model.spec.int8 else metrics[f"{float_of(name)}_macs"]
        )
    if not group.leads:
        return None
    report: dict[str, Any] = {"compressed_bytes": {}}
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


def quantized(model: Classifier, *, bits: int) -> Classifier:
    """Return a copy of the model whose linear layers are row-wise int8."""
    copy = rebuild(model.spec)
    copy.net.load_state_dict(model.net.state_dict(), strict=True)
    int8 = quantize_linears(copy.net, bits=bits)
    return Classifier(model.spec.model_copy(update={"int8": int8}), copy.net)
