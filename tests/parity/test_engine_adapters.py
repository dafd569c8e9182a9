"""LoRAs and embeddings that prompts name, in pictures."""

import dataclasses
import hashlib
import math
import pickle
import shutil
import unicodedata

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler
from safetensors.torch import save_file

from sd_tpu.checkpoint import weights
from sd_tpu.checkpoint.adapters import LowRank
from sd_tpu.cli.generate import notes
from sd_tpu.families import adapters as adapters_module
from sd_tpu.families.adapters import Adapters
from sd_tpu.families.checkpoint import Checkpoint
from sd_tpu.families.prompt import chunks, parse
from sd_tpu.pictures.images import format_parameters, read_parameters, read_png
from sd_tpu.request import Request, journey
from sd_tpu.runtime.weights import merge
from sd_tpu.serving.engine import Engine
from sd_tpu.serving.job import Failed, ImageReady
from sd_tpu.settings import RANDOM, RequestError
from tests.support.pictures import pictures_of
from tests.support.reference import LEAST, make_torch_pipeline

PROMPT, STEPS = "a (red) cat", 4


@pytest.fixture(scope="module")
def loras(least_pipeline, tmp_path_factory):
    """A folder with eight LoRAs for both networks, and files that are none."""
    folder, pipeline = tmp_path_factory.mktemp("loras"), least_pipeline
    for number in range(8):
        torch.manual_seed(number)
        tensors = {}
        for part, prefix in (("unet", "lora_unet_"), ("text_encoder", "lora_te_")):
            for name, layer in getattr(pipeline, part).named_modules():
                if name.endswith(("to_q", "to_k", "to_v", "to_out.0", "q_proj", "out_proj")):
                    outputs, inputs = layer.weight.shape
                    name = (
                        name
                        if name.startswith("text_model") or part == "unet"
                        else (f"text_model.{name}")
                    )
                    key = prefix + name.replace(".", "_")
                    tensors |= {
                        f"{key}.lora_down.weight": torch.randn(3, inputs) / 3,
                        f"{key}.lora_up.weight": torch.randn(outputs, 3) / 3,
                        f"{key}.alpha": torch.tensor(3.0),
                    }
        save_file(tensors, folder / f"style {number}.safetensors")
    save_file({"lora_unet_other.lora_down.weight": torch.ones(1, 1)}, folder / "other.safetensors")
    (folder / "damaged.safetensors").write_bytes(b"no header")
    return folder


@pytest.fixture(scope="module")
def embeddings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("embeddings")
    save_file({"emb_params": torch.ones(2, 32)}, folder / "good-hands.safetensors")
    save_file({"emb_params": torch.ones(2, 48)}, folder / "wide.safetensors")
    (folder / "sample.safetensors").write_bytes(b"no header")  # which no compiling asks for
    return folder


@pytest.fixture(scope="module")
def engine(least, loras, embeddings):
    """On two devices, so that neighbours have weights of their own."""
    engine = Engine.open(
        least, devices=2, lora_dir=loras, embedding_dir=embeddings, prompt_chunks=2
    )
    yield engine
    engine.close()


def drawn(engine, *prompts: str) -> list[np.ndarray]:
    values = dict(
        prompts=list(prompts), seed=3, steps=STEPS, sampler="ddim", guidance=3.0, same_seed=True
    )
    request = Request.check(
        {name: value for name, value in values.items() if name != "same_seed"}, engine.defaults
    )
    # One seed for all: the pictures differ by what their prompts ask for alone.
    pictures = tuple(
        picture and dataclasses.replace(picture, seed=3) for picture in request.pictures
    )
    pixels = {}
    for event in engine.submit(
        dataclasses.replace(request, pictures=pictures), previews=False
    ).events():
        assert not isinstance(event, Failed), event.message
        if isinstance(event, ImageReady):
            pixels[event.index] = event.pixels
    return [pixels[index] for index in sorted(pixels)]


@pytest.mark.slow("compiles for two devices")
def test_eight_pictures_with_eight_loras_are_each_what_they_are_alone(engine):
    prompts = [f"{PROMPT} <lora:style {number}:0.8>" for number in range(8)]
    before = drawn(engine, PROMPT)[0]
    compiled = len(engine.worker._programs)
    together = drawn(engine, *prompts)
    assert len({picture.tobytes() for picture in [before, *together]}) == 9
    for number in (0, 5):
        np.testing.assert_array_equal(together[number], drawn(engine, prompts[number])[0])
    np.testing.assert_array_equal(drawn(engine, PROMPT)[0], before)
    assert len(engine.worker._programs) == compiled


@pytest.mark.slow("compiles for longer prompts")
def test_long_prompts_are_drawn_by_programs_of_their_own(engine):
    plain, again = drawn(engine, "a cat", "a cat BREAK in a hat")
    np.testing.assert_array_equal(plain, drawn(engine, "a cat")[0])
    assert (plain != again).any()


