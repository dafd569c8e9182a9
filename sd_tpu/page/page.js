// What the page does in the browser: it knows what is filled in, keeps it, takes it back, and asks
// the server. `window.sdTpu` is what Gradio calls, and what tests wait for.

(() => {
"use strict";

const $ = (selector, within = document) => within.querySelector(selector);
const $$ = (selector, within = document) => [...within.querySelectorAll(selector)];
const make = (tag, given) => Object.assign(document.createElement(tag), given);

// Storage that a browser may refuse.
const kept = {
    get(where, key) {
        try {
            return JSON.parse(where().getItem(key));
        } catch { return null; }
    },
    set(where, key, value) {
        try {
            where().setItem(key, JSON.stringify(value));
        } catch {}
    },
};
const local = () => localStorage, session = () => sessionStorage;

// Gradio takes the browser's first language, or English; the page is in the first that it speaks,
// or in the one that was chosen.
const texts = window.gradio_config?.i18n_translations ?? {};
const language = [kept.get(local, "sd_tpu language"), ...navigator.languages]
    .map((tag) => tag?.toLowerCase().split("-")[0]).find((tag) => tag in texts) ?? "en";

// Facts about settings from the server: how many boxes there are, after which number seeds begin again,
// the two that are chosen as one size, those whose choices are the server's, and which settings say
// how a picture that is handed in is used.
const { boxes: BOXES, seeds: SEEDS, sides: SIDES, offered: OFFERED, uses: USES } =
    window.sdTpuSettings;

let answer, stream, upload;  // how the server is asked: for an answer, for a run, to take a file
let browser = null;  // this browser's name, once the page has arrived
let own = Array.from({ length: BOXES }, () => ({}));  // of each box its own settings
let keep = Array(BOXES).fill(false);  // whether each card is kept
let ownPlace = 0;  // the box whose settings the panel shows
let filling = false;  // whether it is not a person who fills something in
let touched = false;  // whether a person has, since something was said to be wrong
let past = [], future = [];  // what was replaced, and what was taken back; the latest last
let atPast = false;  // whether the focus is, or was at last, at one of the buttons for that
const gallery = { run: null, seed: null, version: 0 };  // what is shown, as far as it is known
let turn = Promise.resolve();  // when the next may begin that takes the place of what is shown
let goesOn = [];  // what of the line is said of a run, whatever else is said there
const pending = new Map();  // runs asked for that have no name yet: whether each is to be stopped
let travels = false;  // whether a journey is drawn that is to be shown
let samples = 1;  // which set comes next; the first is in the boxes from the start
let looks = 0, looking, opening = false;
let wasBusy = false;  // whether the line said so at last
const album = { pages: 1, favourites: false, words: "" };  // what of the history is shown
let known = [], learnt = -Infinity;  // what prompts can say here, and since when that is known
let offered = [], chosen = -1;  // what would complete a prompt: where it begins, and the text
let offeredAt;  // where the cursor was in which text then
const bookmarks = () => kept.get(local, "sd_tpu favourites") ?? [];
const earlier = () => kept.get(local, "sd_tpu prompts") ?? [];
const EARLIER = 100;  // prompts that are remembered
const KNOWN = 60_000;  // ms for which it is
const PAST = 20;  // kept of each
const LOOK = 150;  // ms after which the server is asked what is to be said of what is filled in
const FRAME = 20;  // ms after which what has been said is painted
const PAUSE = 500;  // ms without a key after which somebody has stopped typing
const pauses = [];  // which have begun, by the box's place

const boxes = () => $$(".prompt textarea");
const seedBox = () => $("#seed input");
const commons = () => $$("#settings-panel [name]");
const ownFold = (place) => $(`.below .fold[data-place="${place}"]`);
const sampleSets = () => JSON.parse($("[data-samples]").dataset.samples);
const title = () => $("header[lang]").dataset.title;

let connected;
const connecting = new Promise((resolve) => { connected = resolve; });

window.sdTpu = {
    connect(ask, follow, send) {
        [answer, stream, upload] = [ask, follow, send];
        connected();
    },
    // When all is there: what was filled in last, or what a link brings.
    async arrive() {
        await connecting;
        speak();
        const stored = kept.get(local, `sd_tpu/${title()}`);
        browser = stored?.browser ?? newName();
        [past, future] = readPast();
        if (stored?.live) $("#live input").checked = true;
        fill(stored?.form ?? {});
        this.arrived = true;
        markInert();
        showPast();
        // Gradio changes what is there, or makes it anew.
        const any = { subtree: true, childList: true, attributeFilter: ["data-at"] };
        new MutationObserver(lineChanged).observe($("#line"), any);
        new MutationObserver(cardsChanged).observe($("#cards"), { ...any, attributeFilter: [
            "class"] });
        begin(asking("show"), kept.get(session, "sd_tpu busy") !== true);
        if (location.hash.length > 1) await openLink();
    },
};

// Puts what Gradio has shown in another language right, from what the page has brought along.
function speak() {
    const said = (text) => String(text).replace(/__i18n__{[^}]*"key": ?"([^"]*)"}/,
        (_, key) => texts[language][key]);
    const here = Object.keys(texts).find((tag) => $("header[lang]").lang.split("-")[0] === tag);
    if (here === language) return;
    for (const { type, props } of window.gradio_config.components) {
        const element = props.elem_id && document.getElementById(props.elem_id);
        if (!element || !/__i18n__/.test(JSON.stringify(props))) continue;
        if (type === "html") $(".html-container > *", element).innerHTML = said(props.value);
        if (type !== "textbox") continue;
        $("textarea", element).placeholder = said(props.placeholder);
        $("[data-testid=block-info]", element).textContent = said(props.label);
    }
}

// A name for this browser that nobody can guess: its runs are found by it.
function newName() {
    return Array.from(crypto.getRandomValues(new Uint8Array(16)),
        (byte) => byte.toString(16).padStart(2, "0")).join("");
}

// Until what was saved is there, what is typed would be lost, and what is made would be nobody's.
function markInert() {
    for (const part of $$("#tools, #cards, #bar")) part.inert = !window.sdTpu.arrived;
}

const begun = new MutationObserver(() => {
    if (window.sdTpu.arrived) begun.disconnect();
    else markInert();
});
begun.observe(document, { subtree: true, childList: true });

// Gradio tells the document's language by the browser's; the heading says which the page speaks.
new MutationObserver(() => {
    const heading = $("header[lang]"), root = document.documentElement;
    if (!heading || heading.lang === root.lang && heading.dir === root.dir) return;
    Object.assign(root, { lang: heading.lang, dir: heading.dir });
}).observe(document, { subtree: true, childList: true, attributeFilter: ["lang"] });

// --- what is filled in --------------------------------------------------------------------------

function form() {
    return { prompts: boxes().map((box) => box.value), seed: seedBox().value,
        settings: Object.fromEntries(commons().map((field) => [field.name, field.value])),
        own: own.map((box) => ({ ...box })), keep: [...keep] };
}

