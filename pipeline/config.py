"""The recipe: a frozen, typed tree read from a TOML file, then from the command line's overrides."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from pipeline.errors import PipelineError
from pipeline.names import validate_name

RECIPES = Path(__file__).parent / "recipes"
NOT_FOR_A_GRAPH = ("model", "train", "compress")  # sections that a finished ONNX file takes the place of


def _split_commas(value: object) -> object:
    """Let the command line write a list as `flip,crop`."""
    return [part for part in value.split(",") if part] if isinstance(value, str) else value


def _whole(value: object) -> object:
    """Let the command line write one of several numbers."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


class Section(BaseModel):
    """A part of the recipe: frozen, and an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class DataConfig(Section):
    """Which images, how they are cut into splits and brought to the model's size."""

    name: Literal["digits", "mnist", "fashion-mnist", "cifar10", "imagefolder"] = Field(description="data set")
    root: Path | None = Field(
        None, exclude=True, description="imagefolder: the folder with train/ and, if there are, val/ and test/"
    )
    height: int = Field(ge=1, le=4096, description="pixels")
    width: int = Field(ge=1, le=4096, description="pixels")
    channels: Annotated[Literal[1, 3], BeforeValidator(_whole)] = Field(description="1 grey, 3 colour")
    resize: int | None = Field(
        None, ge=1, description="shorter side before the centre crop; default: the longer of both"
    )
    background: Annotated[tuple[int, int, int], BeforeValidator(_split_commas)] = Field(
        (0, 0, 0), description="transparent pixels are laid on this colour"
    )
    max_pixels: int = Field(50_000_000, ge=1, description="larger images are refused, in training and in serving")
    validation: float = Field(0.15, gt=0, lt=0.5, description="share of the training images, where no split is given")
    test: float = Field(0.15, gt=0, lt=0.5, description="share of the training images, where no split is given")
    split_seed: int = Field(0, ge=0, description="which images go into which split")
    augment: Annotated[tuple[Literal["flip", "crop"], ...], BeforeValidator(_split_commas)] = Field(
        (), description="flip: left-right; crop: random shift after padding"
    )
    crop_padding: int = Field(4, ge=1, description="pixels added on each side before a random crop")

    @property
    def shorter_side(self) -> int:
        """Return the shorter side, in pixels, before the centre crop."""
        return self.resize or max(self.height, self.width)

    @model_validator(mode="after")
    def _resize_covers_the_crop(self) -> "DataConfig":
        if self.shorter_side < max(self.height, self.width):
            raise ValueError(f"data.resize = {self.resize} is smaller than the crop; use at least the longer side")
        return self


class ModelConfig(Section):
    """Which network."""

    name: str = Field(
        description="simple_cnn, lenet, resnet20, resnet56, a torchvision classification model, or module:callable"
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="simple_cnn and lenet: before the last layer")


class TrainConfig(Section):
    """How the network is trained."""

    epochs: int = Field(ge=1, description="passes over the training images")
    batch_size: int = Field(ge=1, description="images per step over all processes")
    optimizer: Literal["sgd", "adam", "adamw"] = Field("sgd", description="sgd, adam or adamw")
    lr: float = Field(gt=0, description="peak learning rate")
    momentum: float = Field(0.9, ge=0, lt=1, description="sgd only")
    weight_decay: float = Field(0.0, ge=0, description="not for biases and normalisations")
    schedule: Literal["cosine", "constant"] = Field("cosine", description="of the learning rate: cosine or constant")
    warmup_epochs: float = Field(0.0, ge=0, description="linear warm-up")
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="probability given to the other classes in training")
    accumulate: int = Field(1, ge=1, description="micro-batches per step")
    precision: Literal["fp32", "bf16"] = Field("fp32", description="fp32, or bf16 autocast")
    channels_last: bool = Field(True, description="memory layout of activations and weights")
    seed: int = Field(0, ge=0, description="of weights, order and augmentation")
    nproc: int = Field(0, ge=0, exclude=True, description="processes; 0: one per GPU, or 2 on a machine without")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", exclude=True, description="auto: GPUs where there are any")
    checkpoint_steps: int = Field(100, ge=1, description="steps between checkpoints for resuming")


class PruneConfig(Section):
    """Structured pruning: whole channels go."""

    enabled: bool = Field(True, description="false: no pruned candidate is made")
    blocks: float = Field(
        0.0, ge=0, lt=1, description="share of the residual blocks that go, before any channels; 0: the depth stays"
    )
    ratio: float = Field(0.5, ge=0, lt=1, description="share of `target` that goes; 0: no channels")
    target: Literal["channels", "macs", "cost"] = Field(
        "channels", description="what ratio is a share of; cost: CPU time of one image, measured on this machine"
    )
    round_to: int = Field(
        16,
        ge=1,
        description="widths stay multiples of this; of a half, a quarter ... of it in layers narrower than two",
    )
    importance: Literal["l1", "l2", "taylor", "bn_scale"] = Field("l2", description="which channels matter least")
    scope: Literal["global", "uniform"] = Field("uniform", description="rank channels in all layers, or in each")
    steps: int = Field(1, ge=1, description="prune so many times, recovering after each; 1: one-shot")
    keep: Annotated[tuple[str, ...], BeforeValidator(_split_commas)] = Field(
        (), description="layers that keep their channels, by name; the last layer always does"
    )
    sparsity: float = Field(
        0.0, ge=0, lt=1, description="share of the remaining weights set to 0: a smaller compressed file, no speed"
    )


