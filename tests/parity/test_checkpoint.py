"""Checkpoints in folders and on the hub: what is fetched, read and refused."""

import fnmatch
import json
import shutil
from functools import partial
from pathlib import Path

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sd_tpu import FlaxStableDiffusionPipeline
from sd_tpu.checkpoint import folder as checkpoint
from sd_tpu.checkpoint import weights
from sd_tpu.checkpoint.config import CheckpointError
from sd_tpu.cli.drawing import early_defaults
from sd_tpu.families.anima import Anima
from sd_tpu.families.checkpoint import Checkpoint
from sd_tpu.families.controlnet import ControlNet
from sd_tpu.families.decoder import TinyDecoder
from sd_tpu.families.ip_adapter import IPAdapter
from sd_tpu.families.stable_diffusion import StableDiffusion
from sd_tpu.settings import Picture

STEM = "diffusion_pytorch_model"

# The files of a model on the hub that publishes every form of its weights.
HUB = {
    "model_index.json",
    "README.md",
    "v1-4.ckpt",
    "v1-4.safetensors",
    "logo.png",
    "sd_tpu.json",
    "scheduler/scheduler_config.json",
    "tokenizer/vocab.json",
    "tokenizer/merges.txt",
    "tokenizer/tokenizer_config.json",
    "tokenizer/special_tokens_map.json",
    "safety_checker/model.safetensors",
    "safety_checker/pytorch_model.bin",
    "text_encoder/config.json",
    "unet/config.json",
    "vae/config.json",
    "text_encoder/flax_model.msgpack",
    "text_encoder/pytorch_model.bin",
    "text_encoder/model.safetensors",
    "text_encoder/model.fp16.safetensors",
    *(
        f"{part}/{STEM}{form}"
        for part in ("unet", "vae")
        for form in (
            ".bin",
            ".fp16.bin",
            ".msgpack",
            ".safetensors",
            ".fp16.safetensors",
            ".non_ema.safetensors",
        )
    ),
}
COMMON = {
    "model_index.json",
    "sd_tpu.json",
    "scheduler/scheduler_config.json",
    "tokenizer/vocab.json",
    "tokenizer/merges.txt",
    "tokenizer/tokenizer_config.json",
    "tokenizer/special_tokens_map.json",
    "text_encoder/config.json",
    "unet/config.json",
    "vae/config.json",
}


