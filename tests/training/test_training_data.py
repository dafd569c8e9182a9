"""The training data: composed pictures, their captions, and the tokenizer that reads them."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from training import captions, compose, concepts, grammar, recipe, sprites
from training.captions import Scene
from training.compose import Composer, Mix

TOKENIZER = Path(__file__).parents[2] / "assets" / "model" / "tokenizer"
COLOURS = {"apple": (200, 0, 0), "owl": (0, 200, 0), "grapes": (0, 0, 200)}
WIDE = Mix(
    single=0.45,
    small=0.06,
    big=0.06,
    beside=0.17,
    stacked=0.10,
    copies=0.10,
    upside_down=0.06,
    gradient=0.10,
    recoloured=0.15,
)
SINGLES = Mix()
KINDS = ("single", "small", "big", "beside", "stacked", "copies", "upside_down")


@pytest.fixture(scope="module")
def discs() -> sprites.Sprites:
    """Each concept is a disc of one colour, on transparent black, in two styles."""
    rows, columns = np.mgrid[:48, :48] - 23.5
    inside = rows**2 + columns**2 < 23**2
    rgba = np.zeros((2 * len(COLOURS), 48, 48, 4), np.uint8)
    for index, colour in enumerate(c for c in COLOURS.values() for _ in range(2)):
        rgba[index][inside] = (*colour, 255)
    names = [name for name in COLOURS for _ in range(2)]
    return sprites.Sprites(rgba=rgba, concepts=names, styles=["flat", "3d"] * len(COLOURS))


def only(kind: str, **chances) -> Mix:
    return Mix(**dict.fromkeys(KINDS, 0.0) | {kind: 1.0} | chances)


def place(picture: np.ndarray, concept: str) -> np.ndarray:
    """The mean row and column of the pixels that have the concept's colour."""
    return np.argwhere((picture == COLOURS[concept]).all(-1)).mean(0)


def test_the_same_seed_composes_the_same_pictures_and_captions(discs):
    composer = Composer(discs, 64, WIDE)
    pictures, texts = composer.batch(np.random.default_rng(5), 40)
    again, same_texts = Composer(discs, 64, WIDE).batch(np.random.default_rng(5), 40)
    assert np.array_equal(pictures, again) and texts == same_texts
    others, _ = composer.batch(np.random.default_rng(6), 40)
    assert pictures.shape == (40, 64, 64, 3) and not np.array_equal(pictures, others)


def test_edges_mix_object_and_background_without_dark_or_bright_fringes(discs):
    scene = Scene(concepts=("apple",), style="flat", background="gray")
    picture = Composer(discs, 64, SINGLES).draw(scene, np.random.default_rng(0))
    thing, ground = (np.array(c, float) for c in (COLOURS["apple"], captions.BACKGROUNDS["gray"]))
    share = (1 - picture[..., 1] / ground[1])[..., None]  # the apple has no green
    assert ((share > 0.1) & (share < 0.9)).sum() > 20, "the edge is not antialiased"
    assert np.abs(picture - (ground + share * (thing - ground))).max() < 3


@pytest.mark.parametrize("kind, axis", [("beside", 1), ("stacked", 0)])
def test_the_first_of_a_pair_is_left_or_above(discs, kind, axis):
    composer, rng = Composer(discs, 64, only(kind)), np.random.default_rng(1)
    for _ in range(30):
        picture, _, facts = composer.sample(rng)
        first, second = (place(picture, concept) for concept in facts.concepts)
        assert first[axis] < second[axis] - 20
        assert facts.count == 2 and facts.relation in captions.OPPOSITES


@pytest.mark.parametrize("kind", ["beside", "stacked"])
def test_a_pairs_caption_names_both_things_in_their_order(discs, kind):
    composer, rng = Composer(discs, 64, only(kind)), np.random.default_rng(2)
    turned = tuple(phrase for side in ("right of", "below") for phrase in captions.RELATIONS[side])
    for _ in range(100):
        _, text, facts = composer.sample(rng)
        first, second = (text.index(concept) for concept in facts.concepts)
        assert (first > second) == any(f" {phrase} " in text for phrase in turned), text


