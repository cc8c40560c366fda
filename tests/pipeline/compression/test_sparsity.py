"""Zeros are where the smallest weights were, as many as asked for, and they stay through training."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipeline.compression.sparsity import compressed_bytes, hold_zeros, prunable, size_facts, sparsify, sparsity_facts
from pipeline.models import build, load_weights, save_weights
from tests.pipeline.compression.networks import random_model


@pytest.mark.parametrize("share", [0.3, 0.8])
def test_share_of_zeros_in_the_file_is_what_was_asked_for(tmp_path: Path, share: float) -> None:
    model = random_model(channels=1)
    sparsify(model.net, share=share)
    save_weights(model, tmp_path / "w.safetensors")
    state = load_file(tmp_path / "w.safetensors")
    weights = [state[name] for name in prunable(model.net)]
    zeros = sum(int((weight == 0).sum()) for weight in weights)
    assert zeros / sum(weight.numel() for weight in weights) == pytest.approx(share, abs=1e-4)


def test_smallest_weights_of_the_whole_network_go() -> None:
    model = random_model(channels=1)
    before = torch.cat([weight.detach().abs().flatten().clone() for weight in prunable(model.net).values()])
    sparsify(model.net, share=0.5)
    after = torch.cat([weight.detach().abs().flatten() for weight in prunable(model.net).values()])
    assert before[after == 0].max() <= before[after != 0].min()


def test_zeros_stay_through_training_and_the_rest_learns() -> None:
    model = random_model(channels=1)
    zeros = sparsify(model.net, share=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    hold_zeros(optimizer, model.net, zeros)
    before = {name: weight.detach().clone() for name, weight in prunable(model.net).items()}
    for _ in range(3):
        optimizer.zero_grad()
        torch.autograd.backward(model(torch.full((2, 16, 16, 1), 200, dtype=torch.uint8)).square().mean())
        optimizer.step()
    for name, weight in prunable(model.net).items():
        assert weight[zeros[name]].abs().sum() == 0
        assert not torch.equal(weight, before[name])


def test_no_mask_is_left_and_the_unpruned_network_takes_the_file(tmp_path: Path) -> None:
    model = random_model(channels=1)
    names = set(model.net.state_dict())
    hold_zeros(torch.optim.SGD(model.parameters(), lr=0.1), model.net, sparsify(model.net, share=0.8))
    save_weights(model, tmp_path / "w.safetensors")
    assert set(load_file(tmp_path / "w.safetensors")) == names
    load_weights(build(model.spec), tmp_path / "w.safetensors")


def test_zeros_shrink_the_compressed_file_and_nothing_else(tmp_path: Path) -> None:
    dense, sparse = random_model(channels=1), random_model(channels=1)
    sparsify(sparse.net, share=0.8)
    paths = [tmp_path / "dense.safetensors", tmp_path / "sparse.safetensors"]
    for model, path in zip((dense, sparse), paths, strict=True):
        save_weights(model, path)
    before, after = (size_facts(m, path) for m, path in zip((dense, sparse), paths, strict=True))
    assert after["params"] == before["params"] == sum(t.numel() for t in dense.net.state_dict().values() if t.ndim)
    assert after["weights_bytes"] == before["weights_bytes"]
    assert after["nonzeros"] < 0.23 * before["nonzeros"]
    assert compressed_bytes(paths[1]) < 0.4 * compressed_bytes(paths[0])


def test_report_says_where_the_zeros_are() -> None:
    model = random_model(channels=1)
    sparsify(model.net, share=0.8)
    facts = sparsity_facts(model)
    assert facts["sparsity"] == pytest.approx(0.8, abs=1e-4)
    assert facts["layers"]["layers.8.conv2.weight"] > facts["layers"]["conv.weight"]
