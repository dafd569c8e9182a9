// Undo and redo as lists of snapshots, the latest last: no elements, no storage.

/** @typedef {import("./types").Snapshot} Snapshot */
/** @typedef {{ past: Snapshot[], future: Snapshot[] }} Stacks */

export const MOST = 20; // snapshots in each list

/**
 * Whether a snapshot is what is shown, so that going there would change nothing.
 * @param {Snapshot} snapshot
 * @param {import("./types").Form} form
 * @param {string | null} run
 */
export function isSame({ form: fields, run: there, drawn }, form, run) {
    return JSON.stringify(fields) === JSON.stringify(form) && !(drawn && there !== run);
}

/**
 * The stacks after `now` is about to be replaced; `same` says which snapshots are what is shown.
 * @param {Stacks} stacks
 * @param {Snapshot} now
 * @param {(snapshot: Snapshot) => boolean} same
 * @returns {Stacks}
 */
export function push({ past, future }, now, same) {
    const last = past.at(-1);
    const before = last && same(last) ? past.slice(0, -1) : past;
    return bounded([...before, now], future);
}

/**
 * One step back or forth, to the nearest snapshot that differs from what is shown; null if none
 * does.
 * @param {Stacks} stacks
 * @param {boolean} back
 * @param {{ form: import("./types").Form, run: string | null }} now
 * @param {(snapshot: Snapshot) => boolean} same
 * @returns {Stacks & { target: Snapshot } | null}
 */
export function step({ past, future }, back, now, same) {
    const [from, other] = back ? [past, future] : [future, past];
    const last = from.findLastIndex((each) => !same(each));
    if (last < 0) return null;
    const target = from[last];
    const left = from.slice(0, last);
    const added = [...other, { ...now, drawn: target.drawn }];
    return { target, ...(back ? bounded(left, added) : bounded(added, left)) };
}

/**
 * The stacks that a tab has stored, without what is no snapshot.
 * @param {unknown} stored
 * @returns {Stacks}
 */
export function parseStacks(stored) {
    const part = (/** @type {number} */ index) => {
        const list = Array.isArray(stored) ? stored[index] : null;
        return Array.isArray(list) ? list.filter((each) => each?.form?.prompts) : [];
    };
    return { past: part(0), future: part(1) };
}

/**
 * @param {Snapshot[]} past
 * @param {Snapshot[]} future
 * @returns {Stacks}
 */
const bounded = (past, future) => ({ past: past.slice(-MOST), future: future.slice(-MOST) });
