"""The three programs: compiled once, and an image depends on its own request alone."""

import dataclasses
import re
from functools import cache, partial
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype.door import is_bearable
from flax import nnx
from jaxtyping import TypeCheckError, jaxtyped

from benchmarks.hlo import COMPUTATION
from sd_tpu.families.checkpoint import Checkpoint
from sd_tpu.models import AutoencoderKL, UNet2DConditionModel
from sd_tpu.models import platform as platforms
from sd_tpu.runtime import programs as programs_module
from sd_tpu.runtime import slots as denoise
from sd_tpu.runtime.compiler import ADVANCE_OPTIONS, compiler_options
from sd_tpu.runtime.mesh import make_mesh, replicated
from sd_tpu.runtime.programs import ImageEncoder, Programs
from sd_tpu.runtime.slots import MAX_ROWS, START_PICTURE, SlotInputs, gaussian
from sd_tpu.runtime.weights import MAX_TOGETHER, ReplicaWeights
from sd_tpu.sampling.samplers import COLUMNS, REACH, make_table

ALL = 10**6  # rows: more than any table has

PART = dict(guidance_start=0.3, guidance_stop=0.8)

# (prompt, negative prompt, sampler, spacing, steps, guidance, seed, what is not exact): nothing in
# common
DIFFERENT = [
    ("a cat", "", "ddim", None, 4, 7.5, 1, {}),
    ("a dog", "ugly", "euler_ancestral", "trailing", 4, 3.0, 2, dict(cache_interval=2)),
    ("", "", "heun", "karras", 3, 1.0, 3, dict(cache_interval=3)),
    ("a castle in the clouds", "fog", "pndm", None, 5, 12.0, 4, dict(guidance_stop=0.5)),
    ("a red house", "", "dpmpp_2m_sde", "karras", 5, 5.0, 5, dict(cache_interval=4, **PART)),
    ("two birds", "blurry", "unipc", None, 4, 0.0, 6, {}),
    ("one bird", "", "lcm", None, 3, 2.0, 2**32 - 1, dict(guidance_start=0.4)),
    ("a very small ship", "large", "dpmpp_2s", None, 4, 7.5, 8, {}),
]


def enter(
    checkpoint,
    prompt,
    negative,
    sampler,
    spacing,
    steps,
    guidance,
    seed,
    inexact=MappingProxyType({}),
) -> SlotInputs:
    return SlotInputs.of(
        make_table(sampler, checkpoint.schedule, steps, spacing=spacing),
        checkpoint.prompt_inputs(prompt, negative),
        guidance=guidance,
        key=np.asarray(jax.random.PRNGKey(seed)),
        **inexact,
    )


