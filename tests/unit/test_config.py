"""A checkpoint's JSON files: what is read, and what is refused by name."""

import json
import os

import pytest

from sd_tpu.checkpoint.card import GUIDE_PROMPTS, ModelCard
from sd_tpu.checkpoint.config import (
    CheckpointError,
    ControlNetConfig,
    PipelineConfig,
    ProjectedTextEncoderConfig,
    SchedulerConfig,
    TextEncoderConfig,
    TinyVAEConfig,
    TrainingConfig,
    UNetConfig,
    VAEConfig,
    read_json,
)
from sd_tpu.checkpoint.weights import opened
from sd_tpu.http.access import read_keys
from sd_tpu.reading import read_bytes
from sd_tpu.styles import Styles


def test_sd_1_is_what_is_assumed_where_a_config_is_silent():
    config = UNetConfig.from_dict({"_class_name": "UNet2DConditionModel", "act_fn": "silu"})
    assert config == UNetConfig().canonical()
    assert config.heads == (8, 8, 8, 8)
    assert VAEConfig.from_dict({}).downscale == 8


@pytest.mark.parametrize(
    "values, heads",
    [
        (dict(attention_head_dim=[5, 10, 20, 20]), (5, 10, 20, 20)),
        (dict(attention_head_dim=5), (5, 5, 5, 5)),
        (dict(attention_head_dim=8, num_attention_heads=[5, 10, 20, 20]), (5, 10, 20, 20)),
        (dict(attention_head_dim=8, num_attention_heads=None), (8, 8, 8, 8)),
    ],
)
def test_heads_are_a_number_or_a_list(values, heads):
    assert UNetConfig.from_dict(values).heads == heads


@pytest.mark.parametrize(
    "config, name, value",
    [
        (UNetConfig, "addition_embed_type", "text_image"),  # Kandinsky
        (UNetConfig, "mid_block_type", "UNetMidBlock2DSimpleCrossAttn"),
        (UNetConfig, "class_embed_type", "timestep"),
        (UNetConfig, "num_class_embeds", 1000),  # the upscaler
        (UNetConfig, "encoder_hid_dim", 4096),
        (UNetConfig, "time_embedding_dim", 512),
        (UNetConfig, "resnet_time_scale_shift", "scale_shift"),
        (UNetConfig, "act_fn", "gelu"),
        (UNetConfig, "only_cross_attention", True),
        (UNetConfig, "dual_cross_attention", True),
        (UNetConfig, "conv_in_kernel", 1),
        (UNetConfig, "cross_attention_dim", [768, 768, 768, 768]),
        (VAEConfig, "scaling_factor", "0.18"),
        (VAEConfig, "mid_block_add_attention", False),
        (TextEncoderConfig, "hidden_act", "relu"),
        (TinyVAEConfig, "act_fn", "silu"),
        (ControlNetConfig, "global_pool_conditions", True),  # shuffle
        (ControlNetConfig, "conditioning_channels", 4),
        (ControlNetConfig, "controlnet_conditioning_channel_order", "gbr"),
        (ControlNetConfig, "only_cross_attention", True),
        (TinyVAEConfig, "upsampling_scaling_factor", 4),
    ],
)
def test_what_other_architectures_have_is_refused_by_name(config, name, value):
    with pytest.raises(CheckpointError) as caught:
        config.from_dict({name: value})
    assert name in str(caught.value) and repr(value) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("config", [UNetConfig, ControlNetConfig])
@pytest.mark.parametrize("kinds", [["AttnDownBlock2D"] * 4, [3, None], "AttnDownBlock2D"])
def test_unknown_blocks_are_refused_by_name(config, kinds):
    with pytest.raises(CheckpointError, match="down_block_types"):
        config.from_dict(dict(down_block_types=kinds))


