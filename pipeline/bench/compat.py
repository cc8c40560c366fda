"""`make compat`: which torchvision classifiers can be pruned, rebuilt and exported, and what that gains, as a table.

Weights are random, so nothing here speaks of accuracy: only whether a network goes through, whether PyTorch and ONNX
Runtime agree afterwards, and what one image costs. Shape legend: N images, H height, W width, C channels, K classes.
"""

import argparse
import gc
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from pipeline.bench.report import conditions
from pipeline.compression.macs import count_macs
from pipeline.compression.prune import Rule, prune
from pipeline.compression.rebuild import rebuild
from pipeline.config import PruneConfig
from pipeline.errors import PipelineError
from pipeline.export import Floats, Served, export_onnx
from pipeline.measure import measure_interleaved, ratio
from pipeline.models import Classifier, ModelSpec, build, load_weights, save_weights
from pipeline.session import open_session, probabilities

OUT = Path("artifacts/compat")
SIDE = 224  # pixels
CLASSES = 1000
IMAGES = 8
ROUNDS = 9
LARGEST_DIFFERENCE = 1e-3  # of a logarithm of a probability: fp32 in another order of summation
SPREAD = 100  # images must differ by so many times as much, or agreement proves nothing
# Family -> its members in torchvision, the first of which are measured without --all.
FAMILIES: dict[str, tuple[str, ...]] = {
    "AlexNet": ("alexnet",),
    "ConvNeXt": ("convnext_tiny", "convnext_small", "convnext_base", "convnext_large"),
    "DenseNet": ("densenet121", "densenet161", "densenet169", "densenet201"),
    "EfficientNet": tuple(f"efficientnet_b{n}" for n in range(8)),
    "EfficientNetV2": ("efficientnet_v2_s", "efficientnet_v2_m", "efficientnet_v2_l"),
    "GoogLeNet": ("googlenet",),
    "Inception": ("inception_v3",),
    "MaxViT": ("maxvit_t",),
    "MNASNet": ("mnasnet0_5", "mnasnet0_75", "mnasnet1_0", "mnasnet1_3"),
    "MobileNetV2": ("mobilenet_v2",),
    "MobileNetV3": ("mobilenet_v3_small", "mobilenet_v3_large"),
    "RegNet X": tuple(f"regnet_x_{n}" for n in ("400mf", "800mf", "1_6gf", "3_2gf", "8gf", "16gf", "32gf")),
    "RegNet Y": tuple(f"regnet_y_{n}" for n in ("400mf", "800mf", "1_6gf", "3_2gf", "8gf", "16gf", "32gf", "128gf")),
    "ResNet": ("resnet18", "resnet50", "resnet34", "resnet101", "resnet152"),
    "ResNeXt": ("resnext50_32x4d", "resnext101_32x8d", "resnext101_64x4d"),
    "ShuffleNetV2": tuple(f"shufflenet_v2_x{n}" for n in ("0_5", "1_0", "1_5", "2_0")),
    "SqueezeNet": ("squeezenet1_1", "squeezenet1_0"),
    "Swin": ("swin_t", "swin_s", "swin_b"),
    "SwinV2": ("swin_v2_t", "swin_v2_s", "swin_v2_b"),
    "VGG": ("vgg11_bn", "vgg11", "vgg13", "vgg13_bn", "vgg16", "vgg16_bn", "vgg19", "vgg19_bn"),
    "ViT": ("vit_b_32", "vit_b_16", "vit_l_16", "vit_l_32", "vit_h_14"),
    "Wide ResNet": ("wide_resnet50_2", "wide_resnet101_2"),
}
TWO = ("ResNet",)  # families of which two members are measured without --all


@dataclass(frozen=True)
class Row:
    """One model: what became of it, or why not."""

    family: str
    model: str
    reason: str | None = None  # why it is refused; None: it went through
    macs: int = 0
    macs_pruned: int = 0
    params: int = 0
    params_pruned: int = 0
    difference: float = 0.0  # largest, PyTorch against ORT, of a logarithm of a probability
    cost_ms: float = 0.0  # CPU milliseconds of one image, dense, ORT fp32, one thread
    cheaper: float = 0.0  # how many times, pruned over dense
    cheaper_low: float = 0.0  # 95 % interval
    cheaper_high: float = 0.0


