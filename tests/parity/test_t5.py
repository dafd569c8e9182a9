"""T5's encoder and tokenizer against those of transformers.

Each comparison of networks prints its relative error: `pytest -rP tests/parity/test_t5.py`.
"""

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from flax import nnx
from safetensors import safe_open
from tokenizers import models, normalizers, pre_tokenizers, processors, trainers
from transformers.models.t5.modeling_t5 import T5Attention

from sd_tpu.checkpoint import weights
from sd_tpu.checkpoint.config import CheckpointError, T5Config
from sd_tpu.families.t5_tokenizer import T5Tokenizer
from sd_tpu.models import T5EncoderModel
from sd_tpu.models.t5 import relative_buckets
from tests.support.parity import TOLERANCE, assert_agrees, relative
from tests.support.prompts import PROMPTS, SUBJECTS

TINY = dict(
    d_model=32,
    d_kv=12,  # times the heads, it is not d_model
    d_ff=48,
    num_layers=3,
    num_heads=4,
    vocab_size=99,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=20,
    feed_forward_proj="gated-gelu",
    layer_norm_epsilon=1e-3,
)

# --- network ------------------------------------------------------------------------------------


def made(folder: Path, **values) -> transformers.T5EncoderModel:
    """Write a tiny encoder whose parameters all differ, norms' too, and return it."""
    torch.manual_seed(0)
    encoder = transformers.T5EncoderModel(transformers.T5Config(**{**TINY, **values}))
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    encoder.save_pretrained(folder)
    return encoder.eval().requires_grad_(False)


def loaded(folder: Path, dtype=jnp.float32) -> tuple[nnx.GraphDef, weights.Params]:
    config = T5Config.from_dict(json.loads((folder / "config.json").read_text()))
    graph, expected = weights.architecture(T5EncoderModel, config, dtype=dtype)
    return graph, weights.load([folder / "model.safetensors"], expected)


@partial(jax.jit, static_argnums=0)
def encoded(graph: nnx.GraphDef, params: weights.Params, ids: np.ndarray) -> jax.Array:
    return nnx.merge(graph, params)(ids)


@pytest.mark.parametrize("length", [7, 77])
@pytest.mark.parametrize("feed_forward", ["gated-gelu", "relu"])
def test_the_encoder_is_that_of_transformers(tmp_path, feed_forward, length):
    reference = made(tmp_path, feed_forward_proj=feed_forward)
    ids = torch.randint(0, 99, (2, length))
    ids[1, 5:] = 0  # padding, which is seen
    assert_agrees(
        f"T5EncoderModel, {feed_forward}, {length} tokens",
        encoded(*loaded(tmp_path), ids.numpy()),
        reference(ids).last_hidden_state,
    )


def test_every_parameter_counts(tmp_path):
    """None is so small that the comparison would not tell whether it is there."""
    made(tmp_path)
    graph, params = loaded(tmp_path)
    ids = np.random.default_rng(0).integers(0, 99, (2, 40))
    before = encoded(graph, params, ids)
    for name in weights.shapes(params):
        changed = weights.map_named(lambda at, x, name=name: 1.5 * x if at == name else x, params)
        assert relative(encoded(graph, changed, ids), before) > 100 * TOLERANCE, name


@pytest.mark.parametrize("buckets, max_distance", [(32, 128), (8, 20), (4, 2), (5, 3), (33, 100)])
def test_distances_share_buckets_as_in_transformers(buckets, max_distance):
    offsets = torch.arange(600)[None] - torch.arange(600)[:, None]
    np.testing.assert_array_equal(
        relative_buckets(600, buckets, max_distance),
        T5Attention._relative_position_bucket(offsets, True, buckets, max_distance),
    )


