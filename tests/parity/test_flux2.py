"""FLUX.2 klein: pictures and reference pictures against PyTorch's, files, and what is refused."""

import inspect
import sys

import jax
import numpy as np
import pytest
import torch
from diffusers import Flux2KleinPipeline
from PIL import Image

from benchmarks.report import count_compilations
from sd_tpu.families.checkpoint import Checkpoint
from sd_tpu.families.flux2_klein import Flux2Klein
from sd_tpu.pictures.inputs import Input, edited_pixels
from sd_tpu.request import Request
from sd_tpu.runtime.programs import ImageEncoder
from sd_tpu.runtime.slots import signed
from sd_tpu.settings import RequestError
from tests.support import flux2
from tests.support.kinds import once
from tests.support.parity import assert_agrees
from tests.support.pictures import assert_alike, pictures_of
from tests.support.transformer_pictures import (
    GIVEN,
    HOLE,
    MASK,
    PHOTO,
    START,
    Kind,
    QwenTests,
    TransformerPictureTests,
)

PUBLISHED = Flux2Klein.taken
SIZES = (64, 64), (101, 75)  # width, height; both are tokens of one bucket
THREE = (*SIZES, SIZES[1])  # of two


def photo(width: int, height: int) -> np.ndarray:
    """Random colours in squares of nine pixels."""
    squares = np.random.default_rng(width).integers(
        0, 256, (height // 9 + 1, width // 9 + 1, 3), np.uint8
    )
    return squares.repeat(9, 0).repeat(9, 1)[:height, :width]


PHOTOS = {size: photo(*size) for size in SIZES}
REFERENCES = {size: Input.of_pixels(pixels) for size, pixels in PHOTOS.items()}
SEEN = {each.name: each for each in REFERENCES.values()}


def named(*sizes) -> str:
    """Return the names of reference pictures of these sizes, as a setting."""
    return " ".join(REFERENCES[size].name for size in sizes)


@pytest.fixture(scope="module", autouse=True)
def few_layers():
    with flux2.few_layers():
        yield


class TestFlux2(TransformerPictureTests, QwenTests):
    family = Flux2Klein
    # The distilled model's program is that of the other without guidance.
    kinds = {
        "base": Kind(dict(distilled=False, single_layers=1), 50, 4.0, 0.4),
        "distilled": Kind(
            dict(distilled=True, single_layers=1), 4, 1.0, 0.4, guided=False, negated=False
        ),
    }
    prompts = ["a cat", "a red fox (with [brackets] and 1:1.5) and Häuser, 猫, 🦊"]
    asked = dict(seed=3, steps=4, guidance=3.0)
    size = 512, 512
    samplers = ("euler",)
    parts = "transformer", "vae"
    adapted = (
        "transformer_blocks.0.attn.to_q",
        "transformer_blocks.0.attn.add_k_proj",
        "transformer_blocks.0.ff.linear_in",
        "single_transformer_blocks.0.attn.to_qkv_mlp_proj",
    )
    misfits = [
        ("text_encoder", {"num_hidden_layers": 4}, "4 layers give 48 numbers.*first 4"),
        ("vae", {"latent_channels": 4}, "32 channels.*latents have 16"),
    ]
    refused = [(dict(clip_skip=2), "Clip skip is for models whose prompts CLIP reads")]

    make_pipeline = staticmethod(flux2.make_pipeline)

    @classmethod
    def options(cls, reference, steps) -> dict:
        return {"text_encoder_out_layers": flux2.FEW}

    def edited(self, engine, *sizes, given=SEEN, **values) -> np.ndarray:
        """Return our picture with reference pictures of these sizes."""
        values = {"reference": named(*sizes), **values}
        return self.drawn(engine, given=given, **values)[0]

    @once
    @pytest.mark.slow("compiles two buckets of tokens, and an encoder for each size")
    @pytest.mark.parametrize(
        ("sizes", "guidance"),
        [(SIZES[1:], 3.0), (SIZES, 3.0), (THREE, 1.0)],
        ids=["not square", "two", "three, no guidance"],
    )
    def test_reference_pictures_are_edited_as_by_pytorch(self, reference, engine, sizes, guidance):
        ours = self.edited(engine, *sizes, guidance=guidance)
        images = [Image.fromarray(PHOTOS[size]) for size in sizes]
        expected = self.theirs(reference, engine, image=images, guidance_scale=guidance)
        assert_alike(ours, expected)
        if guidance == 1.0:  # of which there are no programs for pictures without references
            return
        plain = self.edited(engine, guidance=guidance)
        assert np.mean(np.abs(plain.astype(int) - ours) <= 2) < 0.9

    @once
    def test_a_reference_picture_is_prepared_as_by_diffusers(self, reference, engine):
        sizes = (64, 64), (101, 75), (130, 1039), (1024, 1025), (1201, 1013), (64, 512)
        for size in sizes:
            pixels, processor = photo(*size), reference.image_processor
            image = processor.check_image_input(Image.fromarray(pixels))
            image = processor._resize_if_exceeds_area(image)
            unit = engine.checkpoint.model.size_unit
            width, height = (length // unit * unit for length in image.size)
            expected = processor.preprocess(image, height=height, width=width, resize_mode="crop")
            given = Input.of_pixels(pixels)
            ours = signed(edited_pixels(given.name, {given.name: given}, unit))
            assert np.array_equal(ours.transpose(2, 0, 1)[None], expected.numpy())

    @once
    def test_tokens_of_reference_pictures_are_where_diffusers_has_them(self, reference, engine):
        sizes = [(64, 72), (80, 64), (64, 64)]
        unit = engine.checkpoint.model.downscale
        shown = [torch.zeros(1, 1, height // unit, width // unit) for height, width in sizes]
        inputs = engine.checkpoint.model.reference_inputs(sizes)
        assert np.array_equal(
            inputs["reference_positions"], reference._prepare_image_ids(shown)[0].numpy()
        )
        assert inputs["reference_count"] == len(inputs["reference_positions"])

    @once
    def test_the_order_of_reference_pictures_matters(self, engine):
        first, turned = (self.edited(engine, *each) for each in (SIZES, SIZES[::-1]))
        assert not np.array_equal(first, turned)

    @once
    @pytest.mark.parametrize(
        ("size", "complaint"),
        [
            ((63, 100), "63x100 pixels.*64 or more on either side"),
            ((577, 72), "577x72 pixels.*at most 8 times as long as wide"),
        ],
    )
    def test_a_reference_picture_that_is_too_small_or_too_long_is_refused(
        self, engine, size, complaint
    ):
        given = Input.of_pixels(photo(*size))
        with pytest.raises(RequestError, match=complaint) as caught:
            self.drawn(engine, given={given.name: given}, reference=given.name)
        assert caught.value.setting == "reference"

    @once
    def test_more_than_ten_reference_pictures_are_refused_by_their_number(self, engine):
        ten = named(*SIZES[:1] * 10)
        values = {**self.asked, "prompts": self.prompts, "reference": ten}
        assert len(Request.check(values, engine.catalog).common.references) == 10
        with pytest.raises(RequestError, match="11 pictures were given; at most 10"):
            Request.check({**values, "reference": f"{ten} {named(SIZES[0])}"}, engine.catalog)

    @once
    def test_tokens_of_reference_pictures_are_counted_in_buckets(self, engine):
        model = engine.checkpoint.model
        inputs = {"ids": np.zeros((2, 512), np.int32)}
        assert model.for_inputs(inputs).reference_tokens == 0
        assert model.for_inputs(inputs).shape_key == ()
        for tokens, bucket in (
            (1, 256),
            (256, 256),
            (257, 512),
            (4096, 4096),
            (4097, 8192),
            (9000, 12288),
        ):
            found = model.for_inputs(inputs | model.reference_inputs([(8, 8 * tokens)]))
            assert found.reference_tokens == bucket
            assert found.shape_key == (f"{bucket} tokens of reference pictures",)

    @once
    def test_pictures_with_and_without_reference_pictures_do_not_tell_of_each_other(self, engine):
        own = [
            {"reference": named(*sizes), "steps": 2 + index % 3, "guidance": 2.0 + index}
            for index, sizes in enumerate(
                [(), SIZES[:1], SIZES, SIZES[1:], SIZES[::-1], (), THREE, SIZES[1:]]
            )
        ]
        own[6]["guidance"] = 1.0  # as three are compiled for above
        prompts = [f"{word} cat" for word in "abcdefgh"]
        values = {**self.asked, "prompts": prompts, "overrides": own}
        request = Request.check(values, engine.catalog)
        together = pictures_of(engine.submit(request, inputs=SEEN))
        compiled = count_compilations()
        for index in (0, 2, 3, 6):
            alone = pictures_of(engine.submit(request.only(index), inputs=SEEN))
            assert np.array_equal(together[index], alone[0]), own[index]
        assert compiled() == 0
        assert len({picture.tobytes() for picture in together.values()}) == 8

    @once
    @pytest.mark.slow("draws with a start picture too")
    def test_reference_pictures_stand_beside_a_start_picture(self, engine):
        given = SEEN | GIVEN
        values = dict(init_image=START.name, mask=HOLE.name, mask_blur=0)
        ours = self.drawn(engine, given=given, reference=named(SIZES[0]), **values)[0]
        plain = self.drawn(engine, given=given, **values)[0]
        assert np.array_equal(ours[MASK == 0], PHOTO[MASK == 0]) and not np.array_equal(ours, plain)

    @once
    def test_a_reference_picture_is_encoded_once_for_all_that_share_it(self, engine, monkeypatch):
        new = Input.of_pixels(photo(64, 64)[::-1].copy())
        encode, encoded = ImageEncoder._encode, []
        monkeypatch.setattr(
            ImageEncoder,
            "_encode",
            lambda encoder, params, waiting: (
                encoded.extend(waiting) or encode(encoder, params, waiting)
            ),
        )
        given = {**SEEN, new.name: new}
        for prompts in (["a", "b"], ["c"]):
            name = f"{new.name} {named(SIZES[1])}"
            self.edited(engine, given=given, prompts=prompts, reference=name)
        assert len([image for _, image in encoded]) <= 2
        one, other = (
            self.edited(engine, given=given, reference=name) for name in (new.name, named(SIZES[0]))
        )
        assert not np.array_equal(one, other)

    @once
    def test_the_shift_is_that_of_the_pipeline(self, reference, engine):
        module = sys.modules[type(reference).__module__]
        for tokens, steps in ((18, 30), (256, 4), (4096, 4), (4096, 50), (5000, 20)):
            model, schedule = engine.checkpoint.model, engine.checkpoint.schedule
            found = model.schedule_of(schedule, 8, 8 * tokens, steps)
            assert found.shift == pytest.approx(np.exp(module.compute_empirical_mu(tokens, steps)))

    @once
    def test_the_autoencoder_is_that_of_diffusers(self, reference, engine, folder):
        _, params = Checkpoint.from_pretrained(folder / "model")
        model = engine.checkpoint.model
        assert model.downscale == 8
        picture = 2 * (PHOTO.astype(np.float32) / 255) - 1
        ours = jax.jit(model.encode)(params, picture)
        with torch.no_grad():
            found = reference.vae.encode(torch.tensor(picture.transpose(2, 0, 1)[None]))
            patches = reference._patchify_latents(found.latent_dist.mode())
            statistics = reference.vae.bn
            mean, variance = (
                each.view(1, -1, 1, 1) for each in (statistics.running_mean, statistics.running_var)
            )
            expected = (patches - mean) / torch.sqrt(variance + reference.vae.config.batch_norm_eps)
        assert_agrees("AutoencoderKLFlux2, encode", ours, expected[0].permute(1, 2, 0), 1e-4)

    @once
    def test_layers_that_nothing_depends_on_are_not_read(self, folder, engine):
        text = Checkpoint.open(folder / "model").parameters.shapes["text_encoder"]
        assert len(text["layers"]) == flux2.FEW[-1] and "norm" not in text


def test_the_layers_whose_states_are_the_text_are_those_of_the_pipeline():
    taken = inspect.signature(Flux2KleinPipeline.__call__).parameters["text_encoder_out_layers"]
    assert taken.default == PUBLISHED
