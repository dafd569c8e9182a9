// The script's state: the server's facts about settings, and all that changes while it runs.

// How many boxes there are, the number after which seeds begin again, the two settings that are
// chosen as one size, those whose choices depend on the server, and the picture that each strength
// or scale goes with.
export const {
    boxes: BOXES,
    seeds: SEEDS,
    sides: SIDES,
    offered: OFFERED,
    uses: USES,
} = window.sdTpuSettings;

/** @type {import("./types").State} */
export const state = {
    arrived: false, // whether what was saved is filled in
    browser: null, // this browser's name, by which the server finds its runs

    overrides: Array.from({ length: BOXES }, () => ({})),
    keep: Array(BOXES).fill(false), // the cards that Draw leaves alone
    selection: { indices: [], anchor: 0 }, // selected cards, in order; where a range begins
    panelIndex: 0, // the box whose overrides the panel shows
    lastForm: null, // the form before the latest change
    filling: false, // whether the page, and not a person, fills something in
    edited: false, // whether a person has changed anything since the last error
    samples: 1, // the set of samples that comes next; the first is in the boxes from the start

    // Snapshots, the latest last; whether the focus is, or was last, at one of the buttons.
    undo: { past: [], future: [], focused: false },
    run: { name: null, seed: null, version: 0 }, // the run that is shown, as far as it has come
    awaited: null, // the latest request to show a run, until the server has answered
    turn: Promise.resolve(), // when the next run may take the place of the one that is shown
    changing: Promise.resolve(), // when the next change may be asked for
    pending: new Map(), // requests for runs that have no name yet: whether each is to be stopped
    // Classes that say how a run goes on; whether the line was busy when it changed last, and whether
    // a run has ended that nobody has seen since.
    line: { running: [], busy: false, unseen: false },
    journey: false, // whether a journey is drawn, which is shown as it comes and at its end
    pauses: [], // timers of Live, by box

    look: {
        number: 0, // only the latest answer counts
        open: false, // whether the field that is wrong is to be shown
        timer: undefined,
        models: true, // whether to ask for the models: the page itself lists only the first
        live: false, // whether Live is to come back as soon as it is possible
    },
    inputs: {}, // small versions of the pictures that this browser has handed in, by name
    references: 1, // reference pictures that the chosen model takes, or 1
    incoming: {}, // the last upload for each box and setting
    completion: {
        words: [], // that prompts can use here
        endings: [], // what styles put behind prompts
        since: -Infinity, // when they were asked for
        box: null, // the prompt box that had the focus last
        offered: [],
        ghost: "", // what Tab would write behind the cursor
        chosen: -1,
        cursor: "", // where it was, and in which text, when these were offered
    },
    history: {
        filter: { pages: 1, favourites: false, words: "", board: "" },
        deleted: null, // the board that was deleted last, with its pictures
        number: 0,
        timer: undefined,
    },
    teach: {
        pictures: [], // with their captions, as they are handed in
        timer: undefined,
        number: 0, // only the latest answer counts
        watching: undefined,
        seen: {}, // what is shown of each run's kept states
    },
    viewed: null, // the picture in the full-screen view
    painter: { strokes: [], inverted: false }, // the mask that is painted
    pasted: null, // a list that was pasted into a box
    away: {
        since: null, // the time from which on the server did not answer
        busy: false, // whether a run went on then
        checking: false,
        refused: 0, // requests in a row, by a server that is there again
        timer: undefined,
        finished: [], // the address of each card's last finished picture
    },
    wake: { hiddenSince: Infinity, timer: undefined }, // for phones that slept
    focus: null, // a selector of the button that has the focus and may be made anew
};
