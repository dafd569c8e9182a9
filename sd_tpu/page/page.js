// What the page does in the browser itself: keys, folds, links, the full-screen view, and what it
// remembers. `window.sdTpu` holds what Gradio's events call.

(() => {
"use strict";

let browser = null;  // this browser's name, once the page has arrived
let form = null;  // the contents of all fields, once the server has filled them
// What they held before they were replaced, and before that was taken back; the latest last.
let past = [], future = [];
let taking = null;  // what is being taken back, or forth again
let atPast = false;  // whether the focus is, or was at last, at one of the two buttons for that
const PAST = 20;  // kept of each
const REPLACING = ".replaces, #gallery [data-do], [data-do=again], "
    + "[data-do=clear]:not(#history *)";
const PAUSE = 500;  // ms without a key after which somebody has stopped typing
const pauses = [];  // which have begun, by the box's place
let held = null;  // the history's button that has the focus: each change makes it anew

// A name for this browser that nobody can guess: its runs are found by it.
function newName() {
    return Array.from(crypto.getRandomValues(new Uint8Array(16)),
        (byte) => byte.toString(16).padStart(2, "0")).join("");
}

window.sdTpu = {
    // Before the server fills the boxes: what was saved, what stands behind the address's #, and
    // the language that Gradio has taken for this browser's.
    arrive(saved) {
        const link = location.hash.slice(1);
        if (link) history.replaceState(null, "", location.pathname + location.search);
        browser = saved?.browser ?? newName();
        [past, future] = readPast();
        // A page that was open here already has remembered its own; `saved` may be another tab's.
        const [how] = performance.getEntriesByType("navigation");
        const anew = link && how?.type !== "reload";
        if (anew && Array.isArray(saved?.form)) keepPast([...past, saved.form]);
        const shown = document.querySelector("header[lang]")?.lang;
        return { ...saved, browser, link, shown };
    },
    // Once the server has filled the boxes: all fields.
    saveAll(saved, ...values) {
        form = values;
        this.arrived = true;  // for tests to wait for, too
        markInert();
        requestAnimationFrame(showCommon);
        showPast();
        return { ...saved, browser, form: [...form] };
    },
    // Some fields, from the one with the number `first` on. Until all are there the form holds what
    // it begins with, and `saved` may know no name yet.
    save(first, saved, ...values) {
        if (!form) return saved;
        form.splice(first, values.length, ...values);
        return this.saveAll(saved, ...form);
    },
    remember,
    // The contents of all fields as they were before they were replaced, or before that was taken
    // back.
    take(back) {
        if (!taking) {
            const from = back ? past : future;
            const last = from.findLastIndex((fields) => !isShown(fields));
            taking = { back, last, shown: [...form], fields: last < 0 ? form : from[last] };
        }
        return taking.fields;
    },
    // Once they are shown; not, if the server could not be asked.
    taken(shown) {
        if (shown && taking.last >= 0) {
            const { back, last } = taking;
            const rest = (back ? past : future).slice(0, last);
            const other = [...(back ? future : past), taking.shown];
            if (back) keepPast(rest, other);
            else keepPast(other, rest);
        }
        taking = null;
        showPast();
    },
    changed,
    changedPlace: null,  // the box that is to be drawn again
    // A comparison is begun at the top of the page, far from where its pictures come.
    lookAtPictures() {
        document.querySelector("#line").scrollIntoView({ block: "center" });
    },
    // What could not be done up there is told down here.
    lookAtRefusal() {
        requestAnimationFrame(() => {
            document.querySelector("#line .wrong")?.scrollIntoView({ block: "nearest" });
        });
    },
    download(file) {
        if (file) link(file).click();
    },
    refreshHistory() {
        refresh(document.querySelector("#history-panel[data-open]"));
    },
    // After something was done in the history: with a file if one was asked for. If that is to be
    // looked at, the picture's name stands behind a #, also where the picture is gone.
    didInHistory(file) {
        const [address, id] = file.split("#"), viewer = document.querySelector("#viewer");
        if (!id) this.download(address);
        else if (viewer.open && shown.name === id) {
            if (address) fill(address, link(address));
            else viewer.close();
        }
        requestAnimationFrame(() => {
            document.querySelectorAll("#history time").forEach(tellTime);
            // The focus is where it was, or at what comes first.
            if (!held || held.isConnected) return;
            const { do: deed, id } = held.dataset;
            const same = id ? `[data-do=${deed}][data-id="${id}"]` : `[data-do=${deed}]`;
            const find = (button) => document.querySelector(`#history ${button}`);
            (find(same) ?? find("[data-do]:not([hidden])")
                ?? document.querySelector("[aria-controls=history-panel]")).focus();
        });
    },
};

function link(file) {
    return Object.assign(document.createElement("a"), { href: file, download: "" });
}

// The server knows neither where somebody is nor how the time is written there.
function tellTime(time) {
    const options = { dateStyle: "medium", timeStyle: "short" };
    const { lang } = document.documentElement;
    time.textContent = new Date(time.dateTime).toLocaleString(lang, options);
}

// Until what was saved is there, what is typed would be lost, and what is made would be nobody's.
function markInert() {
    const parts = "#tools, #live, #prompts, #settings-fold, #actions";
    for (const part of document.querySelectorAll(parts)) part.inert = !window.sdTpu.arrived;
}

const begun = new MutationObserver(() => {
    if (window.sdTpu.arrived) begun.disconnect();
    else markInert();
});
begun.observe(document, { subtree: true, childList: true });

// Gradio tells the document's language by the browser's; the heading says which the page speaks.
new MutationObserver(() => {
    const heading = document.querySelector("header[lang]"), root = document.documentElement;
    if (!heading || heading.lang === root.lang && heading.dir === root.dir) return;
    Object.assign(root, { lang: heading.lang, dir: heading.dir });
}).observe(document, { subtree: true, childList: true, attributeFilter: ["lang"] });

document.addEventListener("focusin", (event) => {
    held = event.target.closest("#history [data-do]");
});

// Asks for the contents of a panel, if it is made by the server.
function refresh(panel) {
    panel?.querySelector("[data-do=refresh]")?.click();
}

// --- what can be taken back ---------------------------------------------------------------------

// It belongs to this tab, which may be loaded again, and to this model.
function keepPast(before, after = future) {
    [past, future] = [before.slice(-PAST), after.slice(-PAST)];
    try {
        sessionStorage.setItem(document.title, JSON.stringify([past, future]));
    } catch {}  // a browser that keeps nothing
}

function readPast() {
    let kept = [];
    try {
        kept = JSON.parse(sessionStorage.getItem(document.title));
    } catch {}
    return [kept?.[0], kept?.[1]].map((all) => Array.isArray(all) ? all.filter(Array.isArray) : []);
}

function isShown(fields) {
    return JSON.stringify(fields) === JSON.stringify(form);
}

function showPast() {
    const buttons = ["#undo", "#redo"].map((name) => document.querySelector(name));
    const [undo, redo] = buttons, nowhere = document.body;
    if (document.activeElement !== nowhere) atPast = buttons.includes(document.activeElement);
    undo.disabled = past.every(isShown);
    redo.disabled = future.every(isShown);
    // A button that is disabled loses the focus, in some browsers at once. The other takes it as
    // soon as it can: not before all fields are shown.
    const lost = document.activeElement === nowhere || document.activeElement.disabled;
    if (atPast && lost) buttons.find((button) => !button.disabled)?.focus();
}

// Before something takes the place of what is filled in; if it then does not, it costs nothing.
function remember() {
    if (form && !isShown(past.at(-1))) keepPast([...past, [...form]]);
}

document.addEventListener("click", (event) => {
    if (event.target.closest(REPLACING)) remember();
}, { capture: true });

// --- drawing while somebody types ---------------------------------------------------------------

// Not by Gradio's own events: of what is pasted, dictated or put together they know nothing.
document.addEventListener("input", (event) => {
    const columns = [...document.querySelectorAll("#prompts > .column")];
    const place = columns.findIndex((column) => column.contains(event.target));
    if (place >= 0) changed(place);
});

// Somebody has changed a box or its own settings.
function changed(place) {
    const live = document.querySelector("#live input");
    clearTimeout(pauses[place]);
    if (live.checked && !live.disabled) pauses[place] = setTimeout(redraw, PAUSE, place);
}

function redraw(place) {
    const button = document.querySelector("#live [data-do=redraw]");
    window.sdTpu.changedPlace = place;
    button.click();
    // It stands below its box, which may be at the window's end; but what is typed in comes first.
    for (const seen of [`#gallery [data-place="${place}"]`, ":focus"]) {
        document.querySelector(seen)?.scrollIntoView({ block: "nearest" });
    }
}

// --- keys ---------------------------------------------------------------------------------------

document.addEventListener("keydown", (event) => {
    const viewer = document.querySelector("#viewer");
    if (viewer?.open) {
        const forth = document.documentElement.dir === "rtl" ? -1 : 1;
        const steps = { ArrowLeft: -forth, ArrowUp: -1, ArrowRight: forth, ArrowDown: 1 };
        if (event.key in steps) leaf(steps[event.key]);
    } else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        if (window.sdTpu.arrived) document.querySelector("#generate").click();
    } else if (event.key === "Escape" && !event.isComposing
            && !event.target.closest("[role=combobox][aria-expanded=true]")) {
        document.querySelector("#stop").click();  // without effect while it is disabled
    }
});

// --- what is clicked ----------------------------------------------------------------------------

document.addEventListener("click", (event) => {
    const clicked = (selector) => event.target.closest(selector);
    if (clicked(".fold")) toggle(clicked(".fold"));
    else if (clicked("#history [data-do=again]")) document.querySelector("#generate").focus();
    else if (clicked("[data-then]")) {  // which goes away, with the focus
        document.querySelector(`[aria-controls=${clicked("[data-then]").dataset.then}]`).focus();
    } else if (clicked("[data-link]")) copy(clicked("[data-link]"));
    else if (clicked("button.view")) open(clicked("figure"));
    else if (clicked("#viewer [data-step]")) leaf(Number(clicked("[data-step]").dataset.step));
    else if (clicked("#viewer [data-close]") || event.target.id === "viewer") {
        document.querySelector("#viewer").close();
    }
});

function toggle(fold) {
    const opened = fold.getAttribute("aria-expanded") !== "true";
    fold.setAttribute("aria-expanded", opened);
    const panel = document.getElementById(fold.getAttribute("aria-controls"));
    panel.toggleAttribute("data-open", opened);
    Object.assign(panel, { role: "group", ariaLabel: fold.ariaLabel ?? fold.textContent });
    showCommon();
    if (opened) refresh(panel);
}

// In the empty fields of the boxes' own settings stands what is taken instead.
function showCommon() {
    const find = (parent, field) => document.querySelectorAll(
        `${parent} .${field} :is(input, textarea)`);
    const show = (field, shown) => find("#prompts", `field-${field}`).forEach(
        (own, place) => {
            own.placeholder = shown(place);
            if (field !== "negative") own.inputMode = "decimal";  // which keys a phone offers
        });
    for (const field of ["steps", "guidance", "guidance_start", "guidance_stop", "cache_interval",
        "negative"]) {
        const [common] = find("#settings-panel", `field-${field}`);
        show(field, () => common.value || common.placeholder);
    }
    const seed = document.querySelector("#seed input");
    show("own_seed", (place) => seed.value >= 0 && seed.value !== ""
        ? String(Number(seed.value) + place) : seed.placeholder);
}

async function copy(button) {
    const link = `${location.origin}${location.pathname}${location.search}#${button.dataset.link}`;
    try {
        await navigator.clipboard.writeText(link);
        const label = button.textContent;
        button.textContent = button.dataset.copied;
        setTimeout(() => { button.textContent = label; }, 2000);
    } catch {  // without https there is no clipboard
        prompt(button.dataset.prompt, link);
    }
}

// A link that is opened where the page is open already changes nothing but this.
addEventListener("hashchange", () => {
    if (location.hash.length < 2) return;
    remember();
    location.reload();
});

// --- a phone that slept ------------------------------------------------------------------------

const NAP = 20_000, PATIENCE = 3_000;  // ms
let hiddenSince = Infinity;

document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
        hiddenSince = Date.now();
    } else if (Date.now() - hiddenSince > NAP) {
        const line = document.querySelector("#line");
        const told = line.textContent;
        setTimeout(() => {  // its connection may be gone: a run is found again by loading the page
            if (line.querySelector(".busy") && line.textContent === told) location.reload();
        }, PATIENCE);
    }
});