// Fills in what of a form is given.
function fill({ prompts, seed, settings = {}, sizes, own: owns, keep: marks }) {
    filling = true;
    try {
        if (prompts) boxes().forEach((box, place) => write(box, prompts[place] ?? ""));
        if (seed !== undefined) seedBox().value = seed;
        if (sizes) offerNames("size", sizes, 3);
        for (const [name, value] of Object.entries(settings)) {
            const field = $(`#settings-panel [name="${CSS.escape(name)}"]`);
            if (field) choose(field, value);
            offerPer();
        }
        if (owns) own = Array.from({ length: BOXES }, (_, place) => ({ ...owns[place] }));
        if (marks) keep = Array.from({ length: BOXES }, (_, place) => marks[place] === true);
    } finally {
        filling = false;
    }
    showOwn();
    changed();
}

// Sizes of a model, or models: for all boxes, for one, and to be compared.
function offerNames(name, values, ticked) {
    const all = $(`#all-${name}`), own = $(`#own-${name}`);
    const options = () => values.map((each) => new Option(each, each));
    all.replaceChildren(...options());
    own.replaceChildren(own.options[0], ...options());
    all.dataset.options = own.dataset.options = values.length;
    const list = $(`#compare-panel [data-what=${name}]`);
    const tick = $("label", list);
    list.dataset.options = values.length;
    tick.parentElement.replaceChildren(...values.map((each, place) => {
        const label = tick.cloneNode(true);
        Object.assign($("input", label), { value: each, checked: place < ticked });
        label.lastChild.data = each;
        return label;
    }));
}

// Gradio's boxes learn of it like of a key.
function write(box, text) {
    if (box.value === text) return;
    box.value = text;
    box.dispatchEvent(new Event("input", { bubbles: true }));
}

function choose(field, value) {
    if (field.type === undefined || typeof value !== "string") return;
    const there = field.options && [...field.options].some((option) => option.value === value);
    if (field.options && !there) {
        if (!OFFERED.includes(field.name)) return;  // what another page offered
        field.add(new Option(value, value));
        field.dataset.options = field.options.length;  // else it may be hidden, as no choice
    }
    field.value = value;
}

// Some choices go only with some of another setting.
function offerPer(chosen) {
    for (const field of $$("#settings-panel [data-per]")) {
        const { of, allowed } = JSON.parse(field.dataset.per);
        const here = ["", ...allowed[$(`#settings-panel [name=${of}]`).value] ?? []];
        for (const option of field.options) {
            option.hidden = option.disabled = !here.includes(option.value);
        }
        if (chosen === of || !here.includes(field.value)) field.value = "";
    }
}

// The seed that is filled in, if it is one; without it a new one is drawn.
function fixedSeed() {
    const { value } = seedBox();
    return value.trim() !== "" && Number(value) >= 0 ? Number(value) : null;
}

// The panel of a box's own settings: in its empty fields stands what is taken instead.
function showOwn() {
    for (const field of $$("#own-panel [name]")) {
        field.value = "";
        choose(field, own[ownPlace][field.name] ?? "");
        const common = $(`#settings-panel [name=${field.name}]`), seed = fixedSeed();
        if (common) field.placeholder = common.value || common.placeholder || "";
        else if (field.name === "seed") {
            field.placeholder = seed === null ? seedBox().placeholder : seed + ownPlace;
        }
    }
    for (const slider of $$("#own-panel [type=range]")) {
        const number = slider.previousElementSibling;
        slider.value = number.value || number.placeholder;
    }
    showInputs();
    showUses();
}

// After anything that is filled in has become different.
function changed() {
    for (const slider of $$("#settings-panel [type=range]")) {
        slider.value = slider.previousElementSibling.value;
    }
    showPressed();
    showInputs();
    cardsChanged();
    if (!browser) return;
    const live = $("#live input").checked || wanted;
    kept.set(local, `sd_tpu/${title()}`, { browser, live, form: form() });
    last = form();
    showPast();
    lookSoon();
}

function lookSoon() {
    clearTimeout(looking);
    looking = setTimeout(look, LOOK);
}

let last = null;  // what was filled in before the latest change
let wanted = false;  // whether Live is to come back as soon as it is possible
let fresh = true;  // whether the models are still to be asked for: the page lists only the first

// What the server says of it: words too many or unknown, what is a box's own, what is wrong.
async function look(open = false) {
    const number = ++looks;
    opening = opening || open;
    const told = await ask("look", { fresh });
    if (number !== looks) return;
    if (!told.told_of) {  // no answer came, or a refusal that has been said
        if (fresh && !told.told) looking = setTimeout(look, PATIENCE);
        return;
    }
    fresh = false;
    showOffered(told);
    Object.assign(inputs, told.inputs);
    showInputs();
    const show = (element, html) => {
        if (element.innerHTML !== html) element.innerHTML = html;
    };
    $$(".below .told").forEach((element, place) => show(element, told.told_of[place] ?? ""));
    $$(".below .own").forEach((element, place) => show(element, told.own[place]));
    show($(".faster"), told.faster);
    const live = $("#live input");
    wanted = wanted || live.checked && told.slow !== "";
    // Not `disabled`: whoever comes to it by keyboard is to learn why it is off.
    Object.assign(live, { ariaDisabled: String(told.slow !== ""),
        checked: told.slow === "" && (live.checked || wanted) });
    if (told.slow === "") wanted = false;
    $("#live .note").textContent = told.slow;
    if ($("#line .wrong") && touched && !told.wrong) takeBack(told.line);
    blame(told.culprit, opening);
    opening = false;
}

// Which models there are by now, and what the one that is filled in has of its own.
function showOffered({ presets, sizes, models }) {
    const renew = (name, ...others) => {
        const { value } = $(`#all-${name}`);
        offerNames(name, ...others);
        choose($(`#all-${name}`), value);
        choose($(`#own-${name}`), own[ownPlace][name] ?? "");
    };
    if (models?.length > 1) renew("model", models, BOXES);
    if (!sizes) return;  // nothing is known of a model that cannot be read
    const before = [...$("#all-size").options].map(({ value }) => value);
    if (!sizes.every((each) => before.includes(each)) || before.length > sizes.length + 1) {
        renew("size", sizes, 3);
    }
    presets.forEach((steps, place) => { $$("#presets button")[place].dataset.steps = steps; });
    showPressed();
}

function showPressed() {
    const steps = $("#settings-panel [name=steps]").value;
    for (const button of $$("#presets button")) {
        button.setAttribute("aria-pressed", button.dataset.steps === steps);
    }
}

// Marks the field that something is wrong with, and shows it.
function blame(culprit, open) {
    for (const field of $$("[aria-invalid]")) field.removeAttribute("aria-invalid");
    const { setting, index } = culprit ?? {};
    if (!setting) return;
    const inOwn = index !== null && setting !== "prompt";
    const field = setting === "prompt" ? boxes()[index ?? 0]
        : setting === "seed" && !inOwn ? seedBox()
        : $(`${inOwn ? "#own-panel" : "#settings-panel"} [name=${
            SIDES.includes(setting) ? "size" : setting}]`);
    const panel = field?.closest(".panel");
    if (open && panel) {
        unfold(inOwn ? ownFold(index) : $(`[aria-controls=${panel.id}]`));
        field.closest("details")?.toggleAttribute("open", true);
    }
    if (!inOwn || ownPlace === index) field?.setAttribute("aria-invalid", "true");
    if (open) field?.focus();
}

