"""What a worker makes of plans, with programs that only count."""

import dataclasses
import pickle
import threading
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from sd_tpu.checkpoint.config import CheckpointError
from sd_tpu.checkpoint.division import Division
from sd_tpu.runtime.mesh import make_mesh
from sd_tpu.serving.plan import Batch, Plan, Prompt, TextEncoder, Ticket, Weights
from sd_tpu.serving.tally import Tally
from sd_tpu.serving.worker import Worker

BATCH, BASE = (
    Batch(architecture="sd", height=8, width=8, slots=4),
    Weights(name="base", architecture="sd"),
)


class Programs:
    """Slots that hold a number each: what entered, and one more with every row."""

    slots, latent_shape, mesh, has_previewer = 4, (1, 1, 1), make_mesh(1), False
    autoencoder, divisions = "vae", None

    def replica(self, slot):
        return 0

    def empty(self):
        return SimpleNamespace(latents=np.zeros((4, 1, 1, 1)), clean=np.full((4, 1, 1, 1), 2.0))

    def encode(self, params, slots, entering):
        for slot, slot_inputs in entering.items():
            slots.latents[slot] = getattr(slot_inputs, "value", slot_inputs)
        return slots

    def advance(self, params, slots, n):
        slots.latents = slots.latents + np.reshape(n, (-1, 1, 1, 1))
        return slots

    def decode(self, params, latents, wanted):
        """Grey, as bright as the latent says."""
        bright = (100 + 10 * np.tile(latents, 3)).clip(0, 255).round().astype(np.uint8)
        return np.where(wanted[:, None, None, None], bright, np.uint8(77))

    def unsafe(self, params, pictures):
        """The slots with a white picture."""
        return {slot for slot, pixels in pictures.items() if pixels.min() == 255}


def grey(value, **within):
    return pytest.approx(np.full((1, 1, 3), value), **within)


@dataclasses.dataclass
class SlotInputs:
    """A number, to which what was made of a text is added."""

    value: float

    def with_texts(self, texts):
        return SlotInputs(self.value + texts["text"])


class Reader:
    """Makes of a number what its text encoder's weights add; counts its calls."""

    def __init__(self):
        self.calls = []

    def compile(self, shapes):
        assert shapes == {"text_encoder": {}}

    def encode(self, params, prompts):
        self.calls.append(list(prompts))
        if None in prompts:
            raise MemoryError("too much")
        return [{"text": each + params["text_encoder"]["add"].item()} for each in prompts]


READER = TextEncoder(architecture="sd", shapes=((1,),))
TEXTS = Weights(name="base", texts=True)


def prompt(number: float | None, weights: Weights = TEXTS) -> Prompt:
    return Prompt(
        encoder=READER, weights=weights, digest=bytes(str(number), "ascii"), inputs=number
    )


NOTHING = prompt(0.0)


def ticket(value, text: Prompt = NOTHING) -> Ticket:
    return Ticket(
        job=1,
        index=0,
        client="",
        batch=BATCH,
        weights=BASE,
        prompt=text,
        kinds=np.ones(5, int),
        slot_inputs=SlotInputs(value),
    )


def plan(**values) -> Plan:
    return Plan(batch=BATCH, weights={0: BASE}, **values)


def compiled(build, mesh=None, reader=None) -> tuple[Worker, object]:
    worker = Worker(
        mesh or make_mesh(1),
        lambda weights, sharding: {},
        build,
        build_text_encoder=lambda _: (reader or Reader(), {"text_encoder": {}}),
    )
    report = worker.execute(Plan(compile=(READER, BATCH)))
    while not (BATCH in report.compiled or report.failed):
        report = worker.execute(Plan())
    worker.close()
    return worker, report


@pytest.fixture
def worker() -> Worker:
    worker, report = compiled(lambda batch: (Programs(), 7.0, {}))
    assert report.compiled[BATCH].decode_seconds > 0
    worker.weights.record(0, BASE, {"vae": {}})
    record_texts(worker, TEXTS, 0.0)
    worker.execute(Plan(encode=(NOTHING,)))
    return worker


