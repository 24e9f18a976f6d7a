"""What counts as the right answer: numbers, word problems, reasoning-gym tasks."""

from __future__ import annotations

import json
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.rewards import gsm8k, numeric, reasoning_gym


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("5-3", "3"),
        ("it is -5.", "-5"),
        ("-1,234.50 dollars", "-1234.50"),
        ("1,000,000", "1000000"),
        ("10, 20", "20"),
        ("$18", "18"),
        ("= .5", "0.5"),
        ("3 + 4 = 7\n", "7"),
        ("none", None),
        ("v2", None),
        ("", None),
    ],
)
def test_last_number(text, number):
    assert numeric.last_number(text) == (None if number is None else Decimal(number))


@given(st.integers(-(10**12), 10**12), st.sampled_from(["{}", "{:,}", "{}.0", "so {} ", "3 then {}.", "= {}\n"]))
def test_a_written_number_scores_and_its_successor_does_not(value, form):
    assert numeric.reward("p", form.format(value), [], [], answer=value) == 1.0
    assert numeric.reward("p", form.format(value), [], [], answer=str(value + 1)) == 0.0


def test_a_reference_that_is_no_number_is_an_error():
    for function in (numeric.reward, gsm8k.reward):
        with pytest.raises(ValueError, match="reference answer 'nan?.*' is not a number"):
            function("p", "3", [], [], answer="nan")


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("The answer is 18.", 1.0),
        ("5 + 13 = 18", 1.0),
        ("$18.00", 1.0),
        ("18 eggs remain", 1.0),
        ("\\boxed{18} and not 20", 1.0),
        ("first \\boxed{20}, no: \\boxed{18}", 1.0),
        ("\\boxed{18 \\text{ dollars}}", 1.0),
        ("\\boxed{\\frac{36}{2}}", 1.0),
        ("20 is wrong\n#### $18\nthat is 3 more", 1.0),
        ("#### 18 no, #### 20", 0.0),
        ("18 eggs, then 20", 0.0),
        ("\\boxed{20} and 18", 0.0),
        ("no number", 0.0),
        ("", 0.0),
        ("####", 0.0),
        ("\\boxed{" * 2000 + "18", 0.0),
        ("\\boxed{9^{9^{9^9}}}", 0.0),
        ("\\boxed{1000000!}", 0.0),
        ("9**9**9**9**9", 0.0),
    ],
)
def test_word_problem_answers(completion, score):
    assert gsm8k.reward("p", completion, [], [], answer="He has 20 - 2 = <<20-2=18>>18.\n#### 18") == score


def test_thousands_and_percents():
    assert gsm8k.reward("p", "1,234,567 people", [], [], answer="#### 1,234,567") == 1.0
    assert gsm8k.reward("p", "so 50%", [], [], answer="#### 50") == 1.0


def test_answers_are_taken_out_of_the_text():
    for text, answer in {
        " 12 ": "12",
        "<answer>1</answer> no <answer> 2\n</answer> end": "2",
        "I think <answer>1</answer></think>the answer: 3": "the answer: 3",
        "so \\boxed{x + 1}.": "x + 1",
        "</think>": "",
    }.items():
        assert reasoning_gym.extract_answer(text) == answer


def test_partial_credit_and_exact_accuracy():
    row = {"task": "spell_backward", "task_config": {}, "entry": {"answer": "sun", "metadata": {}}}
    assert reasoning_gym.reward("p", "sun", [], [], **row) == 1.0
    assert reasoning_gym.reward("p", "sum", [], [], **row) == pytest.approx(2 / 3)
    assert [reasoning_gym.exact("p", text, [], [], **row) for text in ("sun", "sum", "suns")] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "junk", ["junk", "12 apples", "2 × x", "9" * 5000, "", "½", "{}", "[1]", "1e400", "1/0", '[{"a": 1}]']
)
@pytest.mark.parametrize("task", sorted(reasoning_gym.ANSWER_FORMS))
def test_junk_scores_zero_where_the_task_itself_would_raise(task, junk):
    import reasoning_gym as gym

    entry = reasoning_gym.pack(gym.create_dataset(task, size=1, seed=1)[0])
    score = reasoning_gym.reward("p", junk, [], [], task=task, task_config={}, entry=entry)
    assert score == 0.0


def test_factorisations_in_any_order_and_spacing_score():
    row = {"task": "prime_factorization", "task_config": {}, "entry": {"answer": "2 × 3 × 3", "metadata": {}}}
    assert reasoning_gym.reward("p", "<answer>3×2 × 3</answer>", [], [], **row) == 1.0
    assert reasoning_gym.reward("p", "2 × 9", [], [], **row) == 0.5


JSON_LIKE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(JSON_LIKE)
def test_an_entry_survives_json_exactly(value):
    def typed(item):
        return (type(item), [typed(x) for x in item]) if isinstance(item, list | tuple) else item

    back = reasoning_gym.unpack(json.loads(json.dumps(reasoning_gym.pack(value))))
    assert back == value and typed(back) == typed(value)


def test_what_json_cannot_hold_is_named():
    with pytest.raises(TypeError, match=r"Fraction\(1, 2\), a Fraction, which JSON cannot hold"):
        reasoning_gym.pack({"a": [Fraction(1, 2)]})
