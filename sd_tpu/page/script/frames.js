// Frames: Gradio's status tracker counts seconds in each of them, from the first load on and without
// an end, though this page never shows it (decision 0042).

import { state } from "./state.js";

const RARELY = 1000; // ms
const ofBrowser = window.requestAnimationFrame;

// The tracker takes the function when its module is loaded, and cancels no frame; all else looks for
// the function at each call.
window.requestAnimationFrame = (callback) =>
    state.arrived
        ? window.setTimeout(() => ofBrowser.call(window, callback), RARELY)
        : ofBrowser.call(window, callback);

/** Call when Gradio's modules are there. */
export function giveFramesBack() {
    window.requestAnimationFrame = ofBrowser;
}