// --- asking -------------------------------------------------------------------------------------

function asking(action, more) {
    return { do: action, lang: $("header[lang]").lang, browser, run: gallery.run, form: form(),
        ...more };
}

// What is answered at once; nothing, where the server is gone.
async function ask(action, more = {}) {
    try {
        const asked = asking(action, more), told = await answer(asked);
        // By now another model may have been chosen.
        if (action === "model" && more.model !== $("#settings-panel [name=model]").value) return {};
        if (told.form) {
            if (action === "model") Object.assign(told.form.settings, changedSince(asked));
            else remember();
            fill(told.form);
            if (told.run) begin(asking("show", { shown: told.run }), true);
        }
        if (told.told) tell(told.told, told.kind ?? "idle", true);
        if (told.news) news(told.news);
        if (told.file) link(told.file).click();
        return told;
    } catch {
        return {};
    }
}

// The settings that have been changed since something was asked for.
function changedSince({ form: { settings } }) {
    return Object.fromEntries(Object.entries(form().settings).filter(
        ([name, value]) => value !== settings[name]));
}

// Asks for a run, one after the other, and shows it; how it ended `before` is old news.
function begin(asked, before = false) {
    const begun = turn.then(async () => {
        const told = await ask(asked.do, { ...asked, run: gallery.run });
        if (told.kind === "wrong") refused();
        if (told.filled) {
            if (!isShown(asked)) remember();  // meanwhile somebody has typed on
            fill(told.filled);
        }
        if (!told.run) return told;
        if (told.run !== gallery.run) gallery.version = 0;
        Object.assign(gallery, { run: told.run, seed: told.seed });
        stream(asking("watch", { seen: gallery.version, before }));
        return told;
    });
    turn = begun.catch(() => {});  // what failed keeps nobody from trying again
    return begun;
}

// Unfinished pictures would look like an answer to what was refused.
function refused() {
    for (const figure of $$("#cards figure.stopped")) {
        figure.className = "blank";
        $("div", figure).replaceChildren(make("span", { className: "number",
            textContent: Number(figure.dataset.place) + 1 }));
        $("figcaption", figure).replaceChildren();
    }
    look(true);
}

function link(file) {
    return make("a", { href: file, download: "" });
}

// Says something before, or in place of, the server.
function tell(text, kind, aloud = false) {
    const line = $("#line p");
    const busy = kind === "busy" ? [] : goesOn;
    if (kind === "busy") $("#line progress").value = 0;
    line.textContent = text;
    line.className = [kind, ...busy].join(" ");  // what goes on goes on
    delete line.dataset.at;
    if (kind === "wrong") touched = false;
    if (aloud) news(text);
}

// What was wrong is right now. The elements stay: Gradio takes away only those it has put there.
function takeBack(html) {
    const before = make("template", { innerHTML: html }).content;
    const [line, { textContent, className, dataset }] = [$("#line p"), $("p", before)];
    Object.assign(line, { textContent, className });
    $("#line progress").value = $("progress", before).value;
    line.dataset.at = dataset.at;
}

function news(text) {
    $("#news [role=status]").textContent = text;
}

// --- runs ---------------------------------------------------------------------------------------

// Whether there is a picture to keep: it may have gone, with the server for one.
function isKept(place) {
    const there = "figure:not(.blank, .example, .stopped) img";
    return keep[place] && $(there, $$("#cards > .card")[place]) !== null;
}

// Draws what is filled in, or something made of it; what it takes the place of shows it at once.
async function draw(action, more) {
    if (action === "generate" && $("#generate").disabled) return;
    if (action !== "generate") remember(form(), action === "larger");
    const asked = announced(asking(action, more));
    if (offered.length) offer(written, []);
    $$("#cards figure").forEach((figure, place) => figure.classList.toggle("asked",
        action === "larger" ? place === more.place
            : (action === "compare" || !isKept(place)) && (action !== "generate"
                || boxes()[place].value.trim() !== "" || $(".such", figure.closest(".card")))));
    // What is said is seen first: storage and Gradio take their time.
    await new Promise((resolve) => { setTimeout(resolve, FRAME); });
    const filled = asked.form.prompts.map((text) => text.trim()).filter(Boolean);
    kept.set(local, "sd_tpu prompts", [...new Set([...filled, ...earlier()])].slice(0, EARLIER));
    changed();
    if (!await attempt(asked)) return;
    keep = keep.map((_, place) => isKept(place));  // what comes where nothing was is not
    changed();
}

// What is asked for with this, which is said at once and can be stopped from now on.
function announced(asked) {
    pending.set(asked, false);
    tell($("#generate").dataset.starting, "busy");
    return asked;
}

// Whether a run has begun; the line says why if it has not. It can be stopped before it is known.
async function attempt(asked) {
    let began = false;
    try {
        const { run, told } = await begin(asked), stopped = pending.get(asked);
        if (!run && !told) tell($("#generate").dataset.failed, "wrong", true);
        // Until the line is the run's own it may say how another goes, beside which more can begin.
        if (run && $("#line p").dataset.run !== run) tell($("#generate").dataset.starting, "busy");
        if (stopped) ask("stop");
        began = Boolean(run) && !stopped;
    } finally {
        pending.delete(asked);
        if (!began) settle();
        showGo();
        showPast();
    }
    return began;
}

// What was asked for shows so no longer.
function settle() {
    if (pending.size) return;
    for (const figure of $$("figure.asked")) figure.classList.remove("asked");
}

function stop() {
    travels = false;
    if (!pending.size) ask("stop");
    for (const asked of pending.keys()) pending.set(asked, true);
}

// What of the two can be pressed; it takes the focus if the other had it.
function showGo() {
    const line = $("#line p").classList, busy = line.contains("busy");
    const focused = document.activeElement;
    $("#stop").disabled = !busy && !pending.size;
    $("#generate").disabled = busy && !line.contains("single") || pending.size > 0;
    if (focused?.disabled && focused.closest("#go")) $("#go button:enabled").focus();
}

function lineChanged() {
    const line = $("#line p");
    if (!line) return;
    const busy = line.classList.contains("busy"), own = line.dataset.at === undefined;
    showGo();
    kept.set(session, "sd_tpu busy", busy);
    const share = Math.round(100 * ($("#line progress")?.value ?? 0));
    document.title = busy && share ? `${share} % · ${title()}` : `${title()} · sd_tpu`;
    if (own) {
        wasBusy ||= busy;  // a quick run is over by the time that the server tells of it
        return;
    }
    goesOn = ["busy", "single"].filter((each) => line.classList.contains(each));
    if (line.dataset.run === gallery.run) gallery.version = Number(line.dataset.version);
    settle();
    if (!busy) showPast();
    if (wasBusy && !busy) {
        showHistory();
        if (travels && line.classList.contains("over")) {
            showJourney().then((view) => { if (view) $("#journey").showModal(); });
        }
        travels = false;
    }
    wasBusy = busy;
    if (line.classList.contains("wrong")) {  // what was asked for has failed
        touched = false;
        look(true);
    }
}