def try_model(name: str, *, family: str, side: int = SIDE, rounds: int = ROUNDS) -> Row:
    """Prune half of a model by the default rule, rebuild it from its files, export and measure; or say why not.

    One model's failure is a row and not the end of the table, so every error is caught here.
    """
    try:
        return _through(name, family=family, side=side, rounds=rounds)
    except Exception as error:
        kind = "" if isinstance(error, PipelineError) else f"{type(error).__name__}: "
        return Row(family, name, reason=" ".join(f"{kind}{error}".split())[:200])


def _through(name: str, *, family: str, side: int, rounds: int) -> Row:
    choice = PruneConfig()
    spec = ModelSpec(
        name=name, num_classes=CLASSES, channels=3, height=side, width=side, mean=(0.5,) * 3, std=(0.25,) * 3
    )
    images_NHWC = patches(IMAGES, side)
    dense = lively(build(spec), images_NHWC)
    rule = Rule(choice.round_to, choice.importance, choice.scope, choice.keep)
    with TemporaryDirectory() as folder:
        weights = Path(folder) / "pruned.safetensors"
        pruned = prune(dense, ratio=0.5, rule=rule)
        save_weights(pruned, weights)
        pruned = load_weights(rebuild(ModelSpec.model_validate_json(pruned.spec.model_dump_json())), weights).eval()
        graphs = {"dense": Path(folder) / "dense.onnx", "pruned": Path(folder) / "pruned.onnx"}
        for model, graph in ((dense, graphs["dense"]), (pruned, graphs["pruned"])):
            export_onnx(model, graph, opset=20, metadata={})
        sessions = {key: open_session(graph) for key, graph in graphs.items()}
        difference = largest_difference(pruned, partial(probabilities, sessions["pruned"]), images_NHWC)
        calls: dict[str, Callable[[], object]] = {
            key: partial(probabilities, session, images_NHWC[:1]) for key, session in sessions.items()
        }
        costs = measure_interleaved(calls, rounds=rounds)
    gain = ratio(costs["dense"], costs["pruned"])
    return Row(
        family,
        name,
        macs=count_macs(dense),
        macs_pruned=count_macs(pruned),
        params=_params(dense),
        params_pruned=_params(pruned),
        difference=difference,
        cost_ms=costs["dense"].median_ms,
        cheaper=gain.median,
        cheaper_low=gain.low,
        cheaper_high=gain.high,
    )


def patches(count: int, side: int) -> NDArray[np.uint8]:
    """Return images of 7 x 7 random colours: to a network of random weights, images of noise are all alike."""
    colours_NHWC = np.random.default_rng(0).integers(0, 256, (count, 7, 7, 3), np.uint8)
    repeats = -(-side // 7)
    return colours_NHWC.repeat(repeats, axis=1).repeat(repeats, axis=2)[:, :side, :side]


@torch.no_grad()
def lively(model: Classifier, images_NHWC: NDArray[np.uint8]) -> Classifier:
    """Make random weights answer each image differently: a parity of constants would prove nothing.

    BatchNorm takes its statistics from the images, weights that start at zero (a ViT's head) get random values, and a
    network without any normalisation gets weights that keep the size of what passes (He et al., 2015).
    """
    torch.manual_seed(0)
    normalised = any(isinstance(m, nn.BatchNorm2d | nn.LayerNorm) for m in model.modules())
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear) and not normalised:
            nn.init.kaiming_normal_(module.weight)
    for parameter in model.parameters():
        if parameter.ndim > 1 and not parameter.any():
            nn.init.normal_(parameter, std=0.02)
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    before = [norm.momentum for norm in norms]
    model.eval()
    for norm in norms:
        norm.momentum = 1.0
        norm.train()
    model(torch.from_numpy(images_NHWC))
    for norm, momentum in zip(norms, before, strict=True):
        norm.momentum = momentum
    return model.eval()