def test_what_prompts_ask_for_and_is_not_there_is_one_sentence(engine):
    for prompt, told in (
        ("a <lora:nobody:1>", "no LoRA 'nobody' here"),
        ("a <lora:other:1>", "does not fit"),
        ("a <lora:damaged:1>", "damaged"),
        ("a <lora::1>", "asks for no LoRA"),
        ("wide", "embedding for other models"),
        ("(a:1000)", "weights go up to 100"),
    ):
        with pytest.raises(RequestError, match=told) as caught:
            drawn(engine, prompt)
        assert "\n" not in str(caught.value) and "/" not in str(caught.value)
    with pytest.raises(RequestError, match=r"^Prompt 2: There is no LoRA 'nobody' here"):
        drawn(engine, "a cat", "a <lora:nobody:1>")
    long = Request.check({"prompts": ["word " * 160 + "End"]}, engine.defaults)
    assert "End" in notes(engine.resolver.resolve(long))[0]


@pytest.mark.parametrize("other", ["a dog", "a dog <lora:style 1:0.5>"])
def test_a_journey_between_other_loras_is_refused_without_blaming_one_of_its_pictures(
    engine, other
):
    (first,) = Request.check({"prompts": ["a cat <lora:style 1>"]}, engine.catalog).pictures
    with pytest.raises(RequestError, match=r"^The two prompts of a journey .* LoRAs"):
        engine.submit(journey(first, other, RANDOM, 8))


def test_an_embedding_changes_the_picture(engine):
    one, other = drawn(engine, "a cat, good-hands", "a cat, goodhands")
    assert (one != other).any()


def test_pictures_with_a_lora_are_those_of_pytorch(engine, loras):
    """With the noise that a seed means here, by a reference of its own: what is fused and taken out
    again leaves weights that differ in their last bits."""
    pipeline = make_torch_pipeline("sd1", **LEAST)
    noise = jax.random.normal(jax.random.PRNGKey(3), (4, 8, 8), jnp.float32)
    reference = type(pipeline)(
        **dict(
            pipeline.components,
            scheduler=DDIMScheduler.from_config(
                pipeline.scheduler.config, clip_sample=False, set_alpha_to_one=False
            ),
        )
    )
    reference.load_lora_weights(str(loras), weight_name="style 2.safetensors")
    reference.fuse_lora(lora_scale=0.7)
    want = reference(
        "a red cat",
        negative_prompt="",
        num_inference_steps=STEPS,
        guidance_scale=3.0,
        latents=torch.tensor(np.asarray(noise))[None],
        output_type="np",
    ).images[0]
    got = drawn(engine, "a red cat <lora:style 2:0.7>")[0]
    away = np.abs(got.astype(int) - np.round(want * 255).astype(int))
    assert (away <= 2).mean() > 0.995 and (away > 2).any(-1).mean() < 0.01
    plain = drawn(engine, "a red cat")[0]
    assert (np.abs(plain.astype(int) - np.round(want * 255)) > 2).mean() > 0.05


def test_a_file_names_the_loras_that_drew_it_as_a1111_does(engine, loras):
    """By the SHA-256 of all that follows the header, without the signs that would divide names."""
    request = Request.check(
        {
            "prompts": ["a <lora:style 1:0.5>", "b <lora:folder/a, b:1>"],
            "negative_prompt": "<lora:style 0>",
        },
        engine.catalog,
    )
    png = engine.to_png(np.zeros((8, 8, 3), np.uint8), request)
    digests = {}
    for name in ("style 1", "style 0"):
        content = (loras / f"{name}.safetensors").read_bytes()
        tensors = content[8 + int.from_bytes(content[:8], "little") :]
        digests[name] = hashlib.sha256(tensors).hexdigest()[:12]
    told = ", ".join(f"{name}: {digest}" for name, digest in digests.items())
    assert f', Lora hashes: "{told}", Version' in read_parameters(png)
    assert read_png(png).prompts == request.prompts
    assert 'Lora hashes: "a b: 12ab"' in format_parameters(request, lora_hashes={"a, b": "12ab"})


def test_a_lora_that_is_written_anew_is_read_anew(engine, loras):
    tag, own = "<lora:rewritten:1>", loras / "rewritten.safetensors"
    try:
        shutil.copy(loras / "style 1.safetensors", own)
        engine.adapters._loras._seen = -math.inf  # as after a few seconds
        (before,) = drawn(engine, f"{PROMPT} {tag}")
        shutil.copy(loras / "style 2.safetensors", own)
        after, expected = drawn(engine, f"{PROMPT} {tag}", f"{PROMPT} <lora:style 2:1>")
        assert np.array_equal(after, expected) and not np.array_equal(after, before)
    finally:
        own.unlink()


