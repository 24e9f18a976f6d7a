"""Folders and named tensors: nothing is left out, nothing slips in, nothing changes on the way."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, build
from torch import Tensor

from archon.models.config import ModelConfig
from archon.models.decoder import Decoder
from archon.weights import (
    Digest,
    WeightsError,
    digest,
    load_folder,
    load_named,
    named_weights,
    read_folder,
    save_folder,
)


def transformers_folder(path: Path, family: str = "qwen3", **options: Any) -> Path:
    build(family, **options).save_pretrained(path)
    return path


def decoder(folder: Path) -> Decoder:
    """A decoder with every parameter NaN, so that an untouched one shows."""
    model = Decoder(ModelConfig.from_folder(folder))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    return model


def loaded(folder: Path) -> Decoder:
    model = decoder(folder)
    load_folder(model, folder)
    return model


def edit(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_through_transformers_is_bit_equal(family: str, tied: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    theirs = build(family, tied=tied)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = loaded(tmp_path / "theirs")
    save_folder(tmp_path / "ours", named_weights(ours), tmp_path / "theirs", max_shard_bytes=20_000)
    assert len(list((tmp_path / "ours").glob("model-*-of-*.safetensors"))) > 1
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    for name, parameter in theirs.named_parameters():
        assert torch.equal(back.get_parameter(name), parameter), name
        assert torch.equal(ours.get_parameter(name), parameter), name
    back.save_pretrained(tmp_path / "back")
    again = loaded(tmp_path / "back")
    assert digest(named_weights(again)) == digest(named_weights(ours)) == digest(named_weights(back))


def test_disk_names_are_those_of_the_hub(tmp_path: Path) -> None:
    folder = transformers_folder(tmp_path / "model", "qwen3_moe")
    assert {name for name, _ in named_weights(loaded(folder))} == set(load_file(folder / "model.safetensors"))
    assert "model.layers.0.mlp.experts.7.up_proj.weight" in dict(named_weights(loaded(folder)))


def test_stacked_experts_on_disk_are_accepted(tmp_path: Path) -> None:
    theirs = build("qwen3_moe")
    ours = Decoder(ModelConfig.from_hf_dict(theirs.config.to_dict()))
    load_named(ours, ((name, parameter.detach()) for name, parameter in theirs.named_parameters()))
    assert digest(named_weights(ours)) == digest(named_weights(theirs))


def test_named_tensors_fill_a_transformers_model() -> None:
    source, target = build("qwen3_moe", seed=1), build("qwen3_moe", seed=2)
    assert digest(named_weights(source)) != digest(named_weights(target))
    load_named(target, named_weights(source))
    assert digest(named_weights(source)) == digest(named_weights(target))


def test_export_casts_and_config_names_the_dtype(tmp_path: Path) -> None:
    folder = transformers_folder(tmp_path / "model", "qwen3_moe")
    save_folder(tmp_path / "half", named_weights(loaded(folder), torch.bfloat16), folder)
    assert {tensor.dtype for _, tensor in read_folder(tmp_path / "half")} == {torch.bfloat16}
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    for name, parameter in loaded(tmp_path / "half").named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, loaded(folder).get_parameter(name).bfloat16().float())


def test_missing_unexpected_and_misshapen_parameters_are_all_named_in_one_error(tmp_path: Path) -> None:
    folder = transformers_folder(tmp_path / "model", "qwen3_moe")
    lost, grown = "model.layers.2.mlp.experts.3.up_proj.weight", "model.layers.1.self_attn.q_norm.weight"

    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[lost]
        tensors[grown] = torch.zeros(3)
        tensors["model.layers.9.bias"] = torch.zeros(1)

    edit(folder, change)
    with pytest.raises(WeightsError) as error:
        load_folder(decoder(folder), folder)
    message = str(error.value)
    assert str(folder) in message
    assert f"1 missing: {lost}" in message
    assert "1 unexpected: model.layers.9.bias" in message
    assert f"1 of another shape: {grown} (3,) for (16,)" in message


def test_a_long_list_is_cut_and_counted() -> None:
    model = Decoder(ModelConfig.from_hf_dict(build("llama").config.to_dict()))
    with pytest.raises(WeightsError, match=r"30 missing: .* and 20 more"):
        load_named(model, [])


def test_a_tensor_given_twice_is_an_error() -> None:
    theirs = build("llama")
    with pytest.raises(WeightsError, match=r"1 given twice: model\.norm\.weight"):
        load_named(build("llama"), [*named_weights(theirs), ("model.norm.weight", torch.zeros(32))])


def test_a_misshapen_stack_is_named_once() -> None:
    tensors = {name: parameter.detach() for name, parameter in build("qwen3_moe").named_parameters()}
    name = "model.layers.0.mlp.experts.down_proj"
    tensors[name] = tensors[name][:4]
    with pytest.raises(WeightsError) as error:
        load_named(build("qwen3_moe"), tensors.items())
    assert str(error.value) == f"1 of another shape: {name} (4, 32, 24) for (8, 32, 24)"


def test_a_meta_model_is_refused(tmp_path: Path) -> None:
    folder = transformers_folder(tmp_path / "model")
    with torch.device("meta"):
        model = Decoder(ModelConfig.from_folder(folder))
    with pytest.raises(WeightsError, match="to_empty"):
        load_folder(model, folder)
    model.to_empty(device="cpu")
    load_folder(model, folder)
    assert digest(named_weights(model)) == digest(read_folder(folder))


def test_rotary_buffers_of_old_folders_are_ignored(tmp_path: Path) -> None:
    folder = transformers_folder(tmp_path / "model", "llama")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(folder, lambda tensors: tensors.update({name: torch.ones(4)}))
    loaded(folder)


def test_a_folder_without_weights_says_what_it_needs(tmp_path: Path) -> None:
    folder = transformers_folder(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        load_folder(decoder(folder), folder)


def sharded(tmp_path: Path) -> Path:
    source = transformers_folder(tmp_path / "source")
    save_folder(tmp_path / "sharded", read_folder(source), source, max_shard_bytes=20_000)
    return tmp_path / "sharded"


def test_an_index_that_names_an_absent_file_is_an_error(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    victim = min(folder.glob("model-*.safetensors"))
    victim.unlink()
    with pytest.raises(FileNotFoundError, match=victim.name):
        load_folder(decoder(folder), folder)


def test_an_index_that_promises_an_absent_tensor_is_an_error(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.ghost"] = min(content["weight_map"].values())
    index.write_text(json.dumps(content))
    with pytest.raises(WeightsError, match=r"model\.ghost"):
        load_folder(decoder(folder), folder)


def test_shards_respect_their_size_and_the_index_is_complete(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    total = 0
    for file in set(index["weight_map"].values()):
        tensors = load_file(folder / file)
        size = sum(tensor.nbytes for tensor in tensors.values())
        assert size <= 20_000 or len(tensors) == 1
        assert set(tensors) == {name for name, place in index["weight_map"].items() if place == file}
        total += size
    assert index["metadata"]["total_size"] == total == sum(tensor.nbytes for _, tensor in read_folder(folder))


def test_configuration_and_tokenizer_files_are_copied_and_old_weights_are_not(tmp_path: Path) -> None:
    source = sharded(tmp_path)
    for name in ("tokenizer.json", "chat_template.jinja", "merges.txt", "generation_config.json"):
        (source / name).write_text("{}")
    (source / "pytorch_model.bin").write_text("old")
    save_folder(tmp_path / "saved", read_folder(source), source)
    assert {file.name for file in (tmp_path / "saved").iterdir()} == {
        "config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "merges.txt",
        "generation_config.json",
        "model.safetensors",
    }


def test_a_config_may_be_given_as_a_dict(tmp_path: Path) -> None:
    theirs = build("qwen2", tied=True)
    save_folder(tmp_path / "saved", named_weights(theirs), theirs.config.to_dict())
    assert digest(named_weights(loaded(tmp_path / "saved"))) == digest(named_weights(theirs))


def test_a_failed_save_leaves_the_old_folder_and_no_rubbish(tmp_path: Path) -> None:
    source = transformers_folder(tmp_path / "source")
    save_folder(tmp_path / "out" / "model", read_folder(source), source)
    before = digest(read_folder(tmp_path / "out" / "model"))

    def broken() -> Any:
        for count, item in enumerate(read_folder(source)):
            if count == 5:
                raise OSError("disk full")
            yield item

    with pytest.raises(OSError, match="disk full"):
        save_folder(tmp_path / "out" / "model", broken(), source, max_shard_bytes=10_000)
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["model"]
    assert digest(read_folder(tmp_path / "out" / "model")) == before


def test_saving_again_replaces_the_whole_folder(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    newer = transformers_folder(tmp_path / "newer", seed=5)
    save_folder(folder, read_folder(newer), newer)
    assert not (folder / "model.safetensors.index.json").exists()
    assert digest(read_folder(folder)) == digest(read_folder(newer))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755


def test_digest_ignores_order_and_sees_every_change() -> None:
    items = [("a", torch.arange(6.0).view(2, 3)), ("b", torch.ones(2, dtype=torch.bfloat16)), ("c", torch.zeros(()))]
    base = digest(items)
    assert base == digest(reversed(items)) and len(base) == 64
    a = items[0][1]
    flipped = a.clone()
    flipped.view(torch.int32)[1, 1] ^= 1
    changes = [("a", flipped), ("a", a.view(3, 2)), ("a", a.double()), ("z", a), ("a", a.view(torch.int32))]
    digests = {digest([change, *items[1:]]) for change in changes} | {digest(items[1:]), base}
    assert len(digests) == len(changes) + 2
    assert digest([("a", a.t().contiguous().t()), *items[1:]]) == base


def test_digest_is_the_documented_one_and_refuses_a_name_twice() -> None:
    import hashlib
    import struct

    result = Digest()
    result.update("w", torch.tensor([[1.0], [2.0]]))
    inner = hashlib.sha256(b"w\0float32\x002,1\0" + struct.pack("<2f", 1.0, 2.0)).hexdigest()
    assert result.hexdigest() == hashlib.sha256(f"w\0{inner}".encode()).hexdigest()
    with pytest.raises(ValueError, match="w was digested before"):
        result.update("w", torch.zeros(1))