class RecoverConfig(Section):
    """Training after pruning, against the labels and the dense model's answers."""

    epochs: int = Field(ge=1, description="passes over the training images, of all steps together")
    lr: float = Field(gt=0, description="learning rate at the start; a cosine takes it to 0")
    distill: float = Field(0.5, ge=0, le=1, description="weight of the dense model's answers in the loss")
    temperature: float = Field(2.0, gt=0, description="the dense model's logits are divided by this")


class QuantizeConfig(Section):
    """Row-wise dynamic int8."""

    bits: Literal["auto", "7", "8"] = Field("auto", description="weight bits; auto: 7 where 8 would saturate (AVX2)")
    min_gain: float = Field(
        1.05, ge=0, description="a layer stays fp32 unless int8 makes it this many times cheaper here; 0: all"
    )


class CompressConfig(Section):
    """Pruning, recovery and quantization."""

    prune: PruneConfig = PruneConfig()
    recover: RecoverConfig
    quantize: QuantizeConfig = QuantizeConfig()


class OnnxConfig(Section):
    """A finished classifier: nothing is trained, and [model], [train] and [compress] are not read."""

    file: Path = Field(exclude=True, description="the .onnx file; what it holds is in the key, its place is not")
    layout: Literal["auto", "nchw", "nhwc"] = Field("auto", description="of its input; auto: where 1 or 3 channels are")
    scale: float = Field(255, gt=0, description="pixels are divided by this, then mean is subtracted")
    mean: Annotated[tuple[float, ...], BeforeValidator(_split_commas)] = Field(
        (0.0,), min_length=1, max_length=3, description="of the scaled pixels: one value, or one for each channel"
    )
    std: Annotated[tuple[Annotated[float, Field(gt=0)], ...], BeforeValidator(_split_commas)] = Field(
        (1.0,), min_length=1, max_length=3, description="the difference is divided by this"
    )
    outputs: Literal["auto", "logits", "probabilities"] = Field(
        "auto", description="what it answers; auto: probabilities if every answer sums to 1"
    )
    bits: Literal["auto", "7", "8"] = Field("auto", description="of static int8's weights, as compress.quantize.bits")


class ExportConfig(Section):
    """PyTorch -> ONNX."""

    provider: Literal["cpu", "cuda", "tensorrt"] = Field(
        "cpu", description="what runs the graph, here and where it is served; on a GPU there are fp16 candidates"
    )
    opset: int = Field(20, ge=18, le=23, description="of the ONNX graphs")
    min_agreement: float = Field(0.995, gt=0, le=1, description="top-1 agreement required of an int8 or fp16 candidate")


class StaticConfig(Section):
    """Static int8 of convolutions, in ONNX, calibrated on training images."""

    enabled: bool = Field(True, description="false: no static candidate is made")
    images: int = Field(256, ge=1, description="training images for calibration")
    methods: Annotated[tuple[Literal["minmax", "entropy", "percentile"], ...], BeforeValidator(_split_commas)] = Field(
        ("minmax", "entropy", "percentile"), min_length=1, description="how ranges are found; the best is kept"
    )
    max_loss: float = Field(
        0.3, ge=0, description="points of validation top-1 that may be lost against the float candidate"
    )


class ChooseConfig(Section):
    """Which candidate ships."""

    budget: float = Field(0.5, ge=0, description="points of validation top-1 that may be lost against dense")
    force: str | None = Field(None, description="ship this candidate, whatever was measured")
    batch_size: int = Field(1, ge=1, description="images per call when the cost is measured")
    rounds: int = Field(
        50, ge=3, description="interleaved rounds; up to 8 times as many while noise leaves the choice open"
    )


class PackageConfig(Section):
    """What the archive is called."""

    name: str = Field(description="the model's name in the URL")
    version: str = Field("1.0", description="the model's version in the answer and the archive's name")
    golden: int = Field(8, ge=1, description="golden images, answered at every start of a worker")

    @field_validator("name", "version")
    @classmethod
    def _archiver_takes_it(cls, value: str, info: ValidationInfo) -> str:
        return validate_name(value, field=f"package.{info.field_name}")


class Recipe(Section):
    """Everything that decides what the pipeline makes."""

    data: DataConfig
    onnx: OnnxConfig | None = Field(None, description="instead of model, train and compress")
    # None only beside [onnx], whose chain reads none of the three: so no reader has to ask.
    model: ModelConfig = cast(ModelConfig, None)
    train: TrainConfig = cast(TrainConfig, None)
    compress: CompressConfig = cast(CompressConfig, None)
    export: ExportConfig = ExportConfig()
    static: StaticConfig = StaticConfig()
    choose: ChooseConfig = ChooseConfig()
    package: PackageConfig

    @model_validator(mode="after")
    def _there_is_a_model(self) -> "Recipe":
        missing = [name for name in NOT_FOR_A_GRAPH if getattr(self, name) is None]
        if missing and self.onnx is None:
            raise ValueError(
                f"section [{missing[0]}] is required and not set; add it to the recipe or pass --onnx FILE"
            )
        for name in ("mean", "std") if self.onnx else ():
            if len(values := getattr(self.onnx, name)) not in (1, self.data.channels):
                raise ValueError(f"onnx.{name} = {values} has another length than 1 or data.channels")
        return self