@pytest.mark.parametrize("dtype, bound", [("float16", 5e-3), ("bfloat16", 4e-2)])
def test_sixteen_bits_bear_what_is_larger_than_they_can_hold(tmp_path, dtype, bound):
    """As in the largest T5, feed-forward layers add more than float16's 65504."""
    reference = made(tmp_path)
    with torch.no_grad():
        for block in reference.encoder.block:
            block.layer[1].DenseReluDense.wo.weight *= 30_000
    reference.save_pretrained(tmp_path)
    ids = torch.randint(0, 99, (2, 40))
    theirs = reference(ids, output_hidden_states=True)
    assert theirs.hidden_states[-2].abs().max() > 65504
    ours = encoded(*loaded(tmp_path, jnp.dtype(dtype)), ids.numpy())
    assert ours.dtype == dtype
    assert relative(ours, theirs.last_hidden_state) <= bound


def test_names_are_those_of_the_files_of_transformers(tmp_path):
    made(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "np") as file:
        names = {*file.keys()}
    config = T5Config.from_dict(TINY)
    assert {*weights.shapes(weights.architecture(T5EncoderModel, config)[1])} == names
    assert {
        "shared.weight",
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        "encoder.block.2.layer.0.SelfAttention.q.weight",
        "encoder.block.2.layer.0.layer_norm.weight",
        "encoder.block.2.layer.1.DenseReluDense.wi_0.weight",
        "encoder.final_layer_norm.weight",
    } < names
    assert "encoder.block.1.layer.0.SelfAttention.relative_attention_bias.weight" not in names


def test_the_encoder_of_stable_diffusion_3_has_its_size():
    config = T5Config.from_dict(
        dict(
            architectures=["T5EncoderModel"],
            model_type="t5",
            d_model=4096,
            d_kv=64,
            d_ff=10240,
            num_layers=24,
            num_heads=64,
            vocab_size=32128,
            relative_attention_num_buckets=32,
            relative_attention_max_distance=128,
            feed_forward_proj="gated-gelu",
            dense_act_fn="gelu_new",
            is_gated_act=True,
            layer_norm_epsilon=1e-6,
            tie_word_embeddings=False,
        )
    )
    graph, params = weights.architecture(T5EncoderModel, config, dtype=jnp.bfloat16)
    sizes = [leaf.size for leaf in jax.tree.leaves(params)]
    assert (len(sizes), sum(sizes)) == (219, 4_762_310_656)
    out = jax.eval_shape(
        lambda params, ids: nnx.merge(graph, params)(ids),
        params,
        jax.ShapeDtypeStruct((1, 256), jnp.int32),
    )
    assert (out.shape, out.dtype) == ((1, 256, 4096), jnp.bfloat16)


@pytest.mark.parametrize(
    "values, sentence",
    [
        (dict(feed_forward_proj="gated-silu"), "feed_forward_proj='gated-silu' is not supported"),
        (dict(model_type="umt5"), "model_type='umt5' is not supported; expected 't5'"),
        (dict(is_decoder=True), "is_decoder=True is not supported"),
        (dict(dense_act_fn="gelu"), "dense_act_fn='gelu' is not supported"),
        (dict(relative_attention_num_buckets=2), "greater than or equal to 4"),
        (dict(relative_attention_max_distance=8), "expected more than 8"),
    ],
)
def test_a_config_of_another_network_is_refused_by_name(values, sentence):
    with pytest.raises(CheckpointError, match=sentence):
        T5Config.from_dict(values)


# --- tokenizer ----------------------------------------------------------------------------------

NORMALIZER = normalizers.Sequence(
    [
        normalizers.NFKC(),
        normalizers.Strip(left=False, right=True),
        normalizers.Replace(tokenizers.Regex(" {2,}"), "▁"),
    ]
)
METASPACE = pre_tokenizers.Metaspace()


@pytest.fixture(scope="module")
def trained() -> str:
    """A small unigram tokenizer with T5's tokens and steps, as JSON."""
    special = ["<pad>", "</s>", "<unk>"]
    words = tokenizers.Tokenizer(models.Unigram())
    words.normalizer, words.pre_tokenizer = NORMALIZER, METASPACE
    words.train_from_iterator(
        SUBJECTS * 3,
        trainers.UnigramTrainer(
            vocab_size=400, special_tokens=special, unk_token="<unk>", show_progress=False
        ),
    )
    words.add_special_tokens([*special, "<extra_id_1>", "<extra_id_0>"])
    words.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return words.to_str()


