"""A turn is extended only from tokens proven equal, the first sampled token trains, and long prompts are refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from areal.models import answer_ids, load_tokenizer, render
from areal.rollout.errors import RejectedPrompt
from areal.rollout.workflow import Episode, Generation, GenerationConfig, PrefixMismatch, Transcript

TINY = Path(__file__).parents[2] / "configs" / "models" / "tiny_qwen3_moe"
CHATML = (
    "{% for m in messages %}"
    "{% set text = m['content'] %}"
    # as reasoning models' templates do: thoughts of earlier turns are dropped
    "{% if m['role'] == 'assistant' and not loop.last %}{% set text = text.split('</think>')[-1] %}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + text + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def chatml_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """A tokenizer with merges, so that text cut elsewhere gives other tokens, and a template that rewrites history."""
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    pieces = ["<unk>", *characters, "No", "No.", "ab", "abc", "</", "\n\n"]
    merges = [("N", "o"), ("No", "."), ("a", "b"), ("ab", "c"), ("<", "/"), ("\n", "\n")]
    backend = Tokenizer(BPE({piece: index for index, piece in enumerate(pieces)}, merges, unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", chat_template=template)


def episode(tokenizer, max_model_len: int = 4096, **options) -> Episode:
    backend = SimpleNamespace(capabilities=SimpleNamespace(max_model_len=max_model_len))
    return Episode(backend, tokenizer, None, GenerationConfig(), prompt_id="p", **options)


def sampled(token_ids: list[int]) -> Generation:
    return Generation(token_ids, [-1.0] * len(token_ids), [0] * len(token_ids), "stop")


@settings(max_examples=50, deadline=None)
@given(turns=st.lists(st.text("abcNo.<>/\n think", min_size=1, max_size=12), min_size=1, max_size=4), cut=st.booleans())
def test_every_turn_is_a_prefix_of_the_next_however_the_text_would_tokenise(turns, cut):
    """The answers are sampled character by character, which is not how the tokenizer would encode them."""
    tokenizer = chatml_tokenizer()
    ep = episode(tokenizer)
    transcript = Transcript()
    transcript.give(ep.render([{"role": "user", "content": "abc"}]))
    for text in turns:
        characters = tokenizer.convert_tokens_to_ids(list(text))
        before = list(transcript.input_ids)
        transcript.sample(sampled(characters + ([] if cut else [tokenizer.eos_token_id])))
        transcript.give(ep.render_next(transcript, "No."))
        assert transcript.input_ids[: len(before)] == before
        assert transcript.input_ids[len(before) :][: len(characters)] == characters
    text = "<|im_start|>user\nabc<|im_end|>\n<|im_start|>assistant\n" + "".join(
        f"{turn}<|im_end|>\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n" for turn in turns
    )
    assert tokenizer.decode(transcript.input_ids) == text
    trained = [token for token, mask in zip(transcript.input_ids, transcript.loss_mask, strict=True) if mask]
    assert tokenizer.decode(trained) == ("" if cut else "<|im_end|>").join([*turns, ""])


def test_thoughts_of_earlier_turns_stay_where_the_template_would_drop_them():
    tokenizer = chatml_tokenizer()
    ep = episode(tokenizer)
    transcript = Transcript()
    transcript.give(ep.render([{"role": "user", "content": "a"}]))
    transcript.sample(sampled(answer_ids(tokenizer, "long thought</think>b")))
    rendered = ep.render(
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "long thought</think>b"},
            {"role": "user", "content": "No."},
        ]
    )
    with pytest.raises(PrefixMismatch, match="differs from the 41 tokens so far at token 20"):
        transcript.give_up_to(rendered)
    transcript.give(ep.render_next(transcript, "No."))
    assert "long thought</think>b<|im_end|>\n<|im_start|>user\nNo.<|im_end|>" in tokenizer.decode(transcript.input_ids)


def test_one_different_inherited_token_is_an_error_and_never_a_silent_reuse():
    transcript = Transcript()
    transcript.give([5, 6, 7])
    transcript.sample(sampled([8, 9]))
    with pytest.raises(PrefixMismatch, match="at token 3"):
        transcript.give_up_to([5, 6, 7, 1, 9, 10])
    with pytest.raises(PrefixMismatch, match="at token 4"):
        transcript.give_up_to([5, 6, 7, 8])
    assert transcript.input_ids == [5, 6, 7, 8, 9]
    transcript.give_up_to([5, 6, 7, 8, 9, 10])
    assert transcript.input_ids == [5, 6, 7, 8, 9, 10]
    assert transcript.loss_mask == [False, False, False, True, True, False]


def test_a_template_that_hides_what_follows_a_turn_is_refused():
    tokenizer = chatml_tokenizer("{{ messages[-1]['content'] }}")
    transcript = Transcript(input_ids=[1])
    with pytest.raises(PrefixMismatch, match="does not render an assistant's turn followed by one of 'user'"):
        episode(tokenizer).render_next(transcript, "No.")


def test_the_first_sampled_token_is_trained_and_the_last_prompt_token_is_not():
    tokenizer = load_tokenizer(TINY)
    ep = episode(tokenizer)
    prompt = ep.render([{"role": "user", "content": "abc"}])
    trajectory = ep.trajectory(prompt, sampled(answer_ids(tokenizer, "cba")), 1.0)
    first = int(trajectory.loss_mask.nonzero()[0])
    assert first == len(prompt)
    assert tokenizer.decode(trajectory.input_ids[first]) == "c"
    assert trajectory.loss_mask[first:].all()


def test_a_long_prompt_is_an_explicit_rejection_and_never_cut():
    tokenizer = load_tokenizer(TINY)  # its own model_max_length is 256
    messages = [{"role": "user", "content": "a" * 300}]
    assert len(render(tokenizer, messages)) == 301
    with pytest.raises(RejectedPrompt, match="prompt p has 301 tokens, 255 fit") as caught:
        episode(tokenizer, max_model_len=256).render(messages)
    assert caught.value.reason == "prompt_too_long"
    assert len(episode(tokenizer, max_model_len=302).render(messages)) == 301


@pytest.mark.parametrize("template", ["{{ bos_token }}" + CHATML, None])
def test_a_conversation_has_one_beginning_of_sequence_token(template):
    tokenizer = chatml_tokenizer(template)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    begin = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    assert tokenizer("a").input_ids[0] == begin
    transcript = Transcript()
    transcript.give(render(tokenizer, [{"role": "user", "content": "a"}]))
    transcript.sample(sampled(answer_ids(tokenizer, "b")))
    transcript.give(episode(tokenizer).render_next(transcript, "No."))
    assert transcript.input_ids[0] == begin and transcript.input_ids.count(begin) == 1
