"""What prompts with wildcards stand for: each value once where all fit, by chance otherwise."""

import os
import time
import unicodedata

import pytest

from sd_tpu.families.prompt import parse
from sd_tpu.settings import MAX_PROMPT_LENGTH, RequestError
from sd_tpu.wildcards import Wildcards

SEVEN = [""] * 7  # boxes left empty


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "in" / "more").mkdir(parents=True)
    (tmp_path / "in" / "animal.txt").write_text(
        "\ufeffcat\n\n# not this\n(small:1.2) {dog|fox}\n", "utf-8"
    )
    (tmp_path / "in" / "more" / "über uns.txt").write_text("a $5 # b\n", "utf-8")
    (tmp_path / "in" / "self.txt").write_text("__self__ again\n")
    (tmp_path / "in" / "latin.txt").write_text("café\n", "latin-1")
    (tmp_path / "in" / "empty.txt").write_text("# nothing\n")
    (tmp_path / "secret.txt").write_text("secret\n")
    (tmp_path / "in" / "link.txt").symlink_to(tmp_path / "secret.txt")
    (tmp_path / "in" / "loop.txt").symlink_to("loop.txt")
    (tmp_path / "in" / "more" / "round").symlink_to(".")
    os.mkfifo(tmp_path / "in" / "pipe.txt")
    return tmp_path / "in"


@pytest.mark.parametrize(
    "prompts, filled",
    [
        (["a {red|green|} fox", *SEVEN], ["a red fox", "a green fox", "a  fox", *[""] * 5]),
        (["{a|b} {1|2}", "", "", "", "x"], ["a 1", "a 2", "b 1", "b 2", "x"]),
        (["x", "", "{a|b}", "", ""], ["x", "", "a", "b", ""]),
        (["{a|{b|c} d}", *SEVEN], ["a", "b d", "c d", *[""] * 5]),
        (["{a|b}"] * 5, ["a", "b", "a", "b", "a"]),
        (["__animal__", *SEVEN], ["cat", "(small:1.2) dog", "(small:1.2) fox", *[""] * 5]),
        (["__more/über uns__, __animal____animal__", "", ""], None),
    ],
)
def test_what_stands_for_several_fills_the_empty_places_after_it(prompts, filled, folder):
    told = Wildcards(folder).fill(prompts, 1)
    if filled is None:  # nine values for three places
        assert len({*told}) == 3 and all(each.startswith("a $5 # b, ") for each in told)
    else:
        assert told == filled


@pytest.mark.parametrize(
    "prompt",
    [
        "{masterpiece}, (a cat:1.2) [x] \\{",
        "{a|b",
        "a|b}",
        "<lora:a__b__c:0.8>",
        "foo__bar__baz",
        "x __ y __ z",
        "a # b, $5, ____",
        "",
        "1girl, ^__^, =__=, smile",
        "^__^ and ^__^",
        "(^__^:1.2), (-__-:0.8)",
        ";__; T__T o__O @__@",
        "(・__・), m(__)m m(__)m, ^__^",
        "snake__case, a __b, __^__",
        "{^__^}, {^_^}",
        r"\__animal__, \__init__",
        r"\{a|b}, {a\|b}",
        r"<lora:a\__animal__:1>",
    ],
)
def test_what_stands_for_nothing_else_stays_as_it_is(prompt, folder):
    assert Wildcards(folder).fill([prompt, ""], 1) == [prompt, ""]


def test_a_face_hides_no_wildcard_and_a_file_may_be_called_like_one(folder):
    (folder / "colour.txt").write_text("red\n")
    assert Wildcards(folder).fill([r"^__^, __colour__ =__=, \\__colour__"], 1) == [
        r"^__^, red =__=, \\red"
    ], "what is escaped is the backslash"
    (folder / "^, =.txt").write_text("face\n")
    assert Wildcards(folder).fill(["^__^, =__="], 1) == ["^face="]


@pytest.mark.parametrize(
    "prompt, filled",
    [
        ("一只__colour__在跑", "一只red在跑"),
        ("two __colour__s", "two reds"),
        ("日本__colour__が a__colour__b", "日本redが aredb"),
        ("a__colour____colour__", "aredred"),
        (r"__sub\x__, __sub\x__es", "low, lowes"),
        ("__a__b__", "both"),
        ("__a__c", "onec"),
        ("__./colour__ __sub//x__", "red low"),
        (r"x__colour \__ __colour__", r"x__colour \__ red"),
    ],
)
def test_a_file_that_is_there_is_meant_whatever_touches_its_sign(prompt, filled, tmp_path):
    (tmp_path / "sub").mkdir()
    for name, value in {"colour": "red", "sub/x": "low", "a__b": "both", "a": "one"}.items():
        (tmp_path / f"{name}.txt").write_text(value)
    assert Wildcards(tmp_path).fill([prompt], 1) == [filled]


def test_what_is_escaped_stays_so_and_is_read_as_text(folder):
    wildcards = Wildcards(folder)
    told = wildcards.fill([r"\__init__ {a\|b|a\|b}"], 1)
    assert told == wildcards.fill(told, 1) == [r"\__init__ a\|b"]
    assert wildcards.value(told[0], 1, "Style") == told[0]
    assert "".join(each.text for each in parse(told[0]).sections[0]) == "__init__ a|b"