def record_texts(worker: Worker, weights: Weights, add: float) -> None:
    array = jax.device_put(np.full((1,), add), worker.weights.on([0]))
    worker.weights.record(0, weights, {"text_encoder": {"add": array}})


def test_a_batch_with_a_controlnet_compiles_on_the_models_own_parameters():
    nameless = Weights(name="", architecture="controlled")
    controlled, seen = dataclasses.replace(BATCH, architecture="controlled", zeros=nameless), []
    shape = jax.ShapeDtypeStruct((2,), np.float32)

    class Seeing(Programs):
        def encode(self, params, slots, entering):
            seen.append(params)
            return super().encode(params, slots, entering)

    worker = Worker(
        make_mesh(1),
        lambda weights, sharding: {},
        lambda batch: (Seeing(), 7.0, {"vae": {"a": shape}, "controlnet": {"a": shape}}),
    )
    there = worker.weights.on([0])
    model = {"vae": {"a": jax.device_put(np.full((1, 2), 5, np.float32), there)}}
    worker.weights.record(0, BASE, model)
    report = worker.execute(Plan(compile=(controlled,)))
    while not report.compiled:
        report = worker.execute(Plan())
    lent = worker.weights.of(0, nameless)
    assert lent["vae"]["a"].unsafe_buffer_pointer() == model["vae"]["a"].unsafe_buffer_pointer()
    assert np.array_equal(seen[0]["controlnet"]["a"], [[0, 0]])
    assert np.array_equal(seen[0]["vae"]["a"], [[5, 5]])
    worker.execute(Plan(drop=((0, BASE),)))
    worker.close()
    assert not worker.weights.names(0), "what was lent would keep the model there"


def test_a_stand_in_is_divided_over_the_chips_of_a_replica_as_parameters_are():
    seen = []

    class Seeing(Programs):
        mesh, divisions = make_mesh(4, 2), {"vae": {"a": Division(chips=2, axis=1)}}

        def encode(self, params, slots, entering):
            seen.append(params["vae"]["a"])
            return super().encode(params, slots, entering)

    shapes = {"vae": {"a": jax.ShapeDtypeStruct((3, 6), np.float32)}}
    compiled(lambda batch: (Seeing(), 7.0, shapes), Seeing.mesh)
    assert seen[0].shape == (2, 3, 6)
    assert {shard.data.shape for shard in seen[0].addressable_shards} == {(1, 3, 3)}


def test_what_a_batch_was_compiled_with_does_not_stay_where_nothing_needs_it():
    worker, report = compiled(
        lambda batch: (Programs(), 7.0, {"vae": {"a": jax.ShapeDtypeStruct((2,), np.float32)}})
    )
    assert report.compiled and not worker.weights.names(0)


def test_on_one_device_a_batch_is_compiled_on_the_parameters_that_are_coming():
    """A stand-in beside them would take as much again, for which no room is made."""
    seen, reading = [], threading.Event()

    class Seeing(Programs):
        def encode(self, params, slots, entering):
            seen.append(params)
            return super().encode(params, slots, entering)

    def read(weights, sharding):
        assert not reading.wait(0.3), "compiled already"
        return {"vae": {"a": jax.device_put(np.full((1, 2), 5, np.float32), sharding)}}

    def build(batch):
        reading.set()
        return Seeing(), 7.0, {"vae": {"a": jax.ShapeDtypeStruct((2,), np.float32)}}

    worker = Worker(make_mesh(1), read, build)
    report = worker.execute(Plan(load=((0, BASE),), compile=(BATCH,)))
    while not report.compiled:
        report = worker.execute(Plan())
    worker.close()
    assert all(np.array_equal(params["vae"]["a"], [[5, 5]]) for params in seen) and seen