function cardsChanged() {
    const marked = bookmarks();
    for (const [place, card] of $$("#cards > .card").entries()) {
        const here = boxes()[place].value.trim(), drawn = $(".words", card)?.textContent;
        card.classList.toggle("kept", isKept(place));
        $("[data-do=keep]", card)?.setAttribute("aria-pressed", keep[place]);
        $("[data-do=bookmark]", card).setAttribute("aria-pressed", marked.includes(here));
        // Of another prompt than is there now a picture says so, and an example nothing.
        $("figure", card).classList.toggle("other", drawn !== undefined && drawn !== here);
    }
    showUses();
}

// What the picture of the box can be used as, if it has one.
function showUses() {
    const uses = $("#own-panel .uses");
    if (uses) uses.hidden = !$(`[data-do=begin][data-place="${ownPlace}"]`);
}

// --- what can be taken back ---------------------------------------------------------------------

// It belongs to this tab, which may be loaded again, and to this model: what was filled in, and
// the run whose pictures were there.
function keepPast(before, after = future) {
    [past, future] = [before.slice(-PAST), after.slice(-PAST)];
    kept.set(session, `sd_tpu past ${title()}`, [past, future]);
}

function readPast() {
    const all = kept.get(session, `sd_tpu past ${title()}`);
    return [0, 1].map((part) => Array.isArray(all?.[part])
        ? all[part].filter((each) => each?.form?.prompts) : []);
}

function isShown({ form: fields, run: there, drawn }) {
    return JSON.stringify(fields) === JSON.stringify(form()) && !(drawn && there !== gallery.run);
}

function showPast() {
    if (!window.sdTpu.arrived) return;
    const buttons = [$("#undo"), $("#redo")], nowhere = document.body;
    if (document.activeElement !== nowhere) atPast = buttons.includes(document.activeElement);
    // A run that is about to be shown fills the boxes itself.
    buttons[0].disabled = pending.size > 0 || past.every(isShown);
    buttons[1].disabled = pending.size > 0 || future.every(isShown);
    // A button that is disabled loses the focus, in some browsers at once; the other takes it.
    const lost = document.activeElement === nowhere || document.activeElement.disabled;
    if (atPast && lost) buttons.find((button) => !button.disabled)?.focus();
}

// Before something takes the place of what is filled in, or only of what is drawn; if it then does
// not, it costs nothing.
function remember(fields = form(), drawn = false) {
    const before = past.length && isShown(past.at(-1)) ? past.slice(0, -1) : past;
    keepPast([...before, { form: fields, run: gallery.run, drawn }]);
}

function step(back) {
    const from = back ? past : future, other = back ? future : past;
    const last = from.findLastIndex((each) => !isShown(each));
    if (last < 0) return;
    const there = from[last];
    const shown = { form: form(), run: gallery.run, drawn: there.drawn };
    if (back) keepPast(from.slice(0, last), [...other, shown]);
    else keepPast([...other, shown], from.slice(0, last));
    touched = true;  // what was wrong may not be any more
    fill(there.form);
    news($("#undo").dataset.undone);
    if (there.run && there.run !== gallery.run) begin(asking("show", { shown: there.run }));
}

// --- drawing while somebody types ---------------------------------------------------------------

function typed(place) {
    const live = $("#live input");
    clearTimeout(pauses[place]);
    if (live.checked) pauses[place] = setTimeout(redraw, PAUSE, place);
}

function typedAll() {
    boxes().forEach((box, place) => {
        if (box.value.trim()) typed(place);
    });
}

function redraw(place) {
    if (isKept(place)) return;  // also since the last key
    if (pending.size) return typed(place);  // which may fill the box with something else
    keep[place] = false;
    begin(asking("live", { place }));
    // It may be at the window's end; but what is typed in comes first.
    for (const seen of [`#cards [data-place="${place}"]`, ":focus"]) {
        $(seen)?.scrollIntoView({ block: "nearest" });
    }
}

// Not by Gradio's own events: of what is pasted, dictated or put together they know nothing.
document.addEventListener("input", ({ target, inputType = "" }) => {
    if (filling || !window.sdTpu.arrived) return;
    touched = true;
    if (target.closest("#viewer")) target.parentElement.style.setProperty("--at", `${target.value}%`);
    if (target.closest("dialog")) return;
    if (target.type === "file") {
        const [file] = target.files, field = target.closest(".upload");
        if (field) handIn(file, placeOf(field), $("[name]", field).name);
        else read(file);
        target.value = "";
        return;
    }
    if (target.type === "range") {
        target = target.previousElementSibling;
        target.value = target.nextElementSibling.value;
    }
    const place = boxes().indexOf(target);
    if (target.closest("#own-panel")) {
        if (target.value === "") delete own[ownPlace][target.name];
        else own[ownPlace][target.name] = target.value;
        typed(ownPlace);
    } else if (target.name === "model" && target.closest("#settings-panel")) {
        remember(last);
        learnt = -Infinity;
        ask("model", { model: target.value });
    } else if (target.name === "what") {
        compareWhat(target);
    } else if (target.type === "search") {
        search(target.value);
    } else if (target.id === "language") {
        kept.set(local, "sd_tpu language", target.value);
        location.reload();
    }
    if (place >= 0) typed(place);
    // By keys, not by what is pasted or still put together.
    if (place >= 0 && /^(insertText|delete)/.test(inputType)) suggest(target);
    if (target.closest("#settings-panel .handed")) typedAll();
    if (target.closest("#settings-panel")) offerPer(target.name);
    changed();
});

// --- keys ---------------------------------------------------------------------------------------

document.addEventListener("keydown", (event) => {
    if ($("#painter[open], #journey[open], .menu:popover-open")) return;
    if ($("#viewer")?.open) {
        const forth = document.documentElement.dir === "rtl" ? -1 : 1;
        const steps = { ArrowLeft: -forth, ArrowUp: -1, ArrowRight: forth, ArrowDown: 1 };
        if (event.key in steps && event.target.type !== "range") leaf(steps[event.key]);
    } else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        if (window.sdTpu.arrived) draw("generate");
    } else if (event.target === written && !event.isComposing && stillOffered()
        && complete(event.key)) {
        event.preventDefault();
    } else if (event.key === "Escape" && !event.isComposing) {
        // What is open is closed first; in what is written in it means nothing more.
        if (!fold() && !event.target.closest("input, textarea, select")) stop();
    }
});

// --- what is clicked ----------------------------------------------------------------------------