def test_what_does_not_fit_is_drawn_by_the_seed_and_no_two_are_alike(folder):
    asked, wildcards = ["{a|b|c|d} {1|2|3}", *SEVEN], Wildcards(folder)
    first, again, other = (wildcards.fill(asked, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert len({*first}) == 8
    assert first[2:3] == wildcards.fill(["", "", asked[0]], 1)[2:], "whatever stands elsewhere"
    many = ["{a|b} " * 600, *SEVEN]
    assert len({*wildcards.fill(many, 1)}) == 8


@pytest.mark.parametrize(
    "prompt, told",
    [
        ("__nobody__", "asks for a value of 'nobody', of which there is none"),
        ("__init__", r"A \ before its __ makes them text."),
        ("__anmal__", "the nearest are animal. "),
        ("__ANIMALS/*__", "there is none"),
        ("__../secret__", "there is none"),
        ("__link__", "there is none"),
        ("__more/../animal__", "there is none"),
        ("__/etc/passwd__", "there is none"),
        (r"__more\x__", "there is none"),
        ("__Animal__", "the nearest are animal"),
        ("__loop__", "there is none"),
        ("__more/round/round/x__", "there is none"),
        ("__animal.txt/x__", "there is none"),
        ("__empty__", "there is none"),
        ("__" + "x" * 300 + "__", "there is none"),
        ("__latin__", "asks for a value of 'latin', whose file is not in UTF-8"),
        ("__self__", "without end"),
        ("{|}", "one of its values is empty"),
        ("{2$$a|b}", "not known here: 2$$"),
        ("{a|0.5::b}", "not known here: 0.5::"),
    ],
)
def test_what_cannot_be_found_is_refused_by_name(prompt, told, folder):
    with pytest.raises(RequestError, match=r"^Prompt 2 ") as caught:
        Wildcards(folder).fill(["a", prompt], 1)
    assert told in str(caught.value)


def test_values_of_values_have_a_bound(folder):
    (folder / "long.txt").write_text("x" * (MAX_PROMPT_LENGTH - 1) + "\n")
    with pytest.raises(RequestError, match=f"at most {MAX_PROMPT_LENGTH}"):
        Wildcards(folder).fill(["__long__ __long__"], 1)


@pytest.mark.parametrize(
    "lines, prompt",
    [
        (["a", "__x__ " * 6], "a __x__"),
        (["{a|" + "__x__" * 6 + "}"], "{a|__x__}"),
        (["{|}" * 1000], "__x__" * 700),
        ([",__a" * 500_000], "__x__"),
    ],
)
def test_the_work_for_a_prompt_has_a_bound(lines, prompt, folder):
    (folder / "x.txt").write_text("\n".join(lines))
    begun = time.perf_counter()
    with pytest.raises(RequestError, match="more wildcards within wildcards than are looked up"):
        Wildcards(folder).fill([prompt, *SEVEN], 7)
    chain = {f"y{number}": f"__y{number + 1}__" * 6 for number in range(18)} | {"y18": "{|}"}
    for name, line in chain.items():
        (folder / f"{name}.txt").write_text(line)
    with pytest.raises(RequestError, match=r"^Style .* than are looked up"):
        Wildcards(folder).value("__y0__", 7, "Style")
    assert time.perf_counter() - begun < 20


def test_a_file_that_is_too_large_is_refused(folder, monkeypatch):
    monkeypatch.setattr("sd_tpu.wildcards.MAX_FILE_BYTES", 1)
    with pytest.raises(RequestError, match="whose file is larger than 0 MiB"):
        Wildcards(folder).fill(["__animal__"], 1)


def test_files_are_listed_and_read_again_when_they_have_changed(folder):
    wildcards = Wildcards(folder)
    assert wildcards.names() == ["animal", "empty", "latin", "more/über uns", "self"]
    (folder / "animal.txt").write_text("whale\n")
    assert wildcards.fill(["__animal__"], 1) == ["whale"]
    with pytest.raises(RequestError, match="no folder of wildcards was given"):
        Wildcards().fill(["__animal__"], 1)
    with pytest.raises(ValueError, match="There is no folder"):
        Wildcards(folder / "nowhere")


def test_both_normal_forms_of_a_name_are_one(tmp_path):
    names = ["폴더/수채화", "café"]
    for name in names:
        file = tmp_path / f"{unicodedata.normalize('NFD', name)}.txt"
        file.parent.mkdir(exist_ok=True)
        file.write_text("red\n")
    wildcards = Wildcards(tmp_path)
    assert sorted(wildcards.names()) == sorted(names)
    for name in names:
        for form in ("NFC", "NFD"):
            assert wildcards.fill([f"a __{unicodedata.normalize(form, name)}__ cup"], 1) == [
                "a red cup"
            ]


def test_what_is_no_file_has_no_values_and_keeps_nobody_waiting(folder):
    with pytest.raises(RequestError, match="there is none here"):
        Wildcards(folder).fill(["__pipe__"], 1)


def test_a_folder_is_read_once_for_a_prompt_and_its_look_ups_have_a_bound(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    for number in range(11_000):
        (tmp_path / f"{number}.txt").touch()
    (tmp_path / "10.txt").write_text("ten")
    listed, read = [], os.listdir
    monkeypatch.setattr(os, "listdir", lambda folder: listed.append(folder) or read(folder))
    wildcards = Wildcards(tmp_path)
    faces = "".join(f"^{number}__^ __sub/{number}^__" for number in range(100)) + "^__^ " * 200
    assert wildcards.fill([f"{faces}__10__"], 1) == [f"{faces}ten"]
    assert sorted(map(str, listed)) == [str(tmp_path), str(tmp_path / "sub")]
    (tmp_path / "10.txt").write_text("".join(f"=__^{number} " for number in range(25_000)))
    with pytest.raises(RequestError, match="than are looked up"):
        wildcards.fill(["__10__"], 1)
