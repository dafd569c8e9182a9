// As much of a browser as the script's modules need in Node.js: import this before them.

/** An element with nothing in it; tests set what they look at. */
class FakeElement {
    dataset = {};
    className = "";
    value = "";
    classList = { contains: (name) => this.className.split(" ").includes(name), toggle() {} };
    setAttribute() {}
    focus() {}
}

const elements = new Map();

/** The only element that a selector finds. */
export function element(selector) {
    if (!elements.has(selector)) elements.set(selector, new FakeElement());
    return elements.get(selector);
}

/** A browser's storage, which refuses what is longer than `room`. */
export class FakeStorage {
    values = new Map();

    constructor(room = Infinity) {
        this.room = room;
    }

    getItem(key) {
        return this.values.get(key) ?? null;
    }

    setItem(key, value) {
        if (value.length > this.room) throw new Error("QuotaExceededError");
        this.values.set(key, value);
    }
}

const page = {
    addEventListener() {},
    querySelector: element,
    querySelectorAll: () => [],
};
for (const selector of ["#line", "#overrides-panel"]) {
    Object.assign(element(selector), {
        querySelector: (within) => element(`${selector} ${within}`),
    });
}
Object.assign(globalThis, {
    document: page,
    addEventListener() {},
    CSS: { escape: (text) => text },
    MutationObserver: class {
        observe() {}
    },
    window: {
        sdTpuSettings: {
            boxes: 8,
            seeds: 2 ** 32,
            sides: ["height", "width"],
            offered: ["size", "model", "style"],
            uses: { strength: "init_image" },
        },
    },
});