const ACTIONS = {
    generate: () => draw("generate"),
    stop,
    redraw: ({ place }) => begin(asking("redraw", { place: Number(place) })),
    vary: ({ place }) => draw("vary", { place: Number(place) }),
    larger: ({ place }) => draw("larger", { place: Number(place) }),
    keep({ place }) {
        keep[place] = !keep[place];
        changed();
    },
    star: ({ id }, button) => inHistory(
        { act: "favourite", id, to: String(button.ariaPressed !== "true") }),
    journey: ({ place }) => plan(Number(place)),
    async travel() {
        const [place, to, count] = $$("#journey select").map(({ value }) => value);
        $("#journey").close();
        travels = await attempt(announced(asking("journey", { place: Number(place),
            to: to === "" ? null : Number(to), count: Number(count) })));
    },
    movie: ({ kind }) => ask("movie", { kind }),
    begin({ place }) {
        const uses = $("#own-panel .uses");
        if (uses) unfold(ownFold(place), uses);
        else ACTIONS.use_as({ place, name: "init_image" });
    },
    use_as({ place = ownPlace, name }) {
        takeAs(name, { place: Number(place) }, Number(place)).then((taken) => {
            if (taken) unfold(ownFold(place), opened("own", name));
        });
    },
    for_all(_, button) {
        const there = own[ownPlace];
        const names = $$("[name]", button.closest(".handed")).map(({ name }) => name);
        const given = names.filter((name) => there[name]).map((name) => [name, there[name].trim()]);
        replace({ settings: Object.fromEntries(given), own: own.map((box) => Object.fromEntries(
            Object.entries(box).filter(([name]) => !names.includes(name)))) });
        typedAll();
    },
    take_away: (_, button) => put(placeOf(button), $("[name]", button.closest(".upload")).name, ""),
    paint: (_, button) => paint(placeOf(button)),
    unpaint() {
        strokes.pop();
        showStrokes();
    },
    invert() {
        inverted = !inverted;
        showStrokes();
    },
    painted: handInMask,
    again({ place }) {
        ask("again", { place: Number(place) }).then(() => $("#generate").focus());
    },
    compare() {
        const what = $("[name=what]:checked").value;
        const ticked = $(`#compare-panel [data-what="${what}"]`);
        const values = ticked ? $$(":checked", ticked).map((tick) => tick.value)
            : $("#compare-panel .values input").value;
        fold();
        draw("compare", { what, values });
    },
    bookmark({ place }) {
        const text = boxes()[place].value.trim(), before = bookmarks();
        const others = before.filter((each) => each !== text);
        kept.set(local, "sd_tpu favourites",
            text && !before.includes(text) ? [text, ...others] : others);
        changed();
    },
    fold: (_, button) => toggle(button),
    close(_, button) {
        const dialog = button.closest("dialog");
        if (dialog) dialog.close();
        else fold();
    },
    undo: () => step(true),
    redo: () => step(false),
    copy_first: () => replace({ prompts: Array(BOXES).fill(
        boxes().map((box) => box.value).find((text) => text.trim()) ?? "") }),
    clear: () => replace({ prompts: [], own: [] }),
    samples() {
        const sets = sampleSets();
        replace({ prompts: sets[samples++ % sets.length], own: [] });
    },
    // By chance, from all samples there are; drawn at once.
    surprise() {
        if ($("#generate").disabled) return;
        const all = sampleSets().flat().filter(Boolean), drawn = all.map((text) => [Math.random(), text]).sort(([a], [b]) => a - b);
        replace({ prompts: drawn.slice(0, BOXES).map(([, text]) => text), own: [] });
        draw("generate");
    },
    word(_, { textContent: word }) {
        remember();
        written ??= boxes()[0];
        const { value, selectionStart: at } = written, before = value.slice(0, at);
        const put = `${before && !/\s$/.test(before) ? " " : ""}${word}`;
        write(written, `${before}${put}${value.slice(at)}`);
        written.selectionStart = written.selectionEnd = at + put.length;
    },
    random({ told }) {
        replace({ seed: "-1" });
        tell(told, "idle", true);
    },
    reuse({ none }) {
        if (gallery.run) replace({ seed: String(gallery.seed) });
        else tell(none, "wrong", true);
    },
    preset: ({ steps }) => replace({ settings: { steps } }),
    reset({ place }) {
        if (place === undefined) {
            const exact = $$("#settings-panel [data-default]").map(
                (field) => [field.name, field.dataset.default]);
            replace({ settings: Object.fromEntries(exact) });
            $("[aria-controls=settings-panel]").focus();
        } else {
            replace({ own: own.map((box, each) => each === Number(place) ? {} : box) });
            ownFold(place).focus();
            typed(Number(place));
        }
    },
    fill(_, button) {
        const lines = $("#list-panel textarea").value.split("\n").map((line) => line.trim())
            .filter(Boolean);
        const { empty, filled, many } = button.dataset;
        if (!lines.length) return tell(empty, "wrong", true);
        replace({ prompts: lines, own: [] });
        tell(lines.length > BOXES ? many.replace("%", lines.length) : filled, "idle", true);
        fold();
    },
    zip: () => ask("zip"),
    grid: () => ask("grid"),
    use() {
        const { id, name } = shown;
        $("#viewer").close();
        if (id) inHistory({ act: "again", id });
        else ACTIONS.again({ place: name });
    },
    begin_shown({ name: as }) {
        const { id, name } = shown;
        $("#viewer").close();
        if (id) takeAs(as, { id }).then((taken) => { if (taken) showHanded(as); });
        else ACTIONS.use_as({ place: name, name: as });
    },
    larger_shown() {
        $("#viewer").close();
        ACTIONS.larger({ place: shown.name });
    },
    large: () => ask("large", shown.which),
    link: (_, button) => copy(button),
    view: (_, button) => open(button.closest("figure")),
    leaf: ({ step }) => leaf(Number(step)),
    history: inHistory,
};

document.addEventListener("click", (event) => {
    const { target } = event, button = target.closest("[data-do]");
    if (target.matches("#live [aria-disabled=true]")) event.preventDefault();
    if (button && $("#line .wrong")) {  // whoever goes on has read it
        touched = true;
        lookSoon();
    }
    target.closest(".menu")?.hidePopover();  // which gives the focus back
    if (button) ACTIONS[button.dataset.do](button.dataset, button);
    else if (target.id === "viewer") target.close();
    else if (target.closest(".about summary")) {
        ask("about").then(({ about }) => { $(".about dl").innerHTML = about ?? ""; });
    }
});

// A menu opens at its button, within the window, and moves with the page.
const MENU = 300;  // pixels, if there are so many
document.addEventListener("beforetoggle", ({ target, newState }) => {
    if (newState !== "open" || !target.matches(".menu")) return;
    const at = $(`[popovertarget=${target.id}]`).getBoundingClientRect();
    const room = document.documentElement.clientWidth - 8, width = Math.min(MENU, room);
    const start = document.documentElement.dir === "rtl" ? at.right - width : at.left;
    const below = at.top + at.bottom < innerHeight;
    Object.assign(target.style, { width: `${width}px`,
        left: `${Math.min(Math.max(4, start), room + 4 - width)}px`,
        top: below ? `${scrollY + at.bottom}px` : "auto",
        bottom: below ? "auto" : `${innerHeight - scrollY - at.top}px` });
}, true);

function replace(given) {
    remember();
    fill(given);
}

// One panel at a time is open; it takes the focus, and gives it back.
function toggle(button) {
    const opened = button.getAttribute("aria-expanded") !== "true";
    fold();
    if (!opened) return;
    button.setAttribute("aria-expanded", true);
    const panel = document.getElementById(button.getAttribute("aria-controls"));
    if (button.dataset.place) ownPlace = Number(button.dataset.place);
    showOwn();
    panel.toggleAttribute("data-open", true);
    panel.ariaLabel = button.ariaLabel ?? button.textContent;
    $("#sheet").scrollTop = 0;
    panel.focus({ preventScroll: true });
    showHistory();
}

