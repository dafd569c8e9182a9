"""What a checkpoint's JSON files say, and which of it is refused by name."""

import json

import pytest

from sd_tpu.config import (
    GUIDE_PROMPTS,
    CheckpointError,
    ModelCard,
    TextEncoderConfig,
    UNetConfig,
    VAEConfig,
    read_json,
)


def test_sd_1_is_what_is_assumed_where_a_config_is_silent():
    config = UNetConfig.from_dict({"_class_name": "UNet2DConditionModel", "act_fn": "silu"})
    assert config == UNetConfig()
    assert config.heads == (8, 8, 8, 8)
    assert VAEConfig.from_dict({}).downscale == 8


@pytest.mark.parametrize("values, heads", [
    (dict(attention_head_dim=[5, 10, 20, 20]), (5, 10, 20, 20)),
    (dict(attention_head_dim=5), (5, 5, 5, 5)),
    (dict(attention_head_dim=8, num_attention_heads=[5, 10, 20, 20]), (5, 10, 20, 20)),
    (dict(attention_head_dim=8, num_attention_heads=None), (8, 8, 8, 8)),
])
def test_heads_are_a_number_or_a_list(values, heads):
    assert UNetConfig.from_dict(values).heads == heads


@pytest.mark.parametrize("config, name, value", [
    (UNetConfig, "addition_embed_type", "text_time"),  # SDXL
    (UNetConfig, "transformer_layers_per_block", [1, 2, 10]),  # SDXL
    (UNetConfig, "mid_block_type", None),
    (UNetConfig, "class_embed_type", "timestep"),
    (UNetConfig, "num_class_embeds", 1000),  # the upscaler
    (UNetConfig, "time_cond_proj_dim", 256),  # latent consistency models
    (UNetConfig, "encoder_hid_dim", 4096),
    (UNetConfig, "resnet_time_scale_shift", "scale_shift"),
    (UNetConfig, "act_fn", "gelu"),
    (UNetConfig, "only_cross_attention", True),
    (UNetConfig, "dual_cross_attention", True),
    (UNetConfig, "conv_in_kernel", 1),
    (UNetConfig, "layers_per_block", [1, 2, 2, 2]),
    (UNetConfig, "cross_attention_dim", [768, 768, 768, 768]),
    (VAEConfig, "scaling_factor", "0.18"),
    (VAEConfig, "shift_factor", 0.1159),  # SD 3
    (VAEConfig, "use_quant_conv", False),
    (VAEConfig, "mid_block_add_attention", False),
    (TextEncoderConfig, "hidden_act", "relu"),
])
def test_what_other_architectures_have_is_refused_by_name(config, name, value):
    with pytest.raises(CheckpointError) as caught:
        config.from_dict({name: value})
    assert name in str(caught.value) and repr(value) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_blocks_are_refused_by_name():
    with pytest.raises(CheckpointError, match="AttnDownBlock2D"):
        UNetConfig.from_dict(dict(down_block_types=["AttnDownBlock2D"] * 4))


@pytest.mark.parametrize("values", [
    dict(block_out_channels=[320, 640]), dict(attention_head_dim=[5, 10]),
    dict(down_block_types=["DownBlock2D"]),
])
def test_lists_of_different_lengths_are_refused(values):
    with pytest.raises(CheckpointError, match="differ in length"):
        UNetConfig.from_dict(values)


def test_configs_can_be_keys_of_a_cache():
    config = UNetConfig.from_dict(dict(attention_head_dim=[5, 10, 20, 20]))
    assert hash(config) == hash(UNetConfig(attention_head_dim=(5, 10, 20, 20)))


@pytest.mark.parametrize("content", ["", "{", "[]", "3"])
def test_what_is_no_json_object_is_refused_by_file_name(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_json(tmp_path / "config.json")


def test_a_model_without_a_card_gets_the_guides_prompts(tmp_path):
    assert ModelCard.read(tmp_path, "some/model") == ModelCard(name="some/model")
    assert ModelCard(name="m").prompts == GUIDE_PROMPTS and len(GUIDE_PROMPTS) == 8


def test_a_card_knows_its_own_name_and_values(tmp_path):
    (tmp_path / "sd_tpu.json").write_text(json.dumps(dict(
        name="Little", prompts=["a", "b"], steps=12, sampler="heun", later_field=1)))
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
    assert card.told("hint", "ko") == ("써요.", "ko")
    assert card.told("details", "ko") == ("All.", "en")
    assert card.told("hint", "ar") == ("Write.", "en")


def test_a_card_that_lists_its_words_finds_the_others_each_once():
    card = ModelCard(name="m", words=("a", "cat", "3d"))
    assert card.unknown_words("A 3D wizard, a Cat and... WIZARD!") == ["wizard", "and"]
    assert card.unknown_words("고양이 a cat") == ["고양이"]
    assert ModelCard(name="m").unknown_words("wizard") == []
