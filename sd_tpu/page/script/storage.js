// The browser's storage for the page: settings, prompts and bookmarks, if it lets it.

const EARLIER = 100; // prompts that are remembered

// Keys of this tab: whether a run goes on, and the one that was begun last.
export const BUSY = "sd_tpu busy";
export const RUN = "sd_tpu run";

export const local = () => localStorage;
export const session = () => sessionStorage;

/**
 * @param {() => Storage} where
 * @param {string} key
 */
export function readStored(where, key) {
    try {
        return JSON.parse(/** @type {string} */ (where().getItem(key)));
    } catch {
        return null;
    }
}

/**
 * @param {() => Storage} where
 * @param {string} key
 * @param {unknown} value
 */
export function store(where, key, value) {
    try {
        where().setItem(key, JSON.stringify(value));
    } catch {} // it is full or forbidden: the page works without it
}

/** @returns {string[]} */
export const bookmarks = () => readStored(local, "sd_tpu favourites") ?? [];

/** @param {string} text */
export function toggleBookmark(text) {
    const before = bookmarks();
    const others = before.filter((each) => each !== text);
    store(local, "sd_tpu favourites", text && !before.includes(text) ? [text, ...others] : others);
}

/** The prompts that were drawn, the latest first. @returns {string[]} */
export const earlierPrompts = () => readStored(local, "sd_tpu prompts") ?? [];

/** @param {string[]} prompts */
export function rememberPrompts(prompts) {
    const filled = prompts.map((text) => text.trim()).filter(Boolean);
    store(
        local,
        "sd_tpu prompts",
        [...new Set([...filled, ...earlierPrompts()])].slice(0, EARLIER),
    );
}
