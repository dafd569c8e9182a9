// Journeys: pictures on the way from one card's picture to another's, shown as one that moves.

import { register } from "./actions.js";
import { $, $$ } from "./dom.js";
import { start } from "./run.js";
import { ask, request } from "./server.js";
import { state } from "./state.js";

/** Offers journeys from a card's picture to another's. @param {string} place */
function plan(place) {
    const dialog = $("#journey");
    const [from, to] = $$("select", dialog);
    const options = () =>
        $$("#cards figure.done").map(({ dataset }) => {
            const number = Number(dataset.place) + 1;
            const name = String(from.dataset.picture)
                .replace("%", String(number))
                .replace("§", String($(`#picture-${number} .words`).textContent));
            return new Option(name, dataset.place);
        });
    from.replaceChildren(...options());
    to.replaceChildren(to.options[0], ...options());
    from.value = place;
    dialog.showModal();
    showJourney();
}

/** Shows the journey that was drawn last, if there is one; returns its address. */
export async function showJourney() {
    const { view } = await ask("movie");
    for (const each of $$("#journey :is(.stage, .files)")) each.hidden = !view;
    if (view) $("#journey img").src = view;
    return view;
}

register({
    journey: ({ place }) => plan(String(place)),
    async travel() {
        const [place, to, count] = $$("#journey select").map(({ value }) => value);
        $("#journey").close();
        state.journey = await start(
            request("journey", {
                place: Number(place),
                to: to === "" ? null : Number(to),
                count: Number(count),
            }),
        );
    },
    movie: ({ kind }) => ask("movie", { kind }),
});
