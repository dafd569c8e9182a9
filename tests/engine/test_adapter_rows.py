"""LoRAs of a transformer as rows: each slot brings its own factors, and no weight is copied."""

import dataclasses
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.torch import save_file

from benchmarks.report import count_compilations
from sd_tpu.checkpoint import weights
from sd_tpu.checkpoint.adapters import read_lora
from sd_tpu.checkpoint.config import CheckpointError
from sd_tpu.checkpoint.division import bytes_of
from sd_tpu.families.adapters import RANKS, Adapters, Cost
from sd_tpu.models.factors import joined
from sd_tpu.models.layers import Linear
from sd_tpu.request import Request
from sd_tpu.runtime.mesh import make_mesh
from sd_tpu.serving.engine import SLOTS, Engine, _adapter_group
from sd_tpu.serving.plan import Account
from sd_tpu.serving.scheduler import Busy, Limits, _BatchState
from sd_tpu.settings import RequestError
from tests.support import z_image
from tests.support.pictures import SIDE, drawn, pictures_of

ASKED = dict(prompts=["a cat"], seed=3, steps=2, guidance=2.0, negative_prompt="fog")
# LoRAs by rank, each with the layers that it changes.
LAYERS = {
    4: ("layers.0.attention.to_q", "all_final_layer.2-1.linear"),
    8: ("layers.1.feed_forward.w2",),
    12: ("noise_refiner.0.attention.to_out.0", "layers.0.feed_forward.w1"),
    16: ("context_refiner.0.attention.to_v", "cap_embedder.1"),
    24: ("layers.0.adaLN_modulation.0", "layers.1.attention.to_k"),
    32: ("all_x_embedder.2-1", "layers.1.feed_forward.w3"),
    48: ("layers.0.attention.to_out.0",),
    64: ("layers.0.feed_forward.w2", "layers.1.attention.to_k"),
}