def largest_difference(
    model: Classifier, answer: Callable[[NDArray[np.uint8]], Floats], images_NHWC: NDArray[np.uint8]
) -> float:
    """Return the largest difference of log-probabilities between PyTorch and `answer`, at batches of 1 and N.

    Raises `PipelineError` when it is too large, and when all images get the same answer.
    """
    with torch.no_grad():
        reference_NK = Served(model).eval()(torch.from_numpy(images_NHWC)).numpy()
    alone_NK = np.concatenate([answer(images_NHWC[n : n + 1]) for n in range(len(images_NHWC))])
    logs = [np.log(np.maximum(p, 1e-30)) for p in (reference_NK, alone_NK, answer(images_NHWC))]
    difference = max(float(np.abs(logs[0] - other).max()) for other in logs[1:])
    if not difference <= LARGEST_DIFFERENCE:
        raise PipelineError(f"PyTorch and ONNX Runtime differ by {difference:.1g} in the logarithm of a probability")
    if float(np.abs(logs[0] - logs[0][:1]).max()) <= SPREAD * difference:
        raise PipelineError("every image gets the same answer, so agreement would prove nothing")
    return difference


def _params(model: Classifier) -> int:
    return sum(parameter.numel() for parameter in model.net.parameters())


def chosen(names: Sequence[str], *, everything: bool) -> list[tuple[str, str]]:
    """Return (family, model) of the named models; without names, of small members of every family, or of all."""
    members = [(family, name) for family, models in FAMILIES.items() for name in models]
    known = {name for _, name in members}
    if unknown := [name for name in names if name not in known]:
        raise PipelineError(f"{unknown[0]!r} is no torchvision classification model; use one of {', '.join(known)}")
    if names:
        return [(family, name) for family, name in members if name in names]
    first = [(f, name) for f, models in FAMILIES.items() for name in models[: 2 if f in TWO else 1]]
    return members if everything else first


def markdown(rows: Sequence[Row], where: dict[str, Any]) -> str:
    """Return the rows as a Markdown table with the conditions under which they were taken."""
    lines = [
        "| family | model | MMACs dense -> pruned | M params | PyTorch-ORT | CPU ms dense | cheaper by (95 %) | "
        "time / MACs |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        if row.reason is not None:
            lines.append(f"| {row.family} | {row.model} | refused: {row.reason} | | | | | |")
            continue
        fewer = row.macs / row.macs_pruned
        lines.append(
            f"| {row.family} | {row.model} | {row.macs / 1e6:,.0f} -> {row.macs_pruned / 1e6:,.0f} ({fewer:.2f}x) | "
            f"{row.params / 1e6:.1f} -> {row.params_pruned / 1e6:.1f} | {row.difference:.0e} | {row.cost_ms:.1f} | "
            f"{row.cheaper:.2f}x ({row.cheaper_low:.2f}-{row.cheaper_high:.2f}) | {row.cheaper / fewer:.2f} |"
        )
    rule = where["rule"]
    lines += [
        "",
        f"Half of the channels go ({rule['importance']}, {rule['scope']}, round_to {rule['round_to']}); random weights,"
        f" {where['side']}x{where['side']} pixels, n = {where['images']} random images for the largest difference of a "
        f"log-probability, {where['rounds']} interleaved rounds for the cost of one image: process CPU time, one "
        f"thread, ORT fp32. {where['date']}, {where['cpu']['name']} ({', '.join(where['cpu']['flags'])}), "
        f"torch {where['versions']['torch']}, torchvision {where['versions']['torchvision']}, onnxruntime "
        f"{where['onnxruntime']}, torch-pruning {where['versions']['torch-pruning']}.",
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Try the models, print the table and write artifacts/compat/report.json, anew after every model."""
    parser = argparse.ArgumentParser(prog="python -m pipeline.bench.compat", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="models; default: small members of every family")
    parser.add_argument("--all", action="store_true", help="every torchvision classification model")
    options = parser.parse_args(arguments)
    try:
        models = chosen(options.names, everything=options.all)
    except PipelineError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    torch.set_num_threads(1)
    rule = PruneConfig().model_dump(mode="json")
    where = conditions() | {"rounds": ROUNDS, "images": IMAGES, "side": SIDE, "rule": rule}
    rows: list[Row] = []
    OUT.mkdir(parents=True, exist_ok=True)
    for family, name in models:
        print(f"compat: {name}", file=sys.stderr, flush=True)
        rows.append(try_model(name, family=family))
        report = {"schema": 1, "rows": [asdict(row) for row in rows], "conditions": where}
        (OUT / "report.json").write_text(json.dumps(report, indent=2) + "\n")
        gc.collect()
    print(markdown(rows, where), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