@pytest.mark.parametrize(
    "values",
    [
        dict(block_out_channels=[320, 640]),
        dict(attention_head_dim=[5, 10]),
        dict(down_block_types=["DownBlock2D"]),
        dict(layers_per_block=[2, 2]),
        dict(transformer_layers_per_block=[1, 2, 10]),
    ],
)
def test_lists_of_different_lengths_are_refused(values):
    with pytest.raises(CheckpointError, match="differ in length"):
        UNetConfig.from_dict(values)


@pytest.mark.parametrize(
    "said, force", [({}, True), ({"force_zeros_for_empty_prompt": None}, None)]
)
def test_nothing_said_of_zeros_for_an_empty_prompt_is_true_and_null_is_not(said, force):
    assert PipelineConfig.from_dict(said).force_zeros_for_empty_prompt is force


@pytest.mark.parametrize(
    "config, name, value",
    [
        (TextEncoderConfig, "num_hidden_layers", 10**9),
        (TextEncoderConfig, "hidden_size", True),
        (ProjectedTextEncoderConfig, "eos_token_id", [1, 2]),
        (UNetConfig, "layers_per_block", 10**9),
        (UNetConfig, "layers_per_block", [2, 2, 2, 10**9]),
        (UNetConfig, "transformer_layers_per_block", -1),
        (UNetConfig, "norm_num_groups", 0),
        (UNetConfig, "norm_eps", float("nan")),
        (UNetConfig, "block_out_channels", [320] * 10**4),
        (UNetConfig, "block_out_channels", []),
        (TrainingConfig, "sample_size", False),
        (PipelineConfig, "force_zeros_for_empty_prompt", "no"),
        (UNetConfig, "use_linear_projection", "yes"),
        (UNetConfig, "time_cond_proj_dim", 255),
        (UNetConfig, "attention_head_dim", [[[[[[[[8]]]]]]]]),
        (VAEConfig, "scaling_factor", float("nan")),
        (VAEConfig, "scaling_factor", 0),
        (VAEConfig, "scaling_factor", True),
        (VAEConfig, "latents_std", [float("inf")] * 4),
        (TinyVAEConfig, "num_decoder_blocks", [1, 2.5]),
        (SchedulerConfig, "num_train_timesteps", 10**9),
        (SchedulerConfig, "num_train_timesteps", True),
        (SchedulerConfig, "beta_start", float("nan")),
        (SchedulerConfig, "beta_end", 1.5),
        (SchedulerConfig, "trained_betas", [0.1, -0.1]),
        (SchedulerConfig, "trained_betas", "0.1"),
        (SchedulerConfig, "steps_offset", 1.5),
        (SchedulerConfig, "_class_name", 3),
        (SchedulerConfig, "timestep_scaling", -1),
        (ModelCard, "steps", 0),
        (ModelCard, "name", " "),
        (ModelCard, "name", "x" * 1001),
        (ModelCard, "prompts", "one"),
    ],
)
def test_values_out_of_bounds_or_of_another_type_are_a_sentence(config, name, value):
    with pytest.raises(CheckpointError) as caught:
        config.from_dict({"name": "m", name: value})
    message = str(caught.value)
    assert f"{name}={repr(value)[:80]}" in message
    assert "\n" not in message and message.endswith(".") and len(message) < 250


