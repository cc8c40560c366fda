"""Whole blocks go, those that can and the least missed first; what is left is a network that its spec rebuilds."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pipeline.compression.blocks
from pipeline.compression.blocks import removable, remove_blocks
from pipeline.compression.macs import count_macs
from pipeline.compression.prune import Rule, prune
from pipeline.compression.rebuild import changed_widths, rebuild
from pipeline.compression.recover import Splits
from pipeline.errors import PipelineError
from pipeline.models import Classifier
from pipeline.training.group import Group
from tests.pipeline.compression.networks import HERE, random_model
from tests.pipeline.stripes import SIZE


def model() -> Classifier:
    return random_model("resnet20", SIZE, channels=1)


@torch.no_grad()
def answers(model: Classifier) -> Tensor:
    spec = model.spec
    shape = (3, spec.height, spec.width, spec.channels)
    logits: Tensor = model.eval()(torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.manual_seed(0)))
    return logits


def learn_head(model: Classifier, splits: Splits) -> None:
    """Fit the last layer to the split, so that every block that does something is missed."""
    images, labels = torch.from_numpy(splits.train.batch(np.arange(20))), torch.from_numpy(splits.train.split.labels)
    head = list(model.net.get_submodule("fc").parameters())
    optimizer = torch.optim.Adam(head, lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        torch.autograd.backward(F.cross_entropy(model(images), labels), inputs=head)
        optimizer.step()


@pytest.mark.parametrize(
    ("name", "size", "count", "first"),
    [
        ("resnet20", 16, 7, "layers.0"),
        ("resnet56", 16, 25, "layers.0"),
        ("resnet50", 64, 12, "layer1.1"),
        ("mobilenet_v2", 32, 10, "features.3"),
        ("efficientnet_b0", 32, 9, "features.2.1"),
        ("swin_t", 64, 12, "features.1.0"),
        ("convnext_tiny", 64, 18, "features.1.0"),
        ("shufflenet_v2_x0_5", 64, 13, "stage2.1"),
        ("vgg11", 64, 0, ""),
        ("lenet", 16, 0, ""),
        (f"{HERE}:small_vit", 32, 2, "encoder.layers.encoder_layer_0"),
    ],
)
def test_blocks_that_can_go_are_those_that_give_back_the_shape_they_take(
    name: str, size: int, count: int, first: str
) -> None:
    found = removable(random_model(name, size))
    assert len(found) == count
    assert found[:1] == [first][:count]


def test_blocks_that_do_the_least_go_first(splits: Splits, group: Group) -> None:
    """A block whose last normalisation scales by 0 changes nothing; the head has learnt to read the others."""
    dense = model()
    idle = ["layers.1", "layers.4", "layers.8"]
    for name in idle:
        torch.nn.init.zeros_(dense.net.get_parameter(f"{name}.bn2.weight"))
    learn_head(dense, splits)
    shallow = remove_blocks(dense, splits.train, share=3 / 7, blocks=7, group=group)
    assert shallow.spec.removed == tuple(idle)
    assert torch.allclose(answers(shallow), answers(dense), atol=1e-5)
    assert not any(name.startswith("layers.4.") for name in shallow.net.state_dict())
    assert count_macs(shallow) < 0.75 * count_macs(dense)


def test_given_model_stays_as_it_is(splits: Splits, group: Group) -> None:
    dense = model()
    before = answers(dense)
    remove_blocks(dense, splits.train, share=0.5, blocks=7, group=group)
    assert torch.equal(answers(dense), before)
    assert dense.spec.removed == ()


def test_a_later_step_goes_on_from_an_earlier_one(splits: Splits, group: Group) -> None:
    dense = model()
    once = remove_blocks(dense, splits.train, share=4 / 7, blocks=7, group=group)
    half = remove_blocks(dense, splits.train, share=2 / 7, blocks=7, group=group)
    twice = remove_blocks(half, splits.train, share=4 / 7, blocks=7, group=group)
    assert len(half.spec.removed) == 2
    assert twice.spec == once.spec
    assert torch.equal(answers(twice), answers(once))


def test_processes_judge_by_each_others_images(splits: Splits, group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two processes answers every other image; a sum over both decides."""
    seen: list[int] = []

    def note(_group: Group, value: float) -> list[float]:
        return [value]

    class Counting:
        split = splits.train.split

        def __len__(self) -> int:
            return len(splits.train)

        def batch(self, part: object) -> object:
            seen.extend(part.tolist())  # type: ignore[attr-defined]
            return splits.train.batch(part)  # type: ignore[arg-type]

    monkeypatch.setattr(pipeline.compression.blocks, "summed", note)
    for rank in (0, 1):
        seen.clear()
        remove_blocks(model(), Counting(), share=1 / 7, blocks=7, group=Group(rank, 2, group.device))  # type: ignore[arg-type]
        assert sorted(set(seen)) == list(range(rank, 20, 2))


def test_channels_go_from_what_is_left(splits: Splits, group: Group) -> None:
    dense = model()
    shallow = remove_blocks(dense, splits.train, share=2 / 7, blocks=7, group=group)
    pruned = prune(shallow, ratio=0.5, rule=Rule(8, "l2", "uniform"), origin=dense.spec)
    assert pruned.spec.removed == shallow.spec.removed
    assert pruned.net.state_dict()["conv.weight"].shape[0] == 8
    again = rebuild(pruned.spec)
    again.net.load_state_dict(pruned.net.state_dict(), strict=True)
    assert torch.equal(answers(again), answers(pruned))
    assert changed_widths(again.net, again.spec) == pruned.spec.widths


def test_bare_parameters_may_go_with_their_block() -> None:
    spec = random_model("convnext_tiny", 32).spec.model_copy(update={"removed": ("features.1.1",)})
    net = rebuild(spec).net
    assert changed_widths(net, spec) == {}
    assert not any(name.startswith("features.1.1.") for name in net.state_dict())


def test_network_without_such_a_block_is_refused(splits: Splits, group: Group) -> None:
    with pytest.raises(PipelineError, match=r"compress.prune.blocks = 0.5, but model.name = 'lenet' has no block"):
        remove_blocks(random_model("lenet", SIZE, channels=1), splits.train, share=0.5, blocks=0, group=group)


def test_quantized_network_is_refused(splits: Splits, group: Group) -> None:
    dense = model()
    dense.spec = dense.spec.model_copy(update={"int8": {"fc": 7}})
    with pytest.raises(PipelineError, match="prune before quantizing"):
        remove_blocks(dense, splits.train, share=0.5, blocks=7, group=group)
