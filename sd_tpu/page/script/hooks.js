// Where lower modules call what lies above them: main.js fills these in.

export const hooks = {
    /** A request did not reach the server. */
    unreachable() {},
    /** The server has said how a run goes. */
    heard() {},
    /** The page has filled something in. */
    filled() {},
    /** The form is different, whoever has changed it. */
    changed() {},
    panelOpened() {},
    /**
     * Another run is to be shown; if it ended `before`, that is not said again.
     * @param {string} _run
     * @param {boolean} _before
     */
    showRun(_run, _before) {},
};