def draw(programs, params, entering: dict[int, SlotInputs], rows_a_call: int = ALL) -> np.ndarray:
    """Pictures [S, H, W, 3] uint8 of what enters empty slots together."""
    slots = programs.encode(params, programs.empty(), entering)
    longest = max(len(slot_inputs.rows) for slot_inputs in entering.values())
    for _ in range(-(-longest // rows_a_call)):
        slots = programs.advance(params, slots, rows_a_call)
    return np.asarray(
        programs.decode(params, slots.latents, np.isin(range(programs.slots), list(entering)))
    )


def make_programs(checkpoint, devices: int, group: int = 1, **options) -> Programs:
    return Programs(
        checkpoint.model, make_mesh(devices), slots=8, height=32, width=32, group=group, **options
    )


@pytest.fixture(scope="module")
def smallest(least):
    """(checkpoint, params) where what a network computes is not looked at, on all devices."""
    return Checkpoint.from_pretrained(least, sharding=replicated(make_mesh()))


LAYOUTS = {"a slot a device": (8, 1), "one device": (1, 1), "one device in fours": (1, 4)}


@pytest.fixture(scope="module")
def drawn(sd1):
    """By a layout's name: (pipeline, params, programs), and the DIFFERENT pictures in one batch."""
    checkpoint, params = sd1

    @cache
    def draw_on(name: str):
        programs = make_programs(checkpoint, *LAYOUTS[name])
        everywhere = jax.device_put(params, replicated(programs.mesh))
        entering = {i: enter(checkpoint, *d) for i, d in enumerate(DIFFERENT)}
        return (checkpoint, everywhere, programs), draw(programs, everywhere, entering)

    return draw_on


@pytest.fixture(scope="module", params=LAYOUTS)
def layout_name(request) -> str:
    """Eight devices, and one that its slots share."""
    return request.param


@pytest.fixture(scope="module")
def on(drawn, layout_name):
    """(pipeline, params, programs) of each layout in turn."""
    return drawn(layout_name)[0]


@pytest.fixture(scope="module")
def together(drawn, layout_name) -> np.ndarray:
    """The eight DIFFERENT pictures, made in one batch."""
    return drawn(layout_name)[1]


def test_eight_different_samplers_in_one_batch_give_the_bytes_each_gives_alone(on, together):
    checkpoint, params, programs = on
    assert len({image.tobytes() for image in together}) == 8
    for i, different in enumerate(DIFFERENT):
        alone = draw(programs, params, {i: enter(checkpoint, *different)})
        assert np.array_equal(alone[i], together[i]), different
        assert not alone[np.arange(8) != i].any()


def test_the_slot_and_the_neighbours_do_not_matter(on, together):
    checkpoint, params, programs = on
    moved = {(3 * i + 1) % 8: i for i in range(8) if i != 4}
    images = draw(
        programs, params, {slot: enter(checkpoint, *DIFFERENT[i]) for slot, i in moved.items()}
    )
    for slot, i in moved.items():
        assert np.array_equal(images[slot], together[i]), DIFFERENT[i]


def test_an_image_that_enters_while_others_are_on_their_way_is_the_same(on, together):
    checkpoint, params, programs = on
    slots = programs.encode(params, programs.empty(), {0: enter(checkpoint, *DIFFERENT[7])})
    slots = programs.advance(params, slots, 3)
    slots = programs.encode(params, slots, {1: enter(checkpoint, *DIFFERENT[4])})
    slots = programs.advance(params, slots, ALL)
    images = np.asarray(programs.decode(params, slots.latents, np.arange(8) < 2))
    assert np.array_equal(images[0], together[7])
    assert np.array_equal(images[1], together[4])


def test_one_row_at_a_time_is_all_at_once(on, together):
    checkpoint, params, programs = on
    entering = {i: enter(checkpoint, *d) for i, d in enumerate(DIFFERENT)}
    assert np.array_equal(draw(programs, params, entering, rows_a_call=1), together)


def test_slots_that_take_rows_at_different_times_draw_the_same(on, together):
    checkpoint, params, programs = on
    entering = {i: enter(checkpoint, *d) for i, d in enumerate(DIFFERENT)}
    slots = programs.encode(params, programs.empty(), entering)
    for n in ([0, 3, 1, 0, 2, 0, 1, 5], [2, 0, 0, 1, 0, 9, 0, 0]):
        taken = np.minimum(slots.row + np.array(n), slots.end)
        slots = programs.advance(params, slots, np.array(n))
        assert slots.row.tolist() == taken.tolist()
    slots = programs.advance(params, slots, ALL)
    images = np.asarray(programs.decode(params, slots.latents, np.ones(8, bool)))
    assert np.array_equal(images, together)


def test_slots_and_entries_have_the_shapes_that_they_declare(on):
    checkpoint, params, programs = on
    entering = {1: enter(checkpoint, *DIFFERENT[0]), 2: None}
    slots = programs.advance(params, programs.encode(params, programs.empty(), entering), 1)
    (texts,) = programs.texts.encode(params, [entering[1].inputs])
    read = {1: entering[1].with_texts(texts), 2: None}
    gathered = jax.tree.map(np.asarray, programs.gather(read))
    with jaxtyped("context"):  # a letter means the same number everywhere
        for struct in (slots, gathered):
            for field in dataclasses.fields(struct):
                assert is_bearable(getattr(struct, field.name), field.type), field.name
    with pytest.raises(TypeCheckError):
        programs.decode(params, slots.latents, np.ones(9, bool))


def test_a_vacated_slot_is_idle_and_its_neighbour_goes_on(on, together):
    checkpoint, params, programs = on
    entering = {i: enter(checkpoint, *DIFFERENT[i]) for i in (0, 3)}
    slots = programs.advance(params, programs.encode(params, programs.empty(), entering), 2)
    slots = programs.encode(params, slots, {0: None})
    slots = programs.advance(params, slots, ALL)
    assert int(slots.row[0]) == int(slots.end[0]) == 0
    image = np.asarray(programs.decode(params, slots.latents, np.arange(8) == 3))[3]
    assert np.array_equal(image, together[3])


def test_the_finished_latents_are_the_last_estimate_of_the_clean_image(on):
    checkpoint, params, programs = on
    slots = programs.encode(params, programs.empty(), {2: enter(checkpoint, *DIFFERENT[0])})
    slots = programs.advance(params, slots, ALL)
    # The last step of DDIM goes to alphas_cumprod[0] here (set_alpha_to_one is off), not to 1.
    np.testing.assert_allclose(slots.latents[2], slots.clean[2], atol=0.2)
    assert float(abs(slots.latents[2]).max()) > 0.5


@pytest.fixture(scope="module")
def evaluations(smallest):
    """Draws entries on one device in groups of `group`, and says which evaluations of the model
    that took, by the sizes of their batches."""
    checkpoint, params = smallest

    @cache
    def counting(group: int, guided: bool):
        programs = make_programs(checkpoint, 1, group, guided=guided)
        draw_here = partial(draw, programs, jax.device_put(params, replicated(programs.mesh)))
        seen = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                UNet2DConditionModel, "__call__", counted(UNet2DConditionModel, "__call__", seen)
            )
            draw_here({0: simple()})  # compiles
        return draw_here, seen

    def simple(steps: int = 1, guidance: float = 1.0, inexact=MappingProxyType({})) -> SlotInputs:
        return enter(checkpoint, "a cat", "a dog", "ddim", None, steps, guidance, 0, inexact)

    def evaluate(group: int, *asked: dict, guided: bool = True) -> list[int]:
        draw_here, seen = counting(group, guided)
        jax.effects_barrier()
        seen.clear()
        draw_here({i: simple(**values) for i, values in enumerate(asked)})
        jax.effects_barrier()
        return seen

    return evaluate


def counted(network: type, name: str, seen: list[int]):
    """The network's method of that name, which adds its batch's size to `seen` whenever it runs."""
    evaluate = getattr(network, name)

    def counting(self, *inputs):
        jax.debug.callback(lambda: seen.append(len(inputs[0])))
        return evaluate(self, *inputs)

    return counting


@pytest.mark.parametrize(
    "group, guidances, rounds",
    [
        (1, [7.5], 1),
        (1, [1.0], 1),
        (1, [1.0, 0.0], 1),
        (1, [1.0] * 8, 4),
        (1, [1.5, 1.0, 7.5, 1.0, 0.5], 4),
        (4, [1.0] * 8, 1),
        (4, [1.5, 1.0, 7.5, 1.0, 0.5], 2),
    ],
)
def test_what_is_not_guided_shares_evaluations_two_by_two(evaluations, group, guidances, rounds):
    seen = evaluations(group, *(dict(steps=3, guidance=guidance) for guidance in guidances))
    assert seen == [2 * group] * (3 * rounds)


@pytest.mark.parametrize("group, steps, rounds", [(1, [3], 3), (1, [3, 1], 4), (4, [3] * 5, 6)])
def test_where_nothing_may_be_guided_a_picture_takes_an_evaluation_of_its_own(
    evaluations, group, steps, rounds
):
    seen = evaluations(group, *(dict(steps=each) for each in steps), guided=False)
    assert seen == [group] * rounds


def test_pictures_without_guidance_are_those_of_programs_that_guide_others(drawn):
    (checkpoint, params, both), _ = drawn("one device")
    plain = make_programs(checkpoint, 1, guided=False)
    entering = {i: enter(checkpoint, *DIFFERENT[index]) for i, index in enumerate((2, 5))}
    apart = np.abs(draw(plain, params, entering).astype(int) - draw(both, params, entering))
    assert apart.max() <= 1
    with pytest.raises(ValueError, match="without guidance"):
        plain.encode(params, plain.empty(), {0: enter(checkpoint, *DIFFERENT[0])})


STOPS, SKIPS = dict(guidance_stop=0.5), dict(cache_interval=2)


@pytest.mark.parametrize(
    "group, inexact, count",
    [
        (1, [STOPS], 4),
        (1, [STOPS] * 2, 2 * 2 + 2 * 1),
        (1, [STOPS, dict(guidance_start=0.5)], 4 * 2),
        (1, [SKIPS], 3),
        (1, [SKIPS] * 4, 3 * 4),
        (1, [SKIPS, {}], 3 + 4),
        (1, [dict(cache_interval=4, guidance_stop=0.25)] * 2, 2 + 1 + 1 + 1),
        (4, [SKIPS, {}, STOPS], 2 * 1 + 2 * 2),
        (4, [STOPS] * 8, 2 * 2 + 2 * 1),
    ],
)
def test_only_what_is_asked_for_is_evaluated_and_packed_anew_when_that_changes(
    evaluations, group, inexact, count
):
    seen = evaluations(group, *(dict(steps=4, guidance=3.0, inexact=each) for each in inexact))
    assert seen == [2 * group] * count


def test_what_has_ended_leaves_its_evaluations_to_the_others(evaluations):
    assert len(evaluations(1, *(dict(steps=steps) for steps in (2, 5, 2, 5)))) == 2 * 2 + 3 * 1


@pytest.mark.parametrize(("platform", "way"), [("cpu", "while"), ("tpu", "cond")])
def test_pictures_are_drawn_where_they_are_wanted_and_nowhere_else(sd1, monkeypatch, platform, way):
    checkpoint, params = sd1
    seen = []
    monkeypatch.setattr(platforms, "platform", lambda: platform)
    monkeypatch.setattr(AutoencoderKL, "decode", counted(AutoencoderKL, "decode", seen))
    latents = np.random.default_rng(0).standard_normal((4, 8, 8, 4)).astype(np.float32)
    traced = jax.jit(partial(denoise.decode_slots, checkpoint.model)).trace(
        params, latents, np.zeros(4, bool)
    )
    assert f" {way}[" in str(traced.jaxpr)
    assert str(traced.jaxpr).count("major_to_minor=(0, 1, 2, 3)") == (platform == "tpu")
    compiled = traced.lower().compile()
    pictures = {}
    for wanted in ([1, 1, 1, 1], [0, 1, 0, 1], [0, 0, 0, 0]):
        pictures[sum(wanted)] = np.asarray(compiled(params, latents, np.array(wanted, bool)))
        jax.effects_barrier()
        assert seen == [1] * sum(wanted)
        seen.clear()
    assert pictures[4].std(axis=(1, 2, 3)).min() > 1
    assert (pictures[2][1::2] == pictures[4][1::2]).all() and not pictures[2][::2].any()
    assert not pictures[0].any()


@pytest.mark.parametrize("name", ["texts", "advance", "decode"])
def test_on_a_cpu_ynnpack_is_given_only_what_it_fuses_with_a_reduction(smallest, name):
    checkpoint, params = smallest
    programs = make_programs(checkpoint, 8)
    slots = programs.empty()
    arguments = {
        "advance": (slots, np.ones(8, np.int32)),
        "decode": (slots.latents, np.ones(8, bool)),
    }
    lowered = (
        programs.texts.lower(params)
        if name == "texts"
        else getattr(programs, f"_{name}").lower(params, *arguments[name])
    )
    compiled = lowered.compile()
    given, others = by_ynnpack(compiled)
    assert given and all(" reduce(" in each for each in given)
    assert any(" dot(" in each for each in others)


def by_ynnpack(compiled) -> tuple[list[str], list[str]]:
    """A program's computations: those that XLA gives to YNNPACK, and the others."""
    computations, current = {}, ""
    for line in compiled.as_text().splitlines():
        if begins := COMPUTATION.match(line):
            current = begins[1]
        computations[current] = computations.get(current, "") + line
    given = set(re.findall(r"calls=%?([\w.\-]+)[^\n]*?__ynn_fusion", compiled.as_text()))
    return (
        [computations[one] for one in given],
        [computations[other] for other in computations.keys() - given],
    )


def test_on_a_cpu_ynnpack_is_given_products_of_bfloat16_as_well(least):
    checkpoint, params = Checkpoint.from_pretrained(
        least, dtype=jnp.bfloat16, sharding=replicated(make_mesh(1))
    )
    programs = make_programs(checkpoint, 1)
    compiled = programs._advance.lower(params, programs.empty(), np.ones(8, np.int32)).compile()
    given, _ = by_ynnpack(compiled)
    assert any(" dot(" in each and "bf16[" in each for each in given)


def test_advance_is_compiled_with_options_of_its_own(smallest, monkeypatch):
    checkpoint, params = smallest
    monkeypatch.setitem(ADVANCE_OPTIONS, "cpu", {"unheard_of": True})
    programs = make_programs(checkpoint, 8)
    with pytest.raises(jax.errors.JaxRuntimeError, match="unheard_of"):
        programs.advance(params, programs.empty(), 1)
    programs.decode(params, programs.empty().latents, np.zeros(8, bool))


@pytest.fixture(scope="module")
def fine_tunes(sd1) -> list:
    """The parameters of eight checkpoints of one architecture."""
    random = np.random.default_rng(0)
    return [
        jax.tree.map(lambda x: np.asarray(x) * np.float32(random.uniform(0.7, 1.3)), sd1[1])
        for _ in range(8)
    ]


@pytest.mark.slow("compiles for eight devices and for one")
def test_eight_checkpoints_on_eight_devices_give_the_bytes_that_each_gives_alone(drawn, fine_tunes):
    (checkpoint, _, plain), _ = drawn("a slot a device")
    programs = make_programs(checkpoint, 8, stacked=True)
    weights = ReplicaWeights(programs.mesh)
    for device, params in enumerate(fine_tunes):
        weights.put(device, "tuned", params)
    entering = {i: enter(checkpoint, *d) for i, d in enumerate(DIFFERENT)}
    together = draw(programs, weights.together(["tuned"] * 8), entering)
    for i, params in enumerate(fine_tunes):
        params = jax.device_put(params, replicated(plain.mesh))
        assert np.array_equal(draw(plain, params, {i: entering[i]})[i], together[i])
    weights.put(3, "another", fine_tunes[5])
    names = ["another" if device == 3 else "tuned" for device in range(8)]
    again = draw(programs, weights.together(names), entering | {3: entering[5]})
    assert np.array_equal(again[3], together[5]) and not np.array_equal(again[3], together[3])
    assert np.array_equal(np.delete(again, 3, axis=0), np.delete(together, 3, axis=0))
    assert programs.traces == {"encode": 1, "advance": 1, "decode": 1}


def test_weights_of_a_device_are_handed_to_the_programs_without_a_copy(fine_tunes):
    weights = ReplicaWeights(make_mesh(2))
    weights.put(0, "a", fine_tunes[0])
    with pytest.raises(ValueError, match=r"replicas \[1\] hold no parameters"):
        weights.together("ab")
    weights.put(1, "b", fine_tunes[1])

    def places(params):
        return [
            [shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards]
            for leaf in jax.tree.leaves(params)
        ]

    before = places(weights.together("ab"))
    weights.put(1, "c", fine_tunes[2])
    after = places(weights.together("ac"))
    assert [here for here, _ in before] == [here for here, _ in after]
    assert weights.together("ac")["unet"]["conv_in"]["bias"].shape == (2, 16)
    weights.drop(1, "b")
    with pytest.raises(ValueError, match=r"replicas \[1\] hold no parameters"):
        weights.together("ab")
    for number in range(MAX_TOGETHER + 1):  # as many combinations as there may be are not kept
        weights.record(1, number, weights.of(1, "c"))
        weights.together(["a", number])
    assert len(weights._together) == MAX_TOGETHER


def test_every_program_is_traced_once_whatever_changes(on, together):
    checkpoint, params, programs = on
    for filled in (1, 5):  # beside all eight
        draw(
            programs,
            params,
            {i: enter(checkpoint, *d) for i, d in enumerate(DIFFERENT[8 - filled :])},
            rows_a_call=filled,
        )
    assert programs.traces == {"encode": 1, "advance": 1, "decode": 1}


def test_what_a_compiler_has_freed_is_returned_once_for_each_program(smallest, monkeypatch):
    returned = []
    monkeypatch.setattr(programs_module, "return_freed_memory", lambda: returned.append("once"))
    checkpoint, params = smallest
    programs = make_programs(checkpoint, 8)
    for _ in range(2):
        draw(programs, params, {0: enter(checkpoint, *DIFFERENT[4])})
    assert len(returned) == len(programs.traces) == 3


def test_what_is_not_wanted_is_not_decoded(sd1):
    """XLA takes what does not depend on a loop's turn out of the loop, where it is always done."""
    checkpoint, params = sd1
    latents = jnp.zeros((2, *checkpoint.model.latent_shape(32, 32)))
    decode = jax.jit(
        partial(denoise.decode_slots, checkpoint.model),
        compiler_options=compiler_options("cpu", jnp.float32),
    )
    text = decode.lower(params, latents, jnp.zeros(2, bool)).compile().as_text()
    drawing = [each for each in text.split("\n}\n") if " convolution(" in each]
    assert drawing and not any(" while(" in each for each in drawing)


def test_other_numbers_of_devices_and_groups_differ_by_rounding_at_most(drawn):
    images = [drawn(name)[1].astype(int) for name in LAYOUTS]
    for other in images[1:]:
        assert np.mean(np.abs(other - images[0]) > 1) <= 0.001


def test_sizes_that_the_model_cannot_make_are_refused_with_the_multiple_it_needs(sd1):
    checkpoint, _ = sd1
    with pytest.raises(ValueError, match=r"28x32 is not possible.*multiples of 8"):
        Programs(checkpoint.model, make_mesh(), slots=8, height=32, width=28)


# --- guidance in an interval, and outputs that are forecast -------------------------------------


@pytest.fixture(scope="module")
def compiled_plainly(drawn):
    """The text encoder and the UNet."""
    (checkpoint, params, _), _ = drawn("one device")
    encoder = nnx.merge(checkpoint.model.text_encoder, params["text_encoder"])
    unet = nnx.merge(checkpoint.model.unet, params["unet"])
    return jax.jit(encoder), jax.jit(unet)


def drawn_plainly(compiled, shape, slot_inputs: SlotInputs, guided: set[int], evaluated: set[int]):
    """Latents [h, w, C] made row by row, with one text at a time: guidance in the rows `guided`,
    and in those that are not `evaluated` history on a line through what was before."""
    encode, evaluate = compiled
    texts = encode(slot_inputs.inputs["text_encoder"]["ids"][:, 0])
    x = slot_inputs.spread * gaussian(jnp.asarray(slot_inputs.key), shape)
    history, known = jnp.zeros((5, *shape)), []
    for i, row in enumerate(slot_inputs.rows):
        c = dict(zip(COLUMNS, row, strict=True))
        if i in evaluated:
            negative, positive = (
                evaluate(c["c_in"] * x[None], jnp.full(1, c["t"]), text[None])[0] for text in texts
            )
            out = positive
            if i in guided:
                out = negative + slot_inputs.guidance * (positive - negative)
            newest = c["u"] * x + c["v"] * out
            known = [*known, (c["t"], newest)][-2:]
        else:
            (t0, h0), (t1, h1) = known
            near = t1 - c["t"] <= REACH
            newest = h0 + (h1 - h0) * (c["t"] - t0) / (t1 - t0) if near else h1
        history = jnp.concatenate([newest[None], history[:-1]])
        noise = gaussian(jax.random.fold_in(slot_inputs.key, i), shape)
        x = c["a"] * x + sum(c[f"b{k}"] * history[k] for k in range(5)) + c["s"] * noise
    return x


ROWS = set(range(8))


@pytest.mark.parametrize(
    "sampler, steps, inexact, guided, evaluated",
    [
        ("dpmpp_2m", 8, {}, ROWS, ROWS),
        ("dpmpp_2m", 8, PART, {2, 3, 4, 5}, ROWS),
        ("euler_ancestral", 8, dict(guidance_stop=0.5), {0, 1, 2, 3}, ROWS),
        ("ddim", 8, dict(cache_interval=3), ROWS, {0, 1, 4, 7}),
        ("euler_ancestral", 8, dict(cache_interval=2), ROWS, {0, 1, 3, 5, 7}),
        ("dpmpp_2m", 8, dict(cache_interval=4, **PART), {2, 3, 4, 5}, {0, 1, 2, 3, 6, 7}),
        ("ddim", 8, dict(cache_interval=10, guidance_start=0.5), {4, 5, 6, 7}, {0, 1, 4, 5, 7}),
        ("pndm", 7, dict(cache_interval=2), ROWS, {0, 1, 3, 5, 7}),
        ("heun", 4, dict(cache_interval=2, guidance_stop=0.5), {0, 1, 2, 3}, {0, 1, 2, 4, 5, 6}),
        ("unipc", 8, dict(cache_interval=4), ROWS, {0, 1, 3, 7}),
    ],
)
def test_a_picture_is_what_a_plain_loop_makes_of_it(
    drawn, compiled_plainly, sampler, steps, inexact, guided, evaluated
):
    (checkpoint, params, programs), _ = drawn("one device")
    plainly = partial(drawn_plainly, compiled_plainly, programs.latent_shape)
    ours = enter(checkpoint, "a cat", "a dog", sampler, None, steps, 4.0, 3, inexact)
    slots = programs.encode(params, programs.empty(), {3: ours})
    slots = programs.advance(params, slots, ALL)
    plain = plainly(
        enter(checkpoint, "a cat", "a dog", sampler, None, steps, 4.0, 3), guided, evaluated
    )
    np.testing.assert_allclose(slots.latents[3], plain, atol=2e-4)
    if inexact:
        exact = plainly(
            enter(checkpoint, "a cat", "a dog", sampler, None, steps, 4.0, 3), ROWS, ROWS
        )
        assert float(abs(exact - plain).max()) > 0.01, "nothing was at stake"


def test_guidance_in_all_steps_and_an_interval_of_one_give_the_exact_bytes(on, together):
    checkpoint, params, programs = on
    exact = dict(guidance_start=0.0, guidance_stop=1.0, cache_interval=1)
    image = draw(programs, params, {5: enter(checkpoint, *DIFFERENT[0][:-1], exact)})[5]
    assert np.array_equal(image, together[0])
    # Here 0.1 of four steps is none, and of pictures without guidance none is left out.
    image = draw(
        programs, params, {2: enter(checkpoint, *DIFFERENT[0][:-1], dict(guidance_start=0.1))}
    )[2]
    assert np.array_equal(image, together[0])
    image = draw(programs, params, {2: enter(checkpoint, *DIFFERENT[5][:-1], PART)})[2]
    assert np.array_equal(image, together[5])


def test_the_longest_table_of_all_ends_with_its_last_row(on):
    checkpoint, params, programs = on
    long = enter(checkpoint, "a cat", "", "ddim", None, 10, 1.0, 0)
    long = long.replace(
        rows=np.resize(long.rows, (MAX_ROWS, len(COLUMNS))),
        kinds=np.resize(long.kinds, MAX_ROWS),
        levels=np.resize(long.levels, (MAX_ROWS, 2)),
        end=np.int32(MAX_ROWS),
    )
    slots = programs.encode(params, programs.empty(), {0: long})
    slots = programs.advance(params, slots.replace(row=slots.row.at[0].set(MAX_ROWS - 3)), ALL)
    assert int(slots.row[0]) == MAX_ROWS


# --- what pictures are encoded as ---------------------------------------------------------------


def test_an_encoder_keeps_what_was_used_last_as_far_as_there_is_room(sd1, monkeypatch):
    """Of pictures that stand for themselves, of which two have room."""
    encoder = ImageEncoder(
        lambda params, image: image, make_mesh(1), {}, height=4, width=4, network_dtype=jnp.float32
    )
    monkeypatch.setattr(programs_module, "ENCODINGS_BYTES", 2 * 4 * 4 * 3 * 4)
    encoded, encode, empty = [], ImageEncoder._encode, enter(sd1[0], *DIFFERENT[0])
    monkeypatch.setattr(
        ImageEncoder,
        "_encode",
        lambda encoder, params, waiting: (
            encoded.append(len(waiting)),
            encode(encoder, params, waiting),
        )[1],
    )

    def ask(*shades: float, **whose) -> list[float]:
        entering = {
            slot: empty.replace(pictures={START_PICTURE: np.full((4, 4, 3), shade, np.float32)})
            for slot, shade in enumerate(shades)
        }
        made = encoder.encode({}, entering, lambda slot: 0, **whose)
        return [float(made[slot].init_latents.mean()) for slot in entering]

    ours = dict(whose={0: "a checkpoint"})
    assert ask(0.25, 0.5, 0.25, **ours) == [0.25, 0.5, 0.25]
    ask(0.25, **ours)
    ask(0.75, **ours)  # in whose place 0.5 goes
    ask(0.25, 0.75, **ours)
    ask(0.5, **ours)
    assert encoded == [2, 0, 1, 0, 1]
    ask(0.5, whose={0: "another"})
    assert ask(0.125, 0.125) == [0.125, 0.125]
    ask(0.125)
    assert encoded[5:] == [1, 1, 1], "without a name for the parameters nothing is kept"