// A panel, unless it is open, and there what is to be seen.
function unfold(button, seen) {
    if (button.ariaExpanded !== "true") toggle(button);
    seen?.scrollIntoView();
}

function fold() {
    const button = $(".fold[aria-expanded=true]");
    button?.setAttribute("aria-expanded", false);
    $(".panel[data-open]")?.removeAttribute("data-open");
    button?.focus();
    return button;
}

function compareWhat({ value, dataset }) {
    const ticked = $$("#compare-panel [data-what]");
    for (const list of ticked) list.hidden = list.dataset.what !== value;
    const values = $("#compare-panel .values");
    values.hidden = ticked.some((list) => !list.hidden);
    const from = fixedSeed() ?? Math.floor(Math.random() * SEEDS);
    $("input", values).value = value !== "seed" ? dataset.values
        : Array.from({ length: BOXES }, (_, place) => (from + place) % SEEDS).join(", ");
}

async function copy(button) {
    const link = `${location.origin}${location.pathname}${location.search}#${button.dataset.link}`;
    try {
        await navigator.clipboard.writeText(link);
        const label = button.dataset.label ??= button.textContent;
        button.textContent = button.dataset.copied;
        setTimeout(() => { button.textContent = label; }, 2000);
    } catch {  // without https there is no clipboard
        prompt(button.dataset.prompt, link);
    }
}

async function openLink() {
    await connecting;
    const link = location.hash.slice(1);
    history.replaceState(null, "", location.pathname + location.search);
    await ask("link", { link });
}

addEventListener("hashchange", () => {
    if (location.hash.length > 1) openLink();
});

// --- pictures that are handed in ----------------------------------------------------------------

// Asks something about a picture's file, however it comes.
async function send(file, action, more) {
    const { large, max } = $("#read-panel .drop").dataset;
    if (!file) return {};
    if (file.size > Number(max)) {
        tell(large, "wrong", true);
        return {};
    }
    try {
        const { path } = await upload(file);
        return await ask(action, { file: path, ...more });
    } catch {
        tell($("#generate").dataset.failed, "wrong", true);
        return {};
    }
}

async function read(file) {
    const { form: there } = await send(file, "read");
    if (there) fold();
}

let inputs = {};  // those that this browser has handed in, small, by name
const coming = {};  // what was asked for last of those that take their time, by box and setting

// The box that an element of a panel is about; none for all.
function placeOf(element) {
    return element.closest("#own-panel") ? ownPlace : undefined;
}

// What a box has of a setting, or none for all has.
function valueOf(place, name) {
    return (own[place]?.[name] || $(`#settings-panel [name=${name}]`).value).trim();
}

function showInputs() {
    for (const field of $$(".upload [name]")) {
        const small = inputs[valueOf(placeOf(field), field.name)];
        const [image, remove] = [field.nextElementSibling, $("[data-do=take_away]",
            field.parentElement)];
        image.hidden = !small;
        remove.hidden = !valueOf(placeOf(field), field.name);  // also what the server has forgotten
        if (small && image.src !== small) image.src = small;
    }
    for (const button of $$("[data-do=paint]")) {
        button.disabled = !inputs[valueOf(placeOf(button), "init_image")];
    }
    // Without the picture all strengths are the same; the first box with words is compared.
    const first = Math.max(0, boxes().findIndex((box) => box.value.trim()));
    for (const [setting, image] of Object.entries(USES)) {
        const label = $(`[name=what][value=${setting}]`)?.closest("label");
        if (label) label.hidden = !valueOf(first, image);
    }
}

// Lets a box, or all, use a picture; a mask is of the start picture that was there.
function put(place, name, input) {
    const given = { [name]: input, ...(name === "init_image" ? { mask: "" } : {}) };
    for (const each of Object.keys(given)) delete coming[`${place} ${each}`];
    if (place === undefined) {
        // A mask for all is not one of the start pictures that boxes have of their own, nor is a
        // box's own mask one of another start picture for all.
        const owns = own.map(({ mask, ...box }) => {
            if (name === "mask" && box.init_image?.trim() && !mask) return { ...box, mask: " " };
            return mask && (name !== "init_image" || box.init_image) ? { ...box, mask } : box;
        });
        replace({ settings: given, own: owns });
        return typedAll();
    }
    for (const each of Object.keys(given)) {  // a space is none, though there is one for all
        if (!given[each] && $(`#settings-panel [name=${each}]`).value) given[each] = " ";
    }
    replace({ own: own.map((box, at) => at === place ? { ...box, ...given } : box) });
    typed(place);
}

// Lets a box, or all, use a picture once it is taken in, unless something has been put there since;
// whether it does.
async function putWhen(taken, place, name) {
    const where = `${place} ${name}`;
    coming[where] = taken;
    const { input } = await taken, puts = Boolean(input) && coming[where] === taken;
    if (puts) put(place, name, input);
    return puts;
}

// Uses a picture that was drawn as a start, control or reference picture.
function takeAs(name, asked, place) {
    return putWhen(ask("take", asked), place, name);
}

// A file as a picture to use, or a mask; where it is dropped beside all cards it may be one to read.
async function handIn(file, place, name = "init_image", more = {}) {
    const mask = name === "mask" ? { mask_of: valueOf(place, "init_image") } : {};
    const taken = send(file, "take", { ...mask, ...more }).then((told) => {
        if (told.form) fold();
        // Until the server has made it small.
        if (told.input) inputs[told.input] ??= URL.createObjectURL(file);
        return told;
    });
    if (await putWhen(taken, place, name) && place === undefined) showHanded(name);
}

// The settings for all with such a picture.
function showHanded(name) {
    unfold($("[aria-controls=settings-panel]"), opened("settings", name));
}

// Where a panel has the picture of this name, unfolded.
function opened(panel, name) {
    const there = $(`#${panel}-panel [name=${name}]`).closest(".handed");
    there.open = true;
    return there;
}

document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => {
    const [file] = event.dataTransfer.files, { target } = event;
    if (!file) return;
    event.preventDefault();
    if (!window.sdTpu.arrived) return;
    const place = $$("#cards > .card").indexOf(target.closest(".card"));
    const field = target.closest(".upload");
    if (target.closest("#read-panel")) read(file);
    else if (field) handIn(file, placeOf(field), $("[name]", field).name);
    else if (place >= 0) handIn(file, place);
    else handIn(file, undefined, "init_image", { or_read: true });
});
document.addEventListener("paste", ({ target, clipboardData: { types, files: [file] } }) => {
    const place = boxes().indexOf(target);
    if (!file || types.includes("text/plain")) return;  // of words some programs add a picture
    if (window.sdTpu.arrived) handIn(file, place < 0 ? placeOf(target) : place);
});

// --- a mask is painted --------------------------------------------------------------------------

let strokes = [], inverted = false, paintedFor;  // lines with their widths