@pytest.mark.parametrize(
    "config, values, message",
    [
        (TextEncoderConfig, dict(hidden_size=770), "does not divide"),
        (
            UNetConfig,
            dict(block_out_channels=[320, 640, 1280, 1281]),
            "1281 channels do not divide",
        ),
        (UNetConfig, dict(attention_head_dim=7), "into 7 heads"),
        (UNetConfig, dict(addition_embed_type="text_time"), "needs addition_time_embed_dim"),
        (UNetConfig, dict(transformer_layers_per_block=[1, [1, 1], 1, 1]), "needs reverse"),
        (
            UNetConfig,
            dict(
                transformer_layers_per_block=[1, [1], 1, 1],
                reverse_transformer_layers_per_block=[1, 1, 1, 1],
            ),
            "differ",
        ),
        (VAEConfig, dict(norm_num_groups=33), "do not divide"),
        (VAEConfig, dict(latents_mean=[0, 0, 0, 0]), "come together"),
        (VAEConfig, dict(latents_mean=[0, 0], latents_std=[1, 1]), "for each channel"),
        (TinyVAEConfig, dict(num_decoder_blocks=[3, 3]), "differ in length"),
        (
            TinyVAEConfig,
            dict(decoder_block_out_channels=[64, 32, 32, 32]),
            "different levels differ",
        ),
    ],
)
def test_values_that_do_not_go_together_are_a_sentence(config, values, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        config.from_dict(values)
    assert str(caught.value).startswith(config.__name__) and "\n" not in str(caught.value)


def test_a_middle_that_is_null_is_left_out_and_other_nulls_are_as_if_absent():
    config = UNetConfig.from_dict(
        dict(
            mid_block_type=None,
            norm_num_groups=None,
            only_cross_attention=None,
            class_embeddings_concat=None,
        )
    )
    assert config == UNetConfig(mid_block_type=None).canonical()


@pytest.mark.parametrize(
    "values, down, middle, up",
    [
        (dict(), [[1, 1]] * 3, 1, [[1] * 3] * 3),
        (
            dict(transformer_layers_per_block=[1, 2, 10]),
            [[1, 1], [2, 2], [10, 10]],
            10,
            [[10] * 3, [2] * 3, [1] * 3],
        ),
        (
            dict(
                transformer_layers_per_block=[0, [2, 2], [4, 5]],
                reverse_transformer_layers_per_block=[[4, 4, 10], [2, 1, 1], 1],
            ),
            [[0, 0], [2, 2], [4, 5]],
            4,
            [[4, 4, 10], [2, 1, 1], [1] * 3],
        ),
        (dict(layers_per_block=[1, 2, 3]), [[1], [1, 1], [1] * 3], 1, [[1] * 4, [1] * 3, [1] * 2]),
    ],
)
def test_depths_of_transformers_are_a_number_or_a_list_or_nested(values, down, middle, up):
    config = UNetConfig.from_dict(
        dict(
            block_out_channels=[320, 640, 1280],
            down_block_types=["CrossAttnDownBlock2D"] * 3,
            up_block_types=["CrossAttnUpBlock2D"] * 3,
        )
        | values
    )
    assert [*map(list, config.down_depths)] == down
    assert config.mid_depth == middle
    assert [*map(list, config.up_depths)] == up


@pytest.mark.parametrize(
    "kind, one, other, third",
    [
        (
            UNetConfig,
            dict(attention_head_dim=8, layers_per_block=2),
            dict(
                num_attention_heads=[8] * 4,
                layers_per_block=[2] * 4,
                sample_size=9,
                transformer_layers_per_block=[1, 1, 1, [1, 1]],
                reverse_transformer_layers_per_block=[[7] * 3, [1] * 3, 1, 1],
            ),
            dict(transformer_layers_per_block=[1, 1, 1, 2]),
        ),  # which the middle has as well
        (TextEncoderConfig, dict(projection_dim=768), dict(eos_token_id=2), dict(hidden_size=1536)),
        (
            ProjectedTextEncoderConfig,
            dict(eos_token_id=2),
            dict(eos_token_id=49407),
            dict(eos_token_id=49406),
        ),
    ],
)
def test_configs_that_describe_the_same_networks_are_equal(kind, one, other, third):
    one, other, third = map(kind.from_dict, (one, other, third))
    assert one == other != third


def test_configs_can_be_keys_of_a_cache():
    config = UNetConfig.from_dict(dict(attention_head_dim=[5, 10, 20, 20]))
    assert hash(config) == hash(UNetConfig(attention_head_dim=(5, 10, 20, 20)).canonical())


@pytest.mark.parametrize("content", ["", "{", "[]", "3"])
def test_what_is_no_json_object_is_refused_by_file_name(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_json(tmp_path / "config.json")


@pytest.mark.parametrize(
    "piece, count, told",
    [
        ("[", 100_000, "recursion"),
        (" ", (1 << 23) + 1, "larger than 8 MiB"),
        ("1, ", 100_000, "more than 100000 values"),
        ("9", 5000, "digits"),
    ],
)
def test_json_that_takes_much_is_a_sentence_before_it_takes_anything(tmp_path, piece, count, told):
    file = tmp_path / "config.json"
    file.write_text(piece * count)
    with pytest.raises(CheckpointError, match=told) as caught:
        read_json(file)
    assert str(caught.value).startswith(str(file))


def test_what_is_no_file_is_never_read(tmp_path):
    """A pipe would keep its reader waiting, and a device never ends."""
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "link.json").symlink_to("/dev/zero")
    (tmp_path / "folder.json").mkdir()
    for file in tmp_path.iterdir():
        for read in (read_json, read_bytes, read_keys, Styles):
            with pytest.raises((CheckpointError, OSError), match="not a regular file"):
                read(file)
        with pytest.raises(CheckpointError, match="not a regular file"), opened(file):
            pass


def test_a_unet_of_very_many_blocks_is_refused():
    with pytest.raises(CheckpointError, match="at most 256 are supported"):
        UNetConfig.from_dict(dict(layers_per_block=16, transformer_layers_per_block=32))


@pytest.mark.parametrize(
    "values",
    [
        dict(steps=10**9),
        dict(guidance=1e9),
        dict(guidance=-1),
        dict(sampler="no such"),
        dict(spacing="no such"),
    ],
)
def test_a_card_asks_for_what_pictures_can_have(tmp_path, values):
    (tmp_path / "sd_tpu.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"ModelCard: (Steps|Guidance|Sampler|Spacing) "):
        ModelCard.read(tmp_path, "folder")


def test_a_model_without_a_card_gets_the_guides_prompts(tmp_path):
    assert ModelCard.read(tmp_path, "some/model") == ModelCard(name="some/model")
    assert ModelCard(name="m").prompts == GUIDE_PROMPTS and len(GUIDE_PROMPTS) == 8


def test_a_card_knows_its_own_name_and_values(tmp_path):
    (tmp_path / "sd_tpu.json").write_text(
        json.dumps(dict(name="Little", prompts=["a", "b"], steps=12, sampler="heun", later_field=1))
    )
    card = ModelCard.read(tmp_path, "folder")
    assert card == ModelCard(name="Little", prompts=("a", "b"), steps=12, sampler="heun")


def test_a_card_of_the_wrong_shape_is_refused():
    with pytest.raises(CheckpointError, match="ModelCard"):
        ModelCard.from_dict({"hint": "no name"})
    for translations in (["ko"], {"ko": "Write."}, {"ko": {"hint": 3}}):
        with pytest.raises(CheckpointError, match="translations"):
            ModelCard.from_dict({"name": "m", "translations": translations})


def test_a_card_speaks_the_readers_language_where_it_can():
    korean = {"hint": "써요."}
    card = ModelCard(name="m", hint="Write.", details="All.", translations={"ko": korean})
    assert card.translated("hint", "ko") == ("써요.", "ko")
    assert card.translated("details", "ko") == ("All.", "en")
    assert card.translated("hint", "ar") == ("Write.", "en")


def test_a_card_that_lists_its_words_finds_the_others_each_once():
    card = ModelCard(name="m", words=("a", "cat", "3d"))
    assert card.unknown_words("A 3D wizard, a Cat and... WIZARD!") == ["wizard", "and"]
    assert card.unknown_words("고양이 a cat") == ["고양이"]
    assert ModelCard(name="m").unknown_words("wizard") == []
