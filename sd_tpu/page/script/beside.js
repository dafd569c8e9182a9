// Side by side: two of the selected pictures in one view, with a slider between them.

import { register } from "./actions.js";
import { $, $$, cards } from "./dom.js";
import { pictured } from "./selection.js";
import { ask } from "./server.js";
import { state } from "./state.js";
import { fit, slide } from "./viewer.js";

const dialog = () => $("#beside");

/** The cards that are looked at: the first stays, the others come beside it by turns. */
let shown = { indices: [0], at: 1 };

async function show() {
    const { indices, at } = shown;
    const pair = [indices[0], indices[at]];
    const images = $$("img", dialog()).reverse(); // the first lies over the other
    for (const [side, index] of pair.entries()) {
        images[side].src = String(state.away.finished[index]);
        images[side].alt = $("figure img", cards()[index])?.alt ?? "";
        $$(".tag", dialog())[side].textContent = String(index + 1);
    }
    fit(images[0]);
    const { apart } = await ask("beside", { index: pair[0], to: pair[1] });
    if (indices === shown.indices && at === shown.at) $(".apart").innerHTML = apart ?? "";
}

register({
    beside() {
        shown = { indices: pictured(), at: 1 };
        for (const button of $$("[data-step]", dialog())) button.hidden = shown.indices.length < 3;
        const slider = $("[type=range]", dialog());
        slider.value = "50";
        slide(slider);
        $(".apart").replaceChildren();
        show();
        dialog().showModal();
        slider.focus();
    },
    beside_next({ step }) {
        const others = shown.indices.length - 1;
        shown.at = ((shown.at - 1 + Number(step) + others) % others) + 1;
        show();
    },
});