async function paint(place) {
    const input = valueOf(place, "init_image"), painter = $("#painter"), image = $("img", painter);
    const { view } = await ask("paint", { input });
    if (!view) return;
    Object.assign(image, { src: view });
    await image.decode();
    const canvas = $("canvas", painter), { naturalWidth: width, naturalHeight: height } = image;
    if (paintedFor?.input !== input) [strokes, inverted] = [[], false];
    paintedFor = { place, input };
    Object.assign(canvas, { width, height });
    painter.showModal();
    showStrokes();
}

function showStrokes() {
    const canvas = $("#painter canvas"), brush = canvas.getContext("2d");
    const { width, height } = canvas;
    brush.globalCompositeOperation = "source-over";
    brush.clearRect(0, 0, width, height);
    const colour = "#4f46e5";  // which is seen on white as well
    Object.assign(brush, { strokeStyle: colour, fillStyle: colour, lineCap: "round",
        lineJoin: "round" });
    for (const { size, points } of strokes) {
        brush.lineWidth = size;
        brush.beginPath();
        for (const [x, y] of [points[0], ...points]) brush.lineTo(x, y);
        brush.stroke();
    }
    if (inverted) {
        brush.globalCompositeOperation = "xor";
        brush.fillRect(0, 0, width, height);
    }
    $("[data-do=unpaint]").disabled = !strokes.length;
    $("[data-do=painted]").disabled = !strokes.length && !inverted;
    $("[data-do=invert]").setAttribute("aria-pressed", inverted);
}

// Where on the canvas a finger or a mouse is.
function spot({ target, clientX, clientY }) {
    const { left, top, width, height } = target.getBoundingClientRect();
    return [(clientX - left) / width * target.width, (clientY - top) / height * target.height];
}

document.addEventListener("pointerdown", (event) => {
    const { target } = event;
    if (!target.matches("#painter canvas") || event.button || !event.isPrimary) return;
    target.setPointerCapture(event.pointerId);
    const share = $("#painter [type=range]").value / 100;
    strokes.push({ size: share * Math.max(target.width, target.height), points: [spot(event)] });
    showStrokes();
});
document.addEventListener("pointermove", (event) => {
    const { target, pointerId } = event;
    if (!target.matches?.("#painter canvas") || !target.hasPointerCapture(pointerId)) return;
    strokes.at(-1).points.push(spot(event));
    showStrokes();
});

function handInMask() {
    const canvas = $("#painter canvas"), { width, height } = canvas;
    const mask = make("canvas", { width, height });
    const onto = mask.getContext("2d");
    onto.drawImage(canvas, 0, 0);
    for (const [how, colour] of [["source-in", "white"], ["destination-over", "black"]]) {
        Object.assign(onto, { globalCompositeOperation: how, fillStyle: colour });
        onto.fillRect(0, 0, width, height);
    }
    $("#painter").close();
    mask.toBlob((blob) => handIn(new File([blob], "mask.png"), paintedFor.place, "mask"));
}

// --- journeys -----------------------------------------------------------------------------------

// From this card's picture to another's, as far as there are any.
function plan(place) {
    const dialog = $("#journey"), [from, to] = $$("select", dialog);
    const options = () => $$("#cards figure.done").map(({ dataset }) => new Option(
        from.dataset.picture.replace("%", Number(dataset.place) + 1)
            .replace("§", $(`#picture-${Number(dataset.place) + 1} .words`).textContent),
        dataset.place));
    from.replaceChildren(...options());
    to.replaceChildren(to.options[0], ...options());
    from.value = place;
    dialog.showModal();
    showJourney();
}

// The one that was drawn last, if there is one.
async function showJourney() {
    const { view } = await ask("movie");
    for (const each of $$("#journey :is(.stage, .files)")) each.hidden = !view;
    if (view) $("#journey img").src = view;
    return view;
}

// The box that was written in at last, which words are put into.
let written = null;
document.addEventListener("focusin", ({ target }) => {
    if (!boxes().includes(target)) return;
    written = target;
    learn();
    if (!target.value) suggest(target);
});

// --- completion ---------------------------------------------------------------------------------

async function learn() {
    if (Date.now() - learnt < KNOWN) return;
    learnt = Date.now();
    const box = written, { value } = box;
    known = (await ask("known")).known ?? [];
    if (document.activeElement === box && box.value !== value) suggest(box);  // somebody types
}

// Offers words that go on as the one before the cursor begins, and whole prompts; in an empty box
// those that are marked as favourites.
function suggest(box) {
    const { value, selectionStart: at } = box, whole = at === value.length;
    const word = /<[^<>]*$|[^\s,;()[\]{}|<>]*$/.exec(value.slice(0, at))[0].toLowerCase();
    const begins = (text) => [text, text.replace(/^(<lora:|__)/, "")].some(
        (each) => each.toLowerCase().startsWith(word)) && text.toLowerCase() !== word;
    // Nothing in the way of somebody who has written a whole word.
    const said = known.some((each) => each.toLowerCase() === word);
    const words = word.length < 2 || said ? [] : known.filter(begins)
        .sort((one, other) => one.length - other.length);
    const written = value.trimStart().toLowerCase(), prompts = [...bookmarks(),
        ...written.length < 2 ? [] : earlier()].filter((text) => whole && text !== value.trim()
        && text.toLowerCase().startsWith(written));
    offer(box, [...words.slice(0, 4).map((text) => [at - word.length, text]),
        ...[...new Set(prompts)].slice(0, words.length ? 3 : 6).map((text) => [0, text])]);
}

const cursor = ({ value, selectionStart }) => `${selectionStart} ${value}`;

// Whether something is offered for what is written where the cursor is now.
function stillOffered() {
    if (offered.length && cursor(written) !== offeredAt) offer(written, []);
    return offered.length > 0;
}

document.addEventListener("selectionchange", stillOffered);

function offer(box, found) {
    const list = $("#suggestions"), opens = found.length && !offered.length;
    [offered, chosen, offeredAt] = [found, -1, cursor(box)];
    list.hidden = !found.length;
    for (const each of boxes()) {
        for (const name of ["controls", "activedescendant"]) each.removeAttribute(`aria-${name}`);
    }
    if (!found.length) return;
    list.replaceChildren(...found.map(([, text], number) => make("div", { dir: "auto",
        id: `suggestion-${number}`, textContent: text, role: "option", ariaSelected: false })));
    const card = box.closest(".card");
    card.append(list);
    box.setAttribute("aria-controls", "suggestions");
    box.setAttribute("aria-autocomplete", "list");
    // Below what is written, or, where there is no room, above it.
    const { top, bottom } = box.getBoundingClientRect(), from = card.getBoundingClientRect();
    const room = (visualViewport?.height ?? innerHeight) - bottom > list.offsetHeight;
    Object.assign(list.style, room ? { top: `${bottom - from.top}px`, bottom: "auto" }
        : { top: "auto", bottom: `${from.bottom - top}px` });
    if (opens) news(list.dataset.told.replace("%", found.length));
}

// What a key does while something is offered; whether it does.
function complete(key) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[key], count = offered.length;
    if (key === "Escape") offer(written, []);
    else if (step) {
        chosen = chosen < 0 && step < 0 ? count - 1 : (chosen + step + count) % count;
        for (const [number, option] of $$("#suggestions > *").entries()) {
            option.setAttribute("aria-selected", number === chosen);
        }
        written.setAttribute("aria-activedescendant", `suggestion-${chosen}`);
    } else if (chosen >= 0 && (key === "Enter" || key === "Tab")) insert(...offered[chosen]);
    else return false;
    return true;
}

