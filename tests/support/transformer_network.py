"""Tests of a network alone, and of a transformer, which are the same for each family."""

import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from sd_tpu.checkpoint import weights
from sd_tpu.checkpoint.config import CheckpointError
from tests.support.kinds import kinds_of, once
from tests.support.parity import assert_agrees, relative

WEIGHTS = "diffusion_pytorch_model.safetensors"
Inputs = dict[str, np.ndarray]  # by the names of a transformer's arguments, in their order


class NetworkTests:
    """A network against diffusers', at random weights.

    A subclass names both and makes their inputs. Weights and config travel by way of the files
    that diffusers writes. Each comparison prints its relative error:
    `pytest -rP tests/parity/test_flux_transformer.py | grep parity`.
    """

    network: ClassVar[type[nnx.Module]]
    theirs: ClassVar[type]
    config: ClassVar[type]
    tiny: ClassVar[dict[str, Any]]  # a small config
    # In what each kind's config differs from it. The first, which has most of what others have, is
    # drawn at every size.
    kinds: ClassVar[dict[str, dict[str, Any]]]
    published: ClassVar[dict[str, dict[str, Any]]]  # configs of full size
    # Parts of parameters' names, and what such parameters are multiplied by: what norms are given
    # is small, so that eps counts; so is what comes of timesteps, whose angles of up to 1000 are
    # rounded to float32 in one way by PyTorch and in another by JAX.
    scales: ClassVar[dict[str, float]] = {}
    far: ClassVar[tuple[str, ...]] = ()  # what is moved ten times as far
    result: ClassVar[Any] = jnp.float32  # of a network in bfloat16
    refused: ClassVar[list[tuple[str, Any]]]  # values of the config

    @classmethod
    def moved(cls, **values) -> torch.nn.Module:
        """Return diffusers' network, every parameter moved."""
        torch.manual_seed(0)
        made = cls.theirs(**cls.tiny | values)
        with torch.no_grad():
            for name, tensor in made.state_dict().items():
                far = any(part in name for part in cls.far)
                tensor += (1 if far else 0.1) * torch.randn_like(tensor)
                tensor *= next((scale for part, scale in cls.scales.items() if part in name), 1)
        return made.eval().requires_grad_(False)

    @classmethod
    def opened(cls, folder: Path, dtype: Any = jnp.float32):
        """Return ours as one program of the inputs, with a folder's weights."""
        config = cls.config.from_dict(json.loads((folder / "config.json").read_text()))
        graph, shapes = weights.abstract(partial(cls.network, config, dtype=dtype))
        state = weights.load([folder / WEIGHTS], shapes)
        return partial(jax.jit(lambda state, given: nnx.merge(graph, state)(**given)), state)

    def pytest_generate_tests(self, metafunc) -> None:
        if "kind" in metafunc.fixturenames:
            metafunc.parametrize("kind", kinds_of(metafunc), scope="class")
        if "refusal" in metafunc.fixturenames:
            metafunc.parametrize("refusal", self.refused, ids=str)
        if "misfit" in metafunc.fixturenames:
            metafunc.parametrize("misfit", self.misfits, ids=str)

    @pytest.fixture(scope="class")
    @classmethod
    def reference(cls, kind) -> torch.nn.Module:
        return cls.moved(**cls.kinds[kind])

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, reference, tmp_path_factory) -> Path:
        """Folder that diffusers writes of the network."""
        folder = tmp_path_factory.mktemp("transformer")
        reference.save_pretrained(folder)
        return folder

    @pytest.fixture(scope="class")
    @classmethod
    def ours(cls, folder):
        return cls.opened(folder)

    @pytest.fixture
    def given(self, kind) -> Inputs:
        raise NotImplementedError

    @once
    def test_in_bfloat16_it_stays_near(self, given, folder, ours):
        found = self.opened(folder, jnp.bfloat16)(given)
        assert found.dtype == self.result
        assert 1e-4 < relative(found, ours(given)) < 0.1

    def test_parameters_of_full_size_are_those_of_diffusers(self):
        for config in self.published.values():
            with torch.device("meta"):
                theirs = self.theirs(**config).state_dict()
            _, ours = weights.abstract(partial(self.network, self.config.from_dict(config)))
            shapes = {name: tuple(value.shape) for name, value in theirs.items()}
            assert weights.shapes(ours) == shapes

    def test_configs_that_are_not_supported_are_refused_by_name(self, refusal):
        name, value = refusal
        with pytest.raises(CheckpointError) as caught:
            self.config.from_dict(self.tiny | {name: value})
        message = str(caught.value)
        assert f"{name}={value!r}" in message and "\n" not in message


