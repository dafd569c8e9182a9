"""Tests of pictures by a transformer of flow matching, which are the same for each family."""

import dataclasses
import sys
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import diffusers
import jax
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from benchmarks.report import count_compilations
from sd_tpu.checkpoint.config import CheckpointError
from sd_tpu.families.checkpoint import Checkpoint
from sd_tpu.families.qwen_tokenizer import THINKS
from sd_tpu.pictures.inputs import Input
from sd_tpu.request import Request
from sd_tpu.sampling.samplers import FLOW_SAMPLERS
from sd_tpu.serving.engine import Engine
from sd_tpu.settings import RequestError
from tests.support import pictures
from tests.support.kinds import kinds_of, once
from tests.support.pictures import assert_alike, pictures_of

HEIGHT, WIDTH = 24, 48  # not square, so that nothing is turned unseen
PHOTO = np.random.default_rng(0).integers(0, 256, (3, 6, 3), np.uint8).repeat(8, 0).repeat(8, 1)
MASK = np.zeros((HEIGHT, WIDTH), np.uint8)
MASK[4:16, 8:29] = 255
START, HOLE = Input.of_pixels(PHOTO), Input.of_pixels(np.stack([MASK] * 3, axis=-1))
GIVEN = {each.name: each for each in (START, HOLE)}


@dataclasses.dataclass(frozen=True)
class Kind:
    """A tiny model of a family, and what its card says."""

    made: dict[str, Any]  # what the family's `make_pipeline` is told
    steps: int
    guidance: float
    larger_strength: float
    guided: bool = True  # whether guidance counts
    negated: bool = True  # whether negative prompts count