function insert(from, text) {
    offer(written, []);
    written.setRangeText(text, from, written.selectionStart, "end");
    written.dispatchEvent(new Event("input", { bubbles: true }));
}

document.addEventListener("mousedown", (event) => {  // the box keeps the focus
    if (event.target.closest("#suggestions")) event.preventDefault();
});
document.addEventListener("click", ({ target }) => {
    const option = target.closest("#suggestions > *");
    if (option && stillOffered()) insert(...offered[Number(option.id.split("-")[1])]);
});
document.addEventListener("focusout", ({ target }) => {
    if (target === written) offer(written, []);
    if (target.matches?.("textarea")) target.scrollTop = 0;  // or half of a line is seen first
});

// What has the focus may be made anew, or go: what is like it takes it, or what comes first.
let held = null;
document.addEventListener("pointerdown", () => { held = null; });
document.addEventListener("focusin", ({ target }) => {
    const button = target.closest("#cards :is([data-do], .icon), #history-panel [data-do]");
    const parts = ["data-do", "data-act", "data-id", "data-place", "popovertarget"].filter(
        (name) => button?.hasAttribute(name));
    held = button && parts.map((name) => `[${name}="${button.getAttribute(name)}"]`).join("");
});
new MutationObserver(() => {
    if (held && document.activeElement === document.body) {
        const same = $(held) ?? (held.includes("data-id") ? $("#history-panel [data-do]")
            ?? $("[aria-controls=history-panel]") : null);
        same?.focus({ preventScroll: true });
    }
}).observe(document, { subtree: true, childList: true });

// --- the history --------------------------------------------------------------------------------

let shows = 0;  // of the history: the latest is what is seen

async function showHistory(act = "show", more = {}) {
    const panel = $("#history-panel[data-open]");
    if (!panel && act === "show") return {};
    const number = ++shows, told = await ask("history", { act, ...album, ...more });
    if (panel && number === shows && told.history !== undefined) {
        $(".found", panel).innerHTML = told.history;
        $$("time", panel).forEach(tellTime);
    }
    return told;
}

async function inHistory({ act, id, to }) {
    if (act === "more") album.pages += 1;
    if (act === "only") {
        limit({ favourites: !album.favourites });
        $("#history-panel [data-act=only]").ariaPressed = album.favourites;
    }
    const told = act === "again" ? await ask(act, { id }) : await showHistory(act, { id, to });
    if (told.form) {
        fold();
        $("#generate").focus();
    }
    if (told.kind === "wrong" || told.history === undefined) return;
    for (const star of $$(`#cards [data-do=star][data-id="${id}"]`)) star.ariaPressed = to;
    const gone = /^(delete|clear)$/.test(act), undo = $("#history-panel .undo");
    if (act === "restore") undo.hidden = true;
    if (!gone) return;
    undo.hidden = false;
    $("span", undo).textContent = told.news;
    $("button", undo).focus();
}

// Shows only some of it.
function limit(to) {
    Object.assign(album, { pages: 1, ...to });
    $("#history-panel [data-act=clear]").hidden = album.favourites || album.words;  // not all are seen
}

let searching;
function search(words) {
    limit({ words });
    clearTimeout(searching);
    searching = setTimeout(showHistory, LOOK);
}

// The server knows neither where somebody is nor how the time is written there.
function tellTime(time) {
    time.textContent = new Date(time.dateTime).toLocaleString(document.documentElement.lang,
        { dateStyle: "medium", timeStyle: "short" });
}

// --- a phone that slept ------------------------------------------------------------------------

const NAP = 20_000, PATIENCE = 3_000;  // ms
let hiddenSince = Infinity, waking;

document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
        hiddenSince = Date.now();
    } else if (Date.now() - hiddenSince > NAP) {
        clearTimeout(waking);
        waking = setTimeout(wake, PATIENCE, $("#line p").textContent);
    }
});

// Its connection may be gone: a run is found again by loading the page. But a line may stand still
// for minutes and be true, and with the page goes what is painted or pasted.
async function wake(said) {
    const still = () => $("#line .busy")?.textContent === said;
    // A run that has no name yet is not the one that the server would tell of.
    const { line } = still() && !pending.size ? await ask("look") : {};
    if (!still()) return;  // the server has told of something: it is connected
    const held = pending.size || line === undefined || $("dialog[open]")
        || $("#list-panel[data-open] textarea")?.value;
    const now = held ? said : $("p", make("template", { innerHTML: line }).content).textContent;
    if (now === said) waking = setTimeout(wake, PATIENCE, said);
    else location.reload();
}

// --- the full-screen view -----------------------------------------------------------------------

// What is in it: the name of a figure, where the others are, and which the server is told it is.
let shown = null;

// A figure is found again by its name: it is made anew, or another picture of it.
function name(figure) {
    return figure.dataset.id ?? figure.dataset.place;
}

function leaf(step) {
    const figures = $$(shown.all);
    const next = figures.findIndex((figure) => name(figure) === shown.name) + step;
    if (figures.length) $(".view", figures.at(next % figures.length))?.click();
}

async function open(figure) {
    const all = figure.closest("#history-panel") ? "#history-panel figure" : "#cards figure.done";
    const { id, place } = figure.dataset, which = id ? { id } : { place: Number(place) };
    const here = shown = { name: name(figure), all, id, which };
    const [viewer, image] = [$("#viewer"), $("img", figure)];
    $("img", viewer).alt = image.alt;
    showBefore();
    $("[data-do=larger_shown]", viewer).hidden = Boolean(id);  // which is on no card
    $(".words", viewer).textContent = image.alt;
    $(".facts", viewer).textContent = $(".seed, .told", figure)?.textContent ?? "";
    show(image.src, $("a[download]", figure));
    const alone = $$(all).length < 2;
    $$("[data-do=leaf]", viewer).forEach((button) => { button.hidden = alone; });
    if (!viewer.open) viewer.showModal();
    ask("before", here.which).then(({ before }) => {
        if (shown === here) showBefore(before);
    });
    if (!id) return;
    // The history's own files are asked for when they are looked at.
    const { view } = await ask("history", { act: "view", id });
    if (shown !== here) return;
    if (view) show(view, link(view));
    else viewer.close();
}

// What the picture began with, beside it: as far as the slider says.
function showBefore(address) {
    const [, image] = $$("#viewer img"), slider = $("#viewer [type=range]");
    for (const each of [image, slider]) each.hidden = !address;
    image.src = address ?? "";
    slider.value = 50;
    slider.parentElement.style.setProperty("--at", "50%");
}

function show(address, file) {
    const link = $("#viewer a"), image = $("#viewer img");
    image.src = address;
    image.decode().then(() => image.parentElement.style.setProperty("--ratio",
        image.naturalWidth / image.naturalHeight), () => {});
    if (document.activeElement === link && !file) $("#viewer [data-do=close]").focus();
    link.hidden = !file;
    if (file) Object.assign(link, { href: file.href, download: file.download });
}
})();
