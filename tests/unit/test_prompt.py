"""A1111's prompt grammar, chunks of 75 tokens, and emphasis."""

import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sd_tpu.families import prompt
from sd_tpu.families.prompt import Lora, PromptError, parse


def fragments(text: str) -> list[tuple[str, float]]:
    (section,) = parse(text).sections
    return [(fragment.text, pytest.approx(fragment.weight)) for fragment in section]


def words(text: str):
    """A tokenizer whose tokens are the words and signs, by their numbers."""
    found = list(re.finditer(r"\w+|[^\w\s]", text))
    return [len(match[0]) for match in found], [match.span() for match in found]


# --- grammar ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, expected",
    [
        ("a cat, sitting: 3 o'clock", [("a cat, sitting: 3 o'clock", 1.0)]),
        ("", []),
        ("an (important) word", [("an ", 1.0), ("important", 1.1), (" word", 1.0)]),
        ("(a:1.3)", [("a", 1.3)]),
        ("(a: 1.3 )(b:.5)(c:2.)(d:-1)", [("a", 1.3), ("b", 0.5), ("c", 2.0), ("d", -1.0)]),
        ("[a]", [("a", 1 / 1.1)]),
        ("((a))", [("a", 1.21)]),
        ("([a])", [("a", 1.0)]),
        ("(a [b] c:2)", [("a ", 2.0), ("b", 2 / 1.1), (" c", 2.0)]),
        ("(unnecessary)(parens)", [("unnecessaryparens", 1.1)]),
        (r"\(literal\] \\ \[", [("(literal] \\ [", 1.0)]),
        (r"a\b", [("ab", 1.0)]),
        (r"(a\):1.5)", [("a)", 1.5)]),
        ("(unbalanced", [("unbalanced", 1.1)]),
        ("x [unbalanced (twice", [("x ", 1.0), ("unbalanced ", 1 / 1.1), ("twice", 1.0)]),
        ("a) b] c:1.3)", [("a) b] c:1.3)", 1.0)]),
        ("(a:1.2.3)", [("a:1.2.3", 1.1)]),
        ("(a:b)", [("a:b", 1.1)]),
        ("(a [b) c]", [("a ", 1.1), ("b", 1.0), (" c", 1 / 1.1)]),
        (
            "a (((house:1.3)) [on] a (hill:0.5), sun, (((sky))).",
            [
                ("a ", 1.0),
                ("house", 1.573),
                (" ", 1.1),
                ("on", 1.0),
                (" a ", 1.1),
                ("hill", 0.55),
                (", sun, ", 1.1),
                ("sky", 1.4641),
                (".", 1.1),
            ],
        ),
    ],
)
def test_brackets_weigh_as_in_a1111(text, expected):
    assert fragments(text) == expected


def test_break_divides_and_emphasis_goes_on_across_it():
    sections = parse("a (b BREAK  c) breakfast, BREAKFAST\nBREAK\nd").sections
    assert [[(f.text, round(f.weight, 5)) for f in section] for section in sections] == [
        [("a ", 1.0), ("b", 1.1)],
        [("c", 1.1), (" breakfast, BREAKFAST", 1.0)],
        [("d", 1.0)],
    ]


def test_loras_are_taken_out_of_the_text():
    parsed = parse("a <lora:my style, v1.5 (x):0.8>(cat<lora:b>:1.2) <lora:c:-1>")
    assert parsed.loras == (Lora("my style, v1.5 (x)", 0.8), Lora("b", 1.0), Lora("c", -1.0))
    assert [(f.text, f.weight) for f in parsed.sections[0]] == [("a ", 1), ("cat", 1.2), (" ", 1)]


@pytest.mark.parametrize(
    "text", ["<lora:>", "<lora: :1>", "<lora:a:b>", "<lora:a:1:2>", "<lora:a:nan>", "<lora:a:1e9>"]
)
def test_a_lora_without_name_or_strength_is_one_sentence(text):
    with pytest.raises(PromptError, match=re.escape(text)):
        parse(f"a cat {text}")


@pytest.mark.parametrize(
    "text",
    [
        "<hypernet:a:1>",
        "<lyco:a:0.5>",
        "[cat:dog:0.5]",
        "[dog:10]",
        "[(cat):.5 ]",
        "[cat::0.5]",
        "[cat|",
        "[[cat]:dog:0.5]",
    ],
)
def test_what_a1111_would_do_and_is_not_done_here_is_one_sentence(text):
    with pytest.raises(PromptError, match=r"not done|nothing that a prompt can ask for"):
        parse(f"a {text}, sitting")


@pytest.mark.parametrize(
    "text",
    [
        r"\[cat|dog\]",
        r"a \[b:0.5\]",
        "a|b",
        "[a: b]",
        "a < b:c",
        "<3 :0.5]",
        "[a] b:0.5]",
        "(a:0.5)",
    ],
)
def test_other_texts_with_such_signs_are_drawn(text):
    assert parse(text).sections[0]


@pytest.mark.parametrize("text", ["(a:101)", "(" * 4000 + "a", "(a:" + "9" * 400 + ")"])
def test_absurd_weights_are_one_sentence(text):
    with pytest.raises(PromptError, match=r"'a' a weight of .*; weights go up to 100"):
        parse(text)


@given(st.text("ab ()[]:1.\\BREAK<>lor\n", max_size=60))
def test_any_text_is_parsed_or_refused_in_a_sentence(text):
    try:
        parsed = parse(text)
    except PromptError:
        return
    assert all(f.text for section in parsed.sections for f in section)
    divided = prompt.chunks(parsed, words, 3)
    assert 1 <= len(divided.chunks) <= 3