class _GraphOnly(BaseModel):
    """The part of a recipe that tells which graph is given."""

    onnx: OnnxConfig


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe by name (`digits`) or path, then apply overrides (`["--train.epochs", "3"]`).

    Raises `PipelineError` with one line that names the field, the value and the remedy.
    """
    path = _find(name)
    try:
        tree = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PipelineError(f"recipe {path}: {error}") from error
    for field, value in _pairs(overrides):
        _assign(tree, field, value)
    try:
        if "onnx" in tree:
            tree = {name: section for name, section in tree.items() if name not in NOT_FOR_A_GRAPH}
        size = _size_of_graph(tree) if "onnx" in tree else {}
        if isinstance(tree.get("data"), dict):
            tree["data"] = size | tree["data"]
        recipe = Recipe.model_validate(tree)
    except ValidationError as error:
        origin = "" if _typed(error, overrides) else f"recipe {path.name}: "
        raise PipelineError(f"{origin}{_first_line(error)}") from error
    for field, pixels in size.items():
        if (asked := getattr(recipe.data, field)) != pixels:
            raise PipelineError(f"data.{field} = {asked}, but the ONNX file takes {pixels}; leave data.{field} out")
    return recipe


def _size_of_graph(tree: dict[str, Any]) -> dict[str, int]:
    """Return the fields of [data] that the recipe's ONNX file decides."""
    from pipeline.imported.file import inspect  # takes 0.3 s, and few recipes name a file

    given = _GraphOnly.model_validate(tree).onnx
    return inspect(given.file, layout=given.layout).image_size


def describe_fields() -> list[str]:
    """Return one line for every field that a recipe may set: name, default, meaning."""
    rows = _described(Recipe, "")
    width = max(len(name) for name, _ in rows)
    return [f"  {name:<{width}}  {meaning}".rstrip() for name, meaning in rows]


def _described(model: type[BaseModel], prefix: str) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, field in model.model_fields.items():
        kinds = (field.annotation, *get_args(field.annotation))
        section = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)
        if section:
            rows += _described(section, f"{prefix}{name}.")
        else:
            default = "required" if field.is_required() else f"default {_as_typed(field.default)}"
            rows.append((f"--{prefix}{name}", f"{default}. {field.description or ''}"))
    return rows


def _as_typed(value: object) -> str:
    """Return a default as one would type it."""
    if value is None or value == ():
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(str(part) for part in value) if isinstance(value, tuple) else str(value)


def _find(name: str) -> Path:
    path = Path(name) if name.endswith(".toml") else RECIPES / f"{name}.toml"
    if path.is_file():
        return path
    if Path(name).is_file():
        raise PipelineError(f"recipe {name!r} is no .toml file; a recipe's name ends in .toml")
    known = ", ".join(sorted(p.stem for p in RECIPES.glob("*.toml")))
    raise PipelineError(f"recipe {name!r} not found; use the path of a .toml file or one of: {known}")


def _pairs(overrides: Sequence[str]) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    words = list(overrides)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or "." not in word:
            raise PipelineError(f"{word!r} is not understood; an override reads --section.field value")
        field, equals, value = word[2:].partition("=")
        if not equals:
            if not words:
                raise PipelineError(f"--{field} has no value; an override reads --section.field value")
            value = words.pop(0)
        pairs.append((field, value))
    return pairs


def _typed(error: ValidationError, overrides: Sequence[str]) -> bool:
    """Tell whether the first wrong value, or a field of the wrong section, came from the command line."""
    wrong = [str(part) for part in error.errors(include_url=False)[0]["loc"]]
    given = [name.split(".") for name, _ in _pairs(overrides)]
    return bool(wrong) and any(name[: len(wrong)] == wrong[: len(name)] for name in given)


def _assign(tree: dict[str, Any], field: str, value: str) -> None:
    *sections, last = field.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise PipelineError(f"--{field}: {section} is not a section of the recipe")
    tree[last] = value


def _first_line(error: ValidationError) -> str:
    """Say what is wrong with one field; the others would mostly be consequences."""
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if first["type"] == "extra_forbidden":
        return f"there is no field {field}; `python -m pipeline --help` lists them{more}"
    if first["type"] == "missing":
        return f"{field} is required and not set; add it to the recipe or pass --{field}{more}"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return f"{message}{more}"
    return f"{field} = {first['input']!r}: {message[0].lower()}{message[1:]}{more}"


def section_facts(recipe: Recipe, sections: Sequence[str]) -> dict[str, Any]:
    """Return the named sections as plain JSON values, without the fields that change no result."""
    return {name: getattr(recipe, name).model_dump(mode="json") for name in sections}
