// Teaching: what is filled in for it, pictures with their captions above all.

import { register } from "./actions.js";
import { $, $$, listen, make } from "./dom.js";
import { tell } from "./line.js";
import { ask, upload } from "./server.js";
import { state } from "./state.js";
import { isOpen, showRuns, watch } from "./training.js";

/** @typedef {import("./types").Fields<"teach">} Fields */

const DELAY = 250; // ms after a change, until the server looks at it
const { teach } = state;
/** @param {string} name */
const field = (name) => $(`#teach-panel [name=${name}]`).value;
const list = () => $("#teach-panel .pictures");
/** A file's name without what says of which kind it is. @param {string} name */
const stem = (name) => name.replace(/\.[^.]*$/, "");

/** What is filled in. @returns {Fields} */
const draft = () => ({
    act: "check",
    name: field("taught"),
    kind: /** @type {Fields["kind"]} */ (field("kind")),
    steps: field("steps"),
    rank: field("rank"),
    side: field("side"),
    pictures: teach.pictures.map(({ file, name, text }) => ({ file, name, text })),
});

/** Takes pictures in, and texts that are captions of pictures of the same names. @param {File[]} files */
async function add(files) {
    const pictures = files.filter(({ name }) => !/\.txt$/i.test(name));
    const captions = files.filter((file) => !pictures.includes(file));
    const count = teach.pictures.length + pictures.length;
    if (count > Number($("#teach-panel .drop").dataset.most)) {
        return check({ ...draft(), pictures: [], count });
    }
    /** @type {Record<string, string>} */
    const texts = {};
    for (const file of captions) texts[stem(file.name)] = (await file.text()).trim();
    for (const picture of teach.pictures) picture.text = texts[stem(picture.name)] ?? picture.text;
    for (const file of pictures) await addPicture(file, texts[stem(file.name)]);
    showPictures();
    checkSoon();
}

/**
 * @param {File} file
 * @param {string | undefined} caption
 */
async function addPicture(file, caption) {
    try {
        const { path } = await upload(file);
        const { words } = await ask("teach", { act: "add", file: path, name: file.name });
        if (words === undefined) return; // it has been said why
        const text = caption ?? words;
        teach.pictures.push({ file: path, name: file.name, text, url: URL.createObjectURL(file) });
        showPictures();
    } catch {
        tell(String($("#generate").dataset.failed), "wrong", true);
    }
}

/** Shows new pictures, and others with what has changed: a caption that is typed keeps the focus. */
function showPictures() {
    const { caption } = list().dataset;
    for (const [index, picture] of teach.pictures.entries()) {
        const item = $$("li", list())[index] ?? begin(picture);
        const input = $("textarea", item);
        if (input.value !== picture.text) input.value = picture.text;
        input.ariaLabel = `${caption} ${index + 1}`;
        $("button", item).dataset.index = String(index);
    }
}

/** @param {typeof teach.pictures[number]} picture */
function begin({ name, url }) {
    const { remove } = list().dataset;
    const item = make("li", {});
    const image = make("img", { src: url, alt: name });
    const input = make("textarea", { rows: 2, dir: "auto" });
    const button = make("button", { type: "button", textContent: remove });
    button.ariaLabel = `${remove}: ${name}`;
    button.dataset.do = "teach_remove";
    item.append(image, input, make("small", {}), button);
    list().append(item);
    return /** @type {import("./types").Part} */ (/** @type {unknown} */ (item));
}

function checkSoon() {
    clearTimeout(teach.timer);
    teach.timer = setTimeout(() => check(draft()), DELAY);
}

/** @param {Fields} fields */
async function check(fields) {
    clearTimeout(teach.timer);
    const number = ++teach.number;
    if (!fields.count && teach.pictures.length === 0) return showCheck({}); // nobody has begun
    const answer = await ask("teach", fields);
    if (number === teach.number) showCheck(answer);
}

/** Shows what is wrong, or how long it would take. @param {import("./types").Answer} answer */
function showCheck({ captions = [], note = "", ready = false }) {
    const estimate = $("#teach-panel .estimate");
    estimate.textContent = note;
    estimate.classList.toggle("wrong", !ready);
    $("#teach-panel [data-do=teach_start]").disabled = !ready;
    // A caption as it will be taught, where it is not what is written.
    for (const [index, small] of $$("#teach-panel .pictures small").entries()) {
        const caption = captions[index] ?? "";
        small.textContent = caption === teach.pictures[index].text ? "" : caption;
    }
}

/** Call when a panel has been opened. */
export function showTeaching() {
    if (!isOpen()) return;
    teach.seen = {};
    checkSoon();
    watch();
}

register({
    async teach_start() {
        const answer = await ask("teach", { ...draft(), act: "start" });
        showRuns(answer);
        if (!answer.runs) return;
        for (const { url } of teach.pictures) URL.revokeObjectURL(url);
        teach.pictures = [];
        list().replaceChildren();
        $("#teach-panel [name=taught]").value = "";
        checkSoon();
        $("#teach-panel .runs").scrollIntoView({ block: "nearest" });
        $("#teach-panel .runs section:last-child button")?.focus({ preventScroll: true });
    },
    teach_remove({ index }) {
        teach.pictures.splice(Number(index), 1);
        $$("li", list())[Number(index)].remove();
        showPictures();
        const buttons = $$("button", list());
        (buttons[Number(index)] ?? buttons.at(-1) ?? $("#teach-panel [type=file]")).focus();
        checkSoon();
    },
});

// Nothing of it is one of the form's: whoever else listens is not told.
listen(
    "input",
    (target, event) => {
        if (!target.closest("#teach-panel")) return;
        event.stopPropagation();
        const at = $$("#teach-panel .pictures textarea").indexOf(target);
        if (at >= 0) teach.pictures[at].text = target.value;
        if (target.type !== "file") return checkSoon();
        add([...(target.files ?? [])]);
        target.value = "";
    },
    true,
);
listen(
    "drop",
    (target, event) => {
        if (!target.closest("#teach-panel")) return;
        event.preventDefault();
        event.stopPropagation();
        const { dataTransfer } = /** @type {DragEvent} */ (event);
        add([...(dataTransfer?.files ?? [])]);
    },
    true,
);