def counted(monkeypatch, whose, name: str) -> list[tuple]:
    """Record the arguments of calls of a function, which goes on as it did."""
    calls, function = [], getattr(whose, name)

    def call(*values, **options):
        calls.append(values)
        return function(*values, **options)

    monkeypatch.setattr(whose, name, call)
    return calls


def test_a_request_is_resolved_once_and_the_file_of_its_lora_is_read_once(
    engine, loras, monkeypatch
):
    file = loras / "once.safetensors"
    try:
        shutil.copy(loras / "style 3.safetensors", file)
        engine.adapters._loras._seen = -math.inf
        drawn(engine, PROMPT)  # compiles, on inputs of a sample
        resolved = counted(monkeypatch, engine.resolver, "resolve")
        tokens = counted(monkeypatch, Checkpoint, "prompt_inputs")
        read = counted(monkeypatch, adapters_module, "read_lora")
        drawn(engine, f"{PROMPT} <lora:once:1>", PROMPT)
        assert (len(resolved), len(tokens)) == (1, 2)
        # Text encoders and what draws read what is theirs.
        assert {path for path, *_ in read} == {file}
        parts = sorted(part for *_, parts in read for part in parts)
        assert parts == sorted(engine.checkpoint.parameters.shapes)
    finally:
        file.unlink()


def test_what_another_process_has_resolved_is_drawn_without_looking_anything_up(
    engine, monkeypatch
):
    """As on a host of Ray's, which numbers architectures in an order of its own."""
    request = Request.check(
        {"prompts": [f"{PROMPT} <lora:style 2:1>", PROMPT], "seed": 3, "steps": STEPS},
        engine.catalog,
    )

    expected = pictures_of(engine.submit(request, previews=False))
    resolved = pickle.loads(pickle.dumps(engine.resolver.resolve(request)))
    elsewhere = {
        index: dataclasses.replace(
            picture,
            batch=dataclasses.replace(picture.batch, architecture="SD 9"),
            weights=dataclasses.replace(picture.weights, architecture="SD 9", files=("then",)),
        )
        for index, picture in resolved.pictures.items()
    }
    batches = len(engine._batches)
    monkeypatch.setattr(Checkpoint, "prompt_inputs", None)
    monkeypatch.setattr(Adapters, "cost", None)
    here = engine.resolver.here(dataclasses.replace(resolved, pictures=elsewhere))
    found = pictures_of(engine.queue(here, previews=False))
    assert found.keys() == expected.keys()
    for index, picture in found.items():
        np.testing.assert_array_equal(picture, expected[index])
    assert len(engine._batches) == batches
    monkeypatch.setattr(engine.adapters._loras, "_files", {})
    monkeypatch.setattr(engine.adapters._loras, "_seen", math.inf)
    with pytest.raises(RequestError, match="no LoRA 'style 2' here"):
        engine.resolver.here(resolved)


@pytest.mark.slow("compiles an engine of its own")
def test_within_a_bound_loras_take_what_they_change_alone(least, loras):
    """As many bytes lie on the device as the account says, and they are within the bound."""
    engine = Engine.open(least, devices=1, lora_dir=loras)
    memory, weights = engine.scheduler._memory, engine.worker.weights
    parameters = engine.checkpoint.parameters
    rank, changed = engine.adapters.cost(
        (("style 0", 1.0),), engine.checkpoint.model, parameters.shapes, parameters.divisions
    )
    own, base = sum(changed.values()), engine.weights.memory + engine.texts.memory
    assert rank == 0 < changed["text_encoder"] < own < base / 4
    memory.limit = engine.batch.memory + base + 2 * own
    pictures = {}
    for number in (0, 1, 2, 0):
        pixels = drawn(engine, f"{PROMPT} <lora:style {number}:0.8>")[0]
        np.testing.assert_array_equal(pictures.setdefault(number, pixels), pixels)
        arrays = {
            leaf.unsafe_buffer_pointer(): leaf.nbytes
            for name in weights.names(0)
            for leaf in jax.tree.leaves(weights.of(0, name))
        }
        assert sum(arrays.values()) == memory.used(0) - engine.batch.memory
        assert memory.used(0) <= memory.limit and engine.weights in weights.names(0)
    engine.close()
    assert len(weights.names(0)) == 6