def test_pictures_enter_take_their_rows_and_are_decoded(worker):
    report = worker.execute(
        plan(enter={1: ticket(2.0), 3: ticket(5.0)}, rows={1: 3, 3: 2}, finish=(3,), preview=(1,))
    )
    report = pickle.loads(pickle.dumps(report))
    assert report.pictures == {3: grey(170)}
    assert report.previews == {1: grey(120, abs=3)} and report.previews[1].dtype == np.uint8
    assert report.advance_seconds > 0 and report.error is None
    report = worker.execute(plan(rows={1: 1}, finish=(1,)))
    assert report.pictures == {1: grey(160)}


def test_what_was_made_of_a_prompt_is_kept_for_pictures_until_it_is_forgotten(worker):
    other = Weights(name="base", texts=True, adapters=(("a", 1.0),))
    record_texts(worker, other, 3.0)
    mine, adapted = prompt(1.0), prompt(1.0, other)
    report = worker.execute(
        plan(
            encode=(mine, adapted),
            enter={0: ticket(2.0, mine), 1: ticket(2.0, adapted)},
            rows={0: 1, 1: 1},
            finish=(0, 1),
        )
    )
    assert report.pictures == {0: grey(140), 1: grey(170)} and report.encode_seconds > 0
    worker.execute(Plan(drop=((0, TEXTS),)))
    again = plan(enter={0: ticket(4.0, mine)}, rows={0: 1}, finish=(0,))
    assert worker.execute(again).pictures == {0: grey(160)}, "no encoder is needed any more"
    worker.execute(Plan(forget=(mine,)))
    assert worker.execute(again).error.startswith("KeyError")


def test_prompts_that_cannot_be_encoded_lose_no_slot(worker):
    worker.execute(plan(enter={0: ticket(2.0)}, rows={0: 1}))
    report = worker.execute(plan(encode=(prompt(None),), rows={0: 1}, finish=(0,)))
    assert report.unread == {prompt(None): "MemoryError: too much"}
    assert not report.pictures and not report.error
    assert worker.execute(plan(rows={0: 1}, finish=(0,))).pictures == {0: grey(140)}


def test_prompts_of_other_weights_are_encoded_where_some_cannot_be(worker):
    others = [Weights(name=name, texts=True) for name in ("first", "last")]
    for weights in others:
        record_texts(worker, weights, 3.0)
    first, last = (prompt(1.0, weights) for weights in others)
    report = worker.execute(Plan(encode=(first, prompt(None), last)))
    assert report.unread == {prompt(None): "MemoryError: too much"}
    entering = {0: ticket(2.0, first), 1: ticket(3.0, last)}
    report = worker.execute(plan(enter=entering, rows={0: 1, 1: 1}, finish=(0, 1)))
    assert report.pictures == {0: grey(170), 1: grey(180)}


def test_rows_that_prompts_kept_from_being_drawn_are_not_counted(worker):
    tally, lost, drawn = Tally(), plan(encode=(prompt(None),), rows={0: 1}), plan(rows={0: 2})
    tally.record(lost, worker.execute(lost))
    assert tally.rows == 0 < tally.seconds["encode"]
    tally.record(drawn, worker.execute(drawn))
    assert tally.rows == 2


def test_prompts_of_one_encoder_and_its_weights_are_encoded_together():
    reader = Reader()
    worker, _ = compiled(lambda batch: (Programs(), 7.0, {}), reader=reader)
    other = Weights(name="other", texts=True)
    for weights in (TEXTS, other):
        record_texts(worker, weights, 0.0)
    worker.execute(Plan(encode=(prompt(1.0), prompt(2.0, other), prompt(3.0))))
    assert reader.calls == [[1.0, 3.0], [2.0]]


def test_pictures_that_are_not_safe_are_told(worker):
    report = worker.execute(
        plan(enter={0: ticket(20.0), 1: ticket(2.0)}, rows={0: 1, 1: 1}, finish=(0, 1))
    )
    assert report.unsafe == {0} and report.pictures == {0: grey(255), 1: grey(130)}


