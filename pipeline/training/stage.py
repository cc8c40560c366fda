"""The train stage: data -> dense model."""

import numpy as np
import torch

from pipeline.artifact import StageResult
from pipeline.config import Recipe, TrainConfig
from pipeline.data import DataSet, open_dataset, preprocessing_of
from pipeline.loader import Images, Sampling, open_images
from pipeline.models import Classifier, ModelSpec, build, save_weights
from pipeline.stage import Context, data_facts
from pipeline.training.group import Group
from pipeline.training.loop import LabelObjective, Schedule, evaluate, fit
from pipeline.training.optim import build_optimizer
from pipeline.training.parallel import DataParallel, Objective

STATISTICS_IMAGES = 10_000  # enough for the mean and spread of a channel to three digits


def train(context: Context, group: Group) -> StageResult | None:
    """Load, build, fit, evaluate, save. Runs in every process; the leading one writes and returns the result."""
    recipe = context.recipe
    dataset, images, validation = open_splits(context)
    torch.manual_seed(recipe.train.seed)
    model = build(dense_spec(recipe, images, num_classes=len(dataset.labels)))
    plan = data_parallel(model, group, LabelObjective(recipe.train.label_smoothing), recipe.train)
    fit(
        plan,
        optimizer_for(model, recipe.train, lr=recipe.train.lr),
        images,
        validation,
        sampling=sampling_of(recipe),
        schedule=Schedule(
            epochs=recipe.train.epochs,
            lr=recipe.train.lr,
            kind=recipe.train.schedule,
            warmup_epochs=recipe.train.warmup_epochs,
            checkpoint_steps=recipe.train.checkpoint_steps,
        ),
        group=group,
        resume=context.resume,
        telemetry=context.telemetry,
        title="train",
    )
    score = evaluate(model, validation, group=group)
    if not group.leads:
        return None
    save_weights(model.cpu(), context.out / "dense.safetensors")
    return StageResult(
        data=data_facts(dataset, images.spec),
        models={"dense": model.spec.model_dump(mode="json")},
        metrics={"val_top1": score.top1, "val_loss": score.loss, "val_images": float(score.count)},
        report={"world_size": group.world_size, "device": str(group.device), "torch_threads": torch.get_num_threads()},
    )


def open_splits(context: Context) -> tuple[DataSet, Images, Images]:
    """Return the data set that the recipe names, and its training and validation images."""
    dataset = open_dataset(context.recipe.data, cache=context.cache)
    spec = preprocessing_of(context.recipe.data)
    train, validation = (open_images(split, spec, cache=context.cache) for split in (dataset.train, dataset.val))
    return dataset, train, validation


def dense_spec(recipe: Recipe, images: Images, *, num_classes: int) -> ModelSpec:
    """Return the spec of the recipe's network; mean and spread are those of (a sample of) the training images."""
    count = min(len(images), STATISTICS_IMAGES)
    positions = np.linspace(0, len(images) - 1, count).astype(np.int64)
    pixels = images.batch(positions).astype(np.float64) / 255
    return ModelSpec(
        name=recipe.model.name,
        num_classes=num_classes,
        channels=recipe.data.channels,
        height=recipe.data.height,
        width=recipe.data.width,
        mean=tuple(round(float(value), 4) for value in pixels.mean((0, 1, 2))),
        std=tuple(max(round(float(value), 4), 1e-3) for value in pixels.std((0, 1, 2))),
        dropout=recipe.model.dropout,
    )


def data_parallel(model: Classifier, group: Group, objective: Objective, config: TrainConfig) -> DataParallel:
    """Return the DDP plan that the recipe's [train] asks for."""
    return DataParallel(
        model,
        group,
        objective,
        accumulate=config.accumulate,
        bf16=config.precision == "bf16",
        channels_last=config.channels_last,
    )


def optimizer_for(model: Classifier, config: TrainConfig, *, lr: float) -> torch.optim.Optimizer:
    """Return the optimizer that the recipe's [train] names, at rate `lr`."""
    return build_optimizer(
        model, name=config.optimizer, lr=lr, momentum=config.momentum, weight_decay=config.weight_decay
    )


def sampling_of(recipe: Recipe) -> Sampling:
    """Return how the recipe cuts epochs into batches and augments them."""
    return Sampling(
        batch_size=recipe.train.batch_size,
        seed=recipe.train.seed,
        augment=recipe.data.augment,
        padding=recipe.data.crop_padding,
    )
