"""The endpoints beside the page, and the program that starts both."""

import re
import time
from pathlib import Path
from unittest.mock import Mock

import gradio_client
import httpx
import numpy as np
import pytest

from sd_tpu import app
from sd_tpu.page import api
from sd_tpu.pictures.images import read_png, to_png
from sd_tpu.serving.job import Cancelled
from sd_tpu.settings import MAX_SEED, Picture, RequestError
from tests.support.asking import make_request


def test_programs_get_pictures_in_their_places_and_the_seed(client, page_engine):
    settings = dict(steps=2, guidance=2.5, sampler="euler", spacing="karras")
    settings |= dict(negative_prompt="blur", guidance_stop=0.5, cache_interval=2)
    pictures, seed, sentence = client.predict(
        ["first", "", "third"], seed=5, **settings, api_name="/generate"
    )
    assert (pictures[1], seed) == (None, 5) and sentence.startswith("Done in")
    asked = read_png(Path(pictures[2]).read_bytes())
    assert asked == make_request(
        prompts=("third",), seed=7, **settings, height=32, width=32, model=page_engine.catalog.first
    )


def test_programs_give_single_pictures_settings_of_their_own(client):
    pictures, _, _ = client.predict(
        ["a", "b"],
        seed=5,
        steps=2,
        overrides=[None, {"seed": 1, "steps": 3, "sampler": "heun"}],
        api_name="/generate",
    )
    first, second = (read_png(Path(picture).read_bytes()).pictures[0] for picture in pictures)
    assert (first.seed, first.steps, first.sampler) == (5, 2, "pndm")
    assert (second.seed, second.steps, second.sampler) == (1, 3, "heun")


def test_programs_follow_a_run_and_can_end_it(client, page_engine):
    job = client.submit(["a"] * 8, steps=200, api_name="/generate")
    told = next(job)
    assert told[0] == [None] * 8 and re.match("Starting|Queued|Step", told[2])
    while not page_engine.occupied:
        time.sleep(0.01)
    (running,) = page_engine.jobs()
    job.cancel()
    while page_engine.jobs():
        time.sleep(0.05)
    assert isinstance(running.end, Cancelled), "the job went on to its end"


def test_programs_are_told_of_pictures_seldom_and_of_the_end_at_once(client, monkeypatch):
    """They fetch all files each time."""
    monkeypatch.setattr(api, "PAUSE_SECONDS", 60.0)
    begun = time.monotonic()
    told = list(
        client.submit(
            ["a"] * 8, overrides=[{"steps": n} for n in range(2, 34, 4)], api_name="/generate"
        )
    )
    counts = [len([*filter(None, pictures)]) for pictures, _, _ in told]
    assert {*counts} == {0, 8} and time.monotonic() - begun < 30


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"prompts": ["a"] * 9}, "There are 9 prompts; at most 8 fit."),
        ({"prompts": ["a" * 4001]}, "Prompt 1 has 4001 characters; at most 4000 are accepted."),
        ({"prompts": "a"}, "The prompts should be a list of texts."),
        ({"prompts": ["a"], "seed": -2}, f"Seed should be from 0 to {MAX_SEED}, not -2."),
        ({"prompts": ["a"], "steps": "many"}, "Steps should be a whole number, not 'many'."),
        (
            {"prompts": ["a"], "guidance_start": 0.5, "guidance_stop": 0.5},
            "Guidance should start before it stops, not start at 0.5 and stop at 0.5.",
        ),
        ({"prompts": ["a"], "sampler": "magic"}, "Sampler 'magic' is unknown; there are ddim, "),
        (
            {"prompts": ["a", "b"], "overrides": [None, {"steps": 0}]},
            "Steps of prompt 2 should be from 1 to 200, not 0.",
        ),
    ],
)
def test_programs_are_refused_by_the_sentence_of_the_page(client, values, sentence):
    with pytest.raises(gradio_client.exceptions.AppError, match=f"^{re.escape(sentence)}"):
        client.predict(**values, api_name="/generate")


def test_programs_can_list_the_samplers(client):
    listed = {entry["key"]: entry for entry in client.predict(api_name="/samplers")}
    assert listed["dpmpp_2m"]["label"] == "DPM++ 2M"
    assert "karras" in listed["dpmpp_2m"]["spacings"]


def test_of_many_models_a_few_are_opened_and_all_are_listed():
    """What cannot be read is left out, as far as anybody has looked."""
    catalog = Mock(**{"models.return_value": [f"m{number}" for number in range(50_000)]})
    own = Picture(width=8, height=16)
    catalog.defaults.side_effect = [RequestError("It is damaged."), *[own] * 99]
    catalog.samplers.return_value = {"euler": ()}
    listed = api._listed(catalog)
    assert catalog.defaults.call_count == api.MAX_OPENED and len(listed) == 49_999
    assert listed[0] == {
        "model": "m1",
        "width": 8,
        "height": 16,
        "steps": 20,
        "guidance": 7.5,
        "samplers": ["euler"],
    }
    assert listed[-1] == {"model": "m49999", **dict.fromkeys(listed[0].keys() - {"model"})}