def test_after_a_failure_the_slots_are_empty_and_the_next_plan_is_carried_out(worker, monkeypatch):
    worker.execute(plan(enter={0: ticket(2.0)}, rows={0: 1}))
    with monkeypatch.context() as broken:
        broken.setattr(Programs, "advance", lambda *_: 1 / 0)
        assert worker.execute(plan(rows={0: 1})).error == "ZeroDivisionError: division by zero"
    report = worker.execute(plan(enter={1: ticket(3.0)}, rows={1: 1}, finish=(0, 1)))
    assert report.pictures == {0: grey(100), 1: grey(140)}


def test_what_cannot_be_compiled_is_reported(worker):
    _, report = compiled(lambda batch: 1 / 0)
    assert report.failed == {BATCH: "ZeroDivisionError: division by zero"}


def test_weights_are_brought_to_the_devices_that_want_them_and_dropped_again():
    asked = []

    def read(weights, sharding):
        asked.append((weights.name, len(sharding.device_set)))
        return {"a": jax.device_put(np.full((1, 3), float(weights.name)), sharding)}

    worker = Worker(make_mesh(4), read, lambda batch: 1 / 0)
    one, two = Weights(name="1"), Weights(name="2")
    report = worker.execute(Plan(load=((0, one), (2, one), (3, two))))
    loaded = dict(report.loaded)
    while len(loaded) < 3:
        loaded |= worker.execute(Plan()).loaded
    worker.close()
    assert asked == [("1", 2), ("2", 1)], "each is read once, whoever wants it"
    assert set(loaded) == {(0, one), (2, one), (3, two)}
    assert worker.weights.of(2, one)["a"].sharding == worker.weights.on([2])
    worker.execute(Plan(drop=((2, one),), load=()))
    assert worker.weights.of(2, one) is None and worker.weights.of(0, one) is not None


def test_what_is_merged_finds_its_base_though_both_come_by_one_plan():
    base = Weights(name="base")
    merged, found = Weights(name="base", adapters=(("a", 1.0),), base=base), []

    def read(weights, sharding):
        if weights.base:
            found.append(worker.weights.of(0, weights.base))
        return {"a": jax.device_put(np.ones((1, 3)), sharding)}

    worker = Worker(make_mesh(1), read, lambda batch: 1 / 0)
    loaded = dict(worker.execute(Plan(load=((0, base), (0, merged)))).loaded)
    while len(loaded) < 2:
        loaded |= worker.execute(Plan()).loaded
    worker.close()
    assert found == [worker.weights.of(0, base)] != [None]


def test_what_others_need_is_brought_before_them_to_whichever_devices():
    base = Weights(name="base")
    merged, order = Weights(name="base", adapters=(("a", 1.0),), base=base), []

    def read(weights, sharding):
        order.append((weights, len(sharding.device_set)))
        return {"a": jax.device_put(np.ones((1, 3)), sharding)}

    worker = Worker(make_mesh(2), read, lambda batch: 1 / 0)
    loaded = dict(worker.execute(Plan(load=((0, merged), (1, base), (1, merged)))).loaded)
    while len(loaded) < 3:
        loaded |= worker.execute(Plan()).loaded
    worker.close()
    assert order == [(base, 1), (merged, 2)]


def test_weights_that_cannot_be_read_are_reported_in_a_sentence():
    def read(weights, sharding):
        raise CheckpointError("The file is gone.\nMore of it.")

    worker = Worker(make_mesh(1), read, lambda batch: 1 / 0)
    report = worker.execute(Plan(load=((0, BASE),)))
    while not report.failed:
        report = worker.execute(Plan())
    worker.close()
    assert report.failed == {(0, BASE): "The file is gone."}


def test_what_can_wait_is_done_after_what_devices_wait_for():
    done, begin = [], threading.Event()

    def read(weights, sharding):
        begin.wait(60)
        if weights == BASE:
            worker.load_later(lambda: done.append(("later", threading.current_thread().name)))
        done.append(weights.name)
        return {"vae": {"weight": np.zeros((1, 1), np.float32)}}

    worker = Worker(make_mesh(1), read, None)
    other = Weights(name="other", architecture="sd")
    worker.execute(Plan(load=((0, BASE), (0, other))))
    begin.set()
    worker._loader.wait()
    worker.close()
    assert done == ["base", "other", ("later", "load")]