class TransformerPictureTests:
    """Pictures of each kind of a family against those of diffusers' pipeline, files, and what is
    refused. A subclass names the family; one engine of each kind is open at a time."""

    family: ClassVar[type]
    kinds: ClassVar[dict[str, Kind]]
    prompts: ClassVar[list[str]]  # two, of different lengths
    asked: ClassVar[dict[str, Any]]  # seed, steps, guidance, maybe a negative prompt
    size: ClassVar[tuple[int, int]]  # by default
    samplers: ClassVar[tuple[str, ...]]  # that diffusers' pipeline takes
    parts: ClassVar[tuple[str, ...]]  # that may have parameters
    adapted: ClassVar[tuple[str, ...]]  # layers of the transformer that a LoRA changes
    misfits: ClassVar[list[tuple[str, dict[str, Any], str]]]  # part, other config, sentence
    refused: ClassVar[list[tuple[dict[str, Any], str]]]  # settings, sentence

    @classmethod
    def make_pipeline(cls, folder: Path, **values) -> diffusers.DiffusionPipeline:
        """Return a tiny pipeline whose tokenizer goes to `folder`."""
        raise NotImplementedError

    @classmethod
    def options(cls, reference: diffusers.DiffusionPipeline, steps: int) -> dict[str, Any]:
        """Return what diffusers' pipeline takes beside what all take."""
        return {}

    def pytest_generate_tests(self, metafunc) -> None:
        if "kind" in metafunc.fixturenames:
            metafunc.parametrize("kind", kinds_of(metafunc), scope="class")
        if "sampler" in metafunc.fixturenames:
            metafunc.parametrize("sampler", self.samplers)

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, kind, tmp_path_factory) -> Path:
        return tmp_path_factory.mktemp("model")

    @pytest.fixture(scope="class")
    @classmethod
    def reference(cls, kind, folder) -> diffusers.DiffusionPipeline:
        """PyTorch's pipeline, written to a folder with a LoRA beside it."""
        reference = cls.make_pipeline(folder / "words", **cls.kinds[kind].made)
        reference.set_progress_bar_config(disable=True)
        reference.save_pretrained(folder / "model")
        torch.manual_seed(5)
        tensors = {}
        for name in cls.adapted:
            layer = reference.transformer.get_submodule(name)
            tensors |= {
                f"transformer.{name}.lora_A.weight": torch.randn(4, layer.in_features) / 4,
                f"transformer.{name}.lora_B.weight": torch.randn(layer.out_features, 4) / 4,
            }
        save_file(tensors, folder / "ink.safetensors")
        return reference

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, reference, folder):
        """Ours with the same model."""
        engine = Engine.open(folder / "model", devices=1, size=(HEIGHT, WIDTH), lora_dir=folder)
        yield engine
        engine.close()

    def drawn(self, engine, given=GIVEN, **values) -> list[np.ndarray]:
        """Return our pictures, of the first prompt if no others are given."""
        values = {"prompts": self.prompts[:1], **values}
        return pictures.drawn(engine, given=given, asked=self.asked, **values)

    def theirs(self, reference, engine, seed=0, kind="", **values) -> np.ndarray:
        """Return PyTorch's picture of the same noise, with the encoder's mode: int [H, W, 3].

        Args:
            seed: from the seed that is asked for on.
            kind: of pipeline, "Img2Img" or "Inpaint".
            values: for the pipeline, in place of what is asked.
        """
        made = reference
        if kind:
            name = type(reference).__name__.replace("Pipeline", f"{kind}Pipeline")
            made = getattr(diffusers, name)(**reference.components)
            made.set_progress_bar_config(disable=True)
            values = {"image": Image.fromarray(PHOTO), **values}
        asked = {
            "prompt": self.prompts[0],
            "guidance_scale": self.asked["guidance"],
            "num_inference_steps": self.asked["steps"],
            "height": HEIGHT,
            "width": WIDTH,
            "output_type": "np",
            **values,
        }
        if "negative_prompt" in self.asked:
            asked["negative_prompt"] = self.asked["negative_prompt"]
        h, w, channels = engine.checkpoint.model.latent_shape(HEIGHT, WIDTH)
        key = jax.random.PRNGKey(self.asked["seed"] + seed)
        noise = torch.tensor(np.array(jax.random.normal(key, (1, channels, h, w))))
        replaced = {"randn_tensor": lambda *_, **__: noise}
        if kind:
            replaced["retrieve_latents"] = lambda found, **_: found.latent_dist.mode()
        with mock.patch.multiple(sys.modules[type(made).__module__], **replaced):
            images = made(**self.options(reference, asked["num_inference_steps"]) | asked).images
        return np.round(images[0] * 255).astype(int)

    @pytest.mark.slow("compiles each kind")
    def test_two_prompts_of_different_lengths_are_drawn_as_by_pytorch(self, reference, engine):
        ours = self.drawn(engine, prompts=self.prompts)
        for index, picture in enumerate(ours):
            expected = self.theirs(reference, engine, index, prompt=self.prompts[index])
            assert_alike(picture, expected)
        assert not np.array_equal(*ours)

    def test_guidance_and_negative_prompts_are_each_slots_own_and_compile_nothing(
        self, kind, reference, engine
    ):
        expected = self.kinds[kind]
        own = [{"guidance": 2.0}, {"guidance": 6.0}]
        weak, strong = self.drawn(engine, prompts=2 * self.prompts[:1], overrides=own)
        assert_alike(weak, self.theirs(reference, engine, guidance_scale=2.0))
        assert_alike(strong, self.theirs(reference, engine, 1, guidance_scale=6.0))
        compiled = count_compilations()
        (again,) = self.drawn(engine, guidance=6.0)
        assert np.array_equal(again, weak) != expected.guided
        negative = "fog " * (20 if expected.negated else 100)  # which is no longer than they take
        (negated,) = self.drawn(engine, guidance=6.0, negative_prompt=negative)
        assert np.array_equal(negated, again) != expected.negated
        assert compiled() == 0

    def test_settings_by_default_are_those_of_its_makers(self, kind, engine):
        expected, card = self.kinds[kind], engine.checkpoint.card
        defaults = expected.steps, expected.guidance, expected.larger_strength
        assert (card.steps, card.guidance, card.larger_strength) == defaults
        assert engine.checkpoint.default_size == self.size

    @once
    def test_each_sampler_that_its_pipeline_takes_is_that_of_pytorch(
        self, reference, engine, sampler, monkeypatch
    ):
        scheduler, flow = getattr(diffusers, FLOW_SAMPLERS[sampler].scheduler), {}
        if "FlowMatch" not in scheduler.__name__:
            flow = dict(use_flow_sigmas=True, flow_shift=3.0, prediction_type="flow_prediction")
        # The noise of those that add some is ours alone.
        steps = 1 if FLOW_SAMPLERS[sampler].stochastic else self.asked["steps"]
        other = scheduler.from_config(reference.scheduler.config, **flow)
        monkeypatch.setattr(reference, "scheduler", other)
        expected = self.theirs(reference, engine, num_inference_steps=steps)
        assert_alike(self.drawn(engine, sampler=sampler, steps=steps)[0], expected)

    @once
    def test_what_a_mask_leaves_black_is_kept(self, engine):
        ours = self.drawn(engine, init_image=START.name, mask=HOLE.name, mask_blur=0)[0]
        assert np.array_equal(ours[MASK == 0], PHOTO[MASK == 0])
        assert not np.array_equal(ours[MASK > 0], PHOTO[MASK > 0])

    @once
    def test_slots_of_a_batch_do_not_tell_that_others_are_there(self, engine):
        samplers = [*FLOW_SAMPLERS, *FLOW_SAMPLERS][:8]
        own = [
            {"sampler": sampler, "steps": 2 + index % 4, "guidance": 2.0 + index}
            for index, sampler in enumerate(samplers)
        ]
        prompts = [f"{word} {self.prompts[index % 2]}" for index, word in enumerate("abcdefgh")]
        request = Request.check(
            {**self.asked, "prompts": prompts, "overrides": own}, engine.catalog
        )
        together, compiled = pictures_of(engine.submit(request)), count_compilations()
        assert all(picture.std() > 2 for picture in together.values())
        for index in (0, 4, 7):
            alone = pictures_of(engine.submit(request.only(index)))
            assert np.array_equal(together[index], alone[0])
        assert compiled() == 0

    def test_arrays_have_the_shapes_that_the_family_tells_of_them(self, engine):
        checkpoint = engine.checkpoint
        inputs = checkpoint.prompt_inputs("a cat", "a dog", guidance=2.0)
        model = checkpoint.model.for_inputs(inputs)
        assert model == checkpoint.model.for_inputs(checkpoint.prompt_inputs("a", ""))

        def shapes(tree):
            return jax.tree.map(lambda x: (np.shape(x), np.dtype(x.dtype)), tree)

        assert shapes(inputs) == shapes(model.input_shapes)
        cond = jax.eval_shape(model.encode_prompt, checkpoint.parameters.shapes, inputs)
        assert shapes(cond) == shapes(model.cond_shapes)

    def assert_lora_is_pytorchs(self, reference, engine, file: Path) -> None:
        (plain,) = self.drawn(engine)
        (ours,) = self.drawn(engine, prompts=[f"{self.prompts[0]} <lora:{file.stem}:0.7>"])
        reference.load_lora_weights(file, adapter_name=file.stem)
        try:
            reference.set_adapters([file.stem], [0.7])
            expected = self.theirs(reference, engine)
        finally:
            reference.unload_lora_weights()
        assert_alike(ours, expected)
        assert np.abs(ours.astype(int) - plain).mean() > 1

    @once
    @pytest.mark.slow("compiles for factors")
    def test_a_lora_of_peft_changes_the_picture_as_in_pytorch(self, reference, engine, folder):
        self.assert_lora_is_pytorchs(reference, engine, folder / "ink.safetensors")

    def test_what_is_saved_is_read_again_here_and_by_pytorch(
        self, reference, engine, folder, tmp_path
    ):
        checkpoint, params = Checkpoint.from_pretrained(folder / "model")
        assert isinstance(checkpoint.model, self.family)
        if not self.family.whole:
            with pytest.raises(CheckpointError, match="without parameters that no picture"):
                checkpoint.save_pretrained(tmp_path, params)
            return
        checkpoint.save_pretrained(tmp_path, params)
        absent = [name for name, part in reference.components.items() if part is None]
        again = type(reference).from_pretrained(tmp_path, **dict.fromkeys(absent))
        for name in self.parts:
            ours, expected = getattr(again, name), getattr(reference, name)
            assert (ours is None) == (expected is None)
            if ours is not None:
                states = ours.state_dict(), expected.state_dict()
                assert states[0].keys() == states[1].keys()
                assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])

    @once
    def test_what_it_does_not_have_is_refused_by_name(self, engine):
        unit = engine.checkpoint.model.size_unit
        for values, sentence in (
            (dict(sampler="ddim"), "DDIM is not for this model"),
            (dict(spacing="karras"), "no karras spacing"),
            (dict(height=HEIGHT - unit // 2), f"sides are multiples of {unit}"),
            *self.refused,
        ):
            with pytest.raises(RequestError, match=sentence):
                self.drawn(engine, **values)

    @once
    def test_a_link_of_another_models_picture_says_what_is_not_for_this_one(self, engine):
        request = Request.check({**self.asked, "prompts": self.prompts}, engine.catalog)
        for changes in ({"sampler": "ddim"}, {"spacing": "karras"}):
            picture = dataclasses.replace(request.picture(0), **changes)
            with pytest.raises(RequestError, match="trained by flow matching"):
                engine.as_drawn(Request((picture,)))

    @once
    def test_parts_that_do_not_fit_are_refused_by_what_differs(self, engine):
        configs = engine.checkpoint.configs
        for part, change, sentence in self.misfits:
            changed = {**configs, part: {**configs[part], **change}}
            with pytest.raises(CheckpointError, match=sentence):
                self.family.build(changed, np.float32)
        with pytest.raises(CheckpointError, match="Token downsampling"):
            self.family.build(configs, np.float32, token_downsampling=2)

    @once
    def test_a_scheduler_for_another_kind_of_noise_is_refused(self, engine):
        there = engine.checkpoint
        noise = dict(beta_start=0.1, beta_end=0.2, beta_schedule="linear")
        configs = {**there.configs, "scheduler": {"_class_name": "DDIMScheduler", **noise}}
        with pytest.raises(CheckpointError, match=r"'DDIMScheduler' does not fit.*flow matching"):
            Checkpoint(there.model, there.tokenizers, configs, there.card)


class StartPictureTests:
    """Start pictures, for families of which diffusers has pipelines for them."""

    @once
    @pytest.mark.parametrize("strength", [0.5, 1.0])
    def test_a_picture_that_begins_with_another_is_that_of_pytorch(
        self, reference, engine, strength
    ):
        ours = self.drawn(engine, init_image=START.name, strength=strength)
        assert_alike(ours[0], self.theirs(reference, engine, kind="Img2Img", strength=strength))

    @once
    @pytest.mark.parametrize("strength", [0.5, 1.0])
    def test_a_picture_with_a_mask_is_that_of_pytorch_where_it_is_white(
        self, reference, engine, strength
    ):
        values = dict(init_image=START.name, mask=HOLE.name, mask_blur=0, strength=strength)
        ours = self.drawn(engine, **values)[0]
        expected = self.theirs(
            reference, engine, kind="Inpaint", strength=strength, mask_image=Image.fromarray(MASK)
        )
        assert_alike(ours[MASK > 0], expected[MASK > 0])
        assert np.array_equal(ours[MASK == 0], PHOTO[MASK == 0])


class JourneyTests:
    """Pictures between two prompts, for families whose texts are all of one length."""

    @once
    @pytest.mark.slow("compiles the way between two prompts")
    def test_a_journey_goes_from_one_prompt_to_another(self, engine):
        begin, end = (self.drawn(engine, prompts=[prompt])[0] for prompt in self.prompts)
        ways = [
            self.drawn(engine, to_prompt=self.prompts[1], share=share)[0]
            for share in (0.001, 0.5, 1.0)
        ]
        distances = [np.abs(way.astype(int) - end).mean() for way in ways]
        assert_alike(ways[0], begin.astype(int))
        assert_alike(ways[2], end.astype(int))
        assert distances[0] > distances[2] and distances[1] > 1


class QwenTests:
    """How texts are read by families whose text encoder is a Qwen3 language model."""

    @once
    def test_ids_are_those_of_the_chat_template(self, reference, engine):
        tokenizer, template = engine.checkpoint.tokenizers["tokenizer"], self.family.template
        for prompt in (*self.prompts, "", "two\nlines", "<|im_end|>"):
            text = reference.tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}],
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=template == THINKS,
            )
            ids = reference.tokenizer(text).input_ids
            assert tokenizer.turn(prompt, template) == ids

    @once
    def test_nothing_is_drawn_between_two_prompts(self, engine):
        with pytest.raises(RequestError, match="draws nothing between two prompts"):
            self.drawn(engine, to_prompt=self.prompts[1], share=0.5)