@pytest.fixture
def folder(trained, tmp_path) -> Path:
    """The trained tokenizer as a folder."""
    (tmp_path / "tokenizer.json").write_text(trained)
    return tmp_path


def theirs(tokenizer, length: int) -> np.ndarray:
    return tokenizer(
        PROMPTS,
        padding="max_length",
        max_length=length,
        truncation=True,
        add_special_tokens=True,
        return_tensors="np",
    ).input_ids


@pytest.mark.parametrize("length", [1, 2, 77, 256])
def test_ids_are_those_that_transformers_makes_of_the_file(folder, length):
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token="</s>", pad_token="<pad>"
    )
    ours = T5Tokenizer.from_folder(folder).ids(PROMPTS, length)
    assert len(PROMPTS) >= 1000 and ours.shape == (len(PROMPTS), length) and ours.dtype == np.int32
    np.testing.assert_array_equal(ours, theirs(reference, length))
    assert (ours == 2).any() or length < 77, "no unknown character was among them"


@pytest.mark.parametrize("length", [8, 77, 512])
def test_ids_are_those_of_t5s_own_class(trained, tmp_path, length):
    """It keeps no normalizer but a precompiled one, and splits at all white space."""
    words = tokenizers.Tokenizer.from_str(json.dumps(json.loads(trained) | {"normalizer": None}))
    words.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), METASPACE])
    T5Tokenizer(words).save(tmp_path)
    reference = transformers.T5TokenizerFast.from_pretrained(tmp_path)
    assert len(reference) == words.get_vocab_size()
    ours = T5Tokenizer.from_folder(tmp_path).ids(PROMPTS, length)
    np.testing.assert_array_equal(ours, theirs(reference, length))


def test_a_saved_tokenizer_is_read_again_by_both(folder, tmp_path):
    ours = T5Tokenizer.from_folder(folder)
    ours.save(tmp_path / "saved")
    again = T5Tokenizer.from_folder(tmp_path / "saved")
    np.testing.assert_array_equal(again.ids(PROMPTS, 77), ours.ids(PROMPTS, 77))
    automatic = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert isinstance(automatic, transformers.T5TokenizerFast)
    assert (automatic.pad_token_id, automatic.eos_token_id, automatic.unk_token_id) == (0, 1, 2)
    words = automatic("a cat, at dawn").input_ids
    assert ours.ids(["a cat, at dawn"], len(words))[0].tolist() == words


def test_settings_of_the_file_neither_cut_nor_fill_up(trained, tmp_path):
    words = tokenizers.Tokenizer.from_str(trained)
    words.enable_truncation(5)
    words.enable_padding(length=5, pad_token="<pad>")
    words.save(str(tmp_path / "tokenizer.json"))
    ours = T5Tokenizer.from_folder(tmp_path).ids(["a cat " * 9, ""], 12)
    assert (ours[0] > 1).sum() == 11 and ours[1].tolist() == [1] + 11 * [0]


def test_without_a_tokenizer_json_it_is_t5s_own(tmp_path):
    """Its ids are those of transformers on a thousand prompts, and those that are published."""
    ours = T5Tokenizer.from_folder(tmp_path)
    assert ours.ids(["a cat"], 5).tolist() == [[3, 9, 1712, 1, 0]]
    ours.save(tmp_path / "saved")
    reference = transformers.T5TokenizerFast.from_pretrained(tmp_path / "saved")
    np.testing.assert_array_equal(ours.ids(PROMPTS, 77), theirs(reference, 77))


@pytest.mark.parametrize(
    "content, sentence",
    [
        ("{", r"tokenizer\.json cannot be read \("),
        ("{}", r"tokenizer\.json cannot be read \("),
        (tokenizers.Tokenizer(models.BPE()).to_str(), r"tokenizer\.json is not that of T5"),
    ],
)
def test_a_tokenizer_json_that_is_none_of_t5_is_refused(tmp_path, content, sentence):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=sentence):
        T5Tokenizer.from_folder(tmp_path)
