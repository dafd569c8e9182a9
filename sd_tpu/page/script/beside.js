// Side by side: two of the selected pictures in one view, with a slider between them.

import { register } from "./actions.js";
import { $, $$, cards } from "./dom.js";
import { pictured } from "./selection.js";
import { ask } from "./server.js";
import { state } from "./state.js";
import { fit, slide } from "./viewer.js";

const dialog = () => $("#beside");

/** The cards that are looked at: the first stays, the others come beside it by turns. */
let shown = { places: [0], at: 1 };

async function show() {
    const { places, at } = shown;
    const pair = [places[0], places[at]];
    const images = $$("img", dialog()).reverse(); // the first lies over the other
    for (const [side, place] of pair.entries()) {
        images[side].src = String(state.away.finished[place]);
        images[side].alt = $("figure img", cards()[place])?.alt ?? "";
        $$(".tag", dialog())[side].textContent = String(place + 1);
    }
    fit(images[0]);
    const { apart } = await ask("beside", { place: pair[0], to: pair[1] });
    if (places === shown.places && at === shown.at) $(".apart").innerHTML = apart ?? "";
}

register({
    beside() {
        shown = { places: pictured(), at: 1 };
        for (const button of $$("[data-step]", dialog())) button.hidden = shown.places.length < 3;
        const slider = $("[type=range]", dialog());
        slider.value = "50";
        slide(slider);
        $(".apart").replaceChildren();
        show();
        dialog().showModal();
        slider.focus();
    },
    beside_next({ step }) {
        const others = shown.places.length - 1;
        shown.at = ((shown.at - 1 + Number(step) + others) % others) + 1;
        show();
    },
});
