// The cards: which is kept, what its buttons and its picture say of the prompt, and whether that goes
// on below its box.

import { register } from "./actions.js";
import { $, $$, boxes, cards, listen } from "./dom.js";
import { hooks } from "./hooks.js";
import { showUses } from "./inputs.js";
import { state } from "./state.js";
import { bookmarks, toggleBookmark } from "./storage.js";

const SLACK = 8; // pixels below the last line, which is seen whole

/**
 * Whether Draw leaves a card alone: its picture may have gone, with the server for one.
 * @param {number} index
 */
export function isKept(index) {
    const picture = "figure:not(.blank, .example, .stopped) img";
    return state.keep[index] && $(picture, cards()[index]) !== null;
}

/** Whether a card has a picture of few steps, to be finished. @param {number} index */
export const isDraft = (index) => $("figure[data-draft]", cards()[index]) !== null;

export const keptDrafts = () =>
    [...cards().keys()].filter((index) => isKept(index) && isDraft(index));

/** Drops the marks of cards that have no picture to keep. */
export function keepOnlyPictures() {
    state.keep = state.keep.map((_, index) => isKept(index));
}

export function showCards() {
    const marked = bookmarks();
    for (const [index, card] of cards().entries()) {
        const here = boxes()[index].value.trim();
        const drawn = $(".words", card)?.textContent;
        card.classList.toggle("kept", isKept(index));
        for (const button of $$("[data-do=keep]", card)) {
            button.ariaPressed = String(state.keep[index]);
        }
        $("[data-do=bookmark]", card).ariaPressed = String(marked.includes(here));
        // Of another prompt than is there now a picture says so, and an example nothing.
        $("figure", card).classList.toggle("other", drawn !== undefined && drawn !== here);
    }
    showMore();
    const drafts = keptDrafts().length;
    const finish = $("#finish");
    finish.hidden = drafts === 0;
    finish.textContent = String(finish.dataset.count).replace("%", String(drafts));
    showUses();
}

/** Marks the boxes whose prompt goes on below their edge. */
function showMore() {
    const more = boxes().map(
        ({ scrollHeight, scrollTop, clientHeight }) =>
            scrollHeight - scrollTop - clientHeight > SLACK,
    );
    for (const [index, box] of boxes().entries()) box.toggleAttribute("data-more", more[index]);
}

listen("scroll", (target) => target.matches?.(".prompt textarea") && showMore(), true);
addEventListener("resize", showMore);

register({
    keep({ index: card }) {
        const index = Number(card);
        state.keep[index] = !state.keep[index];
        hooks.changed();
    },
    bookmark({ index }) {
        toggleBookmark(boxes()[Number(index)].value.trim());
        hooks.changed();
    },
});