@given(
    st.text(st.characters(exclude_characters="()[]\\<"), max_size=60).filter(
        lambda text: "BREAK" not in text
    )
)
def test_text_without_signs_is_one_fragment_as_it_is(text):
    parsed = parse(text)
    assert "".join(f.text for f in parsed.sections[0]) == text and len(parsed.sections[0]) <= 1


# --- chunks -------------------------------------------------------------------------------------


def sizes(text: str, most: int = 10, **options) -> list[int]:
    return [len(chunk.ids) for chunk in prompt.chunks(parse(text), words, most, **options).chunks]


def test_chunks_hold_75_tokens():
    assert sizes("a " * 75) == [75]
    assert sizes("a " * 76) == [75, 1]
    assert sizes("a, " * 100) == [75, 75, 50]
    assert sizes("") == [0]


def test_break_begins_a_chunk_and_may_leave_one_empty():
    assert sizes("a b BREAK c") == [2, 1]
    assert sizes("a BREAK") == [1]
    assert sizes("BREAK a") == [0, 1]
    assert sizes("a BREAK BREAK b") == [1, 0, 1]
    assert sizes("a " * 75 + "BREAK b") == [75, 1]


def test_what_lies_beyond_the_last_chunk_is_told():
    text = "a " * 74 + "cat (dog and) bird"
    divided = prompt.chunks(parse(text), words, 1)
    assert [len(chunk.ids) for chunk in divided.chunks] == [75]
    assert (divided.tokens, divided.lost) == (78, "dog and bird")
    assert prompt.chunks(parse(text), words, 2).lost == ""


def test_weights_go_with_their_tokens():
    (chunk,) = prompt.chunks(parse("a (bb, c:1.5) d"), words, 3).chunks
    assert chunk.ids == (1, 2, 1, 1, 1)
    assert chunk.weights == (1.0, 1.5, 1.5, 1.5, 1.0)


EMBEDDINGS = {"easy-negative": 2, "Bad": 1, "bad hands v4": 3, "<cat-toy>": 1}


@pytest.mark.parametrize(
    "text, found",
    [
        ("bad", {0: ("Bad", 0)}),
        ("x,bad,y", {2: ("Bad", 0)}),
        ("badly, bad2, _bad, sobad", {}),
        ("EASY-negative", {0: ("easy-negative", 0), 1: ("easy-negative", 1)}),
        ("(bad hands v4:1.3)", {i: ("bad hands v4", i) for i in range(3)}),
        ("bad hands", {0: ("Bad", 0)}),
        ("a <cat-toy>.", {1: ("<cat-toy>", 0)}),
    ],
)
def test_an_embeddings_name_stands_for_its_vectors(text, found):
    (chunk,) = prompt.chunks(parse(text), words, 3, EMBEDDINGS).chunks
    assert chunk.vectors == found
    assert all(chunk.ids[index] == 0 for index in found)


def test_an_embedding_is_not_divided():
    assert sizes("a " * 73 + "bad hands v4", embeddings=EMBEDDINGS) == [73, 3]
    assert sizes("a " * 72 + "bad hands v4", embeddings=EMBEDDINGS) == [75]


def test_fifty_thousand_embeddings_do_not_slow_a_prompt():
    names = {f"embedding-{number}": 1 for number in range(50_000)}
    text = "a cat embedding-777 " * 200
    divided = prompt.chunks(parse(text), words, 100, names)
    assert sum(len(chunk.vectors) for chunk in divided.chunks) == 200
    begun = time.perf_counter()
    prompt.chunks(parse("(a)b" * 1000), words, 100, names)  # 2,000 fragments
    assert time.perf_counter() - begun < 2


def test_arrays_are_filled_up_by_empty_chunks():
    divided = prompt.chunks(parse("(a:2) bb BREAK ccc"), words, 3)
    ids, weights = prompt.arrays(divided, 3, begin=90, end=91, pad=0)
    assert ids.shape == weights.shape == (3, 77)
    assert ids.dtype == np.int32 and weights.dtype == np.float32
    np.testing.assert_array_equal(
        ids[:, :5], [[90, 1, 2, 91, 0], [90, 3, 91, 0, 0], [90, 91, 0, 0, 0]]
    )
    assert not ids[:, 5:].any()
    np.testing.assert_array_equal(weights[0, :4], [1, 2, 1, 1])
    assert (weights[1:] == 1).all() and (weights[0, 2:] == 1).all()
    assert (
        prompt.arrays(prompt.chunks(parse("a " * 75), words, 1), 1, 90, 91, 91)[0][0, [0, -1]]
        == [90, 91]
    ).all()


# --- emphasis -----------------------------------------------------------------------------------


def test_weights_multiply_and_the_mean_of_each_block_is_restored():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3, 77, 8)).astype(np.float32) + 0.5
    weights = rng.uniform(0.5, 1.5, (2, 3, 77)).astype(np.float32)
    out = np.asarray(jax.jit(prompt.weighted)(x, weights))
    for block in np.ndindex(2, 3):
        scaled = x[block] * weights[block][:, None]
        expected = scaled * (x[block].mean(dtype=np.float64) / scaled.mean(dtype=np.float64))
        np.testing.assert_allclose(out[block], expected, rtol=1e-4, atol=1e-5)
        assert out[block].mean() == pytest.approx(x[block].mean(), rel=1e-4)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_block_without_emphasis_is_left_bit_for_bit(dtype):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 77, 8)), dtype)
    weights = np.ones((2, 77), np.float32)
    weights[1, 3] = 1.1
    out = jax.jit(prompt.weighted)(x, weights)
    assert out.dtype == dtype
    assert jnp.array_equal(out[0], x[0]) and not jnp.array_equal(out[1], x[1])
    assert np.isfinite(np.asarray(prompt.weighted(jnp.zeros((77, 8)), weights[1]))).all()