def components_of(index):
    """Those of the only family that the tests' hub has."""
    return StableDiffusion.components


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A stand-in for the hub: fetches the files of `hub.files`, empty, and records each call."""

    class Hub:
        files, calls = HUB, []

        def snapshot_download(self, repo, *, revision, allow_patterns):
            self.calls.append((repo, revision))
            for name in self.files:
                if any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns):
                    (tmp_path / name).parent.mkdir(exist_ok=True)
                    (tmp_path / name).write_text("{}")
            return str(tmp_path)

        def fetched(self) -> set[str]:
            return {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()}

    hub = Hub()
    hub.calls = []
    monkeypatch.setattr(checkpoint, "snapshot_download", hub.snapshot_download)
    return hub


@pytest.fixture
def folder(checkpoints, tmp_path) -> Path:
    """A copy of the tiny SD 1 checkpoint, to be spoilt."""
    return shutil.copytree(checkpoints["sd1"], tmp_path / "checkpoint")


def refusal(action, *arguments, **options) -> str:
    """The message of the CheckpointError that the call raises."""
    with pytest.raises(CheckpointError) as caught:
        action(*arguments, **options)
    return str(caught.value)


def edit_json(file: Path, **values):
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


# --- from the hub -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "variant, weights",
    [
        (
            None,
            {
                "text_encoder/model.safetensors",
                f"unet/{STEM}.safetensors",
                f"vae/{STEM}.safetensors",
            },
        ),
        (
            "fp16",
            {
                "text_encoder/model.fp16.safetensors",
                f"unet/{STEM}.fp16.safetensors",
                f"vae/{STEM}.fp16.safetensors",
            },
        ),
    ],
)
def test_only_the_files_needed_are_fetched(hub, variant, weights):
    found = checkpoint.find("someone/model", components_of, "v2", variant)
    assert hub.fetched() == COMMON | weights
    assert {*hub.calls} == {("someone/model", "v2")}
    for part, stem in StableDiffusion.components.items():
        assert {
            f.relative_to(found).as_posix()
            for f in checkpoint.weight_files(found / part, stem, variant)
        } <= weights


def test_shards_and_their_index_are_fetched(hub):
    shards = {f"unet/{STEM}-0000{i}-of-00002.safetensors" for i in (1, 2)}
    hub.files = (
        HUB - {f"unet/{STEM}.safetensors"} | shards | {f"unet/{STEM}.safetensors.index.json"}
    )
    checkpoint.find("someone/model", components_of)
    assert shards | {f"unet/{STEM}.safetensors.index.json"} <= hub.fetched()


def test_a_pipeline_of_blocks_is_fetched_by_its_own_index(hub):
    needed = {
        "modular_model_index.json",
        "scheduler/scheduler_config.json",
        "tokenizer/tokenizer.json",
        "t5_tokenizer/tokenizer.json",
        *(f"{part}/config.json" for part in Anima.components),
        *(f"{part}/{stem}.safetensors" for part, stem in Anima.components.items()),
    }
    hub.files = {*needed, "guider/guider_config.bin"}
    checkpoint.find("someone/model", lambda _: Anima.components)
    assert hub.fetched() == needed


def test_a_variant_that_the_hub_lacks_in_part_is_made_up_by_the_plain_files(hub):
    hub.files = HUB - {f"vae/{STEM}.fp16.safetensors"}
    found = checkpoint.find("someone/model", components_of, None, "fp16")
    assert len(hub.calls) == 3  # the first for the index alone
    assert f"unet/{STEM}.safetensors" not in hub.fetched()
    with pytest.warns(UserWarning, match="no 'fp16' files"):
        files = checkpoint.weight_files(found / "vae", STEM, "fp16")
    assert files == [found / "vae" / f"{STEM}.safetensors"]
    assert checkpoint.weight_files(found / "unet", STEM, "fp16") == [
        found / "unet" / f"{STEM}.fp16.safetensors"
    ]


@pytest.mark.parametrize(
    "find",
    [
        partial(checkpoint.find, components_of=components_of),
        Checkpoint.open,
        ControlNet.open,
        IPAdapter.open,
        partial(TinyDecoder.open, pictures=False),
        FlaxStableDiffusionPipeline.from_pretrained,
    ],
)
def test_the_home_of_nobody_is_no_folder_here(find):
    assert "~nosuchuser/x" in refusal(find, "~nosuchuser/x.safetensors")
    assert early_defaults("~nosuchuser/x") == Picture()


def test_a_hub_id_without_a_connection_is_one_sentence():
    message = refusal(checkpoint.find, "nobody-here/no-such-model", components_of)
    assert message.startswith("Model 'nobody-here/no-such-model' is neither a folder here nor")
    assert "\n" not in message and "Traceback" not in message and len(message) < 500


@pytest.mark.parametrize(
    "error", [ConnectionError(), OSError("first line\nsecond line"), TimeoutError("timed out")]
)
def test_whatever_the_hub_raises_becomes_one_line(monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(checkpoint, "snapshot_download", fail)
    message = refusal(checkpoint.find, "someone/model", components_of)
    assert "someone/model" in message and "\n" not in message
    assert (str(error).split("\n")[0] or "ConnectionError") in message


@pytest.mark.parametrize("name", ["no/such/folder", "../missing", "a b"])
def test_a_path_that_is_not_there_is_one_sentence(name):
    message = refusal(checkpoint.find, name, components_of)
    assert repr(name) in message and "\n" not in message


# --- folders and files --------------------------------------------------------------------------


def test_a_folder_is_found_without_the_hub(hub, folder, monkeypatch):
    assert checkpoint.find(folder, components_of) == folder
    assert checkpoint.find(str(folder), components_of) == folder
    monkeypatch.setenv("HOME", str(folder.parent))
    assert checkpoint.find("~/checkpoint", components_of) == folder
    assert not hub.calls


def test_a_folder_without_an_index_is_no_checkpoint(folder):
    (folder / "model_index.json").unlink()
    message = refusal(FlaxStableDiffusionPipeline.from_pretrained, folder)
    assert message == (
        f"{folder} has no model_index.json, so it is not a checkpoint in the diffusers layout."
    )


@pytest.mark.parametrize(
    "file",
    [
        "unet/config.json",
        "text_encoder/config.json",
        "vae/config.json",
        "scheduler/scheduler_config.json",
        f"unet/{STEM}.safetensors",
        "tokenizer",
    ],
)
def test_a_part_that_is_missing_is_named(folder, file):
    target = folder / file
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    message = refusal(FlaxStableDiffusionPipeline.from_pretrained, folder)
    assert str(target if target.suffix == ".json" else folder / file.split("/")[0]) in message
    assert "\n" not in message


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", "\xff"])
def test_a_config_that_is_no_json_object_is_named(folder, content):
    (folder / "vae" / "config.json").write_bytes(content.encode("latin-1"))
    message = refusal(FlaxStableDiffusionPipeline.from_pretrained, folder)
    assert str(folder / "vae" / "config.json") in message and "\n" not in message


def test_weights_of_another_model_are_told_by_name(folder):
    edit_json(folder / "unet" / "config.json", block_out_channels=[16, 48])
    message = refusal(FlaxStableDiffusionPipeline.from_pretrained, folder)
    assert (
        "~ shape      down_blocks.1.resnets.0.conv1.weight: the file has [32, 16, 3, 3], "
        "the model needs [48, 16, 3, 3]"
    ) in message


# --- variants and shards ------------------------------------------------------------------------


def test_a_variant_is_read_where_there_is_one(folder):
    for file in folder.rglob("*.safetensors"):
        tensors = {name: np.float16(tensor) for name, tensor in load_file(file).items()}
        save_file(tensors, file.with_suffix(".fp16.safetensors"))
        file.write_bytes(b"not to be read")
    _, params = FlaxStableDiffusionPipeline.from_pretrained(folder, variant="fp16")
    assert params["unet"]["conv_in"]["kernel"].dtype == jnp.float32
    message = refusal(FlaxStableDiffusionPipeline.from_pretrained, folder)
    assert "damaged" in message


def test_a_variant_that_is_absent_falls_back_with_a_warning(folder, recwarn):
    with pytest.warns(UserWarning, match="no 'fp16' files") as caught:
        files = checkpoint.weight_files(folder / "unet", STEM, "fp16")
    assert files == [folder / "unet" / f"{STEM}.safetensors"]
    assert len(caught) == 1


def test_shards_written_by_diffusers_are_read(torch_pipelines, checkpoints, folder):
    shutil.rmtree(folder / "unet")
    torch_pipelines["sd1"].unet.save_pretrained(folder / "unet", max_shard_size="400KB")
    assert len(checkpoint.weight_files(folder / "unet", STEM)) > 2
    _, whole = FlaxStableDiffusionPipeline.from_pretrained(checkpoints["sd1"])
    _, sharded = FlaxStableDiffusionPipeline.from_pretrained(folder)
    jax.tree.map(np.testing.assert_array_equal, sharded, whole)


def test_variant_shards_written_by_diffusers_are_found(torch_pipelines, tmp_path):
    """What diffusers calls them is its own affair; what counts is that we read what it writes."""
    unet = torch_pipelines["sd1"].unet
    unet.save_pretrained(tmp_path / "unet", max_shard_size="400KB", variant="fp16")
    files = checkpoint.weight_files(tmp_path / "unet", STEM, "fp16")
    assert len(files) > 2 and all("fp16" in file.name for file in files)


def test_a_shard_that_the_index_names_must_be_there(torch_pipelines, tmp_path):
    torch_pipelines["sd1"].unet.save_pretrained(tmp_path / "unet", max_shard_size="400KB")
    lost = sorted((tmp_path / "unet").glob("*.safetensors"))[1]
    lost.unlink()
    message = refusal(checkpoint.weight_files, tmp_path / "unet", STEM)
    assert str(lost) in message and "missing" in message and "\n" not in message


# --- pickles ------------------------------------------------------------------------------------


def command_in(message: str) -> str:
    """The Python program that the message gives between the quotation marks of python -c."""
    return message.split('python -c "')[1].split('"')[0]


def test_a_folder_of_pickles_is_refused_with_the_command_that_converts_it(
    torch_pipelines, tmp_path
):
    torch_pipelines["sd1"].save_pretrained(tmp_path / "old", safe_serialization=False)
    for file in (tmp_path / "old").rglob("*.safetensors"):  # transformers 5 writes no other
        file.with_name("pytorch_model.bin").write_bytes(b"a pickle")
        file.unlink()
    message = refusal(FlaxStableDiffusionPipeline.from_pretrained, tmp_path / "old")
    assert "pickle" in message and "refused" in message and "\n" not in message
    compile(command_in(message), "the command", "exec")


def test_the_command_that_converts_a_folder_works(torch_pipelines, tmp_path):
    torch_pipelines["sd1"].save_pretrained(tmp_path / "old")
    for part in ("unet", "vae"):
        shutil.rmtree(tmp_path / "old" / part)
        getattr(torch_pipelines["sd1"], part).save_pretrained(
            tmp_path / "old" / part, safe_serialization=False
        )
    message = refusal(FlaxStableDiffusionPipeline.from_pretrained, tmp_path / "old")
    exec(command_in(message), {})
    _, params = FlaxStableDiffusionPipeline.from_pretrained(tmp_path / "old-safetensors")
    theirs = torch_pipelines["sd1"].unet.conv_in.weight.detach().numpy().transpose(2, 3, 1, 0)
    np.testing.assert_array_equal(params["unet"]["conv_in"]["kernel"], theirs)


@pytest.mark.parametrize(
    ("files", "source"),
    [
        (
            {"model_index.json": {}, "unet/config.json": {"_class_name": "UNet2DConditionModel"}},
            "from diffusers import DiffusionPipeline as P; P.from_pretrained('{folder}')",
        ),
        (
            {"unet/config.json": {"_class_name": "FlaxControlNetModel"}},
            "from diffusers import ControlNetModel as P; P.from_pretrained('{folder}/unet')",
        ),
        (
            {"unet/config.json": {"architectures": ["CLIPVisionModelWithProjection"]}},
            "from transformers import CLIPVisionModelWithProjection as P; "
            "P.from_pretrained('{folder}/unet')",
        ),
    ],
)
def test_the_command_converts_the_whole_checkpoint_or_the_network_alone(files, source, tmp_path):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content))
    for pickles in ([], ["diffusion_pytorch_model.bin"]):
        for pickle in pickles:
            (tmp_path / "unet" / pickle).touch()
        message = refusal(checkpoint.weight_files, tmp_path / "unet", STEM)
        assert command_in(message).startswith(f"{source.format(folder=tmp_path)}.save_pretrained(")


@pytest.mark.parametrize(("subfolder", "told"), [("", ""), ("a/b", ", subfolder='a/b'")])
def test_the_command_names_the_hub_id_of_what_was_fetched(subfolder, told, tmp_path):
    folder = tmp_path / "models--some-one--a.model" / "snapshots" / "0a1b" / subfolder
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"_class_name": "ControlNetModel"}')
    message = refusal(checkpoint.weight_files, folder, STEM)
    assert command_in(message).endswith(
        f"P.from_pretrained('some-one/a.model', revision='0a1b'{told})"
        ".save_pretrained('a.model-safetensors')"
    )


def test_a_config_gives_the_command_nothing_to_run(tmp_path):
    (tmp_path / "config.json").write_text('{"_class_name": "P; import antigravity"}')
    assert "antigravity" not in refusal(checkpoint.weight_files, tmp_path, STEM)


@pytest.mark.parametrize(
    "file", [f"{STEM}.fp16.safetensors", f"{STEM}.safetensors.index.fp16.json"]
)
def test_a_variant_that_is_there_alone_is_named(file, tmp_path):
    for name in (file, f"{STEM}.bin", f"{STEM}-00001-of-00002.fp16.safetensors"):
        (tmp_path / name).touch()
    message = refusal(checkpoint.weight_files, tmp_path, STEM)
    assert message == (
        f"{tmp_path} has weights of a variant only (fp16): ask for it, as by --variant fp16."
    )


@pytest.mark.parametrize("suffix", [".ckpt", ".bin", ".pt"])
def test_a_pickle_is_refused_with_the_command_that_converts_it(tmp_path, suffix):
    file = tmp_path / f"v1-4{suffix}"
    file.write_bytes(b"anything")
    message = refusal(FlaxStableDiffusionPipeline.from_pretrained, file)
    assert str(file) in message and "\n" not in message
    command = command_in(message)
    compile(command, "the command", "exec")
    assert f"from_single_file('{file}')" in command
    assert hasattr(diffusers.StableDiffusionPipeline, "from_single_file")
    assert "can run code" in message


# --- links that lead nowhere --------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "model_index.json",
        "sd_tpu.json",
        "unet/config.json",
        f"vae/{STEM}.safetensors",
        "unet",
        "scheduler/scheduler_config.json",
        "tokenizer/vocab.json",
        "tokenizer/special_tokens_map.json",
    ],
)
@pytest.mark.parametrize("opens", [FlaxStableDiffusionPipeline.from_pretrained, Checkpoint.open])
def test_a_link_that_leads_nowhere_is_named_before_anything_is_loaded(
    folder, tmp_path, monkeypatch, name, opens
):
    monkeypatch.setattr(weights, "load_stored", None)
    place = tmp_path / "models--someone--drawn" / "snapshots" / "0a1b2c"
    shutil.copytree(folder, place)
    target = place / name
    if target.is_dir():
        shutil.rmtree(target)
    target.unlink(missing_ok=True)
    target.symlink_to("../../../blobs/77aa")
    message = refusal(opens, place)
    assert f"{target} is a link to ../../../blobs/77aa, which is not there" in message
    assert "hf download someone/drawn" in message and "\n" not in message


def test_a_shard_a_file_and_a_folder_that_are_links_to_nowhere_are_named(torch_pipelines, tmp_path):
    torch_pipelines["sd1"].unet.save_pretrained(tmp_path / "unet", max_shard_size="400KB")
    lost = sorted((tmp_path / "unet").glob("*.safetensors"))[1]
    file, whole = tmp_path / "lora.safetensors", tmp_path / "whole"
    lost.unlink()
    for link in (lost, file, whole):
        link.symlink_to("gone")
    for action, asked, link in (
        (partial(checkpoint.weight_files, stem=STEM), tmp_path / "unet", lost),
        (weights.contents, [file], file),
        (Checkpoint.open, file, file),
        (Checkpoint.open, whole, whole),
        (ControlNet.open, whole, whole),
        (IPAdapter.open, file, file),
    ):
        message = refusal(action, asked)
        assert f"{link} is a link to gone, which is not there" in message


def test_other_variants_may_be_links_to_nowhere(folder):
    (folder / "unet" / f"{STEM}.fp16.safetensors").symlink_to("gone")
    (folder / "vae" / "other.json").symlink_to("gone")
    assert checkpoint.find(folder, components_of) == folder


def test_all_parts_are_checked_before_one_is_loaded(folder, monkeypatch):
    (folder / "vae" / f"{STEM}.safetensors").write_bytes(b"damaged")
    opened = Checkpoint.open(folder)
    monkeypatch.setattr(weights, "load_stored", None)
    assert "is damaged" in refusal(opened.parameters.load)
