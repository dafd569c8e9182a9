// Which texts complete a prompt: words that the server knows, bookmarks and earlier prompts.

const WORDS = 4; // words that are offered, at most
const PROMPTS = 3; // whole prompts beside words
const PROMPTS_ALONE = 6;
const LEAST = 2; // letters after which something is offered

/** @typedef {import("./types").Suggestion} Suggestion */

/**
 * Offers words that go on as the one before the cursor begins, and whole prompts; in an empty box
 * bookmarks alone.
 * @param {string} value what is written
 * @param {number} at where the cursor is
 * @param {{ words: string[], bookmarks: string[], earlier: string[] }} known
 * @returns {Suggestion[]}
 */
export function suggestions(value, at, { words: all, bookmarks, earlier }) {
    const word = wordBefore(value, at);
    /** @param {string} text */
    const continues = (text) =>
        [text, text.replace(/^(<lora:|__)/, "")].some((each) =>
            each.toLowerCase().startsWith(word),
        ) && text.toLowerCase() !== word;
    // Nothing gets in the way of somebody who has written a whole word.
    const whole = all.some((each) => each.toLowerCase() === word);
    const words =
        word.length < LEAST || whole
            ? []
            : all.filter(continues).sort((one, other) => one.length - other.length);
    const written = value.trimStart().toLowerCase();
    const prompts = [...bookmarks, ...(written.length < LEAST ? [] : earlier)].filter(
        (text) =>
            at === value.length && text !== value.trim() && text.toLowerCase().startsWith(written),
    );
    const most = words.length ? PROMPTS : PROMPTS_ALONE;
    return [
        ...words
            .slice(0, WORDS)
            .map((text) => /** @type {Suggestion} */ ([at - word.length, text])),
        ...[...new Set(prompts)]
            .slice(0, most)
            .map((text) => /** @type {Suggestion} */ ([0, text])),
    ];
}

/**
 * The word before the cursor in small letters, or a LoRA's `<lora:` and what follows.
 * @param {string} value
 * @param {number} at
 */
function wordBefore(value, at) {
    const [word] = /** @type {RegExpExecArray} */ (
        /<[^<>]*$|[^\s,;()[\]{}|<>]*$/.exec(value.slice(0, at))
    );
    return word.toLowerCase();
}

/**
 * The number that an arrow key moves to among the suggestions; -1 stands for none of them.
 * @param {number} chosen
 * @param {number} by 1 down, -1 up
 * @param {number} count
 */
export function moved(chosen, by, count) {
    return chosen < 0 && by < 0 ? count - 1 : (chosen + by + count) % count;
}
