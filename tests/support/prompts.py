"""Over a thousand prompts in twenty languages, and what tokenizers stumble over."""

from itertools import permutations

SUBJECTS = (
    """
a photo of an astronaut riding a horse|ein Foto von einem Schloß über dem Fluß
un château enneigé|el perro con sombrero rojo|um gato preto na janela|pes hraje šachy
un gatto che dorme sull'erba|macska a kertben|kot śpi na łóżku|kissa istuu ikkunalla
pisică în grădină|katt på taket|kediler ve köpekler|con mèo dưới gốc cây
кот в сапогах, масло на холсте|собака біля річки|γάτα στον ήλιο|חתול ישן על הספה
قطة نائمة على السرير|แมวนั่งอยู่ใต้ต้นไม้|बिल्ली पेड़ के नीचे|모자를 쓴 고양이
戴帽子的猫，水彩画|窗邊的貓|帽子をかぶった猫、水彩画|8k, ultra-detailed, f/1.8 (best quality:1.2)
kucing di atas atap|"quotes", ‘curly’ “ones” — and dashes…|C:\\path\\to\\file <b>bold</b>
""".strip()
    .replace("\n", "|")
    .split("|")
)
ENDINGS = [
    *("", ", at dawn", " 🐈\u200d⬛🎨 ❤\ufe0f", "  two  spaces ", "\ttab\nline\r\nend"),
    *(" ﬁ ① Ａ e\u0301 é ㎏ ½", " @#$%^&*[]{}~`"),
]
EDGES = [
    *("", " ", "   ", "\n\n", "\t", "▁", "▁▁ ▁a", ".", "😀", "👩\u200d👩\u200d👧 family"),
    *("\u200b", "\ufeffa cat", "a\u3000b\xa0c", "\u2028a\u2029", "e\u0301\u0327", "\U0010ffff"),
    *("\x00", "a\x00b", "\x01\x02 cat \x1b[0m", "a\x7f\x80\x9f"),
    *("</s>", "a</s>b", "<pad> a <unk>", "  </s>  </s> x"),
    *("<extra_id_0> cat", "cat<extra_id_1>", "<extra_id_9>"),
    *("cat " * 500, "x" * 3000, "猫" * 2000, "a, " * 75, "of the " * 36 + "a cat"),
]
PROMPTS = [
    *(subject + ending for subject in SUBJECTS for ending in ENDINGS),
    *(f"{one}, {other}" for one, other in permutations(SUBJECTS, 2)),
    *EDGES,
]
