"""Writes the folder ``tiny_qwen3_moe`` beside this file: the model and tokenizer of the quickstart.

Run: python configs/models/make_tiny_qwen3_moe.py

Weights are not written: the quickstart initialises them and warms them up.
"""

from __future__ import annotations

import json
import string
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig

INSTRUCTION = "Spell this word backward (example: sun -> nus): "
"""Fixed part of every prompt of reasoning-gym's ``spell_backward``: one token, so a prompt is it and the word."""

SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>")
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '\\n' }}{% endfor %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character and newline, one for the instruction; anything else is ``<unk>``."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(INSTRUCTION, normalized=False, special=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )


def make_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3MoeConfig:
    """Qwen3-MoE of 1.3 million parameters, about a third of them active per token."""
    return Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=128,
        moe_intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.02,
        router_aux_loss_coef=0.0,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


def main() -> None:
    folder = Path(__file__).parent / "tiny_qwen3_moe"
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    make_config(tokenizer).save_pretrained(folder)
    assert set(string.printable) - set("\t\r\x0b\x0c") <= set(tokenizer.get_vocab())
    print(f"{folder}: {len(tokenizer)} tokens, {json.loads((folder / 'config.json').read_text())['model_type']}")


if __name__ == "__main__":
    main()
