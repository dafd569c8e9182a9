"""A server that goes away during a run, one that has lost it, and a network that is gone."""

import re

import pytest

from tests.support.pages import served
from tests.support.visitor import (
    LONG,
    PATIENCE,
    expect,
    figures,
    fill,
    generate,
    make,
    newcomer,
    says,
    setting,
    stop,
)

AWAY = "The server is away. Your prompts are safe, and it is tried again."
UNFINISHED = "This run was not finished."


@pytest.mark.slow("waits until a server is missed, and for another")
def test_a_run_that_goes_with_its_server_is_drawn_again_with_its_seed(
    visitor, slow_engine, tmp_path
):
    with served(slow_engine, tmp_path) as address:
        port = int(address.strip("/").rpartition(":")[2])
        tab = visitor.new_page()
        tab.goto(address)
        tab.wait_for_function("window.sdTpu?.arrived")
        fill(tab, ["first", *[""] * 7], seed=7)
        make(tab)
        finished = tab.locator("figure.done img").get_attribute("src")
        fill(tab, ["second", *[""] * 7], seed=8, steps=LONG)
        generate(tab).click()
        says(tab, "Step")
    says(tab, AWAY)
    expect(tab).to_have_title(re.compile("^The server is away"))
    expect(figures(tab).first.locator("img")).to_have_attribute("src", finished)
    for button in (generate(tab), stop(tab)):
        expect(button).to_be_disabled()
    tab.evaluate("""document.body.append(Object.assign(document.createElement("div"),
        { className: "toast-wrap", textContent: "what Gradio says" }))""")
    expect(tab.get_by_text("what Gradio says")).to_be_hidden()
    tab.evaluate("() => { window.stale = true; }")
    with served(slow_engine, tmp_path, port):
        # Gradio loads the page anew; until then a press may be lost, and is asked for again.
        tab.wait_for_function("!window.stale && window.sdTpu?.arrived")
        says(tab, UNFINISHED)
        expect(tab.get_by_label("Prompt 1", exact=True)).to_have_value("second")
        setting(tab, "Steps").fill("2")
        setting(tab, "Steps").blur()
        tab.locator("#seed input").fill("-1")
        tab.get_by_role("button", name="Draw it again").click()
        says(tab, "Done in")
        says(tab, "seed 8")
        tab.close()


def test_a_network_that_is_gone_is_said_and_forgotten_when_it_is_back(visitor, address):
    with newcomer(visitor, address) as tab:
        fill(tab, ["first", *[""] * 7])
        make(tab)
        visitor.set_offline(True)
        try:
            says(tab, "You are offline. Your prompts are safe.")
            expect(generate(tab)).to_be_disabled()
        finally:
            visitor.set_offline(False)
        says(tab, "Done in")
        expect(generate(tab)).to_be_enabled(timeout=PATIENCE)