class TransformerNetworkTests(NetworkTests):
    """A family's transformer against diffusers', as `NetworkTests`."""

    sizes: ClassVar[list[tuple[int, int]]]  # of latents, the first not square, each compiled for
    cases: ClassVar[list[dict[str, Any]]] = [{"times": (961.0, 3.5)}, {"times": (0.25, 1000.0)}]
    many: ClassVar[list[dict[str, Any]]]  # inputs of more than 512 tokens
    shallow: ClassVar[dict[str, Any]]  # in what the network for those differs from `tiny`
    ordered: ClassVar[bool]  # whether the order of words counts
    misfits: ClassVar[list[tuple[dict[str, Any], str]]] = []  # inputs that are refused, and why
    least_change: ClassVar[float] = 1e-3
    least_gradient: ClassVar[float] = 1e-7  # of words
    equal: ClassVar[list[dict[str, Any]]]  # values of the config that mean the same

    @classmethod
    def inputs(cls, kind: str, height: int, width: int, **case) -> Inputs:
        """Return inputs for a batch of two, channels last."""
        raise NotImplementedError

    @classmethod
    def of_diffusers(cls, reference: torch.nn.Module, **inputs) -> np.ndarray:
        """Return what diffusers' network makes of the same inputs, channels last."""
        raise NotImplementedError

    @pytest.fixture
    def given(self, kind) -> Inputs:
        return self.inputs(kind, *self.sizes[0])

    @pytest.fixture(scope="class")
    @classmethod
    def for_many(cls, tmp_path_factory):
        """Return (diffusers' network for many tokens, ours)."""
        reference, folder = cls.moved(**cls.shallow), tmp_path_factory.mktemp("shallow")
        reference.save_pretrained(folder)
        return reference, cls.opened(folder)

    def test_it_is_that_of_diffusers(self, kind, reference, ours):
        sizes = self.sizes if kind == next(iter(self.kinds)) else self.sizes[:1]
        for (height, width), case in itertools.product(sizes, self.cases):
            given = self.inputs(kind, height, width, **case)
            found = ours(given)
            assert found.dtype == jnp.float32
            for row, theirs in enumerate(self.of_diffusers(reference, **given)):
                name = f"{self.network.__name__}, {kind}, {height}x{width}, {case}, row {row}"
                assert_agrees(name, found[row], theirs)

    def test_many_tokens_are_those_of_diffusers(self, for_many):
        """Attention is chunked on CPUs where tokens are more than 512."""
        reference, ours = for_many
        for case in self.many:
            given = self.inputs(next(iter(self.kinds)), **case)
            theirs = self.of_diffusers(reference, **given)
            assert_agrees(f"{self.network.__name__}, {case}", ours(given), theirs)

    def test_inputs_without_whole_patches_or_positions_are_refused(self, misfit):
        case, sentence = misfit

        def drawn():
            model = self.network(self.config.from_dict(self.tiny), rngs=weights.ShapesOnly())
            return model(**self.inputs(next(iter(self.kinds)), **case))

        with pytest.raises(ValueError, match=sentence):
            jax.eval_shape(drawn)

    def test_every_input_of_a_row_matters_to_that_row_alone(self, given, ours):
        before = ours(given)
        for name, values in given.items():
            changed = values.copy()
            changed[1] += 1 if changed.dtype == np.int32 else 0.5
            after = ours(given | {name: changed})
            assert relative(after[0], before[0]) < 1e-6, name
            assert relative(after[1], before[1]) > self.least_change, name

    @once
    def test_every_part_of_the_latents_and_of_the_text_matters(self, given, ours):
        def total(parts):
            return jnp.sum(jnp.sin(ours(given | parts)))

        parts = {name: given[name] for name in ("x", "text")}
        gradients = jax.jit(jax.grad(total))(parts)
        assert (np.abs(gradients["x"]) > 1e-7).all()
        words = given["text"].shape[1]
        for gradient, length in zip(
            gradients["text"], given.get("lengths", [words, words]), strict=True
        ):
            assert (np.abs(gradient[:length]) > self.least_gradient).all()
            assert (gradient[length:] == 0).all()

    def test_where_tokens_are_matters(self, given, ours):
        """Those of the picture, and those of the text where the family orders them."""
        if "lengths" in given:
            given["lengths"][:] = given["text"].shape[1]
        before = ours(given)
        change = relative(ours(given | {"text": given["text"][:, ::-1]}), before)
        assert change > self.least_change if self.ordered else change < 1e-5
        for axis in (1, 2):
            turned = ours(given | {"x": np.flip(given["x"], axis)})
            assert relative(np.flip(turned, axis), before) > self.least_change

    def test_configs_of_one_computation_are_equal(self):
        one, other = (self.config.from_dict(self.tiny | values) for values in self.equal)
        assert one == other and hash(one) == hash(other)
