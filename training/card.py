"""The card of the bundled model, in the page's languages."""

from collections.abc import Iterable

from sd_tpu.checkpoint.card import ModelCard
from training import recipe
from training.captions import BACKGROUNDS, PAINTS
from training.concepts import CONCEPTS, THEMES
from training.sprites import STYLES

CARD = dict(
    name="sd_tpu emoji 256",
    prompts=(
        "a cat on a blue background",
        "a 3d rocket on a black background",
        "a green car on a yellow background",
        "a penguin and a snowman on a light blue background",
        "a star above a house on a purple background",
        "three strawberries",
        "a castle on a pink background",
        "a chick to the right of an egg",
    ),
    more_prompts=(
        "a koala on a green background",
        "a tractor on a yellow background",
        "a big strawberry on a pink background",
        "two bees on a yellow background",
        "a moon above a castle on a black background",
        "a backpack on a pink background",
        "a fox on a green background",
        "a flat guitar on an orange background",
        "a 3d robot",
        "a polar bear on a light blue background",
        "three donuts on a purple background",
        "a star above a pine tree",
        "a whale below a sailboat on a light blue background",
        "an owl on a purple background",
        "a blue umbrella on a white background",
        "a cupcake on a pink to yellow background",
    ),
    steps=8,
    guidance=3.0,
    learning_rate=5e-4,
    larger_strength=0.15,  # at more, what it knows of smaller pictures appears in large ones
)

# By the tags that HTML has for the languages. What is to be written in a prompt is English in all:
# the model was shown nothing else.
HINTS = {
    "en": "This small model draws emoji-like pictures: name a thing, a colour, a style.",
    "ko": "이 작은 모델은 이모지 같은 그림을 그립니다. 사물, 색, 스타일을 영어로 적어 보세요.",
    "zh-Hans": "这个小模型画表情符号风格的图片：请用英语写出一种事物、一种颜色、一种风格。",
    "ar": "هذا النموذج الصغير يرسم صورًا تشبه الرموز التعبيرية: اكتب بالإنجليزية شيئًا ولونًا "
    "وأسلوبًا.",
}
DETAILS = {
    "en": "It knows {count} things: {things}. "
    "On a background of {backgrounds}, or a gradient (“a red to blue background”). "
    "A single thing may be small, big or upside down, and of a colour (“a green "
    "car”): {paints}. "
    "There may be two things, side by side or one above the other, or two or three of a "
    "kind. The style is {styles}.",
    "ko": "아는 사물 {count}가지: {things}. "
    "배경색: {backgrounds}, 또는 한 색에서 다른 색으로 바뀌는 그라데이션(a red to blue "
    "background). "
    "사물 하나는 작거나(small) 크거나(big) 거꾸로(upside down)일 수 있고, 색은(a green "
    "car) {paints} 중 하나일 수 있습니다. "
    "두 사물을 나란히(next to) 또는 위아래로(above, below) 놓거나, 같은 것을 두세 개 그릴 수 "
    "있습니다. "
    "스타일: {styles}. 영어만 이해합니다.",
    "zh-Hans": "它认识 {count} 种事物：{things}。"
    "背景颜色：{backgrounds}，或从一种颜色到另一种颜色的渐变"
    "（a red to blue background）。"
    "单个事物可以是小的（small）、大的（big）或倒置的（upside down），"
    "也可以是这些颜色（a green car）：{paints}。"
    "两个事物可以左右（next to）或上下（above、below）排列，同一种事物可以有两三个。"
    "风格：{styles}。它只懂英语。",
    "ar": "يعرف {count} شيء: {things}. "
    "لون الخلفية: {backgrounds}، أو تدرّج من لون إلى آخر (a red to blue background). "
    "يمكن أن يكون الشيء الواحد صغيرًا (small) أو كبيرًا (big) أو مقلوبًا (upside down)، "
    "وبأحد هذه الألوان (a green car): {paints}. "
    "ويمكن رسم شيئين متجاورين (next to) أو أحدهما فوق الآخر (above, below)، أو اثنين أو "
    "ثلاثة من الشيء نفسه. "
    "الأسلوب: {styles}. لا يفهم النموذج إلا الإنجليزية.",
}


def themes() -> dict[str, list[str]]:
    """Return the concepts by theme, each in one of them."""
    colours = [*dict.fromkeys((*BACKGROUNDS, *PAINTS))]
    things = {theme: [*drawings] for theme, drawings in THEMES.items()}
    return {**things, "colours": colours, "styles": [*STYLES]}


def card() -> ModelCard:
    """Return the card that is exported with the weights."""
    told = {tag: {"hint": hint, "details": _details(tag)} for tag, hint in HINTS.items()}
    return ModelCard(
        **CARD, **told.pop("en"), translations=told, words=recipe.vocabulary(), themes=themes()
    )


def _details(tag: str) -> str:
    """Describe in words the concepts that the trained model can draw."""
    listed, join = (", ".join, _or) if tag == "en" else (_isolated, _isolated)
    return DETAILS[tag].format(
        count=len(CONCEPTS),
        things=listed(CONCEPTS),
        backgrounds=join(BACKGROUNDS),
        paints=join(PAINTS),
        styles=join(STYLES),
    )


def _or(options: Iterable[str]) -> str:
    *most, last = options
    return f"{', '.join(most)} or {last}"


def _isolated(words: Iterable[str]) -> str:
    """Return English words in a row, from left to right whatever stands around them."""
    return f"\u2068{', '.join(words)}\u2069"