def lora(pipeline, layers, rank: int, part: str = "transformer") -> dict[str, torch.Tensor]:
    torch.manual_seed(rank)
    tensors = {}
    for name in layers:
        layer = getattr(pipeline, part).get_submodule(name)
        tensors |= {
            f"{part}.{name}.lora_A.weight": torch.randn(rank, layer.in_features) / rank**0.5,
            f"{part}.{name}.lora_B.weight": torch.randn(layer.out_features, rank) / 4,
        }
    return tensors


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a model and LoRAs beside it."""
    folder = tmp_path_factory.mktemp("rows")
    pipeline = z_image.make_pipeline(folder / "words")
    pipeline.save_pretrained(folder / "model")
    for rank, layers in LAYERS.items():
        save_file(lora(pipeline, layers, rank), folder / f"rank {rank}.safetensors")
    save_file(lora(pipeline, LAYERS[4], 129), folder / "too much.safetensors")
    text = lora(pipeline, ("layers.0.self_attn.q_proj",), 4, "text_encoder")
    save_file(text | lora(pipeline, LAYERS[4], 5), folder / "both.safetensors")
    name, (rows, columns) = "transformer.layers.0.attention.to_q", (48, 48)
    factors = {"w1_a": (rows, 2), "w1_b": (2, columns), "w2_a": (rows, 2), "w2_b": (2, columns)}
    save_file(
        {f"{name}.hada_{which}": torch.randn(shape) for which, shape in factors.items()},
        folder / "loha.safetensors",
    )
    return folder


@pytest.fixture(scope="module")
def engine(folder):
    with Engine.open(folder / "model", devices=1, size=(SIDE, SIDE), lora_dir=folder) as engine:
        yield engine


def prompts(*names: str) -> list[str]:
    return [f"a cat <lora:{name}:0.7>" for name in names]


def asked(engine, given: list[str]) -> Request:
    """A request for pictures of one seed, which differ by their LoRAs alone."""
    request = Request.check({**ASKED, "prompts": given}, engine.catalog)
    pictures = (each and dataclasses.replace(each, seed=3) for each in request.pictures)
    return Request(tuple(pictures))


def cost(engine, *names: str) -> Cost:
    checkpoint = engine.checkpoint
    parameters = checkpoint.parameters
    return engine.adapters.cost(
        tuple((name, 1.0) for name in names),
        checkpoint.model,
        parameters.shapes,
        parameters.divisions,
    )


def factors(engine, *strengths: tuple[str, float], adapters: Adapters | None = None):
    checkpoint, adapters = engine.checkpoint, adapters or engine.adapters
    return adapters.factors(strengths, 64, checkpoint.model, checkpoint.parameters.shapes)


def batch_on_eight(engine, picture, group: int):
    """The batch of a picture on eight replicas, of which nothing is compiled."""
    catalog, adapters = engine.catalog, engine.adapters
    other = Engine(catalog, make_mesh(8, 1), group=group, adapters=adapters)
    try:
        return other._batch(picture)
    finally:
        other.worker.close()


@pytest.mark.slow("compiles Z-Image twice, and draws 17 pictures")
def test_eight_loras_of_other_ranks_are_drawn_in_one_batch_as_each_is_alone(engine):
    (plain,) = drawn(engine, {}, ASKED)
    drawn(engine, {}, ASKED, prompts=prompts("rank 4"))  # compiles
    (batch,) = [batch for batch in engine.worker._programs if batch.adapter_rank]
    assert (batch.slots, batch.adapter_rank) == (SLOTS, 64)
    names = [f"rank {rank}" for rank in LAYERS]
    compiled = count_compilations()
    together = pictures_of(engine.submit(asked(engine, prompts(*names))))
    assert len({picture.tobytes() for picture in [plain, *together.values()]}) == 9
    for index, name in enumerate(names):
        alone = pictures_of(engine.submit(asked(engine, prompts(name))))
        assert np.array_equal(together[index], alone[0]), name
    mixed = pictures_of(engine.submit(asked(engine, ["a cat", *prompts("rank 8", "rank 64")])))
    for ours, expected in zip(mixed.values(), (plain, together[1], together[7]), strict=True):
        assert np.array_equal(ours, expected)
    assert compiled() == 0
    assert {*engine.worker.weights.names(0)} == {engine.weights, engine.texts}


def test_factors_of_slots_are_counted_and_those_of_others_cost_nothing(engine):
    drawn(engine, {}, ASKED, prompts=["a cat", *prompts("rank 4")])
    guided = [batch for batch in engine.worker._programs if batch.guided]
    plain, batch = sorted(guided, key=lambda each: each.adapter_rank)
    assert not jax.tree.leaves(engine.worker._slots[plain].adapters)
    model = engine.worker._programs[batch].model
    of_one = bytes_of(model.adapter_shapes)
    assert bytes_of(engine.worker._slots[batch].adapters) == SLOTS * of_one
    # Those of a picture that enters lie beside those of all slots.
    assert batch.memory == (SLOTS + 1) * of_one + plain.memory * batch.slots // plain.slots
    assert engine.scheduler._memory.used(0) == sum(
        getattr(each, "memory", 0)
        for each in (*engine.worker._programs, engine.weights, engine.texts)
    )


def test_what_can_never_fit_beside_the_model_is_refused(engine):
    memory = engine.scheduler._memory
    drawn(engine, {}, ASKED)
    plain = next(each for each in engine.worker._programs if each.guided and not each.adapter_rank)
    limit, memory.limit = memory.limit, engine.weights.memory + plain.memory
    try:
        with pytest.raises(RequestError, match="more memory than the devices have"):
            drawn(engine, {}, ASKED, prompts=prompts("rank 4"))
    finally:
        memory.limit = limit


def test_as_many_are_stepped_together_as_a_matrix_unit_has_rows_for():
    found = [
        [_adapter_group(4, rank, guided, "tpu") for rank in (16, 64, 128)]
        for guided in (False, True)
    ]
    assert found == [[4, 2, 1], [4, 1, 1]] and _adapter_group(1, 16, False, "tpu") == 1
    assert [_adapter_group(4, 128, True, platform) for platform in ("gpu", "cpu")] == [4, 4]


def test_a_batch_has_slots_enough_that_one_client_has_work_for_every_replica(engine):
    (picture,) = engine.resolver.resolve(asked(engine, prompts("rank 4"))).pictures.values()
    for group in (1, 2):
        batch = batch_on_eight(engine, picture, group)
        # A matrix unit is a TPU's: elsewhere as many are stepped together as of other pictures.
        assert (batch.group, batch.adapter_rank) == (group, 64)
        state, account = _BatchState(batch, 8, 0.0), Account("here", "she")
        ticket = SimpleNamespace(account=account)
        taken = 0
        while state.has_room_for(account):
            state.slots[taken] = SimpleNamespace(ticket=ticket)
            taken += 1
        assert taken >= 8


def test_several_loras_of_a_picture_lie_side_by_side_as_one_of_their_sum(engine, folder):
    first, second = (f"rank {rank}" for rank in (4, 8))
    assert factors(engine, (first, 0.5), (second, 2.0)).keys() == {*LAYERS[4], *LAYERS[8]}
    twice = factors(engine, (first, 0.5), ("both", 2.0))
    checkpoint = engine.checkpoint
    adapted = checkpoint.model.with_adapters(checkpoint.parameters.shapes, RANKS[0])
    sums = {}
    for name in LAYERS[4]:
        its = joined(name, twice[name], adapted.adapter_shapes[name])
        assert its["A"].shape[1] == its["B"].shape[0] == RANKS[0]
        assert not its["A"][:, 9:].any() and its["A"][:, :9].any(axis=0).all()
        sums[name] = its["A"] @ its["B"]
    for name, strength in ((first, 0.5), ("both", 2.0)):
        tensors = engine.adapters._deltas(
            ((name, strength),), checkpoint.parameters.shapes, ["transformer"]
        )["transformer"]
        for layer in LAYERS[4]:
            ((delta, _),) = tensors[f"{layer}.weight"]
            sums[layer] -= strength * delta.scale * (delta.left @ delta.right)
    assert all(np.abs(rest).max() < 1e-5 for rest in sums.values())


def test_a_file_is_kept_once_at_its_own_rank_whatever_its_strengths(engine, folder, monkeypatch):
    read, own = [], Adapters(folder)
    monkeypatch.setattr(
        "sd_tpu.families.adapters.read_lora", lambda *given: read.append(given) or read_lora(*given)
    )
    found = [factors(engine, ("rank 4", strength), adapters=own) for strength in (0.5, 2.0)]
    found.append(factors(engine, ("rank 4", 1.0), ("rank 8", 0.5), adapters=own))
    assert [path.stem for path, *_ in read] == ["rank 4", "rank 8"]
    for layer in LAYERS[4]:
        kept = [lora[layer] for each in found for lora, _ in each[layer]]
        assert len(kept) == 3 and len({id(each) for each in kept}) == 1
        assert kept[0].left.shape[1] == len(kept[0].right) == 4
    del found, kept
    assert not own._read


def test_a_file_that_is_kept_for_one_model_is_looked_at_anew_for_another(engine, folder):
    kept = factors(engine, ("rank 4", 1.0))
    wider = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(tuple(2 * side for side in leaf.shape), leaf.dtype),
        engine.checkpoint.parameters.shapes,
    )
    assert kept
    with pytest.raises(CheckpointError, match="rank 4"):
        engine.adapters.factors((("rank 4", 1.0),), 64, engine.checkpoint.model, wider)


def test_while_one_file_is_read_others_are_not_waited_for(engine, folder, monkeypatch):
    begun, go_on, own = threading.Event(), threading.Event(), Adapters(folder)

    def slow(path, *given):
        if path.stem == "rank 4":
            begun.set()
            assert go_on.wait(60)
        return read_lora(path, *given)

    monkeypatch.setattr("sd_tpu.families.adapters.read_lora", slow)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(factors, engine, ("rank 4", 1.0), adapters=own)
        try:
            assert begun.wait(60)
            second = threads.submit(factors, engine, ("rank 8", 1.0), adapters=own)
            assert second.result(20).keys() == {*LAYERS[8]}
            assert not first.done()
        finally:
            go_on.set()
        assert first.result(60).keys() == {*LAYERS[4]}


def test_no_file_is_read_for_a_request_that_is_refused(engine, monkeypatch):
    resolved, read = engine.resolver.resolve(asked(engine, prompts("rank 4"))), []
    monkeypatch.setattr(engine.adapters, "factors", lambda *given: read.append(given) or {})
    monkeypatch.setattr(engine.scheduler, "limits", Limits(client_pictures=0))
    refused = engine.tally.refused
    with pytest.raises(Busy):
        engine.queue(resolved)
    assert not read and engine.tally.refused == refused + 1


def test_an_estimate_is_for_the_batch_that_draws_with_loras_once_these_are_known(
    engine, folder, monkeypatch
):
    (folder / "unknown.safetensors").write_bytes((folder / "rank 4.safetensors").read_bytes())
    engine.adapters.look_again()
    picture = asked(engine, prompts("unknown")).picture(0)
    with monkeypatch.context() as patch:
        patch.setattr("sd_tpu.families.adapters.changed_by_lora", refuse := lambda *given: 1 / 0)
        patch.setattr("sd_tpu.families.adapters.read_alias", refuse)
        for text in ("<lora:unknown:0.7>", "<lora:nobody's>", "<lora:un"):
            other = dataclasses.replace(picture, prompt=f"a cat {text}")
            assert engine.resolver.estimated(other).batch.adapter_rank == 0
    resolved = engine.resolver.resolve(asked(engine, prompts("unknown"))).pictures[0]
    assert engine.resolver.estimated(picture).batch == resolved.batch
    assert resolved.batch.adapter_rank == 64


def test_ranks_are_filled_up_to_those_that_programs_are_compiled_for(engine):
    assert [cost(engine, f"rank {rank}").rank for rank in LAYERS] == [64] * len(LAYERS)
    assert not any(cost(engine, "rank 64").memory.values())
    # Only where several change the same layer are their ranks added up.
    assert cost(engine, "rank 48", "rank 32").rank == 64
    assert cost(engine, "rank 48", "rank 64").rank == 64
    assert cost(engine, "rank 64", "rank 24").rank == 128


def test_what_is_too_much_for_rows_or_has_no_low_rank_is_merged(engine):
    layers = engine.checkpoint.parameters.shapes["transformer"]
    kernel = bytes_of(layers["layers"][0]["attention"]["to_q"]["kernel"])
    final = bytes_of(layers["all_final_layer"]["2-1"]["linear"]["kernel"])
    assert cost(engine, "loha") == (0, {"transformer": kernel})
    assert cost(engine, "too much") == (0, {"transformer": kernel + final})
    # Beside one that has no rank, the other's factors of the same layer are merged as well.
    assert cost(engine, "loha", "rank 4") == (64, {"transformer": kernel})
    before = drawn(engine, {}, ASKED)[0]
    for name in ("loha", "too much"):
        assert (drawn(engine, {}, ASKED, prompts=prompts(name))[0] != before).any()
        assert [each.adapters for each in engine.worker.weights.names(0)][-1] == ((name, 0.7),)
    assert np.array_equal(drawn(engine, {}, ASKED)[0], before)


def test_a_lora_for_the_text_encoder_too_merges_that_alone(engine):
    text = engine.checkpoint.parameters.shapes["text_encoder"]["layers"][0]["self_attn"]
    of_texts = bytes_of(text["q_proj"]["kernel"])
    assert cost(engine, "both") == (64, {"text_encoder": of_texts, "transformer": 0})
    request = asked(engine, prompts("both"))
    (picture,) = engine.resolver.resolve(request).pictures.values()
    pictures_of(engine.submit(request))
    assert picture.weights == engine.weights
    merged = engine.worker.weights.of(0, picture.texts)
    base = engine.worker.weights.of(0, engine.texts)
    changed = [
        jax.tree_util.keystr(path, simple=True, separator=".")
        for (path, ours), theirs in zip(
            jax.tree_util.tree_leaves_with_path(merged), jax.tree.leaves(base), strict=True
        )
        if ours is not theirs
        and ours.addressable_data(0).unsafe_buffer_pointer()
        != theirs.addressable_data(0).unsafe_buffer_pointer()
    ]
    assert changed == ["text_encoder.layers.0.self_attn.q_proj.kernel"]


def test_what_travels_to_another_process_holds_no_factors(engine, folder):
    request = asked(engine, prompts("rank 64"))
    expected = pictures_of(engine.submit(request))
    content = pickle.dumps(engine.resolver.resolve(request))
    assert len(content) < 2 * len(pickle.dumps(engine.resolver.resolve(asked(engine, ["a cat"]))))
    found = pictures_of(engine.queue(engine.resolver.here(pickle.loads(content))))
    assert np.array_equal(found[0], expected[0])


def test_a_lora_that_is_damaged_is_refused_in_a_sentence(engine, folder):
    name = f"transformer.{LAYERS[48][0]}"
    tensors = {f"{name}.lora_A.weight": torch.ones(4, 48)}
    for value, told in ((torch.nan, "no finite number"), (3e38, "too large for float32")):
        tensors[f"{name}.lora_B.weight"] = torch.full((48, 4), value)
        save_file(tensors, folder / "damaged.safetensors")
        engine.adapters.look_again()
        with pytest.raises(RequestError, match=told):
            drawn(engine, {}, ASKED, prompts=["a cat <lora:damaged:2>"])


def test_a_lora_that_gets_another_rank_while_it_is_asked_for_is_refused(engine, folder):
    (folder / "growing.safetensors").write_bytes((folder / "rank 4.safetensors").read_bytes())
    engine.adapters.look_again()
    resolved = engine.resolver.resolve(asked(engine, prompts("growing")))
    (folder / "growing.safetensors").write_bytes((folder / "too much.safetensors").read_bytes())
    with pytest.raises(RequestError, match="written anew; please ask for it again"):
        engine.queue(resolved)


def test_dense_layers_of_the_denoiser_are_those_whose_kernels_have_two_axes(engine):
    """By which headers of files are asked for what may be rows."""
    model, shapes = engine.checkpoint.model, engine.checkpoint.parameters.shapes
    network = nnx.merge(model.transformer, shapes["transformer"])
    linear = {
        ".".join(map(str, path))
        for path, module in nnx.iter_modules(network)
        if isinstance(module, Linear)
    }
    named = weights.shapes(shapes["transformer"])
    dense = {
        name.removesuffix(".weight")
        for name, shape in named.items()
        if name.endswith(".weight") and len(shape) == 2
    }
    adapted = model.with_adapters(shapes, 64)
    assert linear == dense == adapted.adapter_layers.keys() and model.adapter_layers == {}