def test_programs_can_read_what_a_picture_was_made_from(client, tmp_path):
    made = make_request(prompts=("a fox", ""), seed=9, steps=12, height=8, width=8)
    (tmp_path / "fox.png").write_bytes(to_png(np.zeros((8, 8, 3), np.uint8), made))
    read = client.predict(
        gradio_client.handle_file(tmp_path / "fox.png"), api_name="/read_metadata"
    )
    assert (read["prompts"], read["seed"], read["steps"]) == (["a fox", ""], 9, 12)
    (tmp_path / "text.png").write_text("no picture")
    with pytest.raises(gradio_client.exceptions.AppError, match="not a picture"):
        client.predict(gradio_client.handle_file(tmp_path / "text.png"), api_name="/read_metadata")


def test_no_file_of_the_server_can_be_read(address, tmp_path):
    secret = tmp_path / "secret.png"
    request = make_request(prompts=("secret",))
    secret.write_bytes(to_png(np.zeros((8, 8, 3), np.uint8), request))
    for value in (
        {"path": str(secret)},
        {"path": str(secret), "meta": {"_type": "gradio.FileData"}},
    ):
        asked = httpx.post(f"{address}gradio_api/call/read_metadata", json={"data": [value]})
        answer = httpx.get(f"{address}gradio_api/call/read_metadata/{asked.json()['event_id']}")
        assert "secret" not in answer.text and "error" in answer.text


def test_no_address_is_fetched(address):
    """Gradio would, before what it calls is asked."""
    elsewhere = {"path": "https://pictures.example/x.png", "meta": {"_type": "gradio.FileData"}}
    asked = httpx.post(f"{address}gradio_api/call/read_metadata", json={"data": [elsewhere]})
    answer = httpx.get(f"{address}gradio_api/call/read_metadata/{asked.json()['event_id']}")
    assert "Only files that are uploaded are taken" in answer.text


def test_the_endpoints_are_documented(client):
    endpoints = client.view_api(print_info=False, return_format="dict")["named_endpoints"]
    assert set(endpoints) == {"/generate", "/samplers", "/draw", "/models", "/read_metadata"}
    names = [each["parameter_name"] for each in endpoints["/generate"]["parameters"]]
    assert names == [
        "prompts",
        "seed",
        "negative_prompt",
        "steps",
        "guidance",
        "sampler",
        "spacing",
        "overrides",
        "guidance_start",
        "guidance_stop",
        "cache_interval",
        "guidance_rescale",
        "model",
        "height",
        "width",
        "style",
        "clip_skip",
    ]
    names = [each["parameter_name"] for each in endpoints["/read_metadata"]["parameters"]]
    assert names == ["picture"]


def test_the_documentation_explains_every_parameter(address):
    endpoints = httpx.get(f"{address}gradio_api/info").json()["named_endpoints"]
    for endpoint in endpoints.values():
        for parameter in endpoint["parameters"]:
            assert f"    {parameter['parameter_name']}: " in endpoint["description"]
    assert "Returns:" in endpoints["/generate"]["description"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--model", "/nowhere"],
        ["--size", "63x64"],
        ["--host", "no.such.host.invalid"],
        ["--port", "TAKEN"],
        ["--port", "0"],
        ["--port", "99999"],
        ["--history", __file__],
    ],
)
def test_a_program_that_cannot_start_says_why_in_a_sentence(
    flags, address, capsys, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    taken = address.strip("/").rpartition(":")[2]
    assert app.main([flag.replace("TAKEN", taken) for flag in flags]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("sd_tpu: ") and printed.count("\n") == 1
    assert (flags == ["--port", "TAKEN"]) <= ("without --port it is the first free one" in printed)


def test_a_port_from_the_environment_is_checked_as_well(capsys, monkeypatch):
    monkeypatch.setenv("GRADIO_SERVER_PORT", "70000")
    assert app.main(["--no-history"]) == 2
    assert capsys.readouterr().err == "sd_tpu: A port is a number from 1 to 65535, not 70000.\n"


def test_pictures_are_kept_among_the_users_data_or_where_told_or_not_at_all(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert app.make_parser().parse_args([]).history == tmp_path / "sd_tpu" / "history"
    monkeypatch.setenv("XDG_DATA_HOME", "relative")  # which its specification tells to ignore
    monkeypatch.setenv("HOME", str(tmp_path))
    assert app.make_parser().parse_args([]).history == tmp_path / ".local/share/sd_tpu/history"
    assert app.make_parser().parse_args(["--history", "here"]).history == Path("here")
    assert app.make_parser().parse_args(["--no-history"]).history is None