def test_merging_shares_what_no_adapter_touches_and_leaves_the_base():
    rng = np.random.default_rng(0)
    base = {
        "unet": {
            name: {"kernel": jnp.asarray(rng.standard_normal((1, 8, 6)), jnp.bfloat16)}
            for name in ("a", "b")
        }
    }
    before = np.array(base["unet"]["a"]["kernel"])
    deltas = [
        (
            LowRank(
                rng.standard_normal((8, rank)).astype(np.float16),
                rng.standard_normal((rank, 6)).astype(np.float16),
                np.float32(0.5),
            ),
            s,
        )
        for rank, s in ((3, 0.7), (5, -1.2))
    ]
    merged = merge(base, {"unet": {"a.weight": deltas}})
    want = before[0].astype(np.float32) + sum(
        s * d.scale * d.left.astype(np.float32) @ d.right.astype(np.float32) for d, s in deltas
    )
    np.testing.assert_array_equal(merged["unet"]["a"]["kernel"][0], want.astype(jnp.bfloat16))
    assert merged["unet"]["b"]["kernel"] is base["unet"]["b"]["kernel"]
    np.testing.assert_array_equal(base["unet"]["a"]["kernel"], before)


def test_a_folder_that_cannot_be_read_for_a_while_is_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr("sd_tpu.families.adapters.RESCAN_SECONDS", 0.0)
    folder = tmp_path / "embeddings"
    folder.mkdir()
    (folder / "one.safetensors").touch()
    adapters = Adapters(embeddings=folder)
    folder.rename(tmp_path / "elsewhere")
    assert [*adapters.embeddings()] == ["one"]
    (tmp_path / "elsewhere" / "two.safetensors").touch()
    (tmp_path / "elsewhere").rename(folder)
    assert sorted(adapters.embeddings()) == ["one", "two"]


def test_loras_are_summed_by_name_and_those_of_no_strength_are_none(loras):
    adapters = Adapters(loras)
    assert adapters.asked("a <lora:style 1:0.5> <lora:style 0>", "<lora:style 1:1>") == (
        ("style 0", 1.0),
        ("style 1", 1.5),
    )
    assert adapters.asked("<lora:style 1:0>") == () == Adapters().asked("a cat")
    with pytest.raises(ValueError, match="no folder of LoRAs"):
        Adapters().asked("<lora:style 1>")
    assert Adapters().hashes("<lora:style 1>") == adapters.hashes("<lora:gone>") == {}
    assert weights.map_named(lambda name, leaf: name, {"a": {"scale": np.ones(2)}}) == {
        "a": {"scale": "a.weight"}
    }


def lora_file(folder, name: str, alias: str | None = None) -> None:
    folder.mkdir(exist_ok=True)
    metadata = None if alias is None else {"ss_output_name": alias}
    save_file(
        {"lora_unet_conv_in.lora_down.weight": torch.ones(1, 4, 3, 3)},
        folder / f"{name}.safetensors",
        metadata=metadata,
    )


def test_a_lora_is_called_by_its_file_or_as_it_calls_itself(tmp_path):
    """As A1111 knows it, where that is not ambiguous."""
    for name, alias in (
        ("one-000004", "One"),
        ("two", "one-000004"),
        ("three", "three"),
        ("a", "both"),
        ("b", "both"),
        ("café", "Ne\u0301"),
    ):
        lora_file(tmp_path, name, alias)
    (tmp_path / "broken.safetensors").write_bytes(b"nothing")
    adapters = Adapters(tmp_path)
    assert adapters.asked("<lora:One:0.5> <lora:one-000004:1>") == (("one-000004", 1.5),)
    assert adapters.asked("<lora:three> <lora:Né>") == (("café", 1), ("three", 1))
    assert (
        adapters.hashes("<lora:One>")["One"] == adapters.hashes("<lora:one-000004>")["one-000004"]
    )
    for name in ("one", "none", "nothing"):
        with pytest.raises(ValueError, match="There is no LoRA"):
            adapters.asked(f"<lora:{name}>")
    with pytest.raises(ValueError, match=r"Several LoRAs call themselves 'both': ask .* as 'a'"):
        adapters.asked("<lora:both>")


@pytest.mark.parametrize("name", ["café-noir", "수채화"])
@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_both_normal_forms_of_a_name_are_one(tmp_path, name, form):
    lora_file(tmp_path / "loras", unicodedata.normalize("NFD", name))
    lora_file(tmp_path / "words", unicodedata.normalize("NFD", name))
    adapters, spelled = (
        Adapters(tmp_path / "loras", tmp_path / "words"),
        unicodedata.normalize(form, name),
    )
    assert [*adapters.loras()] == [*adapters.embeddings()] == [name]
    assert adapters.asked(f"<lora:{spelled}>") == ((name, 1),)
    found = chunks(parse(f"a, {spelled} cup"), lambda text: ([1], [(0, len(text))]), 1, {name: 2})
    assert [*found.chunks[0].vectors.values()] == [(name, 0), (name, 1)]


def test_a_name_is_not_found_where_an_accent_goes_on_with_it():
    found = chunks(parse("cafe\u0301"), lambda text: ([1], [(0, len(text))]), 1, {"cafe": 2})
    assert not found.chunks[0].vectors
