"""What a text encoder takes of a picture's two prompts, and what it makes of them."""

import jax
import numpy as np
import pytest
import torch

from sd_tpu.families import text
from sd_tpu.families.prompt import PromptError
from sd_tpu.families.text import PromptOptions

LONG = "a very long prompt about a cat, " * 12  # 97 tokens


def encoded(sd1, prompt, negative="", bias=0.0, clip_skip=1, **options) -> np.ndarray:
    """The conditions [2, n 77, D] of a picture, with a bias at the end of the encoder."""
    pipeline, params = sd1
    inputs = pipeline.prompt_inputs(
        prompt, negative, clip_skip=clip_skip, options=PromptOptions(**options)
    )
    model = pipeline.model.for_inputs(inputs)
    of_encoder = jax.tree.map(np.array, {"text_encoder": params["text_encoder"]})
    of_encoder["text_encoder"]["text_model"]["final_layer_norm"]["bias"] += np.float32(bias)
    cond = jax.jit(model.encode_prompt)(of_encoder, inputs)
    assert cond["text"].shape == model.cond_shapes["text"].shape
    return np.asarray(cond["text"])


def reference(pipeline, *texts: str, skip: int = 1) -> np.ndarray:
    """PyTorch's embeddings [B, 77, D] of texts of one chunk each, after the final norm."""
    ids = pipeline.tokenizer(
        list(texts), padding="max_length", max_length=77, return_tensors="pt"
    ).input_ids
    encoder = pipeline.text_encoder
    with torch.no_grad():
        found = encoder(ids, output_hidden_states=True).hidden_states[-skip]
        return encoder.final_layer_norm(found).numpy()


def test_a_plain_prompt_gives_what_the_encoder_gives(sd1, torch_pipelines):
    got = encoded(sd1, "a cat: 3 o'clock", "ugly")
    want = reference(torch_pipelines["sd1"], "ugly", "a cat: 3 o'clock")
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("skip", [2, 3])
def test_clip_skip_leaves_layers_out_of_both_texts_but_not_the_final_norm(
    loaded, layout, torch_pipelines, skip
):
    want = reference(torch_pipelines[layout], "ugly", "a cat", skip=skip)
    got = encoded(loaded, "a cat", "ugly", clip_skip=skip)
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert np.abs(got - encoded(loaded, "a cat", "ugly")).max() > 0.1


@pytest.mark.parametrize("skip", [5, 6, 12])
def test_clip_skip_ends_where_there_are_no_more_layers(sd1, skip):
    np.testing.assert_array_equal(
        encoded(sd1, "a cat", clip_skip=skip), encoded(sd1, "a cat", clip_skip=4)
    )


def test_plain_inputs_are_those_of_a_prompt_without_grammar(sd1):
    pipeline, _ = sd1
    plain = pipeline.model.plain_inputs(*pipeline.tokenizers["tokenizer"](["a cat", "ugly"]))
    jax.tree.map(np.testing.assert_array_equal, plain, pipeline.prompt_inputs("a cat", "ugly"))


def test_emphasis_multiplies_the_tokens_and_restores_the_mean(sd1, torch_pipelines):
    got = encoded(sd1, "a (red:1.4) cat", bias=0.3)  # else the mean is 0, to rounding
    plain = reference(torch_pipelines["sd1"], "", "a red cat") + np.float32(0.3)
    weights = np.ones((2, 77, 1), np.float32)
    weights[1, 2] = 1.4
    weighted = plain * weights
    weighted[1] *= plain[1].mean() / weighted[1].mean()
    np.testing.assert_allclose(got, weighted, atol=1e-4)
    np.testing.assert_array_equal(got[0], encoded(sd1, "a red cat", bias=0.3)[0])


def test_chunks_follow_one_another_and_the_shorter_text_is_filled_up(sd1, torch_pipelines):
    got = encoded(sd1, "a cat BREAK in a hat", "ugly")
    first, second, ugly, empty = reference(torch_pipelines["sd1"], "a cat", "in a hat", "ugly", "")
    np.testing.assert_allclose(
        got, [np.concatenate([ugly, empty]), np.concatenate([first, second])], atol=1e-5
    )


def test_what_lies_beyond_the_last_chunk_is_cut_and_told(sd1):
    pipeline, _ = sd1
    tokenizer = pipeline.tokenizers["tokenizer"]
    assert pipeline.prompt_inputs(LONG)["text_encoder"]["ids"].shape == (2, 2, 77)
    options = PromptOptions(chunks=1)
    inputs = pipeline.prompt_inputs(f"{LONG} End", options=options)["text_encoder"]
    assert inputs["ids"].shape == (2, 1, 77)
    told = text.count(tokenizer, f"{LONG} End", options)
    assert told.tokens > told.limit == 77 and told.lost.endswith("End")
    assert text.count(tokenizer, "(a:1.3) cat <lora:x:1>", options) == text.Count(4, 77, "")
    assert text.count(tokenizer, LONG, PromptOptions()).limit == 2 * 77


def test_an_embeddings_vectors_take_the_place_of_its_word(sd1, torch_pipelines):
    """Against transformers with the vectors as rows of its table."""
    vectors = np.random.default_rng(0).standard_normal((2, 32)).astype(np.float32)
    got = encoded(
        sd1, "a hatlike cat", "hatlike", embeddings={"hatlike": {"text_encoder": vectors}}
    )
    encoder = torch_pipelines["sd1"].text_encoder
    table = encoder.get_input_embeddings().weight
    ids = np.full((2, 77), 49407)
    ids[:, :3], ids[1, :5] = [49406, 5, 7], [49406, 320, 5, 7, 2368]
    kept = table.detach()[[5, 7]].clone()
    with torch.no_grad():
        table[[5, 7]] = torch.tensor(vectors)
        want = encoder(torch.tensor(ids))[0].numpy()
        table[[5, 7]] = kept
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_more_vectors_than_fit_are_one_sentence(sd1):
    many = {f"e{i}": {"text_encoder": np.zeros((40, 32), np.float32)} for i in range(2)}
    options = PromptOptions(embeddings=many)
    assert sd1[0].prompt_inputs("e1 e1", "e1", options=options)
    with pytest.raises(PromptError, match="80 vectors; a picture has room for 75"):
        sd1[0].prompt_inputs("e0", "e1", options=options)