def test_a_caption_leaves_the_background_out_only_when_it_is_white(discs):
    composer, rng = Composer(discs, 64, WIDE), np.random.default_rng(3)
    unsaid = 0
    for _ in range(400):
        picture, text, facts = composer.sample(rng)
        if facts.gradient is None and facts.background == "white":
            unsaid += "white" not in text
        else:
            spoken = text.replace("grey", "gray")
            assert facts.background in spoken
            assert facts.gradient is None or facts.gradient in spoken
        if facts.size == "normal":
            corner = captions.BACKGROUNDS[facts.background]
            assert tuple(picture[0, 0].tolist()) == corner
    assert unsaid > 20


def test_about_a_third_of_the_captions_omit_the_style_and_the_rest_get_it_right(discs):
    composer, rng = Composer(discs, 64, SINGLES), np.random.default_rng(4)
    said = 0
    for _ in range(600):
        _, text, facts = composer.sample(rng)
        named = [style for style in ("flat", "3d") if style in text]
        assert named in ([], [facts.style])
        said += bool(named)
    assert 0.58 < said / 600 < 0.72


def test_things_are_shifted_by_whole_latents_but_not_out_of_order(discs):
    rng = np.random.default_rng(8)
    for kind, free in (("single", {0, 1}), ("beside", {0}), ("stacked", {1})):
        composer, places = Composer(discs, 64, only(kind)), []
        for _ in range(40):
            picture, _, facts = composer.sample(rng)
            places.append(place(picture, facts.concepts[0]))
        for axis, found in enumerate(np.transpose(places)):
            shifts = (found - found.min()) / (compose.SHIFT * 64)
            assert np.abs(shifts - np.rint(shifts)).max() < 0.05
            assert (shifts.max() > 0.9) == (axis in free)


def test_small_and_big_things_are_drawn_smaller_and_bigger(discs):
    rng = np.random.default_rng(5)
    areas = {}
    for kind in ("small", "single", "big"):
        picture, _, facts = Composer(discs, 64, only(kind, default_background=1)).sample(rng)
        areas[kind] = (picture == COLOURS[facts.concepts[0]]).all(-1).sum()
        assert facts.size == ("normal" if kind == "single" else kind)
    assert 2 * areas["small"] < areas["single"] < areas["big"]


def test_as_many_copies_are_drawn_as_the_caption_says(discs):
    composer, rng = Composer(discs, 64, only("copies")), np.random.default_rng(6)
    for _ in range(30):
        _, text, facts = composer.sample(rng)
        several = facts.count > 1
        assert several == (facts.concepts != ("grapes",))  # which cannot be counted
        assert not several or text.split(" of ")[-1].split(" ")[0] in captions.NUMBERS[facts.count]


def test_three_of_a_thing_look_to_the_autoencoder_as_two_do(discs):
    composer, rng = Composer(discs, 64, SINGLES), np.random.default_rng(0)
    two, three = (
        composer.draw(Scene(concepts=("apple",), style="flat", count=count), rng)
        for count in (2, 3)
    )
    left = [two[top : top + 32, :32] for top in (8, 16, 24)]  # shifted by a latent, or not
    for top, side in ((0, 16), (32, 0), (32, 32)):
        thing = three[top : top + 32, side : side + 32]
        assert any(np.array_equal(thing, part) for part in left)


@pytest.mark.parametrize("coloured, grey_stays", [(20, False), (28, True)])
def test_what_is_grey_keeps_its_colour_where_most_of_the_thing_has_one(coloured, grey_stays):
    sprite = np.full((48, 48, 4), 255, np.uint8)
    sprite[:, :coloured, :3] = 200, 40, 40
    sprite[:, coloured:, :3] = 90
    painted = compose.paint(sprite, captions.PAINTS["blue"])
    assert np.array_equal(painted[0, -1], sprite[0, -1]) == grey_stays
    assert painted[0, 0, 2] > painted[0, 0, 0], "what had a colour is blue"


def test_a_painted_thing_takes_the_colour_and_keeps_its_outline(discs):
    scene = Scene(concepts=("apple",), style="flat", background="white", paint="blue")
    picture = Composer(discs, 64, SINGLES).draw(scene, np.random.default_rng(0))
    middle = picture[32, 32].astype(int)
    assert np.abs(middle - captions.PAINTS["blue"]).max() < 12
    assert (picture[0, 0] == 255).all()


