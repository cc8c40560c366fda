"""The compress stage: dense model -> candidates, each a plain model. Quantization comes before export."""

from pipeline.artifact import StageResult
from pipeline.compression.bits import weight_bits
from pipeline.compression.candidates import DENSE, DYNAMIC_OF, PRUNED, float_of
from pipeline.compression.distill import DistillObjective
from pipeline.compression.prune import count_macs, prune
from pipeline.compression.quantize import quantize_linears
from pipeline.compression.rebuild import load_model, rebuild
from pipeline.config import PruneConfig
from pipeline.loader import Images
from pipeline.models import Classifier, save_weights
from pipeline.stage import Context
from pipeline.training.group import Group
from pipeline.training.loop import Schedule, evaluate, fit
from pipeline.training.stage import data_parallel, open_splits, optimizer_for, sampling_of


def compress(context: Context, group: Group) -> StageResult | None:
    """Load, prune, recover, quantize, evaluate, save. Runs in every process; the leading one writes and returns."""
    recipe = context.recipe
    _, images, validation = open_splits(context)
    dense = load_model(context.parent, "dense")
    bits = weight_bits(recipe.compress.quantize.bits)
    candidates = {DENSE: dense, DYNAMIC_OF[DENSE]: quantized(dense, bits=bits)}
    if recipe.compress.prune.enabled:
        pruned = _pruned(dense, recipe.compress.prune)
        _recover(pruned, dense, images, validation, context=context, group=group)
        candidates |= {PRUNED: pruned, DYNAMIC_OF[PRUNED]: quantized(pruned, bits=bits)}
    metrics: dict[str, float] = {}
    for name, model in candidates.items():
        metrics[f"{name}_val_top1"] = evaluate(model.to(group.device), validation, group=group).top1
        metrics[f"{name}_macs"] = (
            float(count_macs(model.cpu())) if not model.spec.int8 else metrics[f"{float_of(name)}_macs"]
        )
    if not group.leads:
        return None
    for name, model in candidates.items():
        save_weights(model, context.out / f"{name}.safetensors")
    return StageResult(
        data=context.parent.manifest.data,
        models={name: model.spec.model_dump(mode="json") for name, model in candidates.items()},
        metrics=metrics,
    )


def _pruned(dense: Classifier, choice: PruneConfig) -> Classifier:
    return prune(dense, ratio=choice.ratio, round_to=choice.round_to, importance=choice.importance, scope=choice.scope)


def quantized(model: Classifier, *, bits: int) -> Classifier:
    """Return a copy of the model whose linear layers are row-wise int8."""
    copy = rebuild(model.spec)
    copy.net.load_state_dict(model.net.state_dict(), strict=True)
    int8 = quantize_linears(copy.net, bits=bits)
    return Classifier(model.spec.model_copy(update={"int8": int8}), copy.net)


def _recover(
    pruned: Classifier, dense: Classifier, images: Images, validation: Images, *, context: Context, group: Group
) -> None:
    """Train the pruned model against the labels and the dense model's answers."""
    recipe = context.recipe
    recover = recipe.compress.recover
    teacher = dense.to(group.device).eval()
    objective = DistillObjective(teacher, weight=recover.distill, temperature=recover.temperature)
    fit(
        data_parallel(pruned, group, objective, recipe.train),
        optimizer_for(pruned, recipe.train, lr=recover.lr),
        images,
        validation,
        sampling=sampling_of(recipe),
        schedule=Schedule(
            epochs=recover.epochs,
            lr=recover.lr,
            kind="cosine",
            warmup_epochs=0,
            checkpoint_steps=recipe.train.checkpoint_steps,
        ),
        group=group,
        resume=context.resume,
        telemetry=context.telemetry,
        title="recover",
    )