// --- the full-screen view -----------------------------------------------------------------------

let shown = null;  // what is in it: the name of a figure, and where the others are

// A figure is found again by its name: Gradio makes it anew, or another picture of it.
function name(figure) {
    return figure.dataset.id ?? figure.dataset.place;
}

function leaf(step) {
    const figures = [...document.querySelectorAll(shown.all)];
    const next = figures.findIndex((figure) => name(figure) === shown.name) + step;
    figures.at(next % figures.length)?.querySelector(".view").click();
}

function open(figure) {
    const all = figure.closest("#history") ? "#history figure" : "#gallery figure.done";
    shown = { name: name(figure), all };
    const [viewer, image] = [document.querySelector("#viewer"), figure.querySelector("img")];
    viewer.querySelector("img").className = image.className;
    viewer.querySelector("img").alt = image.alt;
    viewer.querySelector(".words").textContent = image.alt;
    viewer.querySelector(".facts").textContent = figure.querySelector(".seed, .told").textContent;
    // The history's own files are asked for when they are looked at.
    fill(image.src, figure.querySelector("a[download]"));
    const alone = document.querySelectorAll(all).length < 2;
    viewer.querySelectorAll("[data-step]").forEach((button) => { button.hidden = alone; });
    if (!viewer.open) viewer.showModal();
}

function fill(address, file) {
    const link = document.querySelector("#viewer a");
    document.querySelector("#viewer img").src = address;
    if (document.activeElement === link && !file) document.querySelector("[data-close]").focus();
    link.hidden = !file;
    if (file) Object.assign(link, { href: file.href, download: file.download });
}
})();