def test_some_combinations_are_kept_from_training_for_the_evaluation(discs):
    def scenes(unseen):
        rng, composer = np.random.default_rng(7), Composer(discs, 64, WIDE, unseen)
        return [composer.scene(rng) for _ in range(3000)]

    def combinations(scenes):
        return {
            (*sorted(scene.concepts), scene.count, scene.background * (scene.count == 1))
            for scene in scenes
            if scene.paint is None and scene.background != "white"
        }

    seen, unseen = combinations(scenes(False)), combinations(scenes(True))
    assert seen and unseen and seen.isdisjoint(unseen)
    assert combinations(scenes(None)) == seen | unseen


def test_shares_that_do_not_add_up_are_refused(discs):
    with pytest.raises(ValueError, match=r"add up to 1\.05"):
        Composer(discs, 64, Mix(single=0.85))


@pytest.mark.parametrize(
    "name, expected",
    [
        ("cat", "a cat"),
        ("owl", "an owl"),
        ("orange cat", "an orange cat"),
        ("unicorn", "a unicorn"),
        ("ufo", "a ufo"),
        ("umbrella", "an umbrella"),
        ("house", "a house"),
        ("green grapes", "green grapes"),
        ("popcorn", "popcorn"),
        ("glass of milk", "a glass of milk"),
    ],
)
def test_names_take_the_article_people_use(name, expected):
    assert grammar.with_article(name) == expected


@pytest.mark.parametrize(
    "name, expected",
    [
        ("butterfly", "butterflies"),
        ("bus", "buses"),
        ("fish", "fish"),
        ("cactus", "cacti"),
        ("snowman", "snowmen"),
        ("glass of milk", "glasses of milk"),
        ("polar bear", "polar bears"),
    ],
)
def test_several_of_a_thing_have_the_plural_people_use(name, expected):
    assert grammar.plural(name) == expected


def test_every_thing_is_of_one_theme_and_has_a_drawing_of_its_own():
    things = concepts.CONCEPTS
    assert len(things) == sum(map(len, concepts.THEMES.values())) == 200
    assert len({*things.values()}) == 200 and concepts.SYNONYMS.keys() <= things.keys()


def test_a_sprite_is_cropped_to_its_content_and_centred():
    image = Image.new("RGBA", (100, 100))
    image.paste((10, 200, 30, 255), (70, 5, 90, 45))  # 20 wide, 40 high, in a corner
    fitted = sprites.fit(image, 32)
    rows, columns = np.nonzero(fitted[..., 3] > 128)
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (0, 31, 8, 23)
    assert (fitted[16, 16] == (10, 200, 30, 255)).all()


def test_an_interrupted_download_leaves_no_file(tmp_path):
    with pytest.raises(RuntimeError, match="failed"):
        sprites.fetch(["sh", "-c", "touch $0/half.tgz; exit 1"], tmp_path / "half.tgz")
    assert list(tmp_path.iterdir()) == []


def test_the_bundled_tokenizer_pads_and_cuts_to_77_as_clip_does():
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.CLIPTokenizer.from_pretrained(TOKENIZER)
    texts = ["a photo of a cat", "cat " * 100]
    short, long = tokenizer(texts, padding="max_length", truncation=True)["input_ids"]
    assert short == [49406, 320, 1125, 539, 320, 2368] + [49407] * 71
    assert long == [49406] + [2368] * 75 + [49407]
    assert len(tokenizer) == 49408 and tokenizer.pad_token == "<|endoftext|>"


def test_each_stream_and_step_has_pictures_of_its_own_and_the_same_again(discs, monkeypatch):
    monkeypatch.setattr(recipe, "composer", lambda size=32: Composer(discs, size, SINGLES))
    one, other = recipe.Stream.AUTOENCODER, recipe.Stream.POOL
    first, ids = recipe.captioned(one, 4, 7)
    assert first.shape == (4, 32, 32, 3) and ids.shape == (4, 77)
    assert np.array_equal(recipe.pictures(one, 32, 4, 7), first)
    for different in (recipe.pictures(one, 32, 4, 8), recipe.pictures(other, 32, 4, 7)):
        assert not np.array_equal(different, first)
